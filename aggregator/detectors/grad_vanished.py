"""Gradients of what is trained are zero or nearly so: all of them exactly, those of the first layers, or at once.

Reads     grad (stage local, else reduced), tensor, loss, labels
Says      zero: the ranks whose gradients are exactly zero step after step, seen and not inferred, and whether no label
          of their batches is supervised; depth: the first layers, whose gradients are too small beside the last ones'
          to change a weight; collapse: the step at which the norm fell a thousandfold and stayed there while the loss
          did not fall
Unknown   fewer than 5 watched steps with gradients
Blind to  gradients that fall little by little, as they do where training converges; single dead layers; models whose
          tensors are not registered in the order in which data passes them; a converged loss of exactly zero
Do        look at the first layer whose gradient is gone: saturated activations, a detach(), a loss that does not
          depend on it; normalisation or residual paths before it help where it shrinks layer by layer
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import interval, listed, unheard
from ..reductions import CATALOGUE
from ..wording import counted

CODE = "GRAD_VANISHED"
NEEDS = {"grad": 1, "tensor": 1}
PARAMS: Mapping[str, object] = {
    "of_ranks": 4,  # of which single tensors are read: replicas have one depth
}
LEAST = 5  # watched steps in a row: a loss may be zero for a batch or two that the model already gets right
MOSTLY = 0.9  # of the steps from the first on
LONG = 20  # watched steps: fewer on some ranks alone may be the batches of a rank that ran out of data
# A usual update changes a weight by up to a hundredth of its size; float32 rounds at 6e-8 of it. So what has 1e-6 of
# the gradient of the layers that learn changes nothing, by a margin of 6. Healthy first layers lie above 1e-3.
TINY = 1e-6
LAYERS = 4  # weight matrices, of which there is a first and a last part
FIRST_LAYERS = 2  # that are tiny, at least: of one alone the cause may lie in itself
FELL = 1e-3  # of the level before, at once: what converges takes many steps for it
AT_ONCE = 4  # steps between two watched ones, at most
BEFORE = 9  # values before that make a level
CONVERGED = 0.05  # of the first losses: what has fallen so far may be learnt
KEPT = 0.5  # of the loss before: it did not fall with the gradient
SHOWN = 8

SQL = f"""
WITH catalogue AS ({CATALOGUE}),
seen AS (
    SELECT g.*, c.family, list_max(g.l2) AS top, list_min(g.l2) AS low FROM grad g
    JOIN catalogue c USING (rank, attempt, pid, generation)
    WHERE g.step > 0 AND len(g.nonfinite) = 0 AND g.stage IN ('local', 'reduced')
      AND (g.stage = 'reduced' OR g.valid) AND list_max(g.l2) >= 0
),
staged AS (SELECT rank, attempt, bool_or(stage = 'local') AS local FROM seen GROUP BY ALL),
own AS (
    SELECT s.* FROM seen s JOIN staged t USING (rank, attempt) WHERE (s.stage = 'local') = t.local
),
steps AS (
    SELECT rank, attempt, any_value(family) AS family, step, max(top) AS top, min(low) > -2 AS whole,
           max(sqrt(list_sum([x * x FOR x IN l2 IF x > 0]))) AS norm
    FROM own GROUP BY rank, attempt, step
),
lines AS (
    SELECT rank, attempt, any_value(family) AS family, list(step ORDER BY step) AS steps,
           list(top = 0 AND whole ORDER BY step) AS zero, list(coalesce(norm, 0) ORDER BY step) AS norms
    FROM steps GROUP BY rank, attempt
),
matrix AS (
    SELECT o.rank, o.attempt, o.step, t.model, t.name, t.index, max(o.l2 / sqrt(t.numel)) AS rms
    FROM (
        SELECT rank, attempt, pid, generation, step, unnest(l2) AS l2,
               unnest(CASE WHEN len(tensors) > 0 THEN tensors ELSE range(len(l2)) END) AS index
        FROM own QUALIFY dense_rank() OVER (PARTITION BY attempt, family ORDER BY rank) <= $of_ranks
    ) o JOIN tensor t USING (rank, attempt, pid, generation, index)
    WHERE o.l2 >= 0 AND t.numel > 0 AND t.trainable AND t.optimizer >= 0 AND contains(t.shape, 'x') GROUP BY ALL
),
depth AS (
    SELECT rank, attempt,
           list({{'model': model, 'step': step, 'names': names, 'rms': rms}} ORDER BY model, step) AS depth
    FROM (
        SELECT rank, attempt, model, step, list(name ORDER BY index) AS names, list(rms ORDER BY index) AS rms
        FROM matrix GROUP BY ALL
    ) GROUP BY ALL
),
losses AS (
    SELECT rank, attempt, list(step ORDER BY step) AS steps, list(total / backwards ORDER BY step) AS "values"
    FROM loss WHERE backwards > 0 AND isfinite(total) GROUP BY ALL
), masked AS (
    SELECT rank, attempt, list(step) AS steps, any_value(ignored) AS ignored FROM (
        SELECT rank, attempt, step, any_value(ignored) AS ignored FROM labels
        JOIN training_pass USING (rank, attempt, pid, loader, iterator)
        GROUP BY ALL HAVING max(supervised) = 0
    ) GROUP BY ALL
)
SELECT l.attempt, l.family, l.rank, l.steps, l.zero, l.norms, d.depth, o.steps AS loss_steps, o."values" AS losses,
       coalesce(m.steps, []), coalesce(m.ignored, 0)
FROM lines l LEFT JOIN depth d USING (rank, attempt) LEFT JOIN losses o USING (rank, attempt)
LEFT JOIN masked m USING (rank, attempt)
ORDER BY l.attempt, l.family, l.rank
"""


class Row(NamedTuple):
    """One rank's watched steps of an attempt."""

    attempt: int
    family: int  # ranks with one and the same tensor catalogue
    rank: int
    steps: list[int]
    zero: list[bool]  # every gradient is exactly zero
    norms: list[float]
    depth: list[dict[str, Any]] | None  # per model and step: gradient per element of each weight matrix, in order
    loss_steps: list[int] | None
    losses: list[float] | None
    masked: Sequence[int] = ()  # steps none of whose labels is supervised
    ignored: int = 0  # what marks them


class Spell(NamedTuple):
    """First and last position of a row's steps at which something holds, and how many there are."""

    first: int
    last: int
    length: int


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """Per attempt: exact zeros; else the first layers and what collapsed."""
    if not any(len(r.steps) >= LEAST for r in rows):
        yield Abstention("INSUFFICIENT_EVIDENCE", f"no rank has {LEAST} watched steps with gradients")
    for attempt in sorted({r.attempt for r in rows}):
        mine = [r for r in rows if r.attempt == attempt]
        found = list(_zero(mine)) or list(_depth(mine))
        yield from found or _collapsed(mine)
    yield from unheard(run)


def _zero(rows: Sequence[Row]) -> Iterator[Finding]:
    spells = {r.rank: (r, s) for r in rows if (s := _spell(r.zero)) and not _learnt(r, r.steps[s.first])}
    if not spells:
        return
    first, row, spell = min((r.steps[s.first], r, s) for r, s in spells.values())
    long = spell.length >= LONG or spell.first == 0 or len(spells) == len(rows)
    last = max(r.steps[s.last] for r, s in spells.values())
    loss = dict(zip(row.loss_steps or (), row.losses or (), strict=True)).get(first)
    before = row.steps[spell.first - 1] if spell.first else None
    masked = all(set(r.steps[s.first : s.last + 1]) <= set(r.masked) for r, s in spells.values())
    none = f"none (all are {row.ignored}, which is ignored)"
    yield Finding(
        ranks=tuple(sorted(spells)), first_step=first, last_good_step=before,
        last_step=last, attempt=row.attempt, severity="warning" if long else "note", evidence_state="OBSERVED",
        subject="all gradients",
        summary=f"every gradient on {listed(spells)} is exactly zero from step {first} to step {last}, at "
                f"{counted(spell.length, 'watched step')} in a row"
                + ("" if loss is None else f"; the loss is {loss:.4g}")
                + ("; no label of these steps' batches is supervised" if masked else ""),
        evidence=tuple(Evidence(rank, r.steps[s.first], "largest gradient norm of any tensor", "0", "above 0")
                       for rank, (r, s) in sorted(spells.items())[:SHOWN])
                 + ((Evidence(row.rank, first, "supervised labels", none, "some"),) if masked else ()),
        cannot_conclude=interval(before, first),
        next_check="look at how labels are made and masked: truncated answers, a mask that is shifted" if masked else
                   "look at what the loss is computed from: labels that are all masked, an output that is detached, "
                   "clamped or saturated",
    )  # fmt: skip


def _spell(state: Sequence[bool]) -> Spell | None:
    """The first time that it holds for LEAST steps in a row."""
    begun = 0
    for at, here in enumerate([*state, False]):
        if here:
            continue
        if at - begun >= LEAST:
            return Spell(begun, at - 1, at - begun)
        begun = at + 1
    return None


def _level(row: Row, step: int) -> float | None:
    """The loss of the steps before; None without any."""
    before = [v for s, v in zip(row.loss_steps or (), row.losses or (), strict=True) if s < step]
    return float(numpy.median(before[-BEFORE:])) if before else None


def _learnt(row: Row, step: int) -> bool:
    """The loss had fallen to next to nothing: a margin or a hinge then has no gradient."""
    level = _level(row, step)
    first = float(numpy.median(numpy.abs((row.losses or [0.0])[:LEAST])))
    return level is not None and abs(level) <= CONVERGED * first


def _depth(rows: Sequence[Row]) -> Iterator[Finding]:
    """Of each catalogue the first model whose first layers get next to nothing, as the ranks that were read agree."""
    for family in dict.fromkeys(r.family for r in rows):
        mine = [r for r in rows if r.family == family]
        read = [r for r in mine if r.depth]
        for model in sorted({d["model"] for r in read for d in r.depth or ()}):
            said = [_shallow([d for d in r.depth or () if d["model"] == model]) for r in read]
            if said and all(s is not None for s in said):
                first, last, names, ratio, steps = next(s for s in said if s is not None)
                yield _deep(tuple(r.rank for r in mine), mine[0].attempt, first, last, names, ratio, steps)
                break


def _shallow(passes: Sequence[Mapping[str, Any]]) -> tuple[int, int, tuple[str, ...], float, int] | None:
    """First and last step, the tensors, their largest share, and at how many steps."""
    tiny: dict[int, tuple[tuple[str, ...], float]] = {}
    looked: list[int] = []
    for one in passes:
        names, rms = one["names"], one["rms"]
        if len(rms) < LAYERS or max(rms) <= 0:
            continue
        looked.append(one["step"])
        largest = sorted(rms)[-2]  # a single tensor may lie far above all others
        ahead = next((i for i, v in enumerate(rms) if v >= TINY * largest), len(rms))
        if sum(v > 0 for v in rms[:ahead]) >= FIRST_LAYERS:  # zeros alone: a part that takes no part
            tiny[looked[-1]] = tuple(names[:ahead]), max(rms[:ahead]) / largest
    if len(tiny) < LEAST:
        return None
    first = min(tiny)
    since = [s for s in looked if s >= first]
    if len(tiny) < MOSTLY * len(since):
        return None
    names, ratio = min(tiny.values(), key=lambda t: len(t[0]))
    return first, max(tiny), names, ratio, len(tiny)


def _deep(ranks: tuple[int, ...], attempt: int, first: int, last: int, names: tuple[str, ...], ratio: float,
          steps: int) -> Finding:  # fmt: skip
    what = "gradient per element beside that of the layers that learn"
    return Finding(
        ranks=ranks, first_step=first, last_step=last, attempt=attempt, subject=names[0], severity="warning",
        evidence_state="INFERRED",
        summary=f"the gradients of the first {len(names)} layers ({names[0]} to {names[-1]}) are at most {ratio:.1g} "
                f"of those of the layers that learn, at {counted(steps, 'watched step')} from step {first} to {last}: "
                "too small to change a weight; no chance is stated, since healthy first layers lie above 1e-3 of it",
        evidence=(Evidence(None, first, what, f"{ratio:.2g}", f"above {TINY:g}"),
                  Evidence(None, first, "layers concerned", ", ".join(names[:SHOWN]))),
        cannot_conclude=("whether they learn all the same: an optimizer that divides by the gradient's size moves them "
                         "where that is above its epsilon",),
        next_check="look at activations that saturate, at the scale of the initial weights, at paths around the depth "
                   "(normalisation, residual connections)",
    )  # fmt: skip


def _collapsed(rows: Sequence[Row]) -> Iterator[Finding]:
    fallen = {r.rank: (r, at) for r in rows if (at := _fall(r))}
    if not fallen:
        return
    row, at = min(fallen.values(), key=lambda f: f[0].steps[f[1]])
    level, here = float(numpy.median(row.norms[max(0, at - BEFORE) : at])), row.norms[at]
    first = row.steps[at]
    yield Finding(
        ranks=tuple(sorted(fallen)), first_step=first, last_good_step=row.steps[at - 1], last_step=row.steps[-1],
        attempt=row.attempt, subject="gradient norm", severity="warning", evidence_state="INFERRED",
        summary=f"the gradient norm on {listed(fallen)} falls at step {first} from {level:.3g} to {here:.3g} and stays "
                "there, while the loss does not fall; no chance is stated: what converges takes many steps for it",
        evidence=tuple(Evidence(rank, r.steps[k], "gradient norm", f"{r.norms[k]:.4g}",
                                f"about {float(numpy.median(r.norms[max(0, k - BEFORE) : k])):.4g}, its level before")
                       for rank, (r, k) in sorted(fallen.items())[:SHOWN]),
        cannot_conclude=("why: units that died, an output that saturated, a loss that no longer depends on it",
                         *interval(row.steps[at - 1], first)),
        next_check="look at activations and outputs at this step, and at the update before it",
    )  # fmt: skip


def _fall(row: Row) -> int:
    """Position at which the norm fell at once and for good, while the loss kept its level; 0 for none."""
    norms = numpy.array(row.norms)
    falls: list[int] = (1 + numpy.nonzero(norms[1:] < FELL * norms[:-1])[0]).tolist()
    for at in falls:
        level = float(numpy.median(norms[max(0, at - BEFORE) : at]))
        if not LEAST <= at <= len(norms) - 2 * LEAST or norms[at] >= FELL * level:
            continue
        if row.steps[at] - row.steps[at - 1] > AT_ONCE or (norms[at:] < FELL * level).mean() < MOSTLY:
            continue
        usual = _level(row, row.steps[at])
        later = [v for s, v in zip(row.loss_steps or (), row.losses or (), strict=True) if s >= row.steps[at]]
        if usual is None or not later or _learnt(row, row.steps[at]) or not usual > 0:
            continue
        if math.isfinite(usual) and float(numpy.median(later)) >= KEPT * usual:
            return at
    return 0
