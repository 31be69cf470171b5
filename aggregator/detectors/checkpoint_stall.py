"""Saving checkpoints, or evaluating, takes a large part of the run's time.

Reads     phase, step
Says      the ranks that do it, the share of the time, how often and how long each time
Unknown   fewer than 20 steps
Blind to  the time after the last step; checkpoints that are written by other means than torch's and safetensors'
Do        save less often, or by torch.distributed.checkpoint.async_save; let every rank write its own shards;
          evaluate on all ranks and on a part of the data. `tdbg metrics RUN` has the time of each step
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity
from ..groups import unheard
from ..wording import ranks_text

CODE = "CHECKPOINT_STALL"
NEEDS = {"phase": 1, "step": 1}
PARAMS: dict[str, object] = {}

# The first steps hold the start of everything, and a save of the untrained model: they are no pace.
SQL = """
WITH s AS (
    SELECT p.rank, p.attempt, p.step, (s.step_ns - s.agent_ns)::DOUBLE AS time_ns,
           coalesce(p.checkpoint_ns, 0) AS checkpoint_ns, coalesce(p.evaluation_ns, 0) AS evaluation_ns
    FROM phase p JOIN step s USING (rank, attempt, step) WHERE s.step_ns > 0 AND p.step > 2
), pauses AS (
    SELECT 'checkpoint' AS phase, * EXCLUDE (checkpoint_ns, evaluation_ns), checkpoint_ns AS pause_ns FROM s
    UNION ALL SELECT 'evaluation', * EXCLUDE (checkpoint_ns, evaluation_ns), evaluation_ns FROM s
)
SELECT attempt, phase, rank, count(*), sum(time_ns)::BIGINT, sum(pause_ns)::BIGINT,
       count(*) FILTER (pause_ns > 0), coalesce(min(step) FILTER (pause_ns > 0), 0), max(step)
FROM pauses GROUP BY attempt, phase, rank ORDER BY attempt, phase, rank
"""

LEAST_STEPS = 20
# A run that saves at the best interval for its failures loses sqrt(2 * save / time between failures) to its saves: five
# minutes a save and a failure every three hours make 24 %. More than that no risk asks for.
CHECKPOINT_SHARE = 0.25
# Evaluation is wanted for itself: as much of it as of training is worth a note. Twice as much, and every few steps, is
# more than anybody reads.
EVALUATION_SHARE, EVALUATION_MOST = 0.5, 2 / 3
OFTEN = 10  # steps between two of these evaluations, at most
LEAST_TIMES = 5  # a run that ends after a few saves says nothing about a longer one
LEAST_NS = 1e9  # in all: the saves of a toy


class Row(NamedTuple):
    attempt: int
    phase: str  # checkpoint or evaluation
    rank: int
    steps: int
    time_ns: int
    pause_ns: int
    times: int  # steps before which there was such a pause
    first: int
    last: int

    @property
    def share(self) -> float:
        return self.pause_ns / max(self.time_ns, 1)


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    everything = list(rows)
    stalled = [r for r in everything if _stalls(r)]
    for attempt, phase in sorted({(r.attempt, r.phase) for r in stalled}):
        yield _finding([r for r in stalled if (r.attempt, r.phase) == (attempt, phase)])
    yield from unheard(run)
    if all(r.steps < LEAST_STEPS for r in everything):
        yield Abstention(
            "INSUFFICIENT_EVIDENCE", f"fewer than {LEAST_STEPS} steps: shares of so short a run say nothing"
        )


def _stalls(row: Row) -> bool:
    least = CHECKPOINT_SHARE if row.phase == "checkpoint" else EVALUATION_SHARE
    enough = row.steps >= LEAST_STEPS and row.times >= LEAST_TIMES and row.pause_ns >= LEAST_NS
    return enough and row.share >= least


def _severity(rows: list[Row]) -> Severity:
    if rows[0].phase == "checkpoint":
        return "warning"
    much = any(r.share >= EVALUATION_MOST and r.steps <= OFTEN * r.times for r in rows)
    return "warning" if much else "note"


def _finding(rows: list[Row]) -> Finding:
    worst = max(rows, key=lambda r: r.share)
    ranks, phase = tuple(r.rank for r in rows), worst.phase
    each, every = worst.pause_ns / worst.times, worst.steps / worst.times
    doing = "saving checkpoints" if phase == "checkpoint" else "evaluation"
    return Finding(
        ranks=ranks,
        first_step=min(r.first for r in rows),
        last_step=max(r.last for r in rows),
        attempt=worst.attempt,
        severity=_severity(rows),
        evidence_state="OBSERVED",
        subject=phase,
        summary=f"{doing} took {worst.share:.0%} of the time on {ranks_text(ranks)}: {each / 1e6:.0f} ms "
        f"each time, every {every:.3g} steps, {worst.times} times",
        evidence=tuple(
            Evidence(r.rank, r.last, f"share of the time in {phase}", f"{r.share:.0%}", f"{r.times} times")
            for r in rows[:8]
        ),
        cannot_conclude=("how often the program needs it",),
        next_check="save less often, less at a time, or beside training (torch.distributed.checkpoint.async_save)"
        if phase == "checkpoint" else "evaluate less often, or on a part of the data",
    )  # fmt: skip
