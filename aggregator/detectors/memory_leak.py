"""A rank's memory rises by about the same at nearly every step, and by now this is a material part of what it holds.

Reads     memory, loader, batch
Says      the ranks, since which step, growth per step and in all, host or device
Unknown   fewer than 24 samples since the data sets' caches last grew; host memory while the first pass over the data
          goes on: a cache that nobody sees may be filling
Blind to  a few bytes a step; what is kept once an epoch; loader workers; a limit nearby (OOM_PRECURSOR says that)
Do        look for what holds a tensor from step to step: a loss summed without .item() or detach(), a list of
          outputs, hooks that keep activations, retain_graph=True. torch.cuda.memory._snapshot() or tracemalloc of two
          steps, compared, names the line
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..firstpass import FIRST_PASS, filling
from ..trends import STEADY_BLOCKS, Rise, steady_rise
from ..wording import mib, ranks_text

CODE = "MEMORY_LEAK"
NEEDS = {"memory": 1}
PARAMS = {
    "fewest": 2 * STEADY_BLOCKS,  # samples: two in each of the fewest blocks that tell a rise from a random walk
    "most_blocks": 64,  # pairs grow with the square
}

# Pages that belong to files (mapped data, libraries, our own record) are in neither sum. Samples up to the last one at
# which the caches of a loader's data set had grown are left out: until then memory rises because the cache fills.
SQL = f"""
WITH {FIRST_PASS}, filled AS (
    SELECT rank, attempt, max(step) FILTER (WHERE grew) AS step FROM (
        SELECT rank, attempt, step, dataset_items > lag(dataset_items) OVER (
            PARTITION BY rank, attempt, pid ORDER BY step, seq) AS grew FROM memory)
    GROUP BY ALL
), series AS (
    SELECT 'host memory' AS kind, m.rank, m.attempt, m.step, m.seq, m.anon_bytes + greatest(m.shared_bytes, 0) AS used
    FROM memory m JOIN filled f USING (rank, attempt)
    WHERE m.anon_bytes > 0 AND m.step >= coalesce(f.step, 0)
    UNION ALL
    SELECT 'device memory', rank, attempt, step, seq, cuda_allocated_bytes FROM memory WHERE cuda_allocated_bytes > 0
), numbered AS (
    SELECT *, row_number() OVER w - 1 AS n, count(*) OVER (PARTITION BY kind, rank, attempt) AS total
    FROM series WHERE step > 0 WINDOW w AS (PARTITION BY kind, rank, attempt ORDER BY step, seq)
), blocks AS (
    SELECT kind, rank, attempt, total, n * least($most_blocks, total // 2) // total AS block, min(used) AS low,
           arg_min(step, used) AS low_step, max(step) AS last
    FROM numbered WHERE total >= $fewest GROUP BY ALL
), judged AS (
    SELECT kind, rank, attempt, any_value(total) AS total, list(low ORDER BY block) AS lows,
           list(low_step ORDER BY block) AS steps, max(last) AS last FROM blocks GROUP BY ALL
), seen AS (
    SELECT rank, attempt, count(*) AS total, max(step) AS last FROM memory WHERE step > 0 GROUP BY ALL
)
SELECT coalesce(j.kind, ''), s.attempt, s.rank, s.total, coalesce(j.lows, []), coalesce(j.steps, []), s.last,
       coalesce(f.step, 0), coalesce(p.ends, 0)
FROM seen s LEFT JOIN judged j USING (rank, attempt) LEFT JOIN filled f USING (rank, attempt)
LEFT JOIN first_pass p USING (rank, attempt)
ORDER BY s.attempt, j.kind, s.rank
"""

# Healthy ranks rise steadily too, by next to nothing: of 32 ranks in 16 kinds of healthy training (gloo, 220 to
# 310 MiB, 40 to 90 steps, glibc) none by more than 0.31 MiB or 4 KiB a step, one over 2,400 steps by 0.9 MiB. A leak is
# a material part of all that the rank holds, and so fast that 65,000 steps make it a gigabyte.
LEAST_SHARE = 0.05
LEAST_BYTES = 16 << 20
LEAST_SLOPE = 16 << 10  # bytes a step


class Row(NamedTuple):
    kind: str  # empty: too few samples
    attempt: int
    rank: int
    total: int  # samples of the rank in all
    lows: list[int]
    steps: list[int]
    last: int
    filled: int  # step at which a data set's cache grew last; 0 for never
    pass_ends: int  # step at which the first pass over the data ends; 0: over, or not known


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    rows = list(rows)
    rising: dict[tuple[int, str], list[tuple[Row, Rise]]] = defaultdict(list)
    withheld: list[Row] = []
    for row in rows:
        rise = steady_rise(row.lows, row.steps)
        if rise is None or not _material(rise):
            continue
        if row.kind == "host memory" and filling(row.pass_ends, row.last, run.status):
            withheld.append(row)
        else:
            rising[row.attempt, row.kind].append((row, rise))
    for (_, kind), members in rising.items():
        yield _finding(kind, members)
    if withheld:
        yield Abstention(
            "INSUFFICIENT_EVIDENCE", f"memory of {ranks_text(r.rank for r in withheld)} rises, but the first pass over "
            f"the data goes on until about step {max(r.pass_ends for r in withheld)}: a cache may be filling",
        )  # fmt: skip
    judged = {r.rank for r in rows if r.kind}
    if len(judged) < run.world_size:
        yield Abstention("INSUFFICIENT_EVIDENCE", _unseen(rows, judged, run))


def _material(rise: Rise) -> bool:
    return rise.growth >= max(LEAST_BYTES, LEAST_SHARE * rise.begin) and rise.slope >= LEAST_SLOPE


def _unseen(rows: Sequence[Row], judged: set[int], run: RunFacts) -> str:
    filling = {r.rank for r in rows if not r.kind and r.total >= PARAMS["fewest"] and r.filled}
    if filling:
        return f"a data set's cache of {ranks_text(filling)} filled until step {max(r.filled for r in rows)}"
    return f"{len(judged)} of {run.world_size} ranks have {PARAMS['fewest']} samples of their memory or more"


def _finding(kind: str, members: Sequence[tuple[Row, Rise]]) -> Finding:
    ranks = tuple(sorted(r.rank for r, _ in members))
    worst, most = max(members, key=lambda m: m[1].growth)
    first = min(rise.first for _, rise in members)
    return Finding(
        ranks=ranks,
        first_step=first,
        last_step=max(r.last for r, _ in members),
        attempt=worst.attempt,
        severity="warning",
        evidence_state="INFERRED",
        subject=kind,
        summary=f"{kind} of {ranks_text(ranks)} rises step by step from step {first} on: by {mib(most.slope)} a step, "
        f"{mib(most.growth)} in all, {most.growth / most.begin:.0%} of what rank {worst.rank} held then",
        evidence=tuple(_evidence(r, rise) for r, rise in members[:8]),
        cannot_conclude=("what holds the memory", "whether it would have levelled off: a buffer may be about to fill"),
        next_check="look for losses, outputs or activations that are kept with their graph (use .item() or .detach()), "
        "for hooks and lists that grow with each step",
    )


def _evidence(row: Row, rise: Rise) -> Evidence:
    value = (
        f"{mib(rise.begin + rise.growth)}, +{mib(rise.growth)} since step {rise.first}, +{mib(rise.slope)} a step, "
        f"rising in {rise.blocks} blocks of steps (Mann-Kendall z {rise.z:.1f})"
    )
    return Evidence(row.rank, row.last, row.kind, value, f"about {mib(rise.begin)}")
