"""Where replicas part: the query that finds the tensors whose bits differ between ranks, and the fold into findings.

Whole rows are compared by one hash first; only an attempt in which some row differs is unfolded into tensors. A
healthy run of any size therefore costs one hash per rank and step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from .detector import RunFacts
from .findings import Abstention, Evidence, Finding, Severity
from .groups import COMPARED, DECLARED, PROMISE, UNDECLARED, Split, interval, listed, split, unheard, why_not_compared
from .stages import point_of

SHOWN = 8  # tensors, and ranks of each, that evidence lists: enough to recognise a pattern, short enough to read
START, END, FINAL = 0, 1, 2  # the order of a step's sweeps
# Of a larger tensor a sweep after an update looks at a window that moves with the step number (rankagent's
# fingerprint); of parameters only in models that are larger as a whole.
WINDOW_ELEMENTS, WHOLE_ELEMENTS = 2_040, 4_000_000


class Row(NamedTuple):
    """One tensor that differs somewhere, beside facts on the whole comparison; `name` None when nothing differs."""

    comparable: int  # tensors that at least two ranks of a replica group hold
    kinds: list[str]  # every kind of sharing in the catalogues
    nameless: bool  # some tensor without a wrapper has no known peers
    broadcasts: bool  # DDP broadcasts some of them (buffers)
    compared: int  # sweeps after an update that at least two ranks made
    compared_before: int  # the same for sweeps before it
    shifted: int | None  # first step from which the ranks' steps no longer correspond
    own_pace: bool  # the ranks took different numbers of steps
    own_settings: bool  # optimizers begin with settings that differ between ranks
    own_losses: bool  # every rank takes a loss of its own, and they are not one and the same
    blinks: bool  # steps were left out, and no 32 in a row would show an average with a period up to that
    attempt: int | None
    name: str | None
    model: int
    position: int  # in the tensor catalogue
    sharing: str
    broadcast: int
    owned: bool  # trainable or held by an optimizer
    first: int
    first_sweep: int
    last: int
    last_good: int | None
    differing: int  # steps at which it differs
    since: int  # steps checked from `first` on
    returns: int  # times that it agreed again after having differed
    settled: bool  # a gradient: the parameters agree all the same after every step from `first` on
    moving: list[int]  # ranks on which its bits change over time
    values: int  # most different values that it has on one of these
    windowed: bool  # each check looked at one part of it
    kept: int  # trained tensors of the same model and undeclared sharing that agree at every check
    unlike: int  # those of them that differed at their first check already
    never_equal: bool  # it differed at its first check itself
    ranks: list[int]
    marks: list[int]
    last_ranks: list[int]
    last_marks: list[int]


def parted_sql(sweeps: str, catalogued: str, fits: str = "TRUE", settled: str = "FALSE",
               whole: int = WHOLE_ELEMENTS, settings: str = "FALSE", catalogue: str = "tensor") -> str:  # fmt: skip
    """The query over `sweeps` (rank, attempt, pid, generation, step, sweep, tensors, marks); arguments are constants.

    `catalogued` picks the rows of the tensor catalogue, `fits` the sweeps at which a tensor is compared, `settled` is
    an expression over the differing tensor `a`, `whole` the size up to which a model's tensors are looked at whole,
    `settings` an expression for `own_settings`, `catalogue` a table or subquery to take for the tensor catalogue.
    """
    sql = (
        _PARTED.replace("{promise}", PROMISE)
        .replace("{compared}", str(COMPARED))
        .replace("{undeclared}", str(UNDECLARED))
    )
    sql = sql.replace("{tensor}", catalogue).replace("{sweeps}", sweeps).replace("{catalogued}", catalogued)
    sql = sql.replace("{window}", str(WINDOW_ELEMENTS)).replace("{whole}", str(whole))
    return sql.replace("{fits}", fits).replace("{settled}", settled).replace("{settings}", settings)


_PARTED: Final = """
WITH swept AS ({sweeps}),
known AS (
    SELECT rank, attempt, pid, generation, index, name, model, sharing, broadcast, optimizer, base,
           peers <> '' AS joined, trainable OR optimizer >= 0 AS owned,
           len(peers) - len(replace(peers, ',', '')) + 1 AS peers,
           hash(name, model, model_type, shape, dtype, sharing, broadcast, peers) AS id, windows
    FROM (
        SELECT * REPLACE ({promise} AS sharing),
               min(index) OVER (PARTITION BY rank, attempt, pid, generation, kind) AS base,
               CASE WHEN kind = 'param' AND numel > {window}
                        AND sum(numel) OVER (PARTITION BY rank, attempt, pid, generation, kind) > {whole}
                       THEN ((numel + {window} - 1) // {window}) | 1 ELSE 1 END AS windows
        FROM {tensor}
    ) WHERE {catalogued}
),
ragged AS (  -- models that are not the same on all their ranks: stages, or trainings of their own, with parts alike
    SELECT attempt, model FROM known WHERE joined AND sharing = 'plain' AND owned AND generation = 1
    GROUP BY attempt, model, id HAVING count(DISTINCT rank) < any_value(peers)
),
held AS (
    SELECT attempt, id, any_value(name) AS name, any_value(model) AS model, min(index) AS index,
           any_value(sharing) AS sharing, any_value(broadcast) AS broadcast, bool_or(owned) AS owned
    FROM known WHERE joined AND sharing IN {compared}
        AND (sharing <> 'plain' OR (attempt, model) NOT IN (SELECT (attempt, model) FROM ragged))
    GROUP BY attempt, id
    HAVING min(rank) <> max(rank)
       AND (any_value(sharing) NOT IN {undeclared} OR count(DISTINCT rank) = any_value(peers))
),
fit AS (SELECT k.* FROM known k JOIN held USING (attempt, id)),
catalogue AS (
    SELECT k.rank, k.attempt, k.pid, k.generation, min(k.base) AS base, bit_xor(hash(f.index, f.id)) AS digest
    FROM known k LEFT JOIN fit f USING (rank, attempt, pid, generation, index)
    GROUP BY ALL HAVING count(f.id) > 0
),
steps AS (
    SELECT attempt, step FROM step GROUP BY attempt, step
    HAVING min(optimizers) <> max(optimizers) OR min(backwards > 0) <> max(backwards > 0)
        OR min(inferred) <> max(inferred)
),
entered AS (
    SELECT attempt, step, row_number() OVER (PARTITION BY attempt, rank, pid ORDER BY seq) AS nth
    FROM event WHERE kind = 'join'
),
shift AS (
    SELECT attempt, min(step) AS step FROM (
        SELECT attempt, step FROM steps
        UNION ALL  -- ranks of which Join let some run out of data begin the next pass with unequal step numbers
        SELECT attempt, min(step) - 1 FROM entered GROUP BY attempt, nth HAVING min(step) <> max(step)
    ) GROUP BY attempt
),
row_check AS (
    SELECT attempt, step, sweep, min(h) <> max(h) AS differs
    FROM (SELECT s.rank, s.attempt, s.step, s.sweep, hash(c.digest, s.tensors, s.marks) AS h
          FROM swept s JOIN catalogue c USING (rank, attempt, pid, generation))
    GROUP BY ALL HAVING min(rank) <> max(rank)
),
cell AS MATERIALIZED (
    SELECT u.rank, u.attempt, u.step, u.sweep, u.step * 4 + u.sweep AS place, f.id, u.mark,
           CASE WHEN u.sweep = 1 AND f.windows > 1 THEN u.step % f.windows ELSE -1 END AS part  -- -1: all of it
    FROM (
        SELECT s.rank, s.attempt, s.pid, s.generation, s.step, s.sweep, unnest(s.marks) AS mark,
               unnest(CASE WHEN len(s.tensors) > 0 THEN s.tensors
                           ELSE range(c.base, c.base + len(s.marks)) END) AS index
        FROM swept s JOIN catalogue c USING (rank, attempt, pid, generation)
        LEFT JOIN shift ON shift.attempt = s.attempt
        WHERE s.attempt IN (SELECT attempt FROM row_check WHERE differs)
          AND (shift.step IS NULL OR s.step <= shift.step)
    ) u JOIN fit f USING (rank, attempt, pid, generation, index)
    WHERE {fits}
),
tensor_check AS (
    SELECT attempt, id, step, place, part, min(mark) AS low, min(mark) <> max(mark) AS differs,
           lag(min(mark) <> max(mark)) OVER (PARTITION BY attempt, id, part ORDER BY place) AS differed
    FROM cell GROUP BY attempt, id, step, place, part HAVING min(rank) <> max(rank)
),
life AS (
    SELECT attempt, id, min(place) FILTER (differs) AS first, max(place) FILTER (differs) AS last,
           count(*) FILTER (differed AND NOT differs) AS returns,
           count(DISTINCT (part, low)) > count(DISTINCT part) AS moves, arg_min(part, place) FILTER (differs) AS part,
           arg_min(differs, place) AS unlike, count(DISTINCT step) FILTER (differs) AS differing, max(place % 4) AS ends
    FROM tensor_check GROUP BY attempt, id
),
fellows AS (
    SELECT attempt, model, sharing, count(*) FILTER (first IS NULL AND moves) AS kept,
           count(*) FILTER (unlike) AS unlike
    FROM life JOIN held USING (attempt, id) WHERE sharing IN {undeclared} AND owned GROUP BY attempt, model, sharing
),
apart AS (
    SELECT attempt, id, first, last, any_value(returns) AS returns, any_value(differing) AS differing,
           nullif(max(CASE WHEN place % 4 = 0 AND ends > 0 THEN step - 1 ELSE step END) FILTER (
               NOT differs AND place < first AND step < first // 4 AND t.part IN (-1, l.part)), 0) AS last_good,
           count(DISTINCT step) FILTER (place >= first) AS since, any_value(l.part) >= 0 AS windowed,
           any_value(l.unlike) AS never_equal
    FROM life l JOIN tensor_check t USING (attempt, id) WHERE first IS NOT NULL GROUP BY attempt, id, first, last
),
drift AS (
    SELECT attempt, id, list(DISTINCT rank) AS moving, max(marks) AS marks FROM (
        SELECT attempt, id, rank, count(DISTINCT mark) AS marks FROM cell JOIN apart USING (attempt, id)
        WHERE sweep < 2 GROUP BY attempt, id, rank, part HAVING min(mark) <> max(mark))
    GROUP BY attempt, id
),
member AS (
    SELECT attempt, id, list(rank ORDER BY rank) FILTER (place = first) AS ranks,
           list(mark ORDER BY rank) FILTER (place = first) AS marks,
           list(rank ORDER BY rank) FILTER (place = last) AS last_ranks,
           list(mark ORDER BY rank) FILTER (place = last) AS last_marks
    FROM cell JOIN apart USING (attempt, id) WHERE place = first OR place = last GROUP BY attempt, id
),
census AS (
    SELECT (SELECT count(DISTINCT id) FROM held) AS comparable,
           (SELECT coalesce(list(DISTINCT sharing), []) FROM known) AS kinds,
           (SELECT coalesce(bool_or(NOT joined), FALSE) FROM known WHERE sharing = 'plain') AS nameless,
           (SELECT coalesce(bool_or(broadcast = 1), FALSE) FROM known) AS broadcasts,
           (SELECT count(*) FROM row_check WHERE sweep > 0) AS compared,
           (SELECT count(*) FROM row_check WHERE sweep = 0) AS compared_before,
           (SELECT min(step) FROM shift) AS shifted,
           (SELECT coalesce(min(last) <> max(last), FALSE) FROM (
                SELECT attempt, max(step) AS last FROM step GROUP BY rank, attempt
                QUALIFY attempt = max(attempt) OVER ())) AS own_pace,
           {settings} AS own_settings,
           (SELECT coalesce(bool_or(differ), FALSE) AND count(DISTINCT rank) >= (SELECT count(DISTINCT rank) FROM known)
            FROM (SELECT rank, min(total) OVER w <> max(total) OVER w AS differ FROM loss WHERE backwards > 0
                  WINDOW w AS (PARTITION BY attempt, step))) AS own_losses,
           (SELECT coalesce(max(gap) > 1 AND count(*) FILTER (gap = 1) < 32, FALSE) FROM (  -- see Row
                SELECT step - lag(step) OVER (PARTITION BY attempt ORDER BY step) AS gap
                FROM row_check WHERE sweep = 1)) AS blinks
),
report AS (
    SELECT a.attempt, h.name, h.model, h.index, h.sharing, h.broadcast, h.owned, a.first // 4 AS first,
           a.first % 4 AS first_sweep, a.last // 4 AS last, a.last_good, a.differing, a.since, a.returns,
           {settled} AS settled, coalesce(d.moving, []) AS moving, coalesce(d.marks, 1) AS most,
           a.windowed, coalesce(f.kept, 0) AS kept,
           coalesce(f.unlike, 0) AS unlike, a.never_equal, m.ranks, m.marks, m.last_ranks, m.last_marks
    FROM apart a JOIN held h USING (attempt, id) JOIN member m USING (attempt, id)
    LEFT JOIN drift d USING (attempt, id)
    LEFT JOIN fellows f ON f.attempt = a.attempt AND f.model = h.model AND f.sharing = h.sharing
)
SELECT * FROM census LEFT JOIN report ON TRUE ORDER BY attempt, first, model, index
"""


Shown = Callable[[Row, object], str]


@dataclass(frozen=True)
class Parting:
    """Tensors that part at the same step between the same ranks, and what is to be said of them."""

    what: str  # "parameter", "buffer", "gradient"
    rows: tuple[Row, ...]
    odd: Split
    severity: Severity = "critical"
    when: str = ""
    cannot_conclude: tuple[str, ...] = ()
    next_check: str = ""


def partings(rows: Iterable[Row], what: str) -> Iterator[Parting]:
    """Fold tensors of one attempt, first step, kind of sharing and set of odd ranks into one."""
    together: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        odd = split(dict(zip(row.ranks, row.marks, strict=True)))
        # beyond step 1 it is one difference, whether a tensor was looked at before the update too or only after it
        sweep = END if row.first_sweep == START and row.first > 1 else row.first_sweep
        promised = "" if row.sharing in ("ddp", "late") else row.sharing
        together[(row.attempt, row.first, sweep, promised, odd.odd, odd.decided)].append(row)
    for found in together.values():
        first = found[0]
        yield Parting(what, tuple(found), split(dict(zip(first.ranks, first.marks, strict=True))))


def unjudged(census: Row, world_size: int) -> Abstention | None:
    """Why the replicas of this run can't be compared, or None when they were."""
    if world_size < 2:
        return Abstention("NOT_APPLICABLE", "a single rank has no replica to differ from")
    if not census.comparable:
        never = not set(census.kinds) & {*DECLARED, "outside", "ignored", "duplicated"}
        why = why_not_compared(census.kinds, census.nameless)
        if census.kinds and never:
            return Abstention("NOT_APPLICABLE", why)
        return Abstention("INSUFFICIENT_EVIDENCE", why)
    return None


def left_open(census: Row, run: RunFacts) -> Iterator[Abstention]:
    """What keeps a comparison without findings from being CLEAR: silent ranks, no sweep, steps that went apart."""
    yield from unheard(run)
    if not census.compared:
        yield Abstention("INSUFFICIENT_EVIDENCE", "no finished step was recorded by two ranks that share tensors")
    if census.shifted is not None:
        why = f"from step {census.shifted} on the ranks' steps do not correspond: later ones were not compared"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)


def finding(parting: Parting, shown: Shown | None = None) -> Finding:
    """The finding with its per-rank evidence; wording that all replica rules share. `shown` writes a mark out."""
    row = parting.rows[0]
    count = len(parting.rows)
    more = f" and {count - 1} more tensor{'s' if count > 2 else ''}" if count > 1 else ""
    who = f"{listed(parting.odd.odd)} " + ("differ" if len(parting.odd.odd) > 1 else "differs")
    who += " from the other ranks" if parting.odd.decided else " from each other"
    how_often = f"it differs at {row.differing} of {row.since} watched steps from then on"
    unknown = () if parting.odd.decided else ("which side is right: no majority of the ranks agrees",)
    return Finding(
        ranks=parting.odd.odd,
        first_step=row.first,
        last_good_step=row.last_good,
        last_step=row.last,
        attempt=row.attempt or 0,
        subject=row.name or "",
        severity=parting.severity,
        summary=f"{parting.what} {row.name}{more}: {who} at step {row.first}{parting.when}; {how_often}",
        evidence=tuple(_evidence(parting, shown or _digest)),
        cannot_conclude=unknown + _reach(row) + parting.cannot_conclude,
        next_check=parting.next_check,
        point=point_of(parting.what, min(r.first_sweep for r in parting.rows) == START),
    )


def drifts(row: Row) -> bool:
    """Its bits change over time, as a statistic's do. Odd is a rank set apart on which they change once, and stay."""
    odd = split(dict(zip(row.ranks, row.marks, strict=True)))
    once = row.last_good is not None and row.values == 2 and row.differing == row.since
    alone = set(row.moving) <= set(odd.odd) if odd.decided else len(row.moving) == 1 and len(row.ranks) == 2
    return bool(row.moving) and not (once and alone)


def _reach(row: Row) -> tuple[str, ...]:
    if row.windowed and row.last_good is None and row.first > 1:
        return (f"at which step up to {row.first} it began: this part of the tensor was not looked at before",)
    return interval(row.last_good, row.first)


def _evidence(parting: Parting, shown: Shown) -> Iterator[Evidence]:
    for row in parting.rows[:SHOWN]:
        here = split(dict(zip(row.ranks, row.marks, strict=True)))
        expected = shown(row, here.shared) if here.decided else "the same on all ranks"
        odd = [(r, m) for r, m in zip(row.ranks, row.marks, strict=True) if r in here.odd][:SHOWN]
        for rank, mark in odd:
            yield Evidence(rank, row.first, f"{parting.what} {row.name} digest", shown(row, mark), expected)
    last = parting.rows[0]
    spread = split(dict(zip(last.last_ranks, last.last_marks, strict=True)))
    if set(spread.odd) - set(parting.odd.odd):
        who = listed(spread.odd)
        yield Evidence(None, last.last, f"{parting.what} {last.name}: ranks that differ by then", who, "none")
    if len(parting.rows) > SHOWN:
        yield Evidence(None, last.first, f"{parting.what}s that differ", str(len(parting.rows)), "0")


def _digest(row: Row, mark: object) -> str:
    """-1 is what the gradient sweep marks a missing gradient with."""
    return "no gradient" if mark == -1 else digits(mark)


def digits(mark: object) -> str:
    """A digest as 16 hex digits."""
    return f"{int(str(mark)) & (1 << 64) - 1:016x}"


def same_model(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows of one attempt and model together, in the order given."""
    groups: dict[tuple[int | None, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.attempt, row.model].append(row)
    yield from groups.values()
