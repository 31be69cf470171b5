"""Replicas agree on the reduced gradient, yet it is not what their own gradients add up to.

Reads     grad (stages local and reduced), delivered, tensor, clip
Says      which rank's part is missing or counted otherwise, else which tensors are off, from which step on; a sum or
          another divisor in place of the mean
Unknown   own gradients of some replica not seen; reductions of the program's own that no common factor describes;
          shards that are not one piece of their tensor, or were added to an earlier reduction
Blind to  steps between two passes; elements outside the step's windows; faults below the rounding of the wire's dtype
Do        look at the communication hook, at the process group that DDP was given, at a divisor of your own; a rank
          whose part is missing reduced something else; two runs that differ here with equal inputs point at the
          transport
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy

from .. import reductions
from ..conservation import Cause, explain
from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity
from ..groups import interval, listed, unheard
from ..reductions import Row, cells
from ..wording import counted

CODE = "REDUCTION_WRONG"
NEEDS = {"grad": 1, "tensor": 1}
PARAMS: Mapping[str, object] = reductions.BOUNDS
# A common factor that holds for every tensor is a law of the run when it did so at some steps before. One step may be
# chance where there is one tensor only; three are none, as each has two numbers of its own.
LAW_STEPS = 3
TOLD_BY = 32  # steps that are asked for a factor: each costs a search
APPROXIMATE = ("powerSGD", "batched_powerSGD", "quantization")  # torch's own hooks that give no exact sum

SQL = reductions.REDUCED


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per model and way of reduction, then what could not be judged."""
    if run.world_size < 2:
        yield Abstention("NOT_APPLICABLE", "a single rank reduces nothing")
        return
    together: dict[tuple[int, int, bool, bool, str], list[Row]] = defaultdict(list)
    for row in rows:
        together[row.attempt, row.family, row.delivered, row.sharded, row.reduction].append(row)
    for several in together.values():
        yield from _declared(several) if several[0].declared else _by_law(several)
    if not rows:
        why = "no step at which the own and the reduced gradients of all replicas were recorded and the latter agree"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    for step in {r.uneven for r in rows} - {None}:
        why = f"from step {step} on the ranks' backwards do not correspond: their numbers differ"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    yield from unheard(run)


def _declared(rows: Sequence[Row]) -> Iterator[Finding | Abstention]:
    """DDP and FSDP promise the mean: every step counts."""
    off = [r for r in rows if r.off]
    if not off:
        return
    first = off[0]
    cause = explain(cells(first, first.own), 1 / first.peers)
    if cause.kind == "none" and len(rows) - len(off) < LAW_STEPS:
        why = f"at step {first.step} the reduced gradient is not the mean of what was seen as the ranks' own, as at " \
              "most other steps: something may have changed it in between"  # fmt: skip
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
        return
    yield _finding(rows, off, cause, "critical")


def _by_law(rows: Sequence[Row]) -> Iterator[Finding | Abstention]:
    """A hook's or the program's own reduction: held against the law that the run itself kept before."""
    exact = [r for r in rows if _fits(r, False)]
    if len(exact) >= LAW_STEPS:
        yield from _against(rows, exact, False)
        return
    shown = [(r, explain(cells(r, r.own), None)) for r in rows if r.x]
    never = shown[0][1] if shown else Cause("none", ())
    always = len(shown) > 1 and all((c.kind, c.ranks) == ("missing", never.ranks) for _, c in shown)
    if always and rows[0].delivered and _is(never.factor * rows[0].peers, 1):
        yield _finding(rows, [r for r in rows if not _fits(r, False)], never, "warning")
        return
    coarse = [r for r in rows if _fits(r, True)]
    if len(coarse) >= LAW_STEPS:
        yield from _against(rows, coarse, True)
        return
    who = f"the communication hook {rows[0].reduction}" if rows[0].reduction else "the program"
    why = f"{who} reduces, and not by a common factor for all tensors: what it should give is not known"
    yield Abstention("INSUFFICIENT_EVIDENCE", why)


def _against(rows: Sequence[Row], kept: Sequence[Row], loose: bool) -> Iterator[Finding | Abstention]:
    law = kept[LAW_STEPS - 1]
    off = [r for r in rows if not _fits(r, loose) and (r.step, r.micro) > (law.step, law.micro)]
    first = next((r for r in off if r.x), None)
    if first is not None:
        cause = explain(cells(first, first.loose if loose else first.own), None)
        factor = _middle(law, loose)
        renormalised = cause.kind == "missing" and _renormalised(off, cause, factor, loose)
        # a mean weighted by sample counts gives the others less where it gives one more; a smaller batch counts less
        raised = cause.kind == "scaled" and _is(cause.factor, factor) and not 0 < cause.weight < 1
        if cause.kind == "missing" or raised:
            severity: Severity = "note" if renormalised else "critical" if first.delivered else "warning"
            yield _finding(rows, off, cause, severity)
        elif first.delivered and cause.kind == "none" and not first.reduction.startswith(APPROXIMATE):
            yield _left(rows, off, cause)
        else:
            why = f"from step {first.step} on the reduced gradient is no longer the ranks' own added up and times " \
                  "one factor: whether the program means that is not known"  # fmt: skip
            yield Abstention("INSUFFICIENT_EVIDENCE", why)
    if not loose:
        yield from _factor(kept)
    else:
        why = "the ranks' own gradients add up only as on a wire of 8 bits of precision: small faults would not show"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)


def _renormalised(off: Sequence[Row], cause: Cause, factor: float, loose: bool) -> bool:
    """Whether the others' parts count for more where one is missing, as they do where that is meant.

    Clipping gives each step a factor of its own and only makes it smaller: the largest one tells.
    """
    here = [r for r in off if r.x][:TOLD_BY]
    told = [explain(cells(r, r.loose if loose else r.own), None) for r in here]
    largest = max(c.factor for c in told if (c.kind, c.ranks) == (cause.kind, cause.ranks))
    return not (_is(largest, factor) or _is(largest, 1 / off[0].peers))


def _left(rows: Sequence[Row], off: Sequence[Row], cause: Cause) -> Finding:
    """The hook kept to a law and then left it, in a way that no rank's part accounts for: a note, as some hooks do so
    by design (compression after a warm-up)."""
    first = off[0]
    good = max((r.step for r in rows if r.step < first.step), default=None)
    of = f"of {cause.tensors[0]}" if cause.tensors else ""
    more = f" and {counted(len(cause.tensors) - 1, 'more tensor')}" if len(cause.tensors) > 1 else ""
    return Finding(
        ranks=tuple(range(first.peers)), first_step=first.step, last_good_step=good, last_step=off[-1].step,
        attempt=first.attempt, severity="note", subject=cause.tensors[0] if cause.tensors else "",
        summary=f"the gradient {of}{more} reduced by {first.reduction}, the same on all ranks, is from step "
                f"{first.step} on no longer the ranks' own added up and times one factor, as it was until then",
        evidence=(Evidence(None, first.step, f"parts in the reduced gradient {of}", "no account fits",
                           "one factor for every rank"),),
        cannot_conclude=("whether the hook means that, as one that compresses after a warm-up does",),
        next_check="compare what the hook returns with an all-reduce of the same bucket",
    )  # fmt: skip


def _factor(kept: Sequence[Row]) -> Iterator[Finding | Abstention]:
    """The common factor itself, where it is one and the same at all steps and neither clipping nor a scale is in it."""
    if any(r.rescaled for r in kept):
        return
    low, high = max(r.low for r in kept), min(r.high for r in kept)
    if low > high:
        yield from _changed(kept)
        return
    first = kept[0]
    mean, backwards = 1 / first.peers, max(r.micro for r in kept) + 1
    fitting = [mean, mean / backwards]
    if any(low <= f <= high for f in fitting):
        return
    if low <= 1 <= high:
        says = "is the sum of the ranks' own, not their mean"
        yield _note(kept, says, 1.0, "note", f"does the learning rate, or the loss, allow for {first.peers} ranks?")
        return
    factor = (low + high) / 2
    divisor = round(1 / factor) if factor > 0 else 0
    fewer = 1 < divisor < first.peers and low <= 1 / divisor <= high
    if fewer or first.delivered:
        says = f"is the sum of the ranks' own times {factor:.6g}, where {first.peers} ranks make {mean:.6g} the mean"
        check = "which number of ranks is the sum divided by?"
        yield _note(kept, says, factor, "warning" if fewer else "note", check)


def _changed(kept: Sequence[Row]) -> Iterator[Finding | Abstention]:
    """The factor was constant, and is another constant from some step on."""
    at = next((k for k in range(1, len(kept)) if not _share(kept[: k + 1])), len(kept))
    before, after = kept[:at], kept[at:]
    if min(len(before), len(after)) < LAW_STEPS or not _share(after):
        if len(before) >= LAW_STEPS > len(after) > 0:  # else clipping, which differs from step to step
            why = f"the factor between the ranks' own and the reduced gradient changed at step {after[0].step}: too " \
                  "few steps were looked at since then to tell another divisor from clipping"  # fmt: skip
            yield Abstention("INSUFFICIENT_EVIDENCE", why)
        return
    old, new = _middle(before[-1], False), _middle(after[0], False)
    says = f"is the sum of the ranks' own times {new:.6g}; until then it was times {old:.6g}"
    severity: Severity = "warning" if after[0].delivered else "note"
    yield _note(after, says, new, severity, "what changed the divisor?", before[-1].step)


def _share(rows: Sequence[Row]) -> bool:
    return max(r.low for r in rows) <= min(r.high for r in rows)


def _range(row: Row, loose: bool) -> tuple[float, float]:
    return (row.loose_low, row.loose_high) if loose else (row.low, row.high)


def _fits(row: Row, loose: bool) -> bool:
    low, high = _range(row, loose)
    return 0 < low <= high


def _middle(row: Row, loose: bool) -> float:
    low, high = _range(row, loose)
    return (low + high) / 2 if numpy.isfinite(high) else low


def _is(value: float, wanted: float) -> bool:
    """Equal but for what the wire rounds: factors that differ by one rank differ by more, up to 50 ranks."""
    return abs(value - wanted) <= 0.01 * abs(wanted)


def _finding(rows: Sequence[Row], off: Sequence[Row], cause: Cause, severity: Severity) -> Finding:
    first = off[0]
    good = [r.step for r in rows if r.step < first.step]
    ranks = cause.ranks or tuple(sorted(set(first.part_ranks or ())))
    made = f"{'FSDP' if first.sharded else 'DDP'}'s reduced gradient" if first.declared else (
        f"the gradient reduced by {first.reduction}" if first.reduction else "the reduced gradient")  # fmt: skip
    count = len(cause.tensors)
    of = f"of {cause.tensors[0]}" + (f" and {counted(count - 1, 'more tensor')}" if count > 1 else "")
    times = f"at {len(off)} of {counted(sum(r.step >= first.step for r in rows), 'step')} checked from then on"
    if cause.kind == "missing":
        what = f"lacks the part of {listed(cause.ranks)}: it is {cause.factor:.6g} times the sum of the others'"
    elif cause.kind == "scaled":
        what = f"counts the part of {listed(cause.ranks)} {cause.weight:.4g} times"
    elif cause.kind == "factor":
        what = f"is the sum of the ranks' own times {cause.factor:.6g}, not their mean"
    else:
        what = "is not the mean of the ranks' own"
    unknown = () if cause.ranks else ("which rank or link is at fault: no single part accounts for the difference",)
    check = f"what does {listed(cause.ranks)} hand to the reduction?" if cause.ranks else \
        "does it come back? a bad link or device does; then take nodes out one by one"  # fmt: skip
    expected = f"{1 / first.peers:.6g} of each rank" if first.declared else "one factor for every rank"
    shown = f"{cause.factor:.6g}, without {listed(cause.ranks)}" if cause.kind == "missing" else (
        f"{cause.factor:.6g}, {listed(cause.ranks)} times {cause.weight:.4g}" if cause.kind == "scaled" else
        f"{cause.factor:.6g}" if cause.kind == "factor" else "no account fits")  # fmt: skip
    evidence = [Evidence(r, first.step, f"part in the reduced gradient {of}", shown, expected)
                for r in (cause.ranks or (None,))]  # fmt: skip
    alike = "put together from all shards" if first.sharded else "the same on all ranks"
    return Finding(
        ranks=ranks, first_step=first.step, last_good_step=max(good, default=None), last_step=off[-1].step,
        attempt=first.attempt, subject=cause.tensors[0] if cause.tensors else "", severity=severity,
        summary=f"{made} {of}, {alike}, {what} at step {first.step}; {times}",
        evidence=tuple(evidence), cannot_conclude=unknown + interval(max(good, default=None), first.step),
        next_check=check,
    )  # fmt: skip


def _note(rows: Sequence[Row], says: str, factor: float, severity: Severity, check: str,
          last_good: int | None = None) -> Finding:  # fmt: skip
    first = rows[0]
    made = f"the gradient reduced by {first.reduction}" if first.reduction else "the reduced gradient"
    return Finding(
        ranks=tuple(range(first.peers)), first_step=first.step, last_good_step=last_good, last_step=rows[-1].step,
        attempt=first.attempt, severity=severity,
        summary=f"{made} {says}, from step {first.step} on at {counted(len(rows), 'checked step')}",
        evidence=(Evidence(None, first.step, "factor between the sum of the ranks' own and the reduced gradient",
                           f"{factor:.6g}", f"{1 / first.peers:.6g}"),),
        next_check=check,
    )  # fmt: skip
