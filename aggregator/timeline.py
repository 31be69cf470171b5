"""What happened in a run, in order: `tdbg timeline RUN`. Learning rates, skipped updates, checkpoints, resumes,
evaluations, passes over the data, attempts, devices' errors, ends of ranks, and the incidents beside them.

What all ranks did at one step is one event. A learning rate that moves step after step in one direction is one event as
well, and so are updates that were left out in a row: a schedule of 10,000 steps is a line, not 10,000.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from . import deviceevents
from .findings import Incident
from .side import Rows
from .wording import counted

# Kinds, in the order in which those of one step are told.
KINDS: Final = (
    "attempt", "load", "put back", "pass", "lr", "loss scale", "skipped", "evaluation", "save", "device", "incident",
    "failure", "exit",
)  # fmt: skip
RAMP = 3  # changes in one direction that are told as one
SMALL_STEP = 0.5  # a change of the rate by more than half of it is a line of its own, whatever goes on around it


@dataclass(frozen=True)
class Event:
    """Something at `step` (0: before the first), of a run of steps up to `last_step`; wall clock of its first row."""

    attempt: int
    step: int
    last_step: int
    time_ns: int | None
    ranks: tuple[int, ...]
    kind: str
    words: str


def timeline(rows: Rows, incidents: Sequence[Incident] = ()) -> list[Event]:
    """All events by attempt, step and kind. Cost: one query a kind, of tables with few rows, and one over `step`."""
    found = [e for make in _MAKERS for e in make(rows)]
    found += [_incident(i) for i in incidents]
    together: dict[tuple[int, int, int, str, str], list[Event]] = {}
    for e in found:
        together.setdefault((e.attempt, e.step, e.last_step, e.kind, e.words), []).append(e)
    events = [_joined(several) for several in together.values()]
    return sorted(events, key=lambda e: (e.attempt, e.step, KINDS.index(e.kind), e.ranks, e.words))


def _joined(several: Sequence[Event]) -> Event:
    times = [e.time_ns for e in several if e.time_ns is not None]
    ranks = sorted({r for e in several for r in e.ranks})
    return replace(several[0], time_ns=min(times, default=None), ranks=tuple(ranks))


def _incident(i: Incident) -> Event:
    f = i.finding
    step = f.first_step or 0
    words = f"{i.reason_code} ({f.severity})" + (f": {f.subject}" if f.subject else "")
    return Event(f.attempt, step, f.last_step or step, None, tuple(sorted(f.ranks)), "incident", words)


def _event(attempt: int, rank: int, step: int, time_ns: int, kind: str, words: str, last: int | None = None) -> Event:
    return Event(attempt, step, step if last is None else last, time_ns, (rank,), kind, words)


# ------------------------------------------------------------ a function for each source


def _attempts(rows: Rows) -> Iterator[Event]:
    for attempt, rank, at in rows(
        "SELECT attempt, rank, min(time_ns) FROM event WHERE kind = 'start' AND rank >= 0 GROUP BY ALL"
    ):
        yield _event(attempt, rank, 0, at, "attempt", "begins" if attempt == 0 else f"restart {attempt} begins")


def _rates(rows: Rows) -> Iterator[Event]:
    changed = rows("""
        SELECT attempt, rank, optimizer, "group", greatest(step, 1) AS step, time_ns, lr FROM optim WHERE isfinite(lr)
        WINDOW one AS (PARTITION BY attempt, rank, optimizer, "group" ORDER BY step, seq)
        QUALIFY lr IS DISTINCT FROM lag(lr) OVER one
        ORDER BY attempt, rank, optimizer, "group", step, seq
    """)
    for (attempt, rank, optimizer, group), changes in groupby(changed, key=lambda r: r[:4]):
        name = f"optimizer {optimizer}" + (f" group {group}" if group else "")
        for part in _ramps([(step, at, lr) for *_, step, at, lr in changes]):
            if len(part) < RAMP:
                for step, at, lr in part:
                    yield _event(attempt, rank, step, at, "lr", f"{name}: {lr:.4g}")
                continue
            (first, at, begin), (last, _, end) = part[0], part[-1]
            words = f"{name}: {begin:.4g} to {end:.4g} in {counted(len(part) - 1, 'change')}"
            yield _event(attempt, rank, first, at, "lr", words, last)


def _ramps(changes: Sequence[tuple[int, int, float]]) -> Iterator[list[tuple[int, int, float]]]:
    """Parts in which the rate moves on in one direction, at most as far apart as before, and by small steps."""
    part: list[tuple[int, int, float]] = []
    for here in changes:
        if len(part) > 1:
            gap, way = part[-1][0] - part[-2][0], part[-1][2] - part[-2][2]
            goes_on = here[0] - part[-1][0] <= gap and (here[2] - part[-1][2]) * way > 0
        else:
            goes_on = bool(part)
        if goes_on and not _leaps(part[-1][2], here[2], first=len(part) < 3):
            part.append(here)
            continue
        if part:
            yield part
        part = [here]
    if part:
        yield part


def _leaps(before: float, after: float, first: bool) -> bool:
    """A warm-up doubles its rate in its first steps; from then on a change by more than half of it is a leap."""
    return not first and abs(after - before) > SMALL_STEP * abs(before)


def _scales(rows: Rows) -> Iterator[Event]:
    changed = rows("""
        SELECT attempt, rank, step, time_ns, scale, lag(scale) OVER one AS before FROM loss
        WINDOW one AS (PARTITION BY attempt, rank ORDER BY step, seq) QUALIFY before <> scale
    """)
    for attempt, rank, step, at, scale, before in changed:
        yield _event(attempt, rank, step, at, "loss scale", f"{before:.6g} to {scale:.6g}")


def _skipped(rows: Rows) -> Iterator[Event]:
    left_out = rows(
        "SELECT attempt, rank, min(step), max(step), min(time_ns), count(*) FROM (SELECT attempt, rank, step, time_ns, "
        "step - row_number() OVER (PARTITION BY attempt, rank ORDER BY step) AS run FROM step WHERE skipped) "
        "GROUP BY attempt, rank, run ORDER BY ALL"
    )
    for attempt, rank, first, last, at, count in left_out:
        yield _event(attempt, rank, first, at, "skipped", f"{counted(count, 'update')} left out by the scaler", last)


def _files(rows: Rows) -> Iterator[Event]:
    for attempt, rank, step, at, event, path, parts in rows(
        "SELECT attempt, rank, step, time_ns, event, path, parts FROM checkpoint WHERE event IN ('save', 'load')"
    ):
        held = ", ".join(json.loads(parts)) if parts else ""
        name = os.path.basename(path) or "a file object"
        yield _event(attempt, rank, step, at, event, name + (f" ({held})" if held else ""))
    for attempt, rank, step, at, put_back in rows(
        "SELECT attempt, rank, step, min(time_ns), string_agg(DISTINCT part, ', ' ORDER BY part) FROM checkpoint "
        "WHERE event = 'apply' GROUP BY attempt, rank, step, backwards"
    ):
        yield _event(attempt, rank, step, at, "put back", put_back)


def _evaluations(rows: Rows) -> Iterator[Event]:
    for attempt, rank, step, at, model, in_eval in rows(
        "SELECT attempt, rank, step, min(time_ns), model_type, bool_and(in_eval) FROM evaluation GROUP BY ALL"
    ):
        yield _event(attempt, rank, step, at, "evaluation", f"{model} in {'eval' if in_eval else 'train'} mode")


def _passes(rows: Rows) -> Iterator[Event]:
    for attempt, rank, step, at, nth in rows(
        "SELECT b.attempt, b.rank, min(b.step), min(b.time_ns), p.nth_pass FROM training_batch b JOIN training_pass p "
        "USING (rank, attempt, pid, loader, iterator) WHERE p.nth_loader = 1 GROUP BY ALL"
    ):
        yield _event(attempt, rank, step, at, "pass", f"pass {nth} over the training data begins")


def _ends(rows: Rows) -> Iterator[Event]:
    for attempt, rank, step, at, kind, during in rows(
        "SELECT attempt, rank, step, time_ns, type, during FROM failure WHERE kind = 'exception'"
    ):
        yield _event(attempt, rank, step, at, "failure", f"{kind} in phase {during}")
    for attempt, rank, step, at, code, stopped in rows(
        "SELECT attempt, rank, step, ended_ns, exit_code, stopped_by_launcher FROM exit"
    ):
        how = "code unknown" if code == -1000 else f"signal {-code}" if code < 0 else f"code {code}"
        yield _event(attempt, rank, step, at, "exit", how + (", stopped by the launcher" if stopped else ""))


def _devices(rows: Rows) -> Iterator[Event]:
    for attempt, step, at, device, what, number, ranks in rows(deviceevents.SQL):
        yield Event(attempt, step, step, at, tuple(ranks), "device", deviceevents.words(device, what, number))


_MAKERS: tuple[Callable[[Rows], Iterable[Event]], ...] = (
    _attempts, _rates, _scales, _skipped, _files, _evaluations, _passes, _devices, _ends
)  # fmt: skip
