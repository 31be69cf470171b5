"""Memory grows step by step towards the nearest limit, and at this pace reaches it as soon as it came this far; or a
device shows that it is short: its allocator flushes, has fragments only, or peaks that leave no room for the next.

Reads     memory, proc, host, gpu_proc, identity, step, loader, batch
Says      the limit, usage, growth per step, the projected step, the ranks that grow; flushes, fragmentation, headroom,
          and other processes on the device
Unknown   no limit seen, or fewer than 20 steps since it was; while it trains, growth within the first pass over the
          data that does not reach the limit before its end: a cache may be filling
Blind to  a single allocation that is larger than what is left; fragments of other allocators than torch's own
Do        it has not happened yet: save a checkpoint, then look at what grows (`tdbg metrics RUN`), as for
          MEMORY_LEAK; or raise the limit before the step named
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ..detector import RunFacts
from ..devicepressure import PRESSURE, WARM, Sign, signs
from ..findings import Abstention, Evidence, Finding
from ..firstpass import FIRST_PASS, filling
from ..trends import Trend, trend
from ..wording import mib, ranks_text

CODE = "OOM_PRECURSOR"
NEEDS = {"memory": 1}
PARAMS = {
    "fewest": 20,  # samples: 8 blocks of at least 2; the first few steps of any program allocate
    "block": 10,  # samples: minima over 10 steps are all but independent (AR 0.8: 0.4 % false alarms)
    "least_blocks": 8,  # with 7 no trend at all reaches z > 3.09
    "most_blocks": 32,  # more add nothing to a trend and their pairs grow with the square
    "warm": WARM,  # steps in which kernels are tuned and caches flushed for it
}

# `place` is the rank, or the node for limits that its ranks share; -1 as a limit means none.
SQL = f"""
WITH {PRESSURE}, {FIRST_PASS}, node AS (
    SELECT rank, attempt, any_value(node) AS node FROM proc WHERE rank >= 0 GROUP BY ALL
), paced AS (
    SELECT attempt, step, max(time_ns) AS time_ns FROM step GROUP BY ALL
), host_step AS (
    SELECT p.attempt, p.step, h.* EXCLUDE (attempt, step)
    FROM host h ASOF JOIN paced p ON h.time_ns >= p.time_ns
), process AS (
    SELECT p.* EXCLUDE (step), s.step FROM proc p ASOF JOIN step s
    ON p.rank = s.rank AND p.attempt = s.attempt AND p.time_ns >= s.time_ns
), series AS (
    SELECT 'address space (RLIMIT_AS)' AS kind, attempt, rank AS place, step, seq, vms_bytes AS used,
           limit_as_bytes AS ceiling FROM memory
    UNION ALL
    SELECT 'data segment (RLIMIT_DATA)', attempt, rank, step, seq, data_bytes, limit_data_bytes FROM memory
    UNION ALL
    SELECT 'data segment (RLIMIT_DATA)', attempt, rank, step, seq, data_bytes, limit_data_bytes FROM process
    ANTI JOIN (SELECT DISTINCT rank, attempt FROM memory WHERE limit_data_bytes > 0) USING (rank, attempt)
    UNION ALL
    SELECT 'device memory', m.attempt, m.rank, m.step, m.seq, m.cuda_allocated_bytes,
           m.cuda_total_bytes - coalesce(o.used, 0)
    FROM memory m LEFT JOIN others o USING (rank, attempt) WHERE m.cuda_total_bytes > 0
    UNION ALL
    SELECT 'cgroup memory', attempt, node, step, seq, cgroup_used_bytes, cgroup_limit_bytes FROM host_step
    UNION ALL
    SELECT 'physical memory', attempt, node, step, seq, memory_total_bytes - memory_available_bytes, memory_total_bytes
    FROM host_step
    UNION ALL
    SELECT 'resident', attempt, rank, step, seq, rss_bytes, 1 FROM memory
), numbered AS (
    SELECT *, row_number() OVER w AS n, count(*) OVER (PARTITION BY kind, attempt, place) AS total,
           last_value(ceiling) OVER (w ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING) AS last_ceiling
    FROM series WHERE ceiling > 0 AND used > 0 AND step > 0
    WINDOW w AS (PARTITION BY kind, attempt, place ORDER BY step, seq)
), blocks AS (
    SELECT kind, attempt, place, last_ceiling, total,
           (n - 1) * greatest($least_blocks, least($most_blocks, total // $block)) // total AS block, min(used) AS low,
           arg_min(step, used) AS low_step, max(used) AS high, arg_max(used, n) AS used,
           min(step) AS first, max(step) AS step
    FROM numbered WHERE total >= $fewest GROUP BY ALL
), judged AS (
    SELECT kind, attempt, place, any_value(last_ceiling) AS ceiling, list(low ORDER BY block) AS lows,
           list(low_step ORDER BY block) AS steps, max(high) AS high, arg_max(used, block) AS used, min(first) AS first,
           max(step) AS last
    FROM blocks GROUP BY ALL
), short AS (
    SELECT kind, attempt, place, any_value(last_ceiling) AS ceiling, [] AS lows, [] AS steps, max(used) AS high,
           max(used) AS used, min(step) AS first, max(step) AS last FROM numbered WHERE total < $fewest GROUP BY ALL
)
SELECT j.kind, j.attempt, j.place, coalesce(n.node, 0), j.ceiling, j.lows, j.steps, j.high, j.used, j.first, j.last,
       p.device, coalesce(f.ends, 0)
FROM (SELECT * FROM judged UNION ALL SELECT * FROM short) j
LEFT JOIN node n ON n.rank = j.place AND n.attempt = j.attempt
LEFT JOIN pressure p ON p.rank = j.place AND p.attempt = j.attempt AND j.kind = 'device memory'
LEFT JOIN (SELECT rank, attempt, ends FROM first_pass UNION ALL
           SELECT -1, attempt, max(ends) FROM first_pass GROUP BY ALL) f
    ON f.attempt = j.attempt AND f.rank = CASE WHEN j.kind = 'device memory' THEN -2
                                               WHEN j.kind IN ('cgroup memory', 'physical memory') THEN -1
                                               ELSE j.place END
ORDER BY j.attempt, j.kind, j.place
"""

LEAST_GROWTH = 0.01  # of the limit: less is the noise of allocators and page caches
NEAR = 0.95  # of the limit: usage that got here while rising was seen, not projected
SHARED = ("cgroup memory", "physical memory")  # limits of a whole node


class Row(NamedTuple):
    kind: str
    attempt: int
    place: int
    node: int
    limit: int
    lows: list[int]  # smallest usage in each block; empty when the series is too short
    steps: list[int]  # step of each of them
    high: int
    used: int  # at the last sample
    first: int
    last: int
    device: dict[str, Any] | None  # what `signs` reads; with kind "device memory" only
    pass_ends: int  # step at which the first pass over the data ends; 0: over, or not known


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    rows = list(rows)
    limited = [r for r in rows if r.kind != "resident"]
    rising: dict[tuple[int, str], list[tuple[Row, Trend]]] = defaultdict(list)
    withheld = []
    for row in limited:
        seen = _nears(row)
        if seen is not None and _may_level_off(row, seen, run):
            withheld.append(row)
        elif seen is not None:
            rising[row.attempt, row.kind].append((row, seen))
    for (attempt, kind), members in rising.items():
        yield _finding(kind, members, _ranks(members, [r for r in rows if r.attempt == attempt]))
    yield from _pressed([r for r in rows if r.device is not None])
    if withheld:
        yield Abstention(
            "INSUFFICIENT_EVIDENCE", f"{withheld[0].kind} grows, but the first pass over the data goes on until about "
            f"step {max(r.pass_ends for r in withheld)}: a cache may be filling",
        )  # fmt: skip
    if not limited:
        yield Abstention(
            "INSUFFICIENT_EVIDENCE", "no limit of address space, data segment, cgroup or machine was recorded"
        )
    elif len({r.place for r in rows if r.kind == "resident"}) < run.world_size:
        yield Abstention("INSUFFICIENT_EVIDENCE", f"not all of {run.world_size} ranks recorded their memory")
    elif not any(r.lows for r in limited):
        yield Abstention(
            "INSUFFICIENT_EVIDENCE", f"fewer than {PARAMS['fewest']} steps were recorded below a memory limit"
        )


def _pressed(rows: Sequence[Row]) -> Iterator[Finding]:
    """One finding per sign and attempt, with the ranks that show it."""
    shown: dict[tuple[int, str], list[tuple[Row, Sign]]] = defaultdict(list)
    for row in rows:
        for sign in signs(row.place, row.last, row.device or {}):
            shown[row.attempt, sign.subject].append((row, sign))
    for (attempt, subject), members in shown.items():
        worst = next((s for _, s in members if s.severity == "warning"), members[0][1])
        others = sorted({r.device["named"] for r, _ in members if r.device and r.device["named"]})
        beside = f"; on the device beside it: {'; '.join(others)}" if others else ""
        yield Finding(
            ranks=tuple(sorted(r.place for r, _ in members)),
            first_step=min(s.first for _, s in members),
            last_step=max(r.last for r, _ in members),
            attempt=attempt,
            severity=worst.severity,
            evidence_state="OBSERVED" if worst.observed else "INFERRED",
            subject=subject,
            summary=f"{ranks_text(r.place for r, _ in members)}: {worst.said}{beside}",
            evidence=tuple(s.evidence for _, s in members[:8]),
            cannot_conclude=("whether an allocation will fail",),
            next_check="smaller batches or shorter sequences; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against "
            "fragments; end other processes on the device",
        )


def _nears(row: Row) -> Trend | None:
    """The trend that leads to the limit within as many further steps as were seen; None without one."""
    if not row.lows or row.lows[-1] - row.lows[0] < LEAST_GROWTH * row.limit:
        return None
    found = trend(row.lows, row.steps)
    if found is None:
        return None
    soon = (row.limit - row.used) / found.slope <= row.last - row.first + 1
    return found if soon or row.high >= NEAR * row.limit else None


def _may_level_off(row: Row, seen: Trend, run: RunFacts) -> bool:
    """Whether a cache may be filling that is full, with the whole of the data in it, before the limit is reached."""
    full = row.last + (row.limit - row.used) / seen.slope
    return filling(row.pass_ends, row.last, run.status) and row.high < NEAR * row.limit and full > row.pass_ends


def _ranks(members: Sequence[tuple[Row, Trend]], rows: Sequence[Row]) -> tuple[int, ...]:
    """The ranks that grow; for a limit of a node, those of its ranks whose resident memory rises."""
    if members[0][0].kind not in SHARED:
        return tuple(sorted(r.place for r, _ in members))
    nodes = {r.place for r, _ in members}
    of_nodes = [r for r in rows if r.kind == "resident" and r.node in nodes]
    growing = [r.place for r in of_nodes if r.lows and trend(r.lows, r.steps) is not None]
    return tuple(sorted(growing or [r.place for r in of_nodes]))


def _finding(kind: str, members: Sequence[tuple[Row, Trend]], ranks: tuple[int, ...]) -> Finding:
    nearest, slope = min(members, key=lambda m: (m[0].limit - m[0].used) / m[1].slope)
    left = max(0, math.ceil((nearest.limit - nearest.used) / slope.slope))
    near = any(r.high >= NEAR * r.limit for r, _ in members)
    share = nearest.used / nearest.limit
    return Finding(
        ranks=ranks,
        first_step=min(r.first for r, _ in members),
        last_step=max(r.last for r, _ in members),
        attempt=nearest.attempt,
        severity="warning",
        evidence_state="OBSERVED" if near else "INFERRED",
        subject=kind,
        summary=f"{kind} of {ranks_text(ranks)} grows by {mib(slope.slope)} a step and is at {share:.0%} "
        f"of its limit of {mib(nearest.limit)} at step {nearest.last}: "
        f"at this pace it is full near step {nearest.last + left}",
        evidence=tuple(_evidence(r, t) for r, t in members[:8]),
        cannot_conclude=(
            "what holds the memory",
            "whether the growth would have gone on: a cache may be about to fill",
        ),
        next_check="look for lists, caches or graphs that are kept from step to step",
    )


def _evidence(row: Row, found: Trend) -> Evidence:
    value = (
        f"{mib(row.used)} used, +{mib(found.growth)} since step {row.first}, +{mib(found.slope)} a step "
        f"(Mann-Kendall z {found.z:.1f}, lower bound of the slope)"
    )
    return Evidence(None if row.kind in SHARED else row.place, row.last, row.kind, value, f"limit {mib(row.limit)}")
