"""A trainable parameter gets gradients, and no optimizer holds it.

Reads     tensor, param, grad
Says      the parameters, the ranks, the step of the first gradient; how often their model's other parameters changed
Unknown   fewer than 3 steps with a gradient, or at which held parameters of the same model changed
Blind to  parameters that something other than an optimizer changes; models of which no optimizer holds anything;
          windows of large tensors between the first and the last sweep
Do        build the optimizer after the last module was added, from model.parameters(), or add the tensors named with
          optimizer.add_param_group
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..changes import WHOLE_ELEMENTS, changes_sql, common
from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, unheard
from ..wording import counted

CODE = "PARAM_NOT_OPTIMIZED"
NEEDS = {"tensor": 1, "param": 1, "grad": 1}
PARAMS: Mapping[str, object] = {}
# Observed, not estimated: bits that stay while a gradient is there. More than one step only because an optimizer that
# is built late, or a loop that alternates between parts, may leave a parameter out for a step or two.
FEWEST = 3
SHOWN = 8

# an optimizer that comes to hold it later in the run clears it
_LOOSE = """
    SELECT t.* FROM tensor t
    WHERE t.kind = 'param' AND t.trainable AND t.optimizer = -1 AND t.numel > 0
      AND EXISTS (SELECT 1 FROM tensor h WHERE h.rank = t.rank AND h.attempt = t.attempt AND h.pid = t.pid
                  AND h.generation = t.generation AND h.model = t.model AND h.kind = 'param' AND h.optimizer >= 0)
      AND NOT EXISTS (SELECT 1 FROM tensor h WHERE h.rank = t.rank AND h.attempt = t.attempt AND h.pid = t.pid
                      AND h.generation > t.generation AND h.model_type = t.model_type AND h.name = t.name
                      AND (h.optimizer >= 0 OR NOT h.trainable))
"""
_WANTED = f"""
    SELECT rank, attempt, pid, generation, index FROM tensor
    SEMI JOIN ({_LOOSE}) USING (rank, attempt, pid, generation, model) WHERE kind = 'param'
"""

SQL = f"""
WITH loose AS ({_LOOSE}),
seen AS (SELECT c.*, t.optimizer, t.model FROM ({changes_sql(_WANTED)}) c
         JOIN tensor t USING (rank, attempt, pid, generation, index)),
held AS (SELECT rank, attempt, pid, generation, model, max(states) AS states FROM seen WHERE optimizer >= 0
         GROUP BY ALL),
size AS (SELECT rank, attempt, pid, generation, sum(numel) AS elements FROM tensor WHERE kind = 'param' GROUP BY ALL)
SELECT a.any_held, l.rank, l.attempt, l.generation, l.model, l.name, s.states, s.marks, s.with_gradient,
       CASE WHEN s.first_gradient = s.first_measured THEN greatest(least(l.step, s.first_gradient), 1)
            ELSE s.first_gradient END,  -- the catalogue is made anew at the update, after the step's gradients
       s.first_gradient, s.last_gradient, s.largest, h.states, z.elements
FROM (SELECT bool_or(optimizer >= 0) AS any_held FROM tensor WHERE kind = 'param') a
LEFT JOIN (loose l JOIN seen s USING (rank, attempt, pid, generation, index)
           JOIN held h ON h.rank = l.rank AND h.attempt = l.attempt AND h.pid = l.pid
                      AND h.generation = l.generation AND h.model = l.model
           JOIN size z ON z.rank = l.rank AND z.attempt = l.attempt AND z.pid = l.pid AND z.generation = l.generation)
    ON TRUE
ORDER BY l.attempt, l.generation, l.model, l.index, l.rank
"""


class Row(NamedTuple):
    """One parameter that no optimizer holds, on one rank; only `any_held` is filled where there is none."""

    any_held: bool | None
    rank: int | None
    attempt: int
    generation: int
    model: int
    name: str
    states: int  # different contents that were seen
    marks: int  # steps at which they were
    with_gradient: int  # steps with a gradient that was not zero
    since: int | None  # of the catalogue where the first gradient that was looked at was not zero, else of that
    first_gradient: int | None
    last_gradient: int | None
    largest: float | None
    held_states: int  # the most that a held parameter of its model had
    elements: int


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per attempt and model."""
    if not any(r.any_held for r in rows):
        yield Abstention("NOT_APPLICABLE", "no optimizer holds a parameter")
        return
    loose = [r for r in rows if r.rank is not None and r.with_gradient]
    still = [r for r in loose if r.states == 1]
    shown = [r for r in still if r.with_gradient >= FEWEST and r.marks > 1 and _trained(r)]
    together: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for r in shown:
        together[r.attempt, r.model].append(r)
    for several in together.values():
        yield _finding(several)
    if not shown and any(r.states < 2 for r in loose):
        name = next(r.name for r in loose if r.states < 2)
        why = f"{name} gets gradients and no optimizer holds it, but fewer than {FEWEST} steps show that others of " \
              "its model are updated meanwhile"  # fmt: skip
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    yield from unheard(run)


def _trained(row: Row) -> bool:
    """Whether held parameters of the same model changed often enough. Of a large model without a small tensor only the
    first and the last sweep can be compared."""
    return row.held_states > FEWEST or (row.elements > WHOLE_ELEMENTS and row.held_states > 1)


def _finding(rows: Sequence[Row]) -> Finding:
    names = list(dict.fromkeys(r.name for r in rows))
    ranks = tuple(sorted({r.rank for r in rows if r.rank is not None}))
    first = min(r.since or 1 for r in rows)
    last = max(r.last_gradient or 1 for r in rows)
    lead = {r.rank: r for r in reversed(rows)}
    return Finding(
        ranks=ranks, first_step=first, last_step=last, attempt=rows[0].attempt, severity="warning", subject=names[0],
        summary=f"{common(names)}: trainable and with a gradient from step {first} on, yet no optimizer holds "
                f"{'it' if len(names) == 1 else 'them'} and nothing changes {'it' if len(names) == 1 else 'them'}, on "
                f"{listed(ranks)}",
        evidence=tuple(Evidence(k, r.first_gradient, f"{r.name}: contents seen in {counted(r.marks, 'step')}, "
                                f"{r.with_gradient} with a gradient up to {r.largest or 0:.3g}", "1",
                                f"several: a held parameter of the same model had {r.held_states}")
                       for k, r in sorted(lead.items(), key=lambda i: i[0] or 0)[:SHOWN]),
        cannot_conclude=("whether it is left out on purpose: then requires_grad=False says so and saves its backward",),
        next_check="build the optimizer after the last change of the model, from model.parameters(), or add the "
                   "parameters with add_param_group",
    )  # fmt: skip
