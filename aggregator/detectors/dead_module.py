"""A module gives the same output for every sample, whatever it gets, and the weights below it get no gradient.

Reads     output, constant, grad, tensor, step
Says      the module, the ranks, the operation behind which nothing varies, the weights that are cut off by it. A
          warning where that is an activation which holds one value; a note where it may be meant, as times zero is
Unknown   fewer than 20 looks at a module of which all gave the same; outputs that were not looked at
Blind to  dead units of a living module; modules that give one output and pass gradients on; what becomes constant after
          the first 32 steps; activations that stay at exactly 1; all that the outputs probe is blind to
Do        look at the input of the module named: scale of the layer before, its bias, the learning rate of the first
          steps; ReLU units that are below zero for every sample never come back, so begin again with a smaller rate
          or another activation
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..changes import common
from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import interval, listed, unheard
from ..wording import counted

CODE = "DEAD_MODULE"
NEEDS = {"output": 1, "grad": 1, "tensor": 1}
PARAMS: Mapping[str, object] = {}
# A branch that is dropped at random in half of the steps is dropped at 20 looks in a row once in a million; what starts
# at zero on purpose (a residual branch, an adapter) moves after one update, or after a warm-up's first ones, and all
# that moves gets gradients before.
FEWEST = 20
# Activations that give one value over a whole range of inputs, where their gradient is exactly zero too.
SATURATES = frozenset((
    "relu", "threshold", "hardtanh", "clamp", "clampmin", "clampmax", "sigmoid", "tanh", "hardsigmoid", "hardswish",
    "gelu", "silu", "elu", "softplus", "mish", "softshrink", "hardshrink",
))  # fmt: skip
MOSTLY = 0.5  # of the steps since then: with fewer looks than that a finding says what it does not stand on
SHOWN = 8

_KEY = "rank, attempt, pid, generation"
SQL = f"""
WITH looks AS (
    SELECT {_KEY}, model, module, fed_same, count(DISTINCT step) AS looks, min(step) AS first, max(step) AS last,
           min(seq) AS place, bool_and(equal) AS equal, bool_and(zero) AS zero, bool_or(ones) AS ones,
           max(witness_same) FILTER (WHERE witness_same >= 0) AS witness_same, any_value(witness) AS witness,
           any_value(op) AS op, any_value(fed_by) AS fed_by, any_value(module_type) AS module_type,
           max(searched) AS searched, arg_min(tensors, seq) AS tensors
    FROM constant WHERE same AND NOT EXISTS (
        SELECT 1 FROM constant o WHERE NOT o.same AND o.rank = constant.rank AND o.attempt = constant.attempt
            AND o.pid = constant.pid AND o.generation = constant.generation AND o.model = constant.model
            AND o.module = constant.module)
    GROUP BY ALL
),
wanted AS (
    SELECT {_KEY}, model, module, fed_same, first, unnest(tensors) AS index FROM looks WHERE len(tensors) > 0
),
gradients AS (
    SELECT {_KEY}, step, unnest(CASE WHEN len(tensors) = 0 THEN range(len(l2)) ELSE tensors END) AS index,
           unnest(l2) AS l2
    FROM grad SEMI JOIN wanted USING ({_KEY})
),
cut AS (
    SELECT {_KEY}, model, module, fed_same, list(DISTINCT name ORDER BY name) AS weights,
           min(g.measured) AS measured, max(g.reached) AS reached, min(g.earliest) AS earliest, max(g.ever) AS ever
    FROM (
        SELECT w.*, count(DISTINCT g.step) FILTER (WHERE g.step >= w.first AND g.l2 <> -2) AS measured,
               count(DISTINCT g.step) FILTER (WHERE g.step >= w.first AND NOT g.l2 <= 0) AS reached,
               count(DISTINCT g.step) FILTER (WHERE NOT g.l2 <= 0) AS ever,
               min(g.step) FILTER (WHERE g.l2 <> -2) AS earliest
        FROM wanted w LEFT JOIN gradients g USING ({_KEY}, index) GROUP BY ALL
    ) g JOIN (SELECT {_KEY}, index, name FROM tensor WHERE trainable) USING ({_KEY}, index) GROUP BY ALL
),
trained AS (
    SELECT {_KEY}, list(DISTINCT step) AS steps FROM gradients WHERE l2 > 0 GROUP BY ALL
),
ends AS (SELECT rank, attempt, max(step) AS last_step FROM step GROUP BY ALL)
SELECT l.rank, l.attempt, l.model, l.module, l.module_type, l.fed_same, l.looks, l.first, l.last, l.equal, l.zero,
       l.ones, coalesce(l.witness_same, -1), l.witness, l.op, l.fed_by, l.searched, coalesce(c.weights, []),
       coalesce(c.measured, 0), coalesce(c.reached, 0), coalesce(c.ever, 0), c.earliest,
       coalesce(len([s FOR s IN d.steps IF s >= l.first]), 0), coalesce(e.last_step, l.last)
FROM looks l LEFT JOIN cut c USING ({_KEY}, model, module, fed_same) LEFT JOIN trained d USING ({_KEY})
LEFT JOIN ends e USING (rank, attempt)
ORDER BY l.attempt, l.model, l.place, l.rank
"""


class Row(NamedTuple):
    """A module that gave the same for every sample at every look, on one rank, its inputs being so too or not."""

    rank: int
    attempt: int
    model: int
    module: str
    module_type: str
    fed_same: bool
    looks: int
    first: int
    last: int
    equal: bool
    zero: bool
    ones: bool
    witness_same: int
    witness: str
    op: str
    fed_by: str
    searched: int
    weights: list[str]  # trainable ones behind it
    measured: int  # steps since then at which their gradients were recorded
    reached: int  # of them, those at which one of them was not zero
    ever: int  # the same over the whole run
    earliest: int | None
    trained: int  # steps since then at which others got gradients
    last_step: int


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per attempt, model and place at which nothing varies any more, with the modules behind it."""
    cut = [r for r in rows if r.weights and not r.reached and not r.ones]
    known = [r for r in cut if min(r.looks, r.measured, r.trained) >= FEWEST]
    places: dict[tuple[int, int, tuple[str, ...]], list[Row]] = defaultdict(list)
    for r in known:
        if _saturated(r):
            places[r.attempt, r.model, tuple(r.weights)].append(r)
    for several in places.values():
        yield _finding(several, _around(several, known))
    named = {(r.attempt, r.model, r.module) for several in places.values() for r in several}
    others: dict[tuple[int, int, tuple[str, ...]], list[Row]] = defaultdict(list)
    for r in known:
        holds = any((r.attempt, r.model) == n[:2] and _below(n[2], r.module) for n in named)
        if not r.fed_same and not holds and (r.attempt, r.model, r.module) not in named:
            others[r.attempt, r.model, tuple(r.weights)].append(r)
    for several in others.values():
        yield _finding(several, [])
    few = [r for r in cut if r not in known and r.trained]
    if few:
        yield Abstention("INSUFFICIENT_EVIDENCE", f"{few[0].module} gave the same for every sample at "
                         f"{counted(few[0].looks, 'look')}; {FEWEST} are needed")  # fmt: skip
    yield from unheard(run)


def _saturated(r: Row) -> bool:
    """Whether an activation holds one value: the module's last operation, or that between it and the layer below."""
    return r.witness_same == 0 and r.fed_by in SATURATES if r.fed_same else r.op in SATURATES


def _below(name: str, parent: str) -> bool:
    return not parent or name.startswith(parent + ".")


def _around(several: Sequence[Row], known: Sequence[Row]) -> list[Row]:
    """The modules around these that give nothing but a constant either, the outermost first."""
    first = several[0]
    found = [r for r in known if (r.attempt, r.model) == (first.attempt, first.model) and not r.fed_same
             and r.module != first.module and _below(first.module, r.module)]  # fmt: skip
    return sorted(found, key=lambda r: len(r.module))


def _finding(several: Sequence[Row], around: Sequence[Row]) -> Finding:
    lead = next((r for r in several if not r.fed_same), None) or several[0]
    saturated = _saturated(lead)
    # between two layers no module of its own applied it: the module around them is what has become constant
    subject = around[0] if lead.fed_same and around else lead
    mine = [r for r in (*several, *around) if r.module in (lead.module, subject.module)]
    ranks = tuple(sorted({r.rank for r in several}))
    always = not lead.searched and not lead.ever and lead.earliest is not None
    first = min(r.first for r in several)
    if always and lead.earliest is not None:
        first = min(first, lead.earliest)
    last_good = lead.searched or None
    seen, steps = min(r.looks for r in several), max(r.last_step for r in several) - first + 1
    gives = "zero" if subject.zero else "one value" if subject.equal else "the same for every sample"
    while_ = "while its inputs vary"
    if lead.fed_same:
        while_ = f"since nothing varies behind the {lead.fed_by} between {lead.witness} and {lead.module}"
    unknown = list(interval(last_good, first))
    if not saturated:
        unknown.append("whether it is meant, as a branch times zero is")
    if seen < MOSTLY * steps:
        unknown.append(f"what it gave at the steps that were not looked at: {seen} of {steps} were")
    behind = list(dict.fromkeys(r.module for r in several if r.module not in (lead.module, subject.module)))
    return Finding(
        ranks=ranks, first_step=first, last_good_step=last_good, last_step=max(r.last for r in several),
        attempt=lead.attempt, severity="warning" if saturated else "note", subject=subject.module,
        summary=f"{subject.module} ({subject.module_type}) gives {gives} at each of {counted(seen, 'look')} on "
                f"{listed(ranks)}, {while_}; {common(lead.weights)} below it got a gradient of exactly zero",
        evidence=(*(Evidence(r.rank, r.first, f"{r.module}: looks at which all samples of its output were equal",
                             f"{r.looks} of {r.looks}", "0") for r in mine[:SHOWN]),
                  Evidence(lead.rank, first, f"{common(lead.weights)}: steps with a gradient that is not zero",
                           f"0 of {lead.measured}", f"others of the model: {lead.trained}"),
                  *((Evidence(lead.rank, lead.first, "on constant inputs behind it", ", ".join(behind[:SHOWN])),)
                    if behind else ())),
        cannot_conclude=tuple(unknown),
        next_check="look at the scale and bias of the layer before it, at the learning rate of the first steps, at "
                   "masks and factors on this branch",
    )  # fmt: skip
