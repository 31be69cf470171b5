"""Parameters that replicas must share differ: the bits are compared, so one step is proof.

Reads     param, tensor, step, loss, optim, event (Join)
Says      which ranks stand apart, from which step on, which tensors, and their digests
Unknown   no two ranks that share a tensor; steps that no longer correspond; models maybe split by hand; tensors that
          FSDP leaves out and that differ from the start
Blind to  steps between two sweeps; shards that no other rank holds
Do        look at what wrote the tensors named at the step named on these ranks only: an update outside DDP, a load on
          one rank, an in-place change; broadcast parameters from one rank and begin again from the last step that was
          equal
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from .. import replicas
from ..detector import RunFacts
from ..findings import Abstention, Finding, Severity
from ..groups import UNDECLARED
from ..replicas import FINAL, START, Parting, Row

CODE = "PARAM_DESYNC"
NEEDS = {"param": 1, "tensor": 1}
# DDP under no_sync with a periodic average comes together again and again; a fault does so at most once (a reload).
PERIODIC_RETURNS = 2
PARAMS: Mapping[str, object] = {}

SQL = replicas.parted_sql(
    """SELECT rank, attempt, pid, generation, greatest(step, 1) AS step, tensors, digest AS marks,
              CASE stage WHEN 'start' THEN 0 WHEN 'end' THEN 1 ELSE 2 END AS sweep
       FROM param WHERE len(digest) > 0""",
    "kind = 'param'",
    settings="""(SELECT coalesce(bool_or(differ), FALSE) FROM (
        SELECT min((lr, settings)) <> max((lr, settings)) AS differ FROM optim WHERE step <= 1
        GROUP BY attempt, optimizer, "group"))""",
)

NO_WRAPPER = "that these tensors are replicas is not declared: no wrapper holds them, their ranks share a process group"
LEFT_OUT = "that these tensors are replicas is not declared: each rank may have been meant to train its own"
KERNELS = "whether something changed them or kernels that do not repeat their results to the bit let them drift apart"
UNSEEN_AVERAGE = "whether the ranks average by themselves between the steps that were compared"
CUSTOM = "whether the program wrote them (averaging, loading, clipping) or something hit the rank's memory"


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """Findings for wrapped models, then for unwrapped ones, then what could not be judged."""
    abstention = replicas.unjudged(rows[0], run.world_size)
    if abstention:
        yield abstention
        return
    differing = [r for r in rows if r.name is not None]
    # A frozen tensor that moves by itself is an average kept inside the model, often on one rank only.
    wrapped = [r for r in differing if r.sharing not in UNDECLARED and (r.owned or not replicas.drifts(r))]
    averaged = [r for r in wrapped if r.returns >= PERIODIC_RETURNS]
    for parting in replicas.partings(wrapped, "parameter"):
        yield from _wrapped(parting, averaged, run)
    plain = [r for r in differing if r.sharing == "plain" and r.owned]
    for model in replicas.same_model(plain):
        yield from _unwrapped(model, run)
    left_out = [r for r in differing if r.sharing in ("outside", "ignored") and (r.owned or not replicas.drifts(r))]
    for model in replicas.same_model(left_out):
        yield from _left_out(model)
    yield from replicas.left_open(rows[0], run)


def _wrapped(parting: Parting, averaged: Sequence[Row], run: RunFacts) -> Iterator[Finding]:
    first = parting.rows[0]
    # an average takes in the whole model, of which only some tensors may be looked at where it shows
    returns = max((r.returns for r in averaged if r.attempt == first.attempt and r.model == first.model
                   and set(r.ranks) >= set(parting.odd.odd)), default=0)  # fmt: skip
    if first.first_sweep == FINAL:
        yield from _after_training(parting, run)
    elif returns:
        when = f", and they agree again {returns} times, as local training with a periodic average does"
        yield replicas.finding(replace(parting, severity="note", when=when))
    elif first.sharing == "duplicated":
        check = "compare what these ranks compute from the same data: dropout, seeds and own writes must be the same"
        yield replicas.finding(replace(parting, severity="warning", cannot_conclude=(KERNELS,), next_check=check))
    elif first.first_sweep == START and first.first == 1:
        check = "compare what each rank loaded or drew before the first step, and whether DDP was built before or after"
        yield replicas.finding(replace(parting, when=", before the first update", next_check=check))
    else:
        check = "look at what this rank runs between its backward and the end of the step: own writes, hooks, loads"
        if not parting.odd.decided:
            check = "see GRAD_DESYNC and HPARAM_DESYNC at this step: a reduction left out, or settings that differ"
        yield replicas.finding(replace(parting, cannot_conclude=(CUSTOM,), next_check=check))


def _after_training(parting: Parting, run: RunFacts) -> Iterator[Finding]:
    """Only the sweep when the process ended differs: weights loaded for a last evaluation, or the steps in between."""
    if run.status != "finished":
        return  # ranks that were stopped are not at one point of the program
    unknown = "whether training or what follows it (a best checkpoint loaded on one rank) changed them"
    yield replicas.finding(
        replace(parting, severity="note", when=", when the process ended", cannot_conclude=(unknown,))
    )


def _unwrapped(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """Tensors of one model that no wrapper holds: replicas only if nothing speaks for a layout made by hand."""
    together = list(replicas.partings([r for r in rows if r.first_sweep != FINAL], "parameter"))
    undecided = [p for p in together if not p.odd.decided]
    for parting in together:
        if parting.odd.decided and not parting.rows[0].returns:
            yield replicas.finding(replace(parting, severity="warning", cannot_conclude=(NO_WRAPPER,)))
    if not undecided or any(r.returns for r in rows):
        return  # ranks that come together again average by themselves
    census, kept, unlike = rows[0], rows[0].kept, rows[0].unlike
    if not census.own_losses:
        why = "unwrapped tensors differ, but the ranks do not each have a loss of their own: one model split by hand?"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    elif census.own_pace and run.status == "finished":
        why = "unwrapped tensors differ, and the ranks took different numbers of steps: trainings of their own?"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    elif census.own_settings:
        why = "unwrapped tensors differ, and so do the ranks' settings from the start: trainings of their own?"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    elif kept and unlike:
        # replicated norms beside weights that were never alike: tensor parallelism by hand looks like this
        why = f"{kept} unwrapped trained tensors agree, {unlike} differed from the start: a layout made by hand?"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    else:
        check = "wrap the model in DDP, or reduce the gradients of every parameter by hand"
        for parting in undecided:
            # Some agree and some came apart: a reduction that forgot them, or experts that each rank has of its own.
            severity: Severity = "note" if kept or census.blinks else "warning"
            unknown = (NO_WRAPPER, UNSEEN_AVERAGE) if census.blinks else (NO_WRAPPER,)
            yield replicas.finding(replace(parting, severity=severity, cannot_conclude=unknown, next_check=check))


def _left_out(rows: Sequence[Row]) -> Iterator[Finding | Abstention]:
    """Tensors of one model that its wrapper does not reduce. Whoever means each rank to have its own begins with
    different values (experts, adapters); what began equal and is trained on each rank's own gradient was forgotten."""
    together = list(replicas.partings([r for r in rows if r.first_sweep != FINAL], "parameter"))
    if any(r.returns for r in rows):
        return  # ranks that come together again average by themselves
    undecided = [p for p in together if not p.odd.decided]
    own = [r for p in undecided for r in p.rows if r.never_equal]
    for parting in together:
        if parting.odd.decided:
            yield replicas.finding(replace(parting, severity="warning", cannot_conclude=(LEFT_OUT,)))
        elif began := tuple(r for r in parting.rows if not r.never_equal):
            first = began[0]
            what = "DDP was told to ignore it" if first.sharing == "ignored" else "FSDP does not cover it"
            when = f", though it was equal before: {what}, and nothing else evens it out"
            # beside tensors that each rank has of its own, one that began equal may be one of them (zeros, ones)
            severity: Severity = "note" if any(r.owned for r in own) else "warning"
            check = "wrap the module that holds it, or reduce its gradient by hand"
            yield replicas.finding(
                replace(
                    parting, rows=began, severity=severity, when=when, cannot_conclude=(LEFT_OUT,), next_check=check
                )
            )
    if any(r.sharing == "outside" for r in own):
        name = next(r.name for r in own if r.sharing == "outside")
        why = f"parameter {name}, which FSDP leaves out, differs from the start: each rank's own, or never made equal?"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
