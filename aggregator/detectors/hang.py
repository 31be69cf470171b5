"""The job stopped making progress: the ranks that did not arrive, and what the others wait in.

Reads     stall and stack (the node's launcher), exit, failure, event, step, collective, collective_step
Says      the ranks that are stuck or wait elsewhere than the majority, where, in what the others wait, for how long;
          which collective some have issued and others have not; a rank that runs on the spot while the others wait;
          also after torch's own timeout or a signal has ended the job
Unknown   a rank that works for less than twice the limit (the others wait for it), ranks whose launcher saw no stall,
          ranks without a stack
Blind to  a halt shorter than the limit that torch's own timeout did not end; a computation that does not end while no
          other rank waits for it
Do        read the stack of the rank that did not arrive (`tdbg incident RUN ID`), at the line named; look for a
          branch on the rank around a collective, data that ended earlier, a lock in a worker. Torch's own timeout is
          init_process_group(timeout=...)
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ..detector import RunFacts
from ..endings import COMMUNICATION, COMMUNICATION_TYPES, INTERRUPT_TYPES, NOT_SEEN, TIMED_OUT
from ..findings import Abstention, Evidence, Finding
from ..positions import ISSUED, SHOWN, Lag, lags, late
from ..standing import Row, Stand, odd_ones, runs_on_the_spot, stand_at_the_end, stand_in_stall
from ..waits import place_of
from ..wording import ranks_text

CODE = "HANG"
NEEDS = {"step": 0}  # a job may halt before its first step
PARAMS: dict[str, object] = {}

# A stall that training got over is none: `over` is the last moment at which a rank was seen to go on.
SQL = f"""
WITH over AS (
    SELECT attempt, max(time_ns) AS time_ns FROM (
        SELECT attempt, time_ns FROM stall WHERE event = 'resumed' UNION ALL SELECT attempt, time_ns FROM step
    ) GROUP BY ALL
), look AS (
    SELECT s.* FROM stall s LEFT JOIN over o USING (attempt)
    WHERE s.event = 'stall' AND s.time_ns > coalesce(o.time_ns, 0)
    QUALIFY row_number() OVER (PARTITION BY s.attempt, s.rank ORDER BY s.time_ns DESC, s.seq DESC) = 1
), sampled AS (
    SELECT attempt, rank, node, stall, look, list(frames ORDER BY sample, seq) AS stacks FROM stack GROUP BY ALL
), stopping AS (
    SELECT attempt, rank, node, stall, look, told, time_ns FROM stall WHERE event = 'stopping'
    QUALIFY row_number() OVER (PARTITION BY attempt, rank ORDER BY time_ns DESC, seq DESC) = 1
), last AS (
    SELECT p.attempt, p.rank, arg_max(k.frames, k.seq) AS frames
    FROM stopping p JOIN stack k USING (attempt, rank, node, stall, look) WHERE k.time_ns >= p.time_ns GROUP BY ALL
), ended AS (
    SELECT rank, attempt, arg_min(exit_code, ended_ns) AS exit_code, min(ended_ns) AS ended_ns,
           arg_min(stopped_by_launcher, ended_ns) AS stopped, max(step) AS step FROM exit WHERE rank >= 0 GROUP BY ALL
), raised AS (
    SELECT rank, attempt, type, message, frames, step, time_ns FROM failure WHERE kind = 'exception'
    QUALIFY row_number() OVER (PARTITION BY rank, attempt ORDER BY time_ns, seq) = 1
), progress AS (
    SELECT rank, attempt, max(step) AS step FROM step GROUP BY ALL
), orderly AS (
    SELECT DISTINCT rank, attempt FROM event WHERE kind = 'end'
), everyone AS (
    SELECT rank, attempt FROM ended UNION SELECT rank, attempt FROM raised UNION SELECT rank, attempt FROM progress
    UNION SELECT rank, attempt FROM stall WHERE rank >= 0
), {ISSUED}
SELECT w.attempt, w.rank, greatest(coalesce(l.step, 0), coalesce(p.step, 0), coalesce(e.step, 0)), l.rank IS NOT NULL,
       coalesce(l.look, 0), coalesce(l.told, s.told, FALSE) OR r.rank IS NOT NULL, coalesce(i.lasts, []),
       coalesce(l.time_ns, 0), coalesce(l.limit_ns, 0), coalesce(l.since_ns, 0), coalesce(l.quiet_ns, 0),
       coalesce(l.window_ns, 0), coalesce(l.busy_ns, 0), coalesce(l.below_ns, 0), coalesce(l.io_bytes, -1),
       coalesce(l.device, FALSE), coalesce(l.closed, FALSE), coalesce(l.phase, ''), coalesce(l.phase_since_ns, 0),
       coalesce(l.state, ''), coalesce(k.stacks, []), s.rank IS NOT NULL, coalesce(t.frames, ''),
       coalesce(e.exit_code, -1000), coalesce(e.stopped, FALSE), coalesce(e.ended_ns, 0), coalesce(r.type, ''),
       coalesce(r.message, ''), coalesce(r.frames, ''), coalesce(r.step, 0), coalesce(r.time_ns, 0), o.rank IS NOT NULL
FROM everyone w
LEFT JOIN look l USING (rank, attempt)
LEFT JOIN sampled k ON k.attempt = l.attempt AND k.rank = l.rank AND k.node = l.node AND k.stall = l.stall
    AND k.look = l.look
LEFT JOIN stopping s ON s.rank = w.rank AND s.attempt = w.attempt
LEFT JOIN last t ON t.rank = w.rank AND t.attempt = w.attempt
LEFT JOIN ended e ON e.rank = w.rank AND e.attempt = w.attempt
LEFT JOIN raised r ON r.rank = w.rank AND r.attempt = w.attempt
LEFT JOIN progress p ON p.rank = w.rank AND p.attempt = w.attempt
LEFT JOIN orderly o ON o.rank = w.rank AND o.attempt = w.attempt
LEFT JOIN issued i ON i.rank = w.rank AND i.attempt = w.attempt
ORDER BY w.attempt, w.rank
"""

# Ranks that never came together have waited for nobody's step.
CONNECTING = re.compile(r"connectfullmesh|connection refused|failed to connect|rendezvous", re.IGNORECASE)
NOBODY_KNOWS = "which of them is right: without a majority that can't be said"
ELSEWHERE = "whether the transport or a device failed, or a rank that was not seen is late"


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    rows = list(rows)
    attempts = sorted({r.attempt for r in rows})
    said = False
    for attempt in attempts:
        of_it = [r for r in rows if r.attempt == attempt]
        what = _attempt(of_it, run, attempt < attempts[-1])
        if isinstance(what, Finding):
            what = _with_order(what, _lags(of_it))
        said = said or what is not None
        if what is not None:
            yield what
    if not said and not _known_not_to(rows, run):
        yield Abstention(
            "INSUFFICIENT_EVIDENCE", "it is not known of all ranks how they ended; no stall was seen before"
        )


def _lags(rows: Sequence[Row]) -> list[Lag]:
    """Collectives that only some have issued, those in which a rank is seen to wait first."""
    stacks = [r.stacks[-1] if r.stacks else r.last_stack or r.frames for r in rows]
    places = {place.where for stack in stacks if (place := place_of(stack)) is not None}
    return lags({r.rank: r.issued for r in rows if r.told}, places)


def _with_order(found: Finding, order: Sequence[Lag]) -> Finding:
    """What stacks and the order of collectives both say. Where they contradict each other, neither is believed."""
    said = "; ".join([found.summary, *(g.text for g in order[:SHOWN])])
    evidence = tuple(
        Evidence(r, found.first_step, "has not issued", g.what) for g in order[:SHOWN] for r in g.missing[:4]
    )
    found = replace(found, summary=said, evidence=(*evidence, *found.evidence))
    behind = late(order)
    if not behind or behind & set(found.ranks):
        return found
    unknown = (
        f"who is at fault: stacks set {ranks_text(found.ranks)} apart, the order of collectives {ranks_text(behind)}"
    )
    weaker = "warning" if found.severity == "critical" else found.severity
    return replace(found, severity=weaker, evidence_state="INFERRED", cannot_conclude=(*found.cannot_conclude, unknown))


def _known_not_to(rows: Sequence[Row], run: RunFacts) -> bool:
    last = [r for r in rows if r.attempt == max((x.attempt for x in rows), default=0)]
    if not last or run.missing_ranks or len(last) < run.world_size:
        return False
    return run.status in ("finished", "running") or any(_failed(r) and not _weak(r) for r in last)


def _attempt(rows: Sequence[Row], run: RunFacts, restarted: bool) -> Finding | Abstention | None:
    stalled = [r for r in rows if r.stalled]
    noticed = max((r.noticed_ns for r in stalled), default=0)
    if any(_failed(r) and not _weak(r) and (not stalled or _end(r) < noticed) for r in rows):
        return None  # a rank that fails of itself takes the others with it
    if stalled and run.status != "finished" and not all(r.exit_code == 0 for r in stalled):
        return _stalled(rows, stalled, run, restarted)
    if _by_timeout(rows):
        return _timed_out(rows, run, restarted)
    return None


def _failed(row: Row) -> bool:
    """Ended badly and of itself."""
    if row.type:
        return row.type not in INTERRUPT_TYPES
    return row.exit_code not in (0, NOT_SEEN) and not row.stopped


def _weak(row: Row) -> bool:
    """Failed as a rank does whose peer is gone or late; the communication library's own watchdog aborts."""
    if not row.type:
        return row.exit_code == -signal.SIGABRT
    return row.type in COMMUNICATION_TYPES or bool(COMMUNICATION.search(row.message))


def _by_timeout(rows: Sequence[Row]) -> bool:
    return any(_weak(r) and TIMED_OUT.search(r.message) and not CONNECTING.search(r.message) for r in rows)


def _end(row: Row) -> int:
    return row.failed_ns or row.ended_ns


# ---------------------------------------------------------------- seen while it lasted


def _stalled(rows: Sequence[Row], stalled: Sequence[Row], run: RunFacts, restarted: bool) -> Finding | Abstention:
    quiet = max(r.quiet_ns for r in stalled) // 10**9
    stands = [stand_in_stall(r, run.world_size) for r in stalled]
    timed_out = _by_timeout(rows)
    for s in stands:
        if s.place is not None and (s.standing == "works" or s.place.kind == "debugger"):
            if s.standing == "works" and (timed_out or runs_on_the_spot(s.row)):
                continue
            doing = "works" if s.standing == "works" else "is in a debugger"
            return Abstention("INSUFFICIENT_EVIDENCE",
                              f"no progress for {quiet} s, but rank {s.row.rank} {doing}: {s.place.text}")  # fmt: skip
    if any(s.standing == "works" for s in stands):
        return _running(stands, quiet, timed_out, run, restarted)
    gone = [Stand(r, "stuck", None, "its program had ended in order") for r in rows if not r.stalled and _left(r)]
    unseen = run.world_size - len(stands) - len(gone)
    return _judge(stands, gone, unseen, f"no progress for {quiet} s", restarted)


def _running(stands: Sequence[Stand], quiet: int, timed_out: bool, run: RunFacts, restarted: bool,
             ) -> Finding | Abstention:  # fmt: skip
    """A rank runs and does not come: a loop without an end, or work that takes this long. Seen are the others' wait,
    and that it stood in one function all the time; only what torch's timeout ended is known to have been too long."""
    works = [s for s in stands if s.standing == "works"]
    waits = [s for s in stands if s.standing == "waits"]
    if not waits or len(works) + len(waits) < run.world_size:
        who, where = works[0].row.rank, works[0].text
        return Abstention("INSUFFICIENT_EVIDENCE", f"no progress for {quiet} s, but rank {who} works: {where}")
    said = (
        f"{_who(works)} {'is' if len(works) == 1 else 'are'} running, not blocked, and did not arrive: {_places(works)}"
    )
    lacking = () if timed_out else ("whether this is a loop without an end or work that takes so long",)
    found = _finding(works, waits, f"no progress for {quiet} s", said, True, lacking, restarted)
    return found if timed_out else replace(found, severity="warning")


def _left(row: Row) -> bool:
    return row.exit_code == 0 or (row.orderly and not _failed(row))


def _timed_out(rows: Sequence[Row], run: RunFacts, restarted: bool) -> Finding | Abstention:
    """torch's own timeout was shorter than the limit."""
    first = min(_end(r) for r in rows if _weak(r))
    gone = [Stand(r, "stuck", None, "its program had ended in order") for r in rows
            if not r.type and r.exit_code == 0 and 0 < r.ended_ns < first]  # fmt: skip
    left = {s.row.rank for s in gone}
    stands = [stand_at_the_end(r) for r in rows if r.rank not in left]
    unseen = run.world_size - len(stands) - len(gone)
    return _judge(stands, gone, unseen, "torch's own timeout ended the wait", restarted)


# ---------------------------------------------------------------- who is named


def _judge(stands: Sequence[Stand], gone: Sequence[Stand], unseen: int, how: str, restarted: bool) -> Finding:
    behind = late(_lags([s.row for s in stands]))
    stuck = [s for s in stands if s.standing == "stuck"]
    waits = [s for s in stands if s.standing == "waits"]
    unknown = [s for s in stands if s.standing == "unknown"]
    lacking: tuple[str, ...] = (
        (f"where the other {unseen} rank(s) stood: their launcher saw no stall",) if unseen > 0 else ()
    )
    if (stuck or gone) and (waits or len(stands) == 1):
        named = [*stuck, *gone]
        return _finding(named, waits, how, _did_not_arrive(named), True, lacking, restarted)
    if stuck and not waits:  # nobody is seen in a call that is known to wait
        odd, majority = odd_ones(stuck)
        if not odd:
            return _finding(stuck, [], how, _all_in(stuck), not unknown, (*lacking, ELSEWHERE), restarted)
        rest = [s for s in stuck if s not in odd]
        lacking += ("whether the others wait for these or only stand elsewhere",) if majority else (NOBODY_KNOWS,)
        return _finding(odd, rest, how, _apart(odd), False, lacking, restarted)
    if unknown or unseen > 0:
        named = unknown or waits
        lacking += ("where they stood: no stack was had of them",) if unknown else ()
        lacking += ("whether these ranks or those that were not seen are at fault",) if not unknown else ()
        return _finding(named, waits if unknown else [], how, _unknown(named, bool(unknown)), False, lacking, restarted)
    odd, majority = odd_ones(waits)
    if not odd and behind:
        odd = [s for s in waits if s.row.rank in behind]
    if not odd:
        return _finding(waits, [], how, _all_in(waits), True, (*lacking, ELSEWHERE), restarted)
    rest = [s for s in waits if s not in odd]
    return _finding(odd, rest, how, _apart(odd), True, lacking if majority else (*lacking, NOBODY_KNOWS), restarted)


def _who(stands: Sequence[Stand]) -> str:
    return ranks_text(s.row.rank for s in stands)


def _did_not_arrive(stands: Sequence[Stand]) -> str:
    return f"{_who(stands)} did not arrive: {_places(stands)}"


def _apart(stands: Sequence[Stand]) -> str:
    return f"{_who(stands)}: {_places(stands)}"


def _all_in(stands: Sequence[Stand]) -> str:
    verb = "waits" if stands[0].standing == "waits" else "stands"
    where = stands[0].text
    return f"rank {stands[0].row.rank} stands in {where}" if len(stands) == 1 else f"every rank {verb} in {where}"


def _unknown(stands: Sequence[Stand], no_stack: bool) -> str:
    return f"{_who(stands)} gave no stack" if no_stack else f"{_who(stands)} wait: {_places(stands)}"


def _places(stands: Sequence[Stand]) -> str:
    """Where they stand, those at one place together."""
    by_place: dict[str, list[Stand]] = {}
    for s in stands:
        by_place.setdefault(f"{s.text}, in step {s.step}", []).append(s)
    if len(by_place) == 1:
        return next(iter(by_place))
    return "; ".join(f"{_who(several)} in {text}" for text, several in list(by_place.items())[:4])


def _finding(named: Sequence[Stand], others: Sequence[Stand], how: str, said: str, observed: bool,
             lacking: Sequence[str], restarted: bool) -> Finding:  # fmt: skip
    step = min(s.step for s in named)
    summary = f"{how}; {said}"
    if others:
        summary += f"; {_who(others)} {'waits' if len(others) == 1 else 'wait'} in {_places(others)}"
    lead = next((s for s in named if s.place is not None), named[0])
    return Finding(
        ranks=tuple(sorted(s.row.rank for s in named)),
        first_step=step,
        last_good_step=step - 1 or None,
        attempt=lead.row.attempt,
        severity="critical" if observed and not restarted else "warning",
        evidence_state="OBSERVED" if observed else "INFERRED",
        subject=lead.place.where if lead.place is not None else lead.why,
        summary=summary,
        evidence=tuple(e for s in [*named[:4], *others[:4]] for e in _evidence(s)),
        cannot_conclude=tuple(lacking),
        next_check="the stack of each rank is in the evidence; start with the rank that did not arrive",
    )


def _evidence(stand: Stand) -> Iterator[Evidence]:
    row, step = stand.row, stand.step
    yield Evidence(row.rank, step, stand.standing, stand.text or "no stack")
    frames = row.stacks[-1] if row.stacks else row.last_stack or row.frames
    if frames:
        yield Evidence(row.rank, step, "stack", "\n".join(frames.splitlines()[-12:]))
    if row.type:
        yield Evidence(row.rank, step, "exception", f"{row.type}: {' '.join(row.message.split())[:200]}")
    if row.stalled:
        used = (
            f"{row.busy_ns / 1e9:.2f} s of CPU and {row.below_ns / 1e9:.2f} s below it in {row.window_ns / 1e9:.1f} s"
        )
        yield Evidence(
            row.rank, step, "no progress", f"{row.quiet_ns / 1e9:.0f} s", f"less than {row.limit_ns / 1e9:.0f} s"
        )
        yield Evidence(row.rank, step, "work meanwhile", used)
        yield Evidence(row.rank, step, "phase", f"{row.phase or 'unknown'} since {row.phase_since_ns}")
