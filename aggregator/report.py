"""All that a report shows, as one value: `tdbg report RUN`. The page is drawn from it and asks nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .about import About
from .coverage import Pass, coverage
from .diagnose import Diagnosis, diagnose
from .findings import Verdict
from .illustrate import PHASES, Picture, pictures
from .metrics import METRICS
from .ranks import RankRow, rank_rows
from .series import Series, series
from .store import Store
from .timeline import Event, timeline
from .verdict import judge

ILLUSTRATED = 12  # incidents above a note that get pictures, the gravest first: a page stays one that a mail takes
MOST_EVENTS = 400
MOST_BARS = 12  # ranks in the phase picture


@dataclass(frozen=True)
class Key:
    """One thing that a run was started with: value -> the ranks that had it."""

    key: str
    values: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Phases:
    """Mean time of each phase of a step, in ns, by rank; `ranks` are the slowest where there are many."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    mean_ns: tuple[tuple[float, ...], ...]  # a row per rank, in the order of names
    of_ranks: int


@dataclass(frozen=True)
class Limit:
    """A memory limit that a launcher saw on its node, in bytes."""

    name: str
    size_bytes: int


@dataclass(frozen=True)
class Report:
    """The whole page, before it is one."""

    verdict: Verdict
    diagnosis: Diagnosis
    about: About
    attempt: int  # the last one, which the overview pictures show
    pictures: dict[str, tuple[Picture, ...]]
    overview: tuple[Series, ...]  # loss, lr, loss scale: one axis with the events
    events: tuple[Event, ...]
    memory: tuple[Series, ...]
    limits: tuple[Limit, ...]
    phases: Phases | None
    ranks: tuple[RankRow, ...]
    differing: tuple[Key, ...]
    common: tuple[Key, ...]
    coverage: tuple[Pass, ...]
    events_left_out: int = 0
    versions: dict[str, str] = field(default_factory=dict)


def report(store: Store) -> Report:
    """Judge the run and gather what the page shows. Cost: the verdict, and some thirty queries beside it."""
    v = judge(store)
    attempt = max(0, v.attempts - 1)
    events = timeline(store.rows, v.incidents)
    keys = _identity(store, attempt)
    grave = [i for i in v.incidents if i.finding.severity != "note"]
    culprits = sorted({r for i in grave for r in i.finding.ranks})
    return Report(
        verdict=v, diagnosis=diagnose(v), about=store.about, attempt=attempt,
        pictures={i.id: pictures(store, i) for i in grave[:ILLUSTRATED]},
        overview=_several(store, ("loss", "lr", "loss_scale"), attempt, culprits),
        events=tuple(events[:MOST_EVENTS]), events_left_out=max(0, len(events) - MOST_EVENTS),
        memory=_several(store, ("rss_bytes", "cuda_allocated_bytes"), attempt, culprits), limits=_limits(store),
        phases=_phases(store, attempt), ranks=rank_rows(store, v.incidents, v.world_size),
        differing=tuple(k for k in keys if len(k.values) > 1), common=tuple(k for k in keys if len(k.values) == 1),
        coverage=coverage(store),
        versions={k.key.removeprefix("version."): " | ".join(value for value, _ in k.values) for k in keys
                  if k.key.startswith("version.")},
    )  # fmt: skip


def _several(store: Store, names: Sequence[str], attempt: int, marked: Sequence[int]) -> tuple[Series, ...]:
    return tuple(s for name in names if (s := series(store, name, attempt, marked)))


def _limits(store: Store) -> tuple[Limit, ...]:
    """The tightest limits of any node; none where nothing was sampled."""
    rows = store.rows(
        "SELECT min(cgroup_limit_bytes) FILTER (cgroup_limit_bytes > 0), min(memory_total_bytes) FILTER "
        "(memory_total_bytes > 0) FROM host"
    )
    memory = store.rows("SELECT min(cuda_total_bytes) FILTER (cuda_total_bytes > 0) FROM memory")
    named = (*zip(("cgroup", "host"), rows[0], strict=True), ("device", memory[0][0]))
    return tuple(Limit(name, int(size)) for name, size in named if size)


def _phases(store: Store, attempt: int) -> Phases | None:
    names = tuple(n for n in (*PHASES, "other_ns"))
    means = ", ".join(f"avg(greatest({n}, 0))" for n in names)
    rows: list[tuple[Any, ...]] = store.rows(
        f"SELECT rank, {means} FROM phase WHERE attempt = ? AND step > 1 AND rank >= 0 GROUP BY rank "
        f"ORDER BY avg(greatest(data_ns, 0) + greatest(forward_ns, 0) + greatest(backward_ns, 0) + "
        f"greatest(optimizer_ns, 0)) DESC, rank",
        [attempt],
    )
    if not rows:
        return None
    shown = sorted(rows[:MOST_BARS])
    return Phases(tuple(n.removesuffix("_ns") for n in names), tuple(r[0] for r in shown),
                  tuple(tuple(float(x or 0) for x in r[1:]) for r in shown), len(rows))  # fmt: skip


def _identity(store: Store, attempt: int) -> tuple[Key, ...]:
    """What each rank was started with, as of the latest row; keys that must differ (pid, local rank) are left out."""
    found: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for key, value, ranks in store.rows(
        "SELECT key, value, list(rank ORDER BY rank) FROM (SELECT key, rank, arg_max(value, (step, seq)) AS value "
        "FROM identity WHERE attempt = ? AND rank >= 0 AND key NOT IN ('pid', 'local_rank') GROUP BY ALL) "
        "GROUP BY ALL ORDER BY key, len(list(rank)) DESC, value",
        [attempt],
    ):
        found.setdefault(key, []).append((value, tuple(ranks)))
    return tuple(Key(key, tuple(values)) for key, values in found.items())


def unit_of(metric: str) -> str:
    """ns, B or nothing."""
    return METRICS[metric].unit
