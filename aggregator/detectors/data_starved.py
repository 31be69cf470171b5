"""Training waits for its data for more of the time than it computes.

Reads     phase, phase_device, step, batch, loader
Says      the ranks that wait, the share of the time, how long a step, how many loader workers they have
Unknown   fewer than 20 steps after the first; a machine so busy that the making of batches had to wait for cores
Blind to  waits below 10 ms a step; data that no torch DataLoader gives; on a device, in steps that were not watched,
          waits that its queue of work hides
Do        more num_workers, persistent_workers=True, prefetch_factor; move decoding out of __getitem__; read one batch
          again and again: if steps are as fast as then, data was the limit
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import unheard
from ..wording import counted, ranks_text

CODE = "DATA_STARVED"
NEEDS = {"phase": 1, "step": 1}
PARAMS = {
    "warm_up": 5,  # steps left out: workers start, files are not in the page cache yet
    "block": 8,  # steps whose sums are judged: workers deliver in turns, so that single waits are long and none
}

# The first batch of a pass waits for its workers to start: that is no pace. What rank 0 reads for all is its own wait.
# On a CUDA device only what it stood still for counts.
# Differences of times are doubles: DuckDB 2.0.1 packs whole numbers for sorting by bounds that it guesses, and gave 0.
SQL = """
WITH loaders AS (
    SELECT b.rank, b.attempt, b.step, min(b.index) AS index, max(l.workers) AS workers, max(l.dispatched) AS dispatched
    FROM batch b LEFT JOIN loader l USING (rank, attempt, pid, loader, iterator)
    WHERE b."end" = '' AND b.grad_enabled GROUP BY ALL
), s AS (
    SELECT p.rank, p.attempt, p.step,
           CASE WHEN d.gap_ns >= 0 THEN least(p.data_ns, d.gap_ns) ELSE p.data_ns END AS data_ns,
           (s.step_ns - s.agent_ns - coalesce(p.checkpoint_ns, 0) - coalesce(p.evaluation_ns, 0))::DOUBLE AS time_ns,
           coalesce(p.cpu_ns, -1) AS cpu_ns, coalesce(p.cpu_wait_ns, -1) AS cpu_wait_ns, l.workers,
           row_number() OVER (PARTITION BY p.rank, p.attempt ORDER BY p.step) AS n
    FROM phase p JOIN step s USING (rank, attempt, step) JOIN loaders l USING (rank, attempt, step)
    LEFT JOIN phase_device d USING (rank, attempt, step)
    WHERE p.step > $warm_up AND s.step_ns > 0 AND l.index > 0 AND (coalesce(l.dispatched, 0) = 0 OR p.rank = 0)
), blocks AS (
    SELECT rank, attempt, min(step) AS first, max(step) AS last, count(*) AS steps, sum(data_ns) AS data_ns,
           sum(time_ns) AS time_ns, sum(cpu_ns) AS cpu_ns, sum(cpu_wait_ns) AS cpu_wait_ns, max(workers) AS workers
    FROM s GROUP BY rank, attempt, n // $block
)
SELECT attempt, rank, min(first), max(last), sum(steps)::BIGINT, sum(data_ns)::BIGINT, sum(time_ns)::BIGINT,
       sum(cpu_ns)::BIGINT, sum(cpu_wait_ns)::BIGINT, coalesce(max(workers), 0),
       sum(steps) FILTER (data_ns * 2 > time_ns)::BIGINT
FROM blocks GROUP BY attempt, rank ORDER BY attempt, rank
"""

LEAST = 20  # steps: half an epoch of the smallest jobs; before, the reading ahead of workers hides their pace
SHARE = 0.5  # of the time: more than half of what the job costs is spent waiting
STEADY = 0.8  # of the steps lie in blocks that are so: not one slow file
# A loader in the rank's own process takes milliseconds for its collating whatever the data; ten of them are work.
LEAST_NS = 10e6


class Row(NamedTuple):
    attempt: int
    rank: int
    first: int
    last: int
    steps: int
    data_ns: int
    time_ns: int  # without the agent, checkpoints and evaluation
    cpu_ns: int  # negative: unknown
    cpu_wait_ns: int
    workers: int
    starved: int  # steps in blocks that waited for data more than half of the time


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    everything = list(rows)
    seen = [r for r in everything if r.steps >= LEAST]
    waiting = [r for r in seen if _waits(r, 1.0) or _may_wait(r)]
    starved = [r for r in waiting if _waits(r, _stretch(r))]
    for attempt in sorted({r.attempt for r in starved}):
        yield _finding([r for r in starved if r.attempt == attempt])
    if len(waiting) > len(starved):
        busy = ranks_text(r.rank for r in waiting if r not in starved)
        yield Abstention(
            "INSUFFICIENT_EVIDENCE", f"{busy} waited for data, yet the machine was too busy to tell whose fault that is"
        )
    yield from unheard(run)
    if not seen:
        yield Abstention(
            "INSUFFICIENT_EVIDENCE", f"fewer than {LEAST} steps after the first took a batch from a loader"
        )


def _stretch(row: Row) -> float:
    """How much longer everything takes as cores are shared: by what the training thread itself waits for one."""
    return 1 + row.cpu_wait_ns / row.cpu_ns if row.cpu_ns > 0 and row.cpu_wait_ns >= 0 else 1.0


def _may_wait(row: Row) -> bool:
    """A long wait beside work that itself took long only because it waited for cores."""
    return _stretch(row) > 2 and row.data_ns / row.steps >= LEAST_NS and row.data_ns >= SHARE / 2 * row.time_ns


def _waits(row: Row, stretch: float) -> bool:
    long = row.data_ns / row.steps / stretch >= LEAST_NS
    return long and row.data_ns >= SHARE * row.time_ns and row.starved >= STEADY * row.steps


def _finding(rows: list[Row]) -> Finding:
    ranks = tuple(r.rank for r in rows)
    share = sum(r.data_ns for r in rows) / sum(r.time_ns for r in rows)
    wait = sum(r.data_ns for r in rows) / sum(r.steps for r in rows)
    workers = min(r.workers for r in rows)
    made = "in the rank's own process" if not workers else f"by {counted(workers, 'loader worker')}"
    return Finding(
        ranks=ranks,
        first_step=min(r.first for r in rows),
        last_step=max(r.last for r in rows),
        attempt=rows[0].attempt,
        severity="warning",
        evidence_state="OBSERVED",
        subject="data",
        summary=f"{ranks_text(ranks)} waited for data {share:.0%} of the time, {wait / 1e6:.1f} ms a step; "
        f"batches are made {made}",
        evidence=tuple(
            Evidence(r.rank, r.last, "share of the time waiting for data", f"{r.data_ns / r.time_ns:.0%}",
                     f"below {SHARE:.0%}; {r.workers} loader workers")
            for r in rows[:8]
        ),
        cannot_conclude=("what makes the batches slow: reading, decoding or transforming",),
        next_check="set num_workers to the cores that are free" if not workers else
        "more loader workers, a larger prefetch_factor, or time the data set's __getitem__ alone",
    )  # fmt: skip
