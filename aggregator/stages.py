"""The first point of a step at which replicas part: parameters, gradients, settings, optimizer state, in their order.

Without any majority this tells where in the step to look. What was looked at before that point and agreed is named, and
so is what was not looked at: between two sampled passes the first point that differs may have been an earlier step's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from .findings import Evidence, Incident

# Points of a step in the order in which values pass them; the words complete "first point that differs: ..."
POINTS: Final[Mapping[str, str]] = {
    "param_start": "parameters before the update",
    "state_start": "optimizer state before the update",
    "clip": "the clipping threshold",
    "delivered": "gradients after the reduction",
    "grad": "gradients as the optimizer gets them",
    "setting": "the optimizer's settings",
    "state_end": "optimizer state after the update",
    "param_end": "parameters after the update",
}
_ORDER: Final = {point: at for at, point in enumerate(POINTS)}

# What says that at least two ranks were looked at, at one point of one step.
_LOOKED: Final[Mapping[str, str]] = {
    "param_start": "SELECT rank FROM param WHERE stage = 'start' AND len(digest) > 0 AND {here}",
    "state_start": "SELECT rank FROM optim_state WHERE stage = 'start' AND len(digest) > 0 AND {here}",
    "clip": "SELECT rank FROM clip WHERE {here}",
    "delivered": "SELECT rank FROM delivered WHERE len(digest) > 0 AND reduction <> 'by hand' AND {here}",
    "grad": "SELECT rank FROM grad WHERE stage = 'reduced' AND len(digest) > 0 AND {here}",
    "setting": "SELECT rank FROM optim WHERE attempt = $attempt AND step <= $step",
}
_NOT_ALWAYS: Final = frozenset({"clip", "state_start", "delivered"})  # a step may have none of it: it is not missed
# What DDP left when the step's last reduction ended is compared here alone: by itself it is no finding.
_DELIVERED_DIFFERS: Final = """SELECT min(h) <> max(h) FROM (
    SELECT rank, arg_max(hash(tensors, digest), micro) AS h FROM delivered
    WHERE len(digest) > 0 AND reduction <> 'by hand' AND {here} GROUP BY rank)"""

_RANKS: Final = "SELECT count(DISTINCT rank) FROM ({rows})"

Rows = Callable[[str, Mapping[str, int]], Sequence[tuple[Any, ...]]]


def order(point: str) -> int:
    """Its place in the step; what has no point comes last."""
    return _ORDER.get(point, len(_ORDER))


def point_of(what: str, before: bool) -> str:
    """The point at which a replica difference was seen; `before` the update or after it. Empty where it has none."""
    name = {"parameter": "param", "optimizer state": "state"}.get(what)
    if name is not None:
        return f"{name}_start" if before else f"{name}_end"
    return "grad" if what == "reduced gradient" else ""


def placed(incidents: Iterable[Incident], rows: Rows) -> tuple[Incident, ...]:
    """The incidents; those that begin at a point of a step say which, and what agreed before it."""
    everything = tuple(incidents)
    return tuple(
        i if i.finding.severity == "note" or i.finding.point not in POINTS else _placed(i, everything, rows)
        for i in everything
    )


def _placed(incident: Incident, others: Sequence[Incident], rows: Rows) -> Incident:
    f = incident.finding
    here = {"attempt": f.attempt, "step": f.first_step or 1}
    differ = {o.finding.point for o in others if o.finding.attempt == f.attempt and _lasts(o, here["step"])}
    point = f.point
    if point == "grad" and _ask(_DELIVERED_DIFFERS, here, rows):
        point = "delivered"
    before = [p for p in POINTS if order(p) < order(point) and p not in differ]
    seen = {p for p in before if p in _LOOKED and _ask(_RANKS.replace("{rows}", _LOOKED[p]), here, rows) > 1}
    agreed = ", ".join(POINTS[p] for p in before if p in seen)
    unseen = ", ".join(POINTS[p] for p in before if p not in seen | _NOT_ALWAYS)
    said = POINTS[point] + (f"; before it agreed: {agreed}" if agreed else "")
    said += f"; not looked at: {unseen}" if unseen else ""
    evidence = Evidence(None, f.first_step, "first point that differs", said)
    return replace(incident, finding=replace(f, evidence=(evidence, *f.evidence)))


def _lasts(incident: Incident, step: int) -> bool:
    first, last = incident.finding.first_step, incident.finding.last_step
    return first is not None and first <= step <= max(first, last or 0)


def _ask(query: str, here: Mapping[str, int], rows: Rows) -> int:
    found = rows(query.replace("{here}", "attempt = $attempt AND greatest(step, 1) = $step"), here)
    return int(found[0][0] or 0)
