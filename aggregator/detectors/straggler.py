"""A rank takes steadily longer than its peers for its own work; the others wait for it in every step.

Reads     phase, phase_device, cpu_wait, tensor
Says      ranks, from which step to which, in which phase, how much longer; as a note a stage heavier than the others
Unknown   fewer than 20 steps after the first five; which of two ranks is the odd one
Blind to  work in forward and backward of sharded models, in which waiting for peers can't be told from work; less than
          a millisecond a step; what a rank's other threads do
Do        profile the phase named on the rank named beside a peer: its data (longer samples, slower disk), its device
          (clock, temperature, another process on it), code that only this rank runs (logging, saving)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy

from .. import straggling
from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import unheard
from ..straggling import Peers, Straggler
from ..wording import ranks_text

CODE = "STRAGGLER"
NEEDS = {"phase": 1}
PARAMS: dict[str, object] = {}

# Ranks with the same tensors do the same work; a rank without any belongs to those without any. On a CUDA device its
# own times count, the host's show launches; there the wait for data is what the device stood still for meanwhile.
SQL = """
WITH role AS (
    SELECT rank, attempt, bool_or(sharing = 'sharded') AS sharded,
           sum(DISTINCT hash(name, CASE WHEN sharing = 'sharded' THEN '' ELSE shape END) // 65536) AS stage
    FROM tensor WHERE kind = 'param' GROUP BY ALL
), p AS (
    SELECT rank, attempt, step, p.data_ns, p.forward_ns, p.backward_ns,
           coalesce(p.reduce_wait_ns, -1) AS reduce_wait_ns, p.optimizer_ns, p.other_ns,
           coalesce(cpu_wait_ns, -1) AS cpu_wait_ns, coalesce(
               [w.data_ns, w.forward_ns, w.backward_ns, w.optimizer_ns, w.other_ns], []) AS waits
    FROM phase p LEFT JOIN cpu_wait w USING (rank, attempt, step)
    WHERE step > 1 AND (rank, attempt) NOT IN (SELECT (rank, attempt) FROM phase_device)
    UNION ALL
    SELECT rank, attempt, step, least(d.gap_ns, p.data_ns), d.forward_ns, d.backward_ns, d.reduce_wait_ns,
           d.optimizer_ns, d.gap_ns - least(d.gap_ns, p.data_ns), -1, []
    FROM phase_device d JOIN phase p USING (rank, attempt, step)
    WHERE step > 1 AND d.gap_ns >= 0 AND p.checkpoint_ns = 0 AND p.evaluation_ns = 0
)
SELECT p.attempt, coalesce(any_value(r.stage), 0) AS stage, coalesce(bool_or(r.sharded), FALSE), p.rank,
       list(step ORDER BY step), list(data_ns ORDER BY step), list(forward_ns ORDER BY step),
       list(backward_ns ORDER BY step), list(reduce_wait_ns ORDER BY step), list(optimizer_ns ORDER BY step),
       list(other_ns ORDER BY step), list(cpu_wait_ns ORDER BY step),
       list(CASE WHEN waits[1] IS NULL THEN [] ELSE waits END ORDER BY step)
FROM p LEFT JOIN role r USING (rank, attempt)
GROUP BY p.attempt, p.rank ORDER BY p.attempt, stage, p.rank
"""


class Row(NamedTuple):
    attempt: int
    stage: int
    sharded: bool
    rank: int
    steps: list[int]
    data: list[int]
    forward: list[int]
    backward: list[int]
    reduce_wait: list[int]  # -1 where it was not measured
    optimizer: list[int]
    other: list[int]
    cpu_wait: list[int]  # -1 unknown
    waits: list[list[int]]  # the same by phase, as in WAITED; empty where it was not measured


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    attempts: dict[int, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        attempts[row.attempt][row.stage].append(row)
    groups = [(attempt, peers_of(stage, of)) for attempt, stages in attempts.items() for stage, of in stages.items()]
    judged = False
    for attempt, group in groups:
        found = straggling.stragglers(group, len(groups))
        judged |= straggling.enough(group) or bool(found)
        for straggler in found:
            yield _doubt(straggler) if straggler.doubtful else _finding(attempt, group, straggler)
    for attempt in attempts:
        yield from _stages(attempt, [g for a, g in groups if a == attempt])
    yield from unheard(run)
    if not judged:
        few = all(len(g.ranks) < 3 for _, g in groups)
        why = "fewer than 3 ranks do the same work" if few else f"fewer than {straggling.LEAST} steps after the first"
        yield Abstention("INSUFFICIENT_EVIDENCE", f"{why}: nobody can be told from its peers")


def peers_of(stage: int, rows: Sequence[Row]) -> Peers:
    """The ranks of one stage over the steps that they have in common; waits for others are left out."""
    common = numpy.array(sorted(set.intersection(*(set(r.steps) for r in rows))), dtype=int)
    at = [numpy.searchsorted(numpy.array(r.steps), common) for r in rows]

    def times(column: str) -> Any:
        return numpy.array([numpy.array(getattr(r, column), dtype=float)[i] for r, i in zip(rows, at, strict=True)])

    own = {"data": times("data"), "optimizer": times("optimizer"), "other": times("other")}
    if not any(r.sharded for r in rows):
        waited = times("reduce_wait")
        own["forward"] = times("forward")
        own["backward"] = numpy.where(waited >= 0, times("backward") - waited, numpy.nan)
    return Peers(stage, tuple(r.rank for r in rows), common, own, _cpu_waits(own, rows, at, times("cpu_wait")))


WAITED = ("data", "forward", "backward", "optimizer", "other")


def _cpu_waits(own: dict[str, Any], rows: Sequence[Row], at: Sequence[Any], total: Any) -> dict[str, Any] | None:
    """Waiting for a core by phase; where that was not measured, all of the step's may have been in any of them."""
    if not total.size or (total < 0).any():
        return None
    waits = {op: total.copy() for op in own}
    for r, (row, steps) in enumerate(zip(rows, at, strict=True)):
        for n, i in enumerate(steps.tolist()):
            for op, wait in zip(WAITED, row.waits[i], strict=False):
                if op in waits:
                    waits[op][r, n] = wait
    return waits


def _doubt(found: Straggler) -> Abstention:
    return Abstention(
        "INSUFFICIENT_EVIDENCE",
        f"{ranks_text(found.ranks[:1])} took {found.excess:+.0%} own time in steps {found.first_step} to "
        f"{found.last_step}, "
        "yet that may be no more than waiting for a core on a busy machine",
    )


def _finding(attempt: int, group: Peers, found: Straggler) -> Finding:
    pair, slow = len(found.ranks) > 1, found.ranks[0]
    # Rank 0 prints, logs and saves for all, by files that only it writes; that everybody waits for it is usual.
    # In a pair the one that waits for it, by means that nobody sees, spends more time as well.
    usual = (slow == 0 or pair) and found.phase == "other"
    apart = found.excess >= numpy.expm1(straggling.PAIR_APART)
    cannot = ["why: a slower device, more work, or another program beside it"]
    if pair:
        cannot.insert(0, "which of the two is as it should be: with two ranks there is no majority")
    if usual:
        cannot.append(
            "whether it works for all, such as writing logs, or waits for the other in a way that is not seen"
        )
    over = f"{found.excess:+.0%} own time ({found.excess_ns / 1e6:.1f} ms a step)"
    unit = "steps" if found.size == 1 else f"sums over {found.size} steps"
    against = f"rank {found.ranks[1]}" if pair else f"the median of its {len(group.ranks) - 1} peers"
    return Finding(
        ranks=tuple(sorted(found.ranks)),
        first_step=found.first_step,
        last_step=found.last_step,
        attempt=attempt,
        severity="note" if usual or (pair and not apart) else "warning",
        evidence_state="INFERRED",
        subject=found.phase,
        summary=f"{ranks_text(found.ranks[:1])} is steadily slower than {against}: {over} in steps "
        f"{found.first_step} to {found.last_step}, most of it in phase {found.phase}",
        evidence=(
            Evidence(slow, found.first_step, "own time over the peers' median", over,
                     f"peers leave room for {found.bar:.1%}"),
            Evidence(slow, found.last_step, f"{unit} more than 5 % above it", f"{found.hits} of {found.blocks}",
                     f"half of them by chance; so many: p = {found.chance:.1g}"),
        ),
        cannot_conclude=tuple(cannot),
        next_check=NEXT.get(found.phase, "compare clocks, temperature and other load of its device with its peers'"),
    )  # fmt: skip


NEXT = {
    "data": "look at where this rank reads its data from, and how many loader workers it has",
    "other": "profile this rank between the end of an update and the next batch",
}


def _stages(attempt: int, groups: list[Peers]) -> Iterator[Finding]:
    for heavy in straggling.heavy_stages(groups):
        yield Finding(
            ranks=heavy.ranks,
            first_step=None,
            attempt=attempt,
            severity="note",
            evidence_state="INFERRED",
            subject="stage",
            summary=f"{ranks_text(heavy.ranks)}, which hold the same part of the model, take "
            f"{heavy.ratio:.2f} times as long as the ranks of other parts",
            cannot_conclude=("whether another cut of the model would be faster",),
            next_check="compare how the layers are dealt to the stages",
        )
