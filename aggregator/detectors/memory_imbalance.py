"""A rank holds at least twice the memory that its peers hold, over the whole second half of its steps, and a lot more.

Reads     memory, tensor
Says      the ranks, what they hold and what their peers hold, host or device
Unknown   fewer than 10 samples; ranks without a peer that trains a model of the same size
Blind to  memory of loader workers; what is large and shared by all; which of two ranks is the odd one
Do        look at what only this rank keeps: gathered outputs, a model loaded onto device 0 by every process
          (map_location), metrics that collect on rank 0, longer samples
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..wording import mib, ranks_text

CODE = "MEMORY_IMBALANCE"
NEEDS = {"memory": 2}
PARAMS = {"fewest": 10}  # samples, of which the second half is judged: a start allocates, and not on all ranks at once

# Ranks are alike when the parameters that they hold are: stages of a pipeline and uneven shards are no peers.
SQL = """
WITH size AS (
    SELECT rank, attempt, sum(numel) FILTER (WHERE kind = 'param') AS numel FROM tensor
    SEMI JOIN (SELECT rank, attempt, max(generation) AS generation FROM tensor GROUP BY ALL)
        USING (rank, attempt, generation)
    GROUP BY ALL
), series AS (
    SELECT 'host memory' AS kind, rank, attempt, step, seq, anon_bytes + greatest(shared_bytes, 0) AS used, -1 AS total
    FROM memory WHERE anon_bytes > 0
    UNION ALL
    SELECT 'device memory', rank, attempt, step, seq, cuda_reserved_bytes, cuda_total_bytes
    FROM memory WHERE cuda_reserved_bytes >= 0
), numbered AS (
    SELECT *, row_number() OVER w AS n, count(*) OVER (PARTITION BY kind, rank, attempt) AS samples
    FROM series WHERE step > 0 WINDOW w AS (PARTITION BY kind, rank, attempt ORDER BY step, seq)
)
SELECT n.kind, n.attempt, n.rank, any_value(n.samples), coalesce(any_value(s.numel), 0),
       min(n.used), max(n.used), max(n.total), max(n.step)
FROM numbered n LEFT JOIN size s USING (rank, attempt)
WHERE n.samples >= $fewest AND 2 * n.n > n.samples GROUP BY n.kind, n.attempt, n.rank
ORDER BY n.attempt, n.kind, n.rank
"""

TIMES = 2.0  # "far more": less is what a logger, an evaluation or the first rank's gathered checkpoint leaves behind
# What libraries that only the first rank loads take of their own stays below this (the largest measured, with torch
# there already: 33 MiB for pandas), with room for a validation set. Of a device: a tenth, as for any imbalance there.
LEAST_BYTES = 256 << 20
LEAST_DEVICE_SHARE = 0.10
APART = 6.0  # times the peers' own spread (median absolute deviation)


class Row(NamedTuple):
    """A rank's second half."""

    kind: str
    attempt: int
    rank: int
    samples: int
    numel: int  # of all its parameters
    low: int
    high: int
    total: int  # of the device; -1 for the host
    last: int

    @property
    def material(self) -> float:
        return LEAST_DEVICE_SHARE * self.total if self.total > 0 else LEAST_BYTES


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    alike: dict[tuple[int, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        alike[row.attempt, row.kind, row.numel].append(row)
    judged: set[int] = set()
    for several in alike.values():
        if len(several) < 2:
            continue
        judged.update(r.rank for r in several)
        odd = _pair(several) if len(several) == 2 else _odd(several)
        if odd:
            yield _finding(odd, [r for r in several if r not in odd] or several)
    if len(judged) < run.world_size:
        yield Abstention(
            "INSUFFICIENT_EVIDENCE",
            f"{len(judged)} of {run.world_size} ranks have {PARAMS['fewest']} samples and a peer of the same size",
        )


def _odd(rows: Sequence[Row]) -> list[Row]:
    """Those whose least is far above what most ranks ever held; fewer than half of all by the choice of the median."""
    middle = median(r.high for r in rows)
    spread = median(abs(r.high - middle) for r in rows)
    return [r for r in rows if r.low >= TIMES * middle and r.low - middle >= max(r.material, APART * spread)]


def _pair(rows: Sequence[Row]) -> list[Row]:
    """Both of two that differ by as much: nothing says which of them is as it should be."""
    less, more = sorted(rows, key=lambda r: r.low)
    return sorted(rows) if more.low >= TIMES * less.high and more.low - less.high >= more.material else []


def _finding(odd: Sequence[Row], others: Sequence[Row]) -> Finding:
    pair = list(odd) == list(others)
    most = max(odd, key=lambda r: r.low)
    usual = min(r.high for r in others) if pair else int(median(r.high for r in others))
    ranks = tuple(r.rank for r in odd)
    holds = f"at each step {mib(most.low)} or more, {most.low / max(usual, 1):.1f} times as much as"
    if pair:
        said = f"{most.kind} of {ranks_text(ranks)} differs: rank {most.rank} holds {holds} the other ({mib(usual)})"
    else:
        said = f"{ranks_text(ranks)} hold{'s' * (len(ranks) == 1)} {holds} most of {len(others)} peers ({mib(usual)})"
    return Finding(
        ranks=ranks,
        first_step=None,  # it need not have begun where the judged half begins
        last_step=max(r.last for r in odd),
        attempt=most.attempt,
        severity="warning",
        evidence_state="INFERRED",
        subject=most.kind,
        summary=said if pair else f"{most.kind}: {said}",
        evidence=tuple(
            Evidence(r.rank, r.last, r.kind, f"{mib(r.low)} to {mib(r.high)}", f"about {mib(usual)}") for r in odd[:8]
        ),
        cannot_conclude=(
            "what holds the memory",
            "whether it is meant to be there: a rank may have a part of its own to play",
            *(("which of the two ranks is as it should be",) if pair else ()),
        ),
        next_check="look for what only this rank builds: buffers, banks, models for evaluation, whole data sets",
    )
