"""A rank's gradient holds NaN or Inf: on which rank it was born, before the reduction spread it, and in which tensor.

Reads     grad, tensor, loss, step, clip, param (whether any update used it)
Says      the ranks whose own gradient it was, the step, the tensor nearest to the loss, whether the loss had it already
Unknown   own gradients that were not seen (views of the buckets, shards of no FSDP): then the step is known, not the
          rank
Blind to  steps between two sweeps; steps that a loss scaler skipped
Do        run this step again on the rank named with torch.autograd.set_detect_anomaly(True); look at the tensor
          nearest to the loss: division by a norm of zero, sqrt(0), log(0), half precision beyond 65504
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import interval, listed, unheard

CODE = "NONFINITE_GRAD"
NEEDS = {"grad": 1, "tensor": 1}
PARAMS: Mapping[str, object] = {}
SHOWN = 8
SPREAD = "on which rank it began: the steps before were not looked at, and an update with NaN spreads it to all"
LEFT_OUT = "; the program left it out of the update"
CUT = "; clipping by value made finite numbers of it, and those the update took"
ORDER = "by order of registration, the last of them: gradients flow from the loss backwards"

# Per attempt the earliest step that no scaler skipped; of it, every rank's own gradient (if seen) and reduced one.
SQL = """
WITH took AS (
    SELECT rank, attempt, step, bool_or(skipped) AS skipped, max(backwards) AS backwards,
           max(discarded) AS discarded
    FROM step
    WHERE attempt IN (SELECT attempt FROM grad WHERE len(nonfinite) > 0) GROUP BY ALL
),
bad AS (
    SELECT g.attempt, min(g.step) AS step, max(g.step) AS last FROM grad g
    LEFT JOIN took t ON t.rank = g.rank AND t.attempt = g.attempt AND t.step = g.step
    WHERE len(g.nonfinite) > 0 AND (g.stage = 'reduced' OR g.valid)
      AND NOT coalesce(t.skipped, g.scale <> 1)  -- with a scaler, a step in progress may still be skipped
    GROUP BY g.attempt
),
here AS (
    SELECT g.*, b.last, row_number() OVER (
               PARTITION BY g.rank, g.attempt, g.stage ORDER BY len(g.nonfinite) > 0 DESC, g.seq) AS nth,
           count(DISTINCT g.micro) FILTER (len(g.nonfinite) > 0) OVER (PARTITION BY g.rank, g.attempt, g.stage) AS times
    FROM grad g JOIN bad b ON b.attempt = g.attempt AND b.step = g.step
),
named AS (
    SELECT h.rank, h.attempt, h.stage, list(t.name ORDER BY t.index DESC) AS names
    FROM (SELECT rank, attempt, pid, generation, stage, unnest(nonfinite) AS index FROM here WHERE nth = 1) h
    JOIN tensor t USING (rank, attempt, pid, generation, index) GROUP BY h.rank, h.attempt, h.stage
),
used AS (  -- unless an update got finite gradients everywhere and all stayed finite: then they were thrown away
    SELECT attempt FROM here GROUP BY attempt
    HAVING count(*) FILTER (stage = 'reduced') = 0 OR bool_or(stage = 'reduced' AND len(nonfinite) > 0)
        OR count(DISTINCT rank) FILTER (stage = 'reduced') < count(DISTINCT rank)
    UNION SELECT p.attempt FROM param p JOIN bad b ON b.attempt = p.attempt AND p.step >= b.step
    WHERE len(p.nonfinite) > 0
    UNION SELECT l.attempt FROM loss l JOIN bad b ON b.attempt = l.attempt AND l.step = b.step + 1
    WHERE l.nonfinite > 0
),
good AS (
    SELECT g.attempt, max(g.step) AS step FROM grad g JOIN bad b ON b.attempt = g.attempt AND g.step < b.step
    WHERE len(g.nonfinite) = 0 GROUP BY g.attempt
)
SELECT h.rank, h.attempt, h.step, h.last, g.step AS last_good, h.stage, h.stage = 'reduced' OR h.valid AS valid,
       coalesce(n.names, []) AS names, len(h.nonfinite) AS tensors, coalesce(t.backwards, 0) - h.times AS micro,
       coalesce(o.nonfinite, 0) > 0 AS loss_bad, h.attempt IN (SELECT attempt FROM used) AS used,
       t.discarded = 0 AND EXISTS (FROM clip c WHERE c.rank = h.rank AND c.attempt = h.attempt AND c.step = h.step
                                                AND c.norm_type = 0) AS cut
FROM here h LEFT JOIN named n ON n.rank = h.rank AND n.attempt = h.attempt AND n.stage = h.stage
LEFT JOIN good g ON g.attempt = h.attempt
LEFT JOIN took t ON t.rank = h.rank AND t.attempt = h.attempt AND t.step = h.step
LEFT JOIN (SELECT rank, attempt, step, max(nonfinite) AS nonfinite FROM loss GROUP BY ALL) o
       ON o.rank = h.rank AND o.attempt = h.attempt AND o.step = h.step
WHERE h.nth = 1 ORDER BY h.attempt, h.rank, h.stage
"""


class Row(NamedTuple):
    """One rank's gradient of one stage at the earliest step at which some gradient was not finite."""

    rank: int
    attempt: int
    step: int
    last: int
    last_good: int | None
    stage: str
    valid: bool
    names: list[str]  # nearest to the loss first
    tensors: int  # how many are not finite
    micro: int  # backwards of the step less those that left it non-finite: the smaller, the earlier it was born
    loss_bad: bool
    used: bool  # an update may have taken it
    cut: bool  # nothing of this step was thrown away, and its gradients were clipped by value, which makes Inf finite


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per attempt."""
    for attempt in sorted({r.attempt for r in rows}):
        yield _finding([r for r in rows if r.attempt == attempt], run)
    yield from unheard(run)


def _finding(rows: Sequence[Row], run: RunFacts) -> Finding:
    own = [r for r in rows if r.stage == "local" and r.valid]
    # Reduced at every backward of an accumulated step, a NaN is in everybody's gradient from the next backward on.
    earliest = min((r.micro for r in own if r.tensors), default=0)
    born = [r for r in own if r.tensors and r.micro == earliest]
    hit = born or [r for r in rows if r.stage == "reduced" and r.tensors]
    first = next((r for r in hit if r.names), hit[0])
    ranks = tuple(r.rank for r in hit)
    what = "own gradient" if born else "reduced gradient"
    loss = "; the loss was already non-finite" if any(r.loss_bad for r in hit) else ""
    subject = first.names[0] if first.names else ""
    unseen = max(run.world_size, len({r.rank for r in rows})) - len(own)
    skipped = first.step - (first.last_good or 0) > 1
    spread = (SPREAD,) if 1 < len(ranks) == run.world_size and skipped else ()
    return Finding(
        ranks=ranks,
        first_step=first.step,
        last_good_step=first.last_good,
        last_step=first.last,
        attempt=first.attempt,
        subject=subject,
        severity="critical" if first.used else "warning" if first.cut else "note",
        summary=f"the {what} of {listed(ranks)} holds NaN or Inf at step {first.step}, in {first.tensors} tensor(s), "
        f"{subject} nearest to the loss{loss}" + ("" if first.used else CUT if first.cut else LEFT_OUT),
        evidence=tuple(_evidence(hit[:SHOWN], what)),
        cannot_conclude=_open(bool(born), unseen, run.world_size) + spread + interval(first.last_good, first.step),
        next_check="look at this rank's batch of that step, and at roots, divisions and norms of zero in the forward",
    )


def _open(born: bool, unseen: int, world_size: int) -> tuple[str, ...]:
    if born:
        return (f"whether more ranks had it: {unseen} rank(s) did not show their own gradient",) if unseen else ()
    if world_size < 2:
        return ()
    if unseen:
        return ("on which rank it was born: the ranks' own gradients were not seen before the reduction",)
    return ("where it was born: every rank's own gradient was finite, so in the reduction or after it",)


def _evidence(hit: Sequence[Row], what: str) -> Iterator[Evidence]:
    for r in hit:
        names = ", ".join(r.names[:SHOWN]) + (f" and {len(r.names) - SHOWN} more" if len(r.names) > SHOWN else "")
        yield Evidence(r.rank, r.step, f"tensors of the {what} that are not finite ({ORDER})", names, "none")
        loss = "not finite" if r.loss_bad else "finite"
        yield Evidence(r.rank, r.step, "loss of the same step", loss)
