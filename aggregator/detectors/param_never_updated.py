"""A parameter that an optimizer holds never changes, or stops changing, while others of the same optimizer go on.

Reads     tensor, param, grad, step, optim, unreached
Says      the parameters and ranks, and which of it they lack: a gradient at all, a gradient that is not zero, or an
          update that changes their bits
Unknown   fewer than 20 updates of the others; large tensors between the first and the last sweep
Blind to  parameters that weight decay or somebody else changes although no gradient reaches them
Do        look whether the tensor is used in the forward at all, is frozen by a rate of 0, or is replaced after the
          optimizer was built; find_unused_parameters=True hides an unused branch; low precision loses updates smaller
          than one bit of the weight
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..changes import changes_sql, common
from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity
from ..groups import listed, unheard
from ..wording import counted

CODE = "PARAM_NEVER_UPDATED"
NEEDS = {"tensor": 1, "param": 1, "grad": 1}
PARAMS: Mapping[str, object] = {}
# A part that is used at random in a fifth of the steps is skipped 20 times in a row once in 87 times, one that is used
# in half of them once in a million: fewer updates would call ordinary branches dead.
FEWEST = 20
# Of a gradient that is zero by construction (a bias before normalisation) only rounding is left: 6e-8 of terms of which
# a thousand or so add up, so less than a ten-thousandth of what others get, element by element.
ROUNDING = 1e-4
SHOWN = 8

_KEY = "rank, attempt, pid, generation"
# Three sweeps of each catalogue are unfolded: the first, the last, one midway. Only what is alike in two of them is
# then looked at step by step, which in a run without a fault is next to nothing. Sweeps of up to 9 tensors before an
# update are those of a few small ones.
_THREE = f"""
    SELECT * FROM (
        SELECT {_KEY}, tensors, digest,
               row_number() OVER (PARTITION BY {_KEY} ORDER BY step, seq) AS n,
               row_number() OVER (PARTITION BY {_KEY} ORDER BY step DESC, seq DESC) AS back,
               count(*) OVER (PARTITION BY {_KEY}) AS rows
        FROM param WHERE stage <> 'start' OR len(tensors) = 0 OR len(tensors) > 9
    ) WHERE rows > 1 AND (n = 1 OR back = 1 OR n = (rows + 1) // 2)
"""
_UNFOLDED = f"""
    SELECT {_KEY}, index, count(DISTINCT digest) AS states, bool_or(digest = latest) AS stays
    FROM (
        SELECT s.*, last_value(digest) OVER (PARTITION BY {_KEY}, index ORDER BY n
                                             ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING) AS latest,
               back = 1 AS last
        FROM (SELECT {_KEY}, n, back,
                     unnest(CASE WHEN len(tensors) = 0 THEN range(len(digest)) ELSE tensors END) AS index,
                     unnest(digest) AS digest FROM ({_THREE})) s
    ) WHERE NOT last GROUP BY {_KEY}, index
"""
_WANTED = f"""
    SELECT {_KEY}, index FROM ({_UNFOLDED})
    JOIN (SELECT * FROM tensor WHERE kind = 'param' AND trainable AND optimizer >= 0 AND numel > 0)
        USING ({_KEY}, index)
    WHERE stays
"""

SQL = f"""
WITH updates AS (
    SELECT t.*, u.updates, u.last_update FROM (
        SELECT {_KEY}, optimizer, count(*) AS others, sum(numel) AS elements FROM (
            SELECT {_KEY}, index FROM ({_UNFOLDED}) WHERE NOT stays)
        JOIN tensor USING ({_KEY}, index) WHERE kind = 'param' AND optimizer >= 0 GROUP BY ALL
    ) t JOIN (
        SELECT p.rank, p.attempt, p.pid, p.generation, max(p.step) AS last_update,
               count(DISTINCT hash(p.tensors, p.digest)) - 1 AS updates
        FROM param p WHERE p.stage = 'end' GROUP BY ALL
    ) u USING ({_KEY})
),
typical AS (
    SELECT {_KEY}, optimizer, median(l2 / sqrt(numel)) AS rms FROM (
        SELECT {_KEY}, unnest(CASE WHEN len(tensors) = 0 THEN range(len(l2)) ELSE tensors END) AS index,
               unnest(l2) AS l2
        FROM (SELECT * FROM grad SEMI JOIN ({_WANTED}) USING ({_KEY})
              QUALIFY row_number() OVER (PARTITION BY {_KEY} ORDER BY step DESC, seq DESC) <= 8)
    ) JOIN tensor USING ({_KEY}, index) WHERE l2 > 0 AND numel > 0 GROUP BY ALL
),
ran AS (
    SELECT {_KEY}, index, max(calls) AS calls, max(from_data) AS from_data, any_value(module) AS module
    FROM (SELECT {_KEY}, calls, from_data, module, unnest(tensors) AS index FROM unreached) GROUP BY ALL
),
whole AS (SELECT {_KEY}, model, bool_and(trainable) AS all_trained,
                 bool_or(trainable AND optimizer < 0) AS some_unheld
          FROM tensor WHERE kind = 'param' GROUP BY ALL),
rates AS (SELECT rank, attempt, pid, optimizer, min(lr) AS lowest FROM optim GROUP BY ALL)
SELECT a.steps, c.rank, c.attempt, c.generation, t.model, t.optimizer, t.name, t.dtype, t.numel, c.states, c.marks,
       c.moved, c.measured, c.with_gradient, c.present, c.last_gradient, c.largest, u.updates, u.others, u.elements,
       u.last_update, y.rms, r.calls, r.from_data, coalesce(r.module, ''), coalesce(w.all_trained, FALSE),
       (SELECT coalesce(bool_or(some_unheld), FALSE) FROM whole k WHERE k.rank = c.rank AND k.attempt = c.attempt
        AND k.pid = c.pid AND k.generation = c.generation),
       l.lowest, c.generation = max(c.generation) OVER (PARTITION BY c.rank, c.attempt, c.pid)
FROM (SELECT count(DISTINCT (attempt, step)) AS steps FROM param WHERE stage = 'end') a
LEFT JOIN (({changes_sql(_WANTED)}) c JOIN tensor t USING ({_KEY}, index)
           LEFT JOIN updates u ON u.rank = c.rank AND u.attempt = c.attempt AND u.pid = c.pid
                AND u.generation = c.generation AND u.optimizer = t.optimizer
           LEFT JOIN typical y ON y.rank = c.rank AND y.attempt = c.attempt AND y.pid = c.pid
                AND y.generation = c.generation AND y.optimizer = t.optimizer
           LEFT JOIN ran r ON r.rank = c.rank AND r.attempt = c.attempt AND r.pid = c.pid
                AND r.generation = c.generation AND r.index = c.index
           LEFT JOIN whole w ON w.rank = c.rank AND w.attempt = c.attempt AND w.pid = c.pid
                AND w.generation = c.generation AND w.model = t.model
           LEFT JOIN rates l ON l.rank = c.rank AND l.attempt = c.attempt AND l.pid = c.pid
                AND l.optimizer = t.optimizer) ON TRUE
ORDER BY c.attempt, c.generation, t.model, c.index, c.rank
"""


class Row(NamedTuple):
    """One parameter that looks alike in two sweeps, on one rank; only `steps` is filled where there is none."""

    steps: int
    rank: int | None
    attempt: int
    generation: int
    model: int
    optimizer: int
    name: str
    dtype: str
    numel: int
    states: int
    marks: int
    moved: int | None  # last step at which it changed
    measured: int
    with_gradient: int
    present: int  # steps with a gradient, be it zero
    last_gradient: int | None
    largest: float | None
    updates: int | None  # at which others of its optimizer changed
    others: int | None
    elements: int | None  # of those others
    last_update: int | None
    typical: float | None  # gradient of one element of others
    calls: int | None  # its module's forward calls in the steps that were watched; None: not watched
    from_data: int | None  # of these on tensors that no parameter went into
    module: str
    all_trained: bool  # its model has no frozen parameter
    some_unheld: bool  # some trainable parameter belongs to no optimizer
    lowest_lr: float | None
    latest: bool  # of the last catalogue


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per attempt, kind and place in the model."""
    if not rows or rows[0].steps <= FEWEST:
        yield Abstention("INSUFFICIENT_EVIDENCE", f"updates of {FEWEST} steps and more are needed")
        return
    together: dict[tuple[int, int, str, str], list[Row]] = defaultdict(list)
    for r in rows:
        kind = _kind(r) if r.rank is not None else ""
        if kind:
            # a cut concerns a whole branch: the modules behind its first one are fed by that
            place = r.name.split(".")[0] if kind == "unreached" else ""
            together[r.attempt, r.model, kind, place].append(r)
    notes: dict[tuple[int, int, str], list[Row]] = defaultdict(list)
    for (attempt, model, kind, _), several in together.items():
        severity = _severity(kind, several)
        if severity == "warning":
            yield _finding(several, kind, severity)
        else:
            notes[attempt, model, kind].extend(several)
    for (_, _, kind), several in notes.items():
        yield _finding(several, kind, "note")
    yield from unheard(run)


def _kind(r: Row) -> str:
    """What this parameter lacks; empty where nothing can be held against it."""
    if not r.latest or not r.others or (r.updates or 0) < FEWEST or r.measured < FEWEST:
        return ""
    if r.states == 1 and r.marks > 1:
        if not r.present and r.name.startswith("optimizer"):
            return "stale" if r.some_unheld else "orphan"
        if not r.present:
            return "unreached"
        if not r.with_gradient:
            return "zero"
        return "unchanged" if r.with_gradient >= FEWEST else ""
    idle = (r.last_update or 0) - (r.moved or 0)
    # still gets gradients: what was frozen, or a branch that is no longer taken, gets none
    if r.states > 1 and r.moved is not None and idle >= FEWEST and (r.last_gradient or 0) >= (r.last_update or 0):
        return "stopped"
    return ""


def _severity(kind: str, rows: Sequence[Row]) -> Severity:
    """A warning where it can hardly be meant."""
    if kind == "stale":
        return "warning"
    if kind == "unreached":
        # It runs at every look, on tensors that no parameter went into (so it stands at the beginning of a branch, not
        # behind all that is used, as an idle pooler does), and all of the model is meant to train.
        return "warning" if any((r.calls or 0) > 0 and r.from_data == r.calls and r.all_trained
                                for r in rows) else "note"  # fmt: skip
    if kind == "unchanged":  # of what changed before and then stopped, updates may have become too small to show
        if any(r.lowest_lr is None or r.lowest_lr <= 0 for r in rows):
            return "note"  # the group's rate may be zero on purpose
        if any(_rounding(r) for r in rows):
            return "note"
        narrow = any(r.dtype in ("bfloat16", "float16") for r in rows)
        per_rank = sum(r.numel for r in rows if r.rank == rows[0].rank)
        # the norms of a model in half precision swallow small updates in many a run; most of its weights must not
        return "note" if narrow and per_rank < (rows[0].elements or 0) else "warning"
    return "note"


def _rounding(r: Row) -> bool:
    return r.largest is None or not r.typical or r.largest / max(r.numel, 1) ** 0.5 < ROUNDING * r.typical


_SAYS = {
    "unreached": "no gradient reaches {it} in {n}",
    "zero": "the gradient is exactly zero in {n}",
    "unchanged": "there is a gradient, yet no update changes a bit of {it} in {n}",
    "stopped": "there is a gradient, yet {it} stopped changing in the last of {n}",
    "stale": "the optimizer holds {it}, but no model does any more and no gradient came in {n}",
    "orphan": "the optimizer holds {it}, but no model does and no gradient came in {n}",
}
_CHECK = {
    "unreached": "look for detach(), no_grad(), .data, item() or a new tensor on the way from this module to the loss; "
                 "where it is not used, leave it out of the optimizer or set requires_grad=False",
    "zero": "is its output multiplied by zero, masked, or behind a unit that is dead?",
    "unchanged": "is the update smaller than the dtype can show (keep fp32 copies), or is its group's lr zero?",
    "stopped": "what changed at that step: its group's lr, or who holds it?",
    "stale": "build the optimizer anew after a module was replaced or resized",
    "orphan": "is it still used?",
}  # fmt: skip


def _finding(rows: Sequence[Row], kind: str, severity: Severity) -> Finding:
    names = list(dict.fromkeys(r.name for r in rows))
    ranks = tuple(sorted({r.rank for r in rows if r.rank is not None}))
    first = max(r.moved or 0 for r in rows) + 1 if kind == "stopped" else 1
    lead = {r.rank: r for r in reversed(rows)}
    says = _SAYS[kind].format(it="it" if len(names) == 1 else "them", n=counted(rows[0].measured, "step"))
    unknown = ["whether it is meant"]
    if kind == "unreached":
        ran = [r for r in rows if r.calls]
        unknown = ["whether it is meant: the forward runs it" if ran else
                   "whether it is meant: its module may simply not have been used"]  # fmt: skip
    return Finding(
        ranks=ranks, first_step=first, last_good_step=first - 1 if kind == "stopped" else None,
        last_step=rows[0].last_update, attempt=rows[0].attempt, severity=severity, subject=names[0],
        summary=f"{common(names)}: {says}, while others of the same optimizer change, on {listed(ranks)}",
        evidence=tuple(Evidence(k, first, f"{r.name}: steps with a gradient; contents seen", f"{r.with_gradient} of "
                                f"{r.measured}; {r.states} in {counted(r.marks, 'step')}",
                                f"{counted(r.others or 0, 'other tensor')} of its optimizer changed")
                       for k, r in sorted(lead.items(), key=lambda i: i[0] or 0)[:SHOWN]),
        cannot_conclude=tuple(unknown), next_check=_CHECK[kind],
    )  # fmt: skip
