"""Who was measured: which ranks were expected, which reported, what was lost on the way, and whether it still runs.

Every warning is a sentence about lost, missing or unreadable data; without any the recording is complete. Each loss is
also a `Gap`, so that no rule says CLEAR about something it could not see.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..rankagent import probes
from .about import About, Status, status_of
from .detector import RunFacts
from .findings import DataQuality
from .parts import Process
from .store import Store
from .wording import counted, ranks_text

# keys under which a rank may say how many ranks there are
WORLD_KEYS = ("world_size", "dist.world_size", "env.WORLD_SIZE")
# tables in which every rank that trains writes from its first step on; others are written only when something happens
STEADY = ("step", "param", "grad", "optim", "rng", "identity")


@dataclass(frozen=True)
class Gap:
    """Something that was not seen: in one table, or (table "") possibly in any."""

    table: str
    why: str


@dataclass(frozen=True)
class Presence:
    """What is known about a run before any rule is asked."""

    status: Status
    world_size: int
    steps: int
    attempts: int
    quality: DataQuality
    facts: RunFacts
    gaps: tuple[Gap, ...]
    absent: dict[str, str]  # table -> why its probe could not be installed


@dataclass
class _Notes:
    """Warnings and gaps as they are found."""

    warnings: list[str] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    dropped: int = 0

    def lost(self, sentence: str, table: str = "") -> None:
        self.warnings.append(sentence)
        self.gaps.append(Gap(table, sentence))


def presence(store: Store, now_ns: int | None = None) -> Presence:
    """Judge the recording itself, attempt by attempt."""
    ranks = [p for p in store.processes if p.kind == "rank"]
    status = status_of(store.about, all(p.state and p.state.closed for p in ranks), now_ns)
    last_steps = _last_steps(store)
    worlds = _world_sizes(store, ranks, last_steps)
    notes = _Notes()
    if not store.about.found:
        notes.warnings.append("run.json is missing or unreadable: command, world size and status are guessed")
    notes.warnings += store.warnings
    for table, writers in store.damaged_tables.items():
        notes.gaps.append(Gap(table, f"parts of table {table} by {counted(len(writers), 'process')} can't be read"))
    notes.gaps += [Gap("", sentence) for sentence in store.files.unread]
    missing = set()
    for attempt, world in sorted(worlds.items()):
        missing |= _attendance(attempt, world, ranks, last_steps, status, notes, several=len(worlds) > 1)
    _accounts(store, notes)
    _closing(ranks, status, notes)
    _switched_off(store, notes)
    if not store.processes:
        notes.lost("no process recorded anything")
    last = _newest(last_steps)
    # a rank is present when its process reported or its rows are there (records of sealed runs may be left behind)
    seen = tuple(sorted({p.index for p in ranks} | set(last)))
    world = worlds[max(worlds)] if worlds else store.about.world_size or 0
    steps = max((step for _, _, step in last_steps), default=0)
    quality = DataQuality(not notes.warnings, tuple(notes.warnings), notes.dropped, seen, last)
    facts = RunFacts(
        world_size=world, status=status, ranks_seen=seen, missing_ranks=tuple(sorted(missing)),
        nodes=max(1, len(store.about.nodes)), local_world_size=_local_world(store.about, world), last_step=last,
        watch_steps=store.about.watch_steps,
    )  # fmt: skip
    return Presence(status, world, steps, max(1, len(worlds)), quality, facts, tuple(notes.gaps), _unavailable(store))


def steady_gaps(store: Store, tables: set[str], expected: int) -> Iterator[Gap]:
    """Steady tables in which some expected rank has no row at all, while others do."""
    for table in sorted(tables & set(STEADY)):
        present = {r for (r,) in store.rows(f'SELECT DISTINCT rank FROM "{table}"')}
        lacking = set(range(expected)) - present
        if present and lacking:
            yield Gap(table, f"table {table} has no row of {ranks_text(lacking)}")


# ---------------------------------------------------------------- who was there


def _last_steps(store: Store) -> list[tuple[int, int, int]]:
    """(attempt, rank, last completed step); 0 for ranks that recorded no step."""
    found = {(p.attempt, p.index): 0 for p in store.processes if p.kind == "rank"}
    for attempt, rank, step in store.rows("SELECT attempt, rank, max(step) FROM step GROUP BY ALL"):
        found[attempt, rank] = step
    return [(a, r, s) for (a, r), s in sorted(found.items())]


def _newest(last_steps: list[tuple[int, int, int]]) -> dict[int, int]:
    """Last step of each rank in its last attempt: the list is in the order of attempts."""
    return {rank: step for _, rank, step in sorted(last_steps)}


def _world_sizes(store: Store, ranks: list[Process], last_steps: list[tuple[int, int, int]]) -> dict[int, int]:
    """World size by attempt: what the ranks were told, what the launchers started, at least the highest rank seen."""
    seen: dict[int, int] = {}
    for attempt, rank, _ in last_steps:
        seen[attempt] = max(seen.get(attempt, 0), rank + 1)
    started: dict[int, int] = {}
    for node in store.about.nodes:
        for attempt, several in node.attempts.items():
            started[attempt] = max(started.get(attempt, 0), *(r + 1 for r in several), 0)
    told = dict(store.rows(
        "SELECT attempt, max(TRY_CAST(value AS INTEGER)) FROM identity "
        "WHERE key IN (SELECT unnest(?)) GROUP BY attempt", [list(WORLD_KEYS)]))  # fmt: skip
    attempts = set(seen) | set(started) or ({0} if store.about.world_size else set())
    worlds = {}
    for attempt in attempts:
        known = max(told.get(attempt) or 0, started.get(attempt, 0))
        # run.json has one number; with several attempts it may be another attempt's
        if len(attempts) == 1 or (attempt == max(attempts) and not known):
            known = max(known, store.about.world_size or 0)
        worlds[attempt] = max(known, seen.get(attempt, 0))
    return worlds


def _attendance(attempt: int, world: int, ranks: list[Process], last_steps: list[tuple[int, int, int]],
                status: Status, notes: _Notes, several: bool) -> set[int]:  # fmt: skip
    """Missing and silent ranks of one attempt."""
    steps = {rank: step for a, rank, step in last_steps if a == attempt}
    where = f" in attempt {attempt}" if several else ""
    missing = set(range(world)) - set(steps)
    if missing:
        done = "has not reported yet" if status == "running" else "recorded nothing"
        notes.lost(f"{ranks_text(missing)} of {world} {done}{where}")
    silent = {rank for rank, step in steps.items() if step == 0}
    if status == "running" and max(steps.values(), default=0) < 2:
        silent = set()  # ranks don't end their first step at the same moment
    if silent and len(silent) == len(steps):
        notes.warnings.append(f"no rank recorded an optimizer step{where}")
    elif silent:
        notes.lost(f"{ranks_text(silent)} recorded no optimizer step{where}, the others did")
    return missing


def _local_world(about: About, world: int) -> int:
    if about.nproc_per_node:
        return about.nproc_per_node
    on_first = [n for n in about.nodes if n.node == 0 and n.attempts]
    if on_first:
        return len(on_first[0].attempts[max(on_first[0].attempts)])
    return world if len(about.nodes) <= 1 else 0


# ---------------------------------------------------------------- what was lost


def _accounts(store: Store, notes: _Notes) -> None:
    """Hold the rows that are here against what each process says it wrote."""
    stored = store.stored_rows()
    unreadable = {writer for writers in store.damaged_tables.values() for writer in writers}
    for process in store.processes:
        name = f"{process.kind} {process.index} (attempt {process.attempt}, process {process.pid})"
        _recorded(process, name, notes)
        # nodes' parts don't tell one node from another, and an unreadable part has its own warning
        if process.kind == "rank" and process.writer not in unreadable:
            _sealed(process, name, stored.get(process.writer, Counter()), notes)
    for kind, index, attempt, pid in sorted(set(stored) - {p.writer for p in store.processes}):
        if kind == "rank":
            notes.lost(f"rank {index} (attempt {attempt}, process {pid}) has sealed parts but no folder in records/: "
                       "what it lost can't be known")  # fmt: skip


def _recorded(process: Process, name: str, notes: _Notes) -> None:
    if process.state is None:
        notes.lost(f"{name} left no readable state page: what it lost can't be known")
    dropped = process.state.dropped if process.state else 0
    if dropped:
        notes.lost(f"{name} dropped {counted(dropped, 'row')} that its record file could not take (full disk?)")
    damaged = sum(d.damaged for d in process.damage.values())
    if damaged:
        notes.lost(f"{name} has {counted(damaged, 'damaged record')}, left out")
    # sequence numbers count what was written and what was dropped on the way to the file
    written = max([d.last_seq + 1 for d in process.damage.values()], default=0)
    written = max(written, process.state.rows if process.state else 0)
    unseen = max(0, written - sum(d.frames for d in process.damage.values()) - dropped - damaged)
    if unseen:
        notes.lost(f"{name} lacks {counted(unseen, 'row')} that it wrote: a file is missing or was cut")
    notes.dropped += dropped + damaged + unseen


def _sealed(process: Process, name: str, stored: Counter[int], notes: _Notes) -> None:
    short = sum(max(0, d.frames - stored[segment]) for segment, d in process.damage.items())
    if short:
        notes.lost(f"{name} sealed {counted(short, 'row')} more than tables/ holds: a part is missing")
        notes.dropped += short
    if set(stored) - set(process.damage):
        notes.lost(f"{name} has sealed parts without an account of them (sealed.json): losses can't be excluded")


def _closing(ranks: list[Process], status: Status, notes: _Notes) -> None:
    """Processes that ended without closing: killed. Their completed steps are all in the record files."""
    newest = max((p.attempt for p in ranks), default=0)
    open_ = [p for p in ranks if p.state and not p.state.closed and (status != "running" or p.attempt < newest)]
    for attempt in sorted({p.attempt for p in open_}):
        killed = {p.index: p.state.step for p in open_ if p.attempt == attempt and p.state}
        torn = [p.index for p in open_ if p.attempt == attempt and any(d.torn for d in p.damage.values())]
        after = f"step {min(killed.values())}" + (
            f" to {max(killed.values())}" if len(set(killed.values())) > 1 else ""
        )
        cut = f"; the record being written by {ranks_text(torn)} was cut" if torn else ""
        where = f" in attempt {attempt}" if newest else ""
        notes.warnings.append(
            f"{ranks_text(killed)} ended without closing the recording{where} after {after} (killed or aborted){cut}; "
            "all completed steps are here"
        )
    for p in ranks:
        if p.state and p.state.closed and any(d.torn for d in p.damage.values()):
            notes.lost(f"the record file of rank {p.index} (attempt {p.attempt}, process {p.pid}) is cut at its end")


def _switched_off(store: Store, notes: _Notes) -> None:
    """Probes that switched themselves off after an error of ours, and what the launcher could not do."""
    tables = _tables_of_probes()
    off = store.rows("SELECT name, any_value(reason), list(DISTINCT rank), min(step) FROM probe "
                     "WHERE state = 'disabled' GROUP BY name ORDER BY name")  # fmt: skip
    for name, reason, ranks, step in off:
        sentence = f"probe {name} switched itself off on {ranks_text(ranks)} at step {step}: {reason}"
        notes.warnings.append(sentence)
        notes.gaps += [Gap(t, sentence) for t in tables.get(name, ("",))]
    told = {r for _, _, ranks, _ in off for r in ranks}
    quiet = {p.index for p in store.processes if p.kind == "rank" and p.state and p.state.disabled} - told
    if quiet:
        notes.lost(f"a probe switched itself off on {ranks_text(quiet)}")
    for about, text in store.rows("SELECT DISTINCT about, text FROM node_note WHERE about IN ('seal', 'supervisor')"):
        notes.warnings.append(f"the launcher's {about} reported: {text}")


def _unavailable(store: Store) -> dict[str, str]:
    """Tables that a probe would have written, had torch what it needs. No loss: those rows never existed."""
    tables = _tables_of_probes()
    rows = store.rows("SELECT name, any_value(reason) FROM probe WHERE state = 'unavailable' GROUP BY name")
    return {t: f"probe {name} was unavailable: {reason}" for name, reason in rows for t in tables.get(name, ())}


def _tables_of_probes() -> dict[str, tuple[str, ...]]:
    """Probe name -> its tables. Modules of probes import no torch until they are installed."""
    found = {}
    for info in pkgutil.iter_modules(probes.__path__):
        module = importlib.import_module(f"{probes.__name__}.{info.name}")
        several = getattr(module, "TABLES", None) or (module.TABLE,)
        found[info.name] = tuple(t.name for t in several)
    return found
