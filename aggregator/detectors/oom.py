"""An allocation failed for want of memory, or the kernel killed a rank for it: rank, phase, what held the memory.

Reads     oom (the rank), exit, host and proc (the node's launcher), step
Says      rank, phase, step, bytes asked for and in use, holders by kind, batch shapes, kernel kills
Unknown   ranks whose end nobody saw; whether SIGKILL was the kernel's, unless its counter of kills rose
Blind to  failed allocations on the host that the program caught
Do        smaller batches or sequences, activation checkpointing, a sharded optimizer; `tdbg incident RUN ID` says
          what held the memory; reserved far above allocated is fragmentation:
          PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; a kill by the kernel is host memory: fewer loader workers
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..wording import mib, ranks_text

CODE = "OOM"
NEEDS = {"step": 0}  # a rank may run out of memory before its first step
PARAMS = {"killed": -int(signal.SIGKILL)}

SQL = """
WITH raised AS (
    SELECT rank, attempt, step, time_ns, caught, kind, device, during, type, requested_bytes AS asked, in_use_bytes,
           reserved_bytes, free_bytes, total_bytes, parameters_bytes, gradients_bytes, optimizer_bytes, others_bytes,
           batch, largest, largest_step, holders, message
    FROM oom
), dead AS (
    SELECT rank, attempt, max(step) AS step, min(ended_ns) AS time_ns, any_value(exit_code) AS exit_code,
           max(oom_kills) AS kills, any_value(node) AS node
    FROM exit WHERE rank >= 0 AND exit_code = $killed AND NOT stopped_by_launcher GROUP BY rank, attempt
), room AS (
    SELECT d.rank, d.attempt,
           max(h.cgroup_used_bytes / h.cgroup_limit_bytes) FILTER (WHERE h.cgroup_limit_bytes > 0) AS cgroup,
           max(1 - h.memory_available_bytes / h.memory_total_bytes) FILTER (WHERE h.memory_total_bytes > 0) AS machine
    FROM dead d JOIN host h ON h.node = d.node AND h.time_ns BETWEEN d.time_ns - 30000000000 AND d.time_ns GROUP BY ALL
), held AS (
    SELECT d.rank, d.attempt, arg_max(p.rss_bytes + p.workers_rss_bytes, p.time_ns) AS used
    FROM dead d JOIN proc p USING (rank, attempt) GROUP BY ALL
)
SELECT attempt, rank, step, time_ns, 'error', caught, kind, device, during, type, asked, in_use_bytes, reserved_bytes,
       free_bytes, total_bytes, parameters_bytes, gradients_bytes, optimizer_bytes, others_bytes, batch, largest,
       largest_step, holders, message, -1, -1.0
FROM raised
UNION ALL
SELECT d.attempt, d.rank, d.step + 1, d.time_ns, 'kill', FALSE, 'host', -1, '', 'SIGKILL', -1, coalesce(h.used, -1), -1,
       -1, -1, -1, -1, -1, -1, '', '', 0, '', '', d.kills, coalesce(greatest(r.cgroup, r.machine), -1)
FROM dead d LEFT JOIN room r USING (rank, attempt) LEFT JOIN held h USING (rank, attempt)
UNION ALL
SELECT max(attempt), rank, 0, 0, 'seen', FALSE, '', -1, '', '', -1, -1, -1, -1, -1, -1, -1, -1, -1, '', '', 0, '', '',
       -1, -1.0 FROM step GROUP BY rank
ORDER BY 1, 4, 2
"""

# Of its limit, or of the machine's memory, in the last 30 s: the launcher samples the more often the nearer a limit is,
# yet what is taken in one piece may lie between two samples.
NEAR = 0.90


class Row(NamedTuple):
    attempt: int
    rank: int
    step: int
    time_ns: int
    how: str  # error, kill, or seen: a rank that recorded something
    caught: bool
    kind: str  # host or device
    device: int
    during: str
    type: str
    asked: int
    in_use: int
    reserved: int
    free: int
    total: int
    parameters: int
    gradients: int
    optimizer: int
    others: int
    batch: str
    largest: str
    largest_step: int
    holders: str
    message: str
    kills: int  # of the kernel in the rank's cgroup in the seconds before; -1 unknown
    fullness: float  # largest share of a limit in use before a kill; -1 unknown


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    rows = list(rows)
    fatal = [r for r in rows if r.how == "error" and not r.caught]
    # of one failure the allocator tells first and the exception after it
    ended = {(r.attempt, r.rank, r.step) for r in fatal}
    refused = [r for r in rows if r.how == "error" and r.caught and (r.attempt, r.rank, r.step) not in ended]
    yield from (_error(r) for r in _first(fatal))
    yield from (_refusal(several) for several in _by_rank(refused))
    kills = [r for r in rows if r.how == "kill"]
    yield from (_kill(r, sum(k.attempt == r.attempt for k in kills)) for r in kills if r.kills > 0)
    unknown = [r.rank for r in kills if r.kills < 0]
    if unknown:
        why = f"{ranks_text(unknown)} ended by SIGKILL, and the kernel's counter of out-of-memory kills can't be read"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    seen = {r.rank for r in rows}
    if len(seen) < run.world_size:
        yield Abstention("INSUFFICIENT_EVIDENCE", f"{len(seen)} of {run.world_size} ranks recorded how they fared")


def _first(rows: Sequence[Row]) -> list[Row]:
    """The first failure of each rank and attempt."""
    return list({(r.attempt, r.rank): r for r in reversed(rows)}.values())[::-1]


def _by_rank(rows: Sequence[Row]) -> list[list[Row]]:
    several: dict[tuple[int, int], list[Row]] = {}
    for r in rows:
        several.setdefault((r.attempt, r.rank), []).append(r)
    return list(several.values())


def _error(r: Row) -> Finding:
    where = f"device {r.device}" if r.device >= 0 else "the device" if r.kind == "device" else "the host"
    asked = f": {mib(r.asked)} asked for" if r.asked >= 0 else ""
    phase = f"in {r.during}" if r.during != "other" else "outside of forward, backward and optimizer"
    most = r.holders.split("\n", 1)[0]
    used = f", {mib(r.in_use)} in use" if r.in_use >= 0 else ""
    largest = f"; most of it in {_readable(most)}" if most and 2 * _size(most) >= r.in_use > 0 else ""
    return Finding(
        ranks=(r.rank,),
        first_step=max(1, r.step),
        last_good_step=r.step - 1 if r.step > 1 else None,
        attempt=r.attempt,
        severity="critical",
        evidence_state="OBSERVED",
        subject=r.during or "other",
        summary=f"rank {r.rank} ran out of memory on {where} in step {max(1, r.step)} {phase}{asked}{used}{largest}",
        evidence=tuple(_evidence(r)),
        cannot_conclude=tuple(_unknown(r)),
        next_check="compare the batch with the largest before it; look at the holders that are no part of the model",
    )


def _evidence(r: Row) -> Iterator[Evidence]:
    def number(metric: str, value: int) -> Iterator[Evidence]:
        if value >= 0:
            yield Evidence(r.rank, r.step, metric, mib(value), "")

    yield Evidence(r.rank, r.step, "exception", f"{r.type}: {' '.join(r.message.split())[:200]}", "none")
    yield Evidence(r.rank, r.step, "phase", r.during, "")
    device = r.kind == "device"
    yield from number("asked for", r.asked)
    yield from number("allocated by tensors" if device else "anonymous and shared memory", r.in_use)
    yield from number("reserved by the allocator" if device else "address space", r.reserved)
    yield from number("free on the device", r.free)
    yield from number("memory of the device", r.total)
    yield from number("parameters and buffers", r.parameters)
    yield from number("gradients", r.gradients)
    yield from number("optimizer state", r.optimizer)
    yield from number("other tensors known to Python", r.others)
    for line in r.holders.split("\n")[:4] if r.holders else ():
        yield Evidence(r.rank, r.step, "other tensors", _readable(line), "")
    if r.batch:
        before = f"largest before: {r.largest} at step {r.largest_step}" if r.largest else ""
        yield Evidence(r.rank, r.step, "last batch", r.batch, before)


def _unknown(r: Row) -> Iterator[str]:
    known = sum(max(0, n) for n in (r.parameters, r.gradients, r.optimizer, r.others))
    if r.parameters < 0:
        yield "what held the memory: it could not be looked at when the rank failed"
    elif 2 * known < r.in_use:
        yield f"what holds the {mib(r.in_use - known)} that no tensor known to Python accounts for: graphs, objects"
    if not r.batch:
        yield "the shapes of the batch: it came from no torch DataLoader and through no wrapped model"


def _size(line: str) -> int:
    tail = line.rpartition(" = ")[2]
    return int(tail) if tail.isdecimal() else 0


def _readable(line: str) -> str:
    what, _, size = line.rpartition(" = ")
    return f"{what} ({mib(int(size))})" if size.isdecimal() else line


def _refusal(rows: Sequence[Row]) -> Finding:
    r = rows[0]
    return Finding(
        ranks=(r.rank,),
        first_step=max(1, r.step),
        last_step=rows[-1].step,
        attempt=r.attempt,
        severity="warning",
        evidence_state="OBSERVED",
        subject=r.during or "other",
        summary=f"the allocator of device {r.device} refused {mib(r.asked)} on rank {r.rank} in step {max(1, r.step)}, "
        f"{len(rows)} time(s) in all, and training went on",
        evidence=tuple(_evidence(r))[1:],
        cannot_conclude=("what the program left out when it caught the error",),
        next_check="a batch that is skipped at every failure is data lost: count them, or make batches smaller",
    )


def _kill(r: Row, killed: int) -> Finding:
    near = r.fullness >= NEAR
    seen = killed <= r.kills and near  # as many kills as victims: each was one
    held = f", holding {mib(r.in_use)} with its workers" if r.in_use >= 0 else ""
    share = f"; {r.fullness:.0%} of the memory was in use before" if r.fullness >= 0 else ""
    return Finding(
        ranks=(r.rank,),
        first_step=max(1, r.step),
        last_good_step=r.step - 1 if r.step > 1 else None,
        attempt=r.attempt,
        severity="critical" if seen else "warning",
        evidence_state="OBSERVED" if seen else "INFERRED",
        subject="kernel",
        summary=f"rank {r.rank} was ended by SIGKILL in step {max(1, r.step)} when the kernel counted {r.kills} "
        f"out-of-memory kill(s) in its cgroup{held}{share}",
        evidence=(
            Evidence(r.rank, r.step, "kernel OOM kills in its cgroup", str(r.kills), "0"),
            *((Evidence(r.rank, r.step, "memory in use before", f"{r.fullness:.0%}", ""),) if share else ()),
            *((Evidence(r.rank, r.step, "resident, workers included", mib(r.in_use), ""),) if held else ()),
        ),
        cannot_conclude=(
            "in which phase of the step, and what held the memory: a killed process says nothing",
            *(() if seen else ("whether the kernel's kill hit this process or one beside it",)),
        ),
        next_check="the kernel's log of the host names each victim",
    )
