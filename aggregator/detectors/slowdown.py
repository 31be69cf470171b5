"""The steps became slower and stayed so: from which step, in which phase, on which ranks.

Reads     step, phase, batch, labels, grad, tensor
Says      the first slow step, times before and after, the ranks whose own time rose, the phase
Unknown   fewer than 20 steps before and after; the machine got busier; the steps do more work than before
Blind to  a rise below 30 % or 2 ms; one that began within the first 25 steps; with a CUDA device, in
          which phase: it says where the host waited
Do        look at what begins at the step named, in the phase named (`tdbg timeline RUN`); profile one step before and
          one after it: clocks and temperature, other processes, growing inputs, a cache that is full
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy

from .. import slowing
from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import unheard
from ..slowing import Change
from ..wording import ranks_text

CODE = "SLOWDOWN"
NEEDS = {"phase": 1, "step": 1}
PARAMS = {
    "told": 32,  # ranks below this one say how much work their steps are: it is alike on all, and reading it costs
}

# A difference of times is a double: DuckDB 2.0.1 packs whole numbers for sorting by bounds that it guesses, wrongly.
SQL = """
WITH given AS (
    SELECT rank, attempt, step, sum(samples) AS samples, any_value(loader) AS loader
    FROM batch WHERE "end" = '' AND grad_enabled GROUP BY ALL
), tokens AS (
    SELECT rank, attempt, step, sum(elements) AS elements FROM labels GROUP BY ALL
), reached AS (
    SELECT rank, attempt, step, max(len(list_filter(l2, lambda x: x > 0))) AS gradients
    FROM grad WHERE stage = 'local' GROUP BY ALL
), s AS (
    SELECT p.rank, p.attempt, p.step, (s.step_ns - s.agent_ns - coalesce(p.checkpoint_ns, 0)
               - coalesce(p.evaluation_ns, 0))::DOUBLE AS time_ns, p.data_ns, p.forward_ns, p.backward_ns,
           coalesce(p.reduce_wait_ns, -1) AS reduce_wait_ns, p.optimizer_ns, p.other_ns,
           coalesce(p.communication_ns, 0) AS communication_ns, coalesce(p.cpu_ns, -1) AS cpu_ns,
           coalesce(p.cpu_wait_ns, -1) AS cpu_wait_ns,
           coalesce(p.checkpoint_ns, 0) + coalesce(p.evaluation_ns, 0) AS pause_ns, s.agent_ns, s.backwards,
           s.optimizers, coalesce(g.samples, -1) AS samples, coalesce(g.loader, -1) AS loader,
           coalesce(t.elements, -1) AS elements, coalesce(r.gradients, -1) AS gradients
    FROM phase p JOIN step s USING (rank, attempt, step) LEFT JOIN given g USING (rank, attempt, step)
    LEFT JOIN tokens t USING (rank, attempt, step) LEFT JOIN reached r USING (rank, attempt, step)
    WHERE s.step_ns > 0
), built AS (
    SELECT rank, attempt, list(DISTINCT step ORDER BY step) AS steps FROM tensor GROUP BY ALL
)
SELECT s.attempt, s.rank, list(step ORDER BY step), list(time_ns ORDER BY step), list(cpu_ns ORDER BY step),
       list(cpu_wait_ns ORDER BY step), list(pause_ns ORDER BY step), list(agent_ns ORDER BY step),
       list(data_ns ORDER BY step), list(forward_ns ORDER BY step),
       list(backward_ns ORDER BY step), list(reduce_wait_ns ORDER BY step), list(optimizer_ns ORDER BY step),
       list(other_ns ORDER BY step), list(communication_ns ORDER BY step),
       CASE WHEN s.rank < $told
           THEN list([backwards, optimizers, samples, loader, elements, gradients] ORDER BY step) ELSE [] END,
       coalesce(any_value(b.steps), [])
FROM s LEFT JOIN built b USING (rank, attempt) GROUP BY s.attempt, s.rank ORDER BY s.attempt, s.rank
"""

WORK = ("backwards", "optimizers", "samples", "loader", "tokens", "gradients")  # of a step, as in the list above
MORE = 1.05  # times the work: one ragged batch moves no median by so much
NEARBY = 2  # steps around a new model or loader in which a change belongs to it
BUSIER = 0.25  # of the rise is waiting for cores: then another program may be all there is to it
# Times the time on a core, or the step without waiting for one: a neighbour on the same core or cache costs less. On
# two cores with five programs a core, steps that took 60 times as long took the same without the waiting.
HARDER = 2.0


class Row(NamedTuple):
    attempt: int
    rank: int
    steps: list[int]
    time: list[int]  # without the agent, checkpoints and evaluation
    cpu: list[int]  # -1 unknown
    cpu_wait: list[int]
    pause: list[int]  # checkpoints and evaluation
    agent: list[int]
    data: list[int]
    forward: list[int]
    backward: list[int]
    reduce_wait: list[int]  # -1 where it was not measured
    optimizer: list[int]
    other: list[int]
    communication: list[int]
    work: list[list[int]]  # empty for most of many ranks
    built: list[int]  # steps at which what is trained was found anew


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    attempts: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        attempts[row.attempt].append(row)
    longest = 0
    for attempt, of in attempts.items():
        job = Job(of)
        longest = max(longest, len(job.steps))
        yield from _judge(attempt, job)
    yield from unheard(run)
    if longest < slowing.USUAL + slowing.LEAST:
        yield Abstention(
            "INSUFFICIENT_EVIDENCE", f"{longest} steps after the first, {slowing.USUAL + slowing.LEAST} needed"
        )


class Job:
    """The ranks of one attempt over the steps that they have in common. Times are [rank, step]."""

    def __init__(self, rows: Sequence[Row]) -> None:
        common = sorted(set.intersection(*(set(r.steps) for r in rows)))[slowing.WARM_UP :]
        self.rows, self.steps = rows, numpy.array(common, dtype=int)
        self._at = [numpy.searchsorted(numpy.array(r.steps), self.steps) for r in rows]
        self.time = numpy.maximum(self.of("time"), 0.0)
        wait = self.of("cpu_wait")
        self.cpu_wait = None if not wait.size or (wait < 0).any() else wait

    def of(self, column: str, which: Sequence[int] | None = None) -> Any:
        """A column of all ranks, or of those at the positions `which`."""
        chosen = range(len(self.rows)) if which is None else which
        return numpy.array([numpy.array(getattr(self.rows[r], column), dtype=float)[self._at[r]] for r in chosen])

    def change(self) -> Change | None:
        """A slowdown of the job's steps that is there with and without waiting for cores."""
        whole = slowing.fastest(self.time)  # of a rank that does not wait while another saves or evaluates
        if self.cpu_wait is None:
            return slowing.change(whole)
        # The agent waits for cores as well. In a step with a pause most of the waiting may have been in that pause.
        spared = self.time + self.of("agent") - self.cpu_wait
        found = slowing.change(slowing.fastest(numpy.where(self.of("pause") > 0, self.time, spared)))
        if found is None:
            return None
        seen = slowing.measured(whole, found.at, found.until)
        return found if seen.after >= numpy.exp(slowing.MATERIAL) * seen.before else None

    def share(self, found: Change) -> slowing.Share:
        waited, backward = self.of("reduce_wait"), self.of("backward")
        measured = waited >= 0
        own = {name: self.of(name) for name in ("data", "forward", "optimizer", "other")}
        own["backward"] = numpy.where(measured, backward - waited, numpy.nan)
        waits = {"reduce_wait": numpy.where(measured, waited, backward), "communication": self.of("communication")}
        return slowing.share(own, waits, found.at, found.until, found.after - found.before)

    def excuse(self, found: Change) -> str:
        """Why the steps may rightly be slower; empty when nothing is known that would say so."""
        first = int(self.steps[found.at])
        if any(abs(s - first) <= NEARBY and s > 1 for r in self.rows for s in r.built):
            return f"at step {first} what is trained was built anew"
        told = [n for n, row in enumerate(self.rows) if row.work]
        if not told:
            return self._busier(found)
        work = self.of("work", told)
        for n, name in enumerate(WORK):
            before, after = _usual(work[:, : found.at, n]), _usual(work[:, found.at : found.until, n])
            if min(before, after) < 0:
                continue
            if name == "loader" and before != after:
                return f"from step {first} on the batches come from another loader"
            if name != "loader" and after > MORE * before:
                return f"from step {first} on a step has {after:g} {name} instead of {before:g}"
        return self._busier(found)

    def _busier(self, found: Change) -> str:
        if self.cpu_wait is None:
            return ""
        waiting, cpu = (slowing.measured(x.sum(0), found.at, found.until) for x in (self.cpu_wait, self.of("cpu")))
        waited = (waiting.after - waiting.before) / len(self.rows)
        harder = cpu.after >= HARDER * cpu.before or found.after >= HARDER * found.before
        if waited < BUSIER * (found.after - found.before) or harder:
            return ""
        longer = f"the ranks waited {waited / 1e6:.1f} ms a step longer for cores"
        return f"from step {self.steps[found.at]} on {longer}: the machine got busier"


def _usual(x: Any) -> float:
    """Median over ranks and steps of what is known; -1 when nothing is."""
    known = x[x >= 0]
    return float(numpy.median(known)) if known.size else -1.0


def _judge(attempt: int, job: Job) -> Iterator[Finding | Abstention]:
    found = job.change() if len(job.steps) else None
    if found is None:
        return
    excuse = job.excuse(found)
    if excuse:
        yield Abstention(
            "INSUFFICIENT_EVIDENCE", f"steps became {found.after / found.before:.1f} times as long, yet {excuse}"
        )
        return
    part = job.share(found)
    first, last = int(job.steps[found.at]), int(job.steps[found.until - 1])
    ranks = tuple(job.rows[r].rank for r in part.ranks)
    cores = " (waiting for cores left out)" if job.cpu_wait is not None else ""
    stays = found.until == len(job.steps)
    yield Finding(
        ranks=ranks,
        first_step=first,
        last_good_step=int(job.steps[found.at - 1]),
        last_step=last,
        attempt=attempt,
        severity="warning",
        evidence_state="INFERRED",
        subject=part.phase,
        summary=f"steps take {found.after / 1e6:.1f} ms from step {first} on instead of "
        f"{found.before / 1e6:.1f} ms{cores}, "
        + ("to the end" if stays else f"until step {last}")
        + (": in several phases" if part.phase == "mixed" else f": {part.part:.0%} of it in phase {part.phase}")
        + f" of {ranks_text(ranks)}",
        evidence=(
            Evidence(None, first, "median step time", f"{found.after / 1e6:.2f} ms",
                     f"{found.before / 1e6:.2f} ms before, scatter {numpy.expm1(found.scatter):.0%}"),
            *(Evidence(None, first, f"rise in phase {name}", f"{rise / 1e6:+.2f} ms a step")
              for name, rise in sorted(part.rises.items(), key=lambda r: -r[1])[:3]),
        ),
        cannot_conclude=("why: what the program does from there on, the device, or what it depends on",),
        next_check=f"look at what begins at step {first}; profile a step before and after it",
    )  # fmt: skip
