"""Signs that a device is short of memory, from the allocator's own counters: flushes, fragmentation, peaks that rise.

Pure functions of one row per rank; `OOM_PRECURSOR` says them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from .findings import Evidence, Severity
from .wording import mib

# Of every rank: the counters as they stood last, and at which steps they rose. The first steps of a program tune
# kernels, build graphs and flush the cache in doing so. `others` are processes of nobody's on the rank's device.
PRESSURE: Final = """
told AS (
    SELECT rank, attempt, step, seq, cuda_total_bytes AS total, cuda_reserved_bytes AS reserved,
           cuda_inactive_split_bytes AS split, cuda_retries - lag(cuda_retries) OVER w AS retries,
           max(cuda_allocated_peak_bytes) OVER w AS peak
    FROM memory WHERE cuda_total_bytes > 0 WINDOW w AS (PARTITION BY rank, attempt, pid, cuda_device ORDER BY step, seq)
), risen AS (
    SELECT *, peak - lag(peak) OVER (PARTITION BY rank, attempt ORDER BY step, seq) AS rise FROM told
), own AS (
    SELECT rank, attempt, any_value(node) AS node, max(device) AS device FROM gpu_proc WHERE rank >= 0 GROUP BY ALL
), strangers AS (
    SELECT o.rank, o.attempt, g.of_pid, arg_max(g.memory_used_bytes, g.time_ns) AS used
    FROM own o JOIN gpu_proc g ON g.node = o.node AND g.device = o.device AND g.rank = -1 GROUP BY ALL
), others AS (
    SELECT rank, attempt, sum(greatest(used, 0))::BIGINT AS used, string_agg('process ' || of_pid ||
           CASE WHEN used > 0 THEN ': ' || used // 1048576 || ' MiB' ELSE '' END, ', ' ORDER BY used DESC) AS named
    FROM strangers GROUP BY ALL
), settings AS (
    SELECT rank, attempt,
           bool_or(value LIKE '%expandable_segments:True%' OR value LIKE '%cudaMallocAsync%') AS other_rules
    FROM identity WHERE key IN ('env.PYTORCH_CUDA_ALLOC_CONF', 'env.PYTORCH_ALLOC_CONF', 'device.allocator')
    GROUP BY ALL
), pressure AS (
    SELECT r.rank, r.attempt, {'total': max(r.total), 'reserved': arg_max(r.reserved, r.step),
           'split': arg_max(r.split, r.step), 'peak': max(r.peak), 'rise': max(r.rise) FILTER (WHERE r.step > $warm),
           'rises': coalesce(list(r.step ORDER BY r.step) FILTER (WHERE r.step > $warm AND r.rise > 0.01 * r.total),
                             []),
           'retried': coalesce(list(r.step ORDER BY r.step) FILTER (WHERE r.step > $warm AND r.retries > 0), []),
           'others': coalesce(any_value(o.used), 0), 'named': coalesce(any_value(o.named), ''),
           'fragments': NOT coalesce(any_value(s.other_rules), FALSE)} AS device,
           min(r.step) AS first, max(r.step) AS last
    FROM risen r LEFT JOIN others o USING (rank, attempt) LEFT JOIN settings s USING (rank, attempt) GROUP BY ALL
)"""

WARM = 10  # steps
SOON = 100  # steps: two flushes so near each other are a state, not an accident
FULL = 0.95  # of the device reserved: what is asked for next has to come from the cache
SPLIT = 0.10  # of the device in parts of blocks that nobody uses: more is there than can be had in one piece


@dataclass(frozen=True)
class Sign:
    """One sign on one rank: `subject` names the rule."""

    subject: str
    severity: Severity
    observed: bool
    first: int
    said: str
    evidence: Evidence


def signs(rank: int, last: int, d: dict[str, Any]) -> Iterator[Sign]:
    """All signs of one rank, from its struct `device`."""
    retried = d["retried"]
    if retried:
        near = any(b - a <= SOON for a, b in pairwise(retried))
        value = f"at steps {', '.join(map(str, retried[:8]))}{' ...' if len(retried) > 8 else ''}"
        yield Sign("allocator retries", "warning" if near else "note", True, retried[0],
                   f"the allocator had to flush its cache {len(retried)} time(s) since step {WARM}",
                   Evidence(rank, retried[0], "allocations tried again", value, f"none after step {WARM}"))  # fmt: skip
    if d["fragments"] and d["reserved"] >= FULL * d["total"] and d["split"] >= SPLIT * d["total"]:
        value = f"{mib(d['reserved'])} of {mib(d['total'])} reserved, {mib(d['split'])} of it in unused parts of blocks"
        # many a run lives with it: only together with a flush it is on its way to fail
        yield Sign("fragmentation", "warning" if retried else "note", True, last,
                   f"the device is {d['reserved'] / d['total']:.0%} reserved and {d['split'] / d['total']:.0%} of it "
                   "lies in fragments", Evidence(rank, last, "fragmentation", value, f"below {SPLIT:.0%}"))  # fmt: skip
    left = d["total"] - d["others"] - d["peak"]
    if len(d["rises"]) >= 2 and d["rise"] and left < d["rise"]:
        value = f"peak {mib(d['peak'])}, {mib(max(left, 0))} left; it rose by {mib(d['rise'])} within one step"
        yield Sign("headroom", "warning", False, d["rises"][0],
                   f"the peak still rises, by up to {mib(d['rise'])} in one step, and {mib(max(left, 0))} are left",
                   Evidence(rank, last, "headroom", value, "more than the largest rise"))  # fmt: skip
