"""Ranks of a process group issued different collectives at one position.

Reads     collective, collective_step
Says      the first position at which operation, size, type, reduction or root differ, which ranks stand apart, each
          side's call site; calls that a rank left out; call sites that a rank goes through in another order
Unknown   groups of which a single rank was recorded; two ranks that crossed two call sites from their first step on
Blind to  point-to-point; what C++ issued in a job that did not fail; the same calls from other lines in another order
Do        go to the two call sites named and look for the branch on the rank, on data or on a time between them: every
          rank of a group must issue the same calls in the same order. TORCH_DISTRIBUTED_DEBUG=DETAIL checks this in a
          short run with the nccl backend
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ..collectives import (
    Behind,
    behind,
    crossed,
    first_of_each,
    left_out,
    permuted,
    stand_apart,
    unread,
)
from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, unheard
from ..issued import Group, Row, groups_of
from ..wording import counted, spans

CODE = "COLLECTIVE_MISMATCH"
NEEDS = {"collective": 1}
PARAMS = {
    "before": 64,  # positions shown to the comparison before the first difference: some steps of an ordinary loop
    "after": 32,  # and after it: enough to see whether a shift fits
}

# Ranks are compared where all that were recorded issued something; a position that only some have reached says nothing.
# Places (line and callers) are compared only where all else is equal and no rank has a role of its own as a root.
SQL = """
WITH issued AS (
    SELECT attempt, rank, pid, source, "group" AS name, position, any_value(op) AS op,
           any_value(signature) AS signature, any_value(root) AS root, any_value(site) AS site,
           any_value(site || ' < ' || callers) AS place, min(step) AS step, max(len(ranks)) AS listed,
           arg_max(ranks, len(ranks)) AS ranks
    FROM collective GROUP BY ALL
), member AS (
    SELECT attempt, rank, pid, source, name, arg_max(ranks, listed) AS ranks FROM issued
    WHERE listed > 0 GROUP BY attempt, rank, pid, source, name, CASE WHEN listed > 0 THEN ranks END
), call AS (
    SELECT i.* EXCLUDE (ranks, listed), m.ranks, hash(m.ranks) AS team
    FROM issued i JOIN member m ON i.attempt = m.attempt AND i.rank = m.rank AND i.pid = m.pid
     AND i.source = m.source AND i.name = m.name AND (i.listed = 0 OR i.ranks = m.ranks)
    WHERE len(m.ranks) > 1
), compared AS (
    SELECT attempt, source, name, team, position, count(DISTINCT rank) AS recorded, max(step) AS step,
           min(hash(op, signature, root)) <> max(hash(op, signature, root)) AS differs,
           min(place) <> max(place) AND max(root) < 0 AS elsewhere
    FROM call GROUP BY ALL HAVING count(DISTINCT rank) > 1
), placed AS (
    SELECT attempt, source, name, team, c.step, rank, min(position) AS position,
           hash(list(place ORDER BY position)) AS ordered, hash(list(place ORDER BY place)) AS used
    FROM call c JOIN compared p USING (attempt, source, name, team, position)
    WHERE p.elsewhere AND NOT p.differs AND source = 'call' GROUP BY ALL
), crossing AS (
    SELECT attempt, source, name, team, min(position) AS crosses FROM (
        SELECT attempt, source, name, team, step, used, min(position) AS position FROM placed GROUP BY ALL
        HAVING min(ordered) <> max(ordered))
    GROUP BY ALL
), first AS (
    SELECT attempt, source, name, team, min(position) FILTER (differs) AS differs,
           min(position) FILTER (elsewhere AND source = 'call') AS elsewhere, min(position) AS start
    FROM compared GROUP BY ALL
), shown AS (
    SELECT *, unnest(list_distinct(list_filter([differs, elsewhere, crosses, start], lambda p: p IS NOT NULL)))
              AS around
    FROM first LEFT JOIN crossing USING (attempt, source, name, team)
)
SELECT DISTINCT c.attempt, c.source, c.name, c.team, c.ranks, c.rank, c.position, c.op, c.signature, c.root, c.site,
       c.place, c.step, s.differs, s.elsewhere
FROM shown s JOIN call c ON s.attempt = c.attempt AND s.source = c.source AND s.name = c.name AND s.team = c.team
 AND (c.position BETWEEN s.around - $before AND s.around + $after
      AND (s.differs IS NOT NULL OR s.elsewhere IS NOT NULL) OR c.position = s.start)
UNION ALL
SELECT attempt, 'steps', "group", hash(ranks), ranks, rank, first, "count"::VARCHAR, digest::VARCHAR, 0,
       site_digest::VARCHAR, site_sum::VARCHAR, step, NULL, NULL
FROM collective_step
WINDOW w AS (PARTITION BY attempt, "group", ranks, step, first, "count")
QUALIFY min(digest) OVER w <> max(digest) OVER w AND min(rank) OVER w <> max(rank) OVER w
UNION ALL
SELECT attempt, 'recorded', "group", 0, arg_max(ranks, len(ranks)), rank, 0, '', '', -1, '', '', 0, NULL, NULL
FROM collective WHERE source = 'recorder' GROUP BY attempt, "group", rank
ORDER BY ALL
"""


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """The first mismatch of each group; what Python issued speaks before what torch's own recorder kept."""
    if run.world_size < 2:
        yield Abstention("NOT_APPLICABLE", "a single rank has nobody to differ from")
        return
    groups = groups_of([r for r in rows if r.source not in ("steps", "recorded")])
    if not groups:
        yield Abstention("INSUFFICIENT_EVIDENCE", "no process group of which two ranks recorded their collectives")
    said: dict[tuple[int, tuple[int, ...]], list[Finding]] = defaultdict(list)
    for group in groups:
        first = next(iter(group.rows.values()))
        if first.differs is not None:
            said[group.attempt, group.ranks].append(_different(group, first.differs))
        elif first.elsewhere is not None:
            for found in [*_shifted(group), *_crossed(group)][:1]:
                if isinstance(found, Abstention):
                    yield found
                else:
                    said[group.attempt, group.ranks].append(found)
    for digest in _digests([r for r in rows if r.source == "steps"]):
        said[digest.attempt, ()].append(digest)
    for attempt in sorted({attempt for attempt, _ in said}):
        of_attempt = [(ranks, f) for (a, ranks), found in said.items() if a == attempt for f in found]
        yield from first_of_each(of_attempt)
    told = [(r.attempt, r.name, tuple(r.ranks), r.rank) for r in rows if r.source == "recorded"]
    for name, silent in unread(told):
        why = f"what torch itself issued on group {name} is known of some ranks only, not of rank {spans(silent)}"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    yield from unheard(run)


# ---------------------------------------------------------------- what was issued differs


def _different(group: Group, position: int) -> Finding:
    at = group.at(position)
    odd = stand_apart({rank: (r.op, r.signature, r.root) for rank, r in at.items()}, len(group.ranks))
    step = min(at[rank].step for rank in odd.odd)
    usual = next((r for rank, r in at.items() if rank not in odd.odd), None)
    sides = [at[rank] for rank in odd.odd] if usual is None else [at[odd.odd[0]], usual]
    text = ", ".join(dict.fromkeys(_said(r) for r in sides))
    summary = (
        f"{listed(odd.odd)} issued {_said(sides[0])} as number {position} of group {group.name}, others {_said(usual)}"
        if usual is not None
        else f"{listed(odd.odd)} issued different collectives as number {position} of group {group.name}: {text}"
    )
    return Finding(
        ranks=odd.odd,
        first_step=step,
        last_good_step=step - 1 or None,
        last_step=max(r.step for r in at.values()),
        attempt=group.attempt,
        subject=" / ".join(sorted({r.op for r in sides})),
        summary=summary + _seems_left_out(group, odd.odd, position),
        evidence=_evidence(at, odd.odd, usual),
        cannot_conclude=_open(odd.decided, group, at),
        next_check="compare the branches that lead to the two call sites: every rank of a group must take the same one",
    )


def _said(row: Row) -> str:
    root = f" with root {row.root}" if row.root >= 0 else ""
    return f"{row.op} {row.signature}".strip() + root + (f" at {row.site}" if row.site else " of torch's own")


def _evidence(at: dict[int, Row], odd: Sequence[int], usual: Row | None) -> tuple[Evidence, ...]:
    named = [at[rank] for rank in odd][:8]
    expected = _said(usual) if usual is not None else "the same on all ranks"
    found = [Evidence(r.rank, r.step, f"collective {r.position} of group {r.name}", _said(r), expected) for r in named]
    if usual is not None:
        found.append(Evidence(usual.rank, usual.step, f"collective {usual.position} of group {usual.name}",
                              _said(usual), expected))  # fmt: skip
    return tuple(found)


def _open(decided: bool, group: Group, at: dict[int, Row]) -> tuple[str, ...]:
    open_ = [] if decided else ["which collective was meant: no majority of the group's ranks issued one"]
    silent = sorted(set(group.ranks) - set(at))
    if silent:
        open_.append(f"what rank {spans(silent)} issued there: no record of it")
    if group.source == "recorder":
        open_.append("the lines of collectives that torch issued itself (DDP, FSDP)")
    return tuple(open_)


def _seems_left_out(group: Group, odd: Sequence[int], position: int) -> str:
    """A guess in words, marked as one: what the odd rank issued follows the others' in earlier steps."""
    sequences = group.sequences
    others = next((sequences[r] for r in group.ranks if r not in odd and r in sequences), None)
    if others is None or len(odd) != 1:
        return ""
    missing = left_out(sequences[odd[0]], others, position)
    if missing is None:
        return ""
    return f"; in earlier steps that comes after {missing.op}, which rank {odd[0]} seems to have left out"


# ---------------------------------------------------------------- the same was issued, from different places


def _shifted(group: Group) -> Iterator[Finding]:
    sequences = group.sequences
    if len(sequences) == 2:
        one, other = sorted(sequences)
        found = [b for a, c in ((one, other), (other, one)) if (b := behind(sequences[a], sequences[c], a))]
    else:
        odd = _odd_from(group)
        main = next((sequences[r] for r in sorted(sequences) if r not in odd), {})
        found = [b for r in odd if (b := behind(sequences[r], main, r))]
    for b in found[:1]:
        yield _left_out_finding(group, b, tuple(sorted(sequences)) if len(group.ranks) == 2 else (b.rank,))


def _odd_from(group: Group) -> tuple[int, ...]:
    """Ranks that a majority leaves alone at the first position with different places."""
    first = next(iter(group.rows.values())).elsewhere
    odd = stand_apart({rank: r.place for rank, r in group.at(first or 0).items()}, len(group.ranks))
    return odd.odd if odd.decided else ()


def _left_out_finding(group: Group, b: Behind, ranks: tuple[int, ...]) -> Finding:
    at = group.at(b.position)
    usual = next((r for rank, r in at.items() if rank != b.rank), None)
    return Finding(
        ranks=ranks,
        first_step=b.missing.step,
        last_good_step=b.missing.step - 1 or None,
        attempt=group.attempt,
        severity="warning",
        evidence_state="INFERRED",
        subject=b.missing.op,
        summary=f"rank {b.rank} is {counted(b.by, 'collective')} behind the others on group {group.name} from position "
        f"{b.position} on: what it issued there in step {b.own.step} they issued {b.by} later; it left out "
        f"{b.missing.op} {b.missing.signature} at {b.missing.place.split(' < ')[0]}",
        evidence=_evidence(at, (b.rank,), usual),
        cannot_conclude=("whether the rank left it out or the others issued it once too often",)
        if len(ranks) == 2
        else (),
        next_check="look for a branch around that call that not every rank takes",
    )


def _crossed(group: Group) -> Iterator[Finding | Abstention]:
    """The first step in which some rank goes through the same call sites in another order."""
    steps: dict[int, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for (rank, _), r in sorted(group.rows.items()):
        steps[r.step][rank].append(r)
    orders_before: set[tuple[str, ...]] = set()
    for step, by_rank in sorted(steps.items()):
        if len(by_rank) < 2 or len({tuple(r.position for r in several) for several in by_rank.values()}) > 1:
            continue
        apart = [i for i, several in enumerate(zip(*by_rank.values(), strict=True))
                 if len({r.place for r in several}) > 1 and max(r.root for r in several) < 0]  # fmt: skip
        places = {rank: [several[i].place for i in apart] for rank, several in by_rank.items()}
        whole = {tuple(r.place for r in several) for several in by_rank.values()}
        if not apart:
            orders_before |= whole
            continue
        odd = crossed(places, len(group.ranks), bool(whole & orders_before))
        if odd:
            yield _crossed_finding(group, by_rank, apart, odd, step)
            return
        if len(group.ranks) == 2 and permuted(*places.values()):
            yield Abstention("INSUFFICIENT_EVIDENCE", "two ranks took the same call sites in turns from the start")
            return


def _crossed_finding(group: Group, by_rank: dict[int, list[Row]], apart: list[int], odd: tuple[int, ...],
                     step: int) -> Finding:  # fmt: skip
    at = {rank: several[apart[0]] for rank, several in by_rank.items()}
    usual = next((r for rank, r in at.items() if rank not in odd), None)
    sites = " and ".join(dict.fromkeys(r.site for r in at.values()))
    return Finding(
        ranks=odd,
        first_step=step,
        last_good_step=step - 1 or None,
        attempt=group.attempt,
        severity="warning",
        evidence_state="INFERRED",
        subject=at[odd[0]].op,
        summary=f"{listed(odd)} went through the calls of {at[odd[0]].op} {at[odd[0]].signature} in another order in "
        f"step {step} of group {group.name}: all ranks use {sites}, in crossed order, so their values were mixed",
        evidence=_evidence(at, odd, usual),
        cannot_conclude=("which order was meant",) if usual is None else (),
        next_check="make the order of these calls the same on all ranks, whatever it is taken from",
    )


# ---------------------------------------------------------------- steps of which only digests were kept


def _digests(rows: Sequence[Row]) -> Iterator[Finding]:
    """The first step in which the digests of as many calls from the same position on differ."""
    if not rows:
        return
    first = min(rows, key=lambda r: (r.attempt, r.step, r.position))
    same = [r for r in rows if (r.attempt, r.step, r.position, r.name, r.team)
            == (first.attempt, first.step, first.position, first.name, first.team)]  # fmt: skip
    odd = stand_apart({r.rank: r.signature for r in same}, len(first.ranks) or len(same))
    what = f"digest of collectives {first.position} to {first.position + int(first.op) - 1} of group {first.name}"
    yield Finding(
        ranks=odd.odd,
        first_step=first.step,
        last_good_step=first.step - 1 or None,
        attempt=first.attempt,
        subject="order",
        summary=f"{listed(odd.odd)} issued other collectives in step {first.step} than the rest of group {first.name}: "
        f"{first.op} calls from position {first.position} on have different digests",
        evidence=tuple(Evidence(r.rank, r.step, what, r.signature, "the same on all ranks") for r in same[:8]),
        cannot_conclude=("which of these calls differ: they had no row of their own",),
        next_check="run again with --tdbg-watch-steps beyond this step: every call then has a row",
    )
