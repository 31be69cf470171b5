"""Norms and sketches of every gradient before the reduction, what DDP or FSDP made of it, and what the optimizer gets.

Writes    grad, delivered
Costs     per watched step one fused norm over the local gradients; of windows of 2,040 elements a sketch before the
          reduction, sketch and fingerprint after it, and a fingerprint before the update; under FSDP a copy of each
          window as well, and norms of whole gradients before they are scattered; of a model that no wrapper reduces a
          hook on each process group until the update, which reads pointers
Blind to  earlier micro-steps that were reduced already are part of a local gradient; of shards what was added to an
          earlier reduction, and all of it where FSDP is not there or told to use a hook of the user's; reductions by
          hand before torch 2.14, of copies or buckets of gradients, and while threads run that may use a group too
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

from .. import fingerprint, torchprivate
from ..agent import Emit
from ..catalogue import REPLICATED, Entry, due
from ..gradientpass import NO_GRADIENT, UNMEASURED, EarlyGradients, Pass, doubtful, norms_of, roots
from ..handreduced import HandReductions
from ..patch import Undo, replace
from ..sketch import PIECES, DeviceSketch, sketch_cpu
from ..tables import Column, Table
from ..unitgradients import UnitGradients

GRAD = Table("grad", (
    Column("stage", "text", "", "local: this rank's own, before any reduction; reduced: as the optimizer gets it"),
    Column("generation", "int32", "", "tensor catalogue that the tensors refer to"),
    Column("micro", "int32", "", "backward calls of this step before this one; reduced: all of them"),
    Column("tensors", "int64[]", "", "catalogue index per entry; empty: all from 0 on"),
    Column("l2", "float64[]", "", "L2 norm per tensor, loss scale removed; -1 no gradient, -2 not measured (the reduced stage, where the local one was; shards that were not seen whole)"),
    Column("digest", "int64[]", "", "exact fingerprint per tensor of the reduced stage (above 2,040 elements: of the step's window); empty at the local stage"),
    Column("nonfinite", "int64[]", "", "catalogue indices of tensors that hold NaN or Inf"),
    Column("valid", "bool", "", "local stage: the values are this rank's alone, before the reduction"),
    Column("scale", "float64", "", "loss scale that was divided out of l2; 1 without a scaler"),
    Column("synced", "int32", "", "local stage: 1 DDP or FSDP reduces in this backward, 0 each was told not to (no_sync), -1 none ran its forward for it"),
    Column("sketch", "float32[]", "", "two signed sums per tensor over the step's window, loss scale included; 0 no gradient, NaN not taken; empty: none (reduced stage, where DDP delivered)"),
    Column("window_l2", "float32[]", "", "L2 norm over that window, loss scale included, where gradients or the wire are narrower than 32 bits; else empty"),
), "one row per watched step and stage; of the local stage one per backward, and one more for what FSDP reduces in it")  # fmt: skip

DELIVERED = Table("delivered", (
    Column("generation", "int32", "", "tensor catalogue that the tensors refer to"),
    Column("micro", "int32", "", "backward calls of this step before this one: that of the local row of grad it belongs to"),
    Column("tensors", "int64[]", "", "catalogue index per entry; empty: all from 0 on"),
    Column("digest", "int64[]", "", "exact fingerprint per tensor (above 2,040 elements: of the step's window); 0 no gradient; empty for shards"),
    Column("sketch", "float32[]", "", "two signed sums per tensor over the step's window, loss scale included; 0 no gradient, NaN not taken"),
    Column("reduction", "text", "", "who reduced: mean: DDP or FSDP by itself; else the names of the communication hooks, or gradient_divide_factor; by hand: the program, of which digest and sketch are empty"),
    Column("wire", "text", "", "types in which FSDP sent the gradients, comma separated; empty for any other"),
    Column("ranks", "text", "", "by hand: ranks of the process group that the tensors' gradients were handed to; empty for any other"),
), "what DDP or FSDP left in the gradients when a backward ended, before the program touched them; of shards the part of a window that lies in them. One row per watched backward that reduces, for either; and one per group for the gradients that the program itself handed to an all-reduce before its update")  # fmt: skip

TABLES = (GRAD, DELIVERED)
MEAN, BY_HAND = "mean", "by hand"


def install(emit: Emit) -> Undo:
    agent = emit.agent
    on_device, sketches = fingerprint.DeviceSweep(), DeviceSketch()
    local_step = [0]  # last step whose local gradients were seen as this rank's alone
    armed: dict[int, bool] = {}  # DDP module -> whether it reduces in the coming backward
    early, units, hand = EarlyGradients(emit), UnitGradients(emit), HandReductions(emit)
    last: list[Pass] = []  # the local pass of the backward in progress
    delivered_step = [0]  # step in which DDP has delivered after the last backward
    builtin: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()

    def forward_begin(module: Any, args: Any, kwargs: Any) -> None:
        number = next((i for i, d, _ in agent.catalogue.ddps() if d is module), -1)
        if number >= 0:
            armed[number] = bool(getattr(module, "require_backward_grad_sync", True))

    def backward_begin(root: Any) -> None:
        hand.forget()
        if agent.watching:
            early.watch(armed)

    def local() -> None:
        agent.catalogue.refresh(in_backward=True)
        if not agent.catalogue.params:
            return
        entries = agent.catalogue.params
        if any(e.sharing == "sharded" for e in entries):  # those are taken unit by unit
            entries = [e for e in entries if e.sharing != "sharded"]
            if not entries:
                return
        entries = due(entries, agent.window.step)
        here = choose(entries, early.taken, [True] * len(entries))
        valid = not any(e.ddp in early.unseen for e in entries)
        if valid:
            local_step[0] = agent.window.step
        synced = max(armed.values(), default=-1)
        narrow = any(p.element_size() < 4 for p in here.parts) or hooked()
        measure("local", here, valid, True, int(synced), early.taken, narrow)
        last[:] = [here]

    def sharded() -> None:
        """The backward is over: what was taken of FSDP's units before they were reduced, and what they became."""
        own = units.own()
        if own is None:
            return
        measure("local", own, True, True, 1, units.taken, units.narrow, units.nonfinite())
        there = units.delivered()
        if there.chosen:
            by = "gradient_divide_factor" if units.own_divisor else MEAN
            deliver(there, by, ",".join(sorted(units.wires)))

    def backward_end(whole: bool) -> None:
        if whole:
            sharded()
        if whole and agent.watching:
            hand.watch()
        units.forget()
        early.forget()
        reducing = {number for number, on in armed.items() if on}
        armed.clear()
        before, last[:] = list(last), []
        delivered_step[0] = 0
        if not (whole and agent.watching and reducing and before):
            return
        entries = before[0].entries
        here = choose(entries, {}, [e.ddp in reducing and e.sharing == "ddp" for e in entries], before[0])
        if here.chosen:
            delivered_step[0] = agent.window.step
            names = {n for i, d, _ in agent.catalogue.ddps() if i in reducing for n in hooks_of(d) or [MEAN]}
            deliver(here, ",".join(sorted(names)), "")

    def by_hand(optimizer: Any, number: int) -> None:
        for generation, ranks, tensors in hand.handed():
            emit(DELIVERED, (generation, agent.backwards - 1), (tensors, [], [], BY_HAND, "", ranks))

    def reduced(optimizer: Any, number: int) -> None:
        if not agent.watching:
            return
        agent.catalogue.refresh()
        held = [e for e in agent.catalogue.params if e.optimizer == number]
        if held:
            # norms and finiteness were taken before the reduction; again here only where that was not possible, and
            # after an alarm, to see whether the update gets what was seen
            normed = local_step[0] != agent.window.step or agent.odd or any(e.sharing == "sharded" for e in held)
            if len(held) == len(agent.catalogue.params):
                held = agent.catalogue.params
            held = due(held, agent.window.step)
            measure("reduced", choose(held, {}, [True] * len(held)), True, normed, -1, {}, False)

    def choose(entries: list[Entry], taken: dict[int, Any], wanted: list[bool], like: Pass | None = None) -> Pass:
        """The dense floating-point gradients of these entries, and this step's window of each."""
        step = agent.window.step
        here = Pass(entries, [] if entries is agent.catalogue.params else [e.index for e in entries], step)
        here.l2 = [NO_GRADIENT] * len(entries)
        known = {id(g): (g, p) for g, p in zip(like.grads, like.parts, strict=True)} if like is not None else {}
        for at, entry in enumerate(entries):
            p = entry.ref()
            grad = p.grad if p is not None else None
            if grad is None:
                continue
            here.l2[at] = UNMEASURED
            if not wanted[at]:
                continue
            if at_hand := taken.get(entry.index):
                part = at_hand[0]
            elif id(grad) in known:
                part = known[id(grad)][1]
                if part.untyped_storage().data_ptr() != grad.untyped_storage().data_ptr():
                    part = fingerprint.windowed(grad, step)  # it was copied, or has got other memory
            else:
                if entry.sharing == "sharded":
                    if not torchprivate.same_placements(p, grad):
                        continue  # a partial sum, which the update will reduce
                    grad = torchprivate.local_shard(grad)
                if (
                    grad.is_sparse
                    or not grad.is_floating_point()
                    or not grad.numel()
                    or not (entry.sharing in REPLICATED or torchprivate.readable(grad))
                ):
                    continue
                part = fingerprint.windowed(grad, step)
            here.chosen.append(at)
            here.grads.append(grad)
            here.parts.append(part)
            here.places.append((entry.index, 0, part.numel()))
        return here

    def measure(stage: str, here: Pass, valid: bool, normed: bool, synced: int, taken: dict[int, Any], narrow: bool,
                known_odd: Sequence[int] = ()) -> None:  # fmt: skip
        """Start what has to be computed; the row is written when the values are on the host.

        `taken`: what is known already of some; `narrow`: windows' norms are wanted; `known_odd`: tensors that hold
        something not finite beside those whose norms say so.
        """
        exact = stage == "reduced"
        covered = delivered_step[0] == here.step and all(e.sharing == "ddp" for e in here.entries)
        sketched = stage == "local" or not covered
        scale = agent.scale
        head = (agent.catalogue.generation, agent.backwards, valid)
        if not here.chosen:
            empty = here.spread([], 0)
            emit(GRAD, (*head, 1.0, synced),
                 (stage, here.indices, here.l2, empty if exact else [], known_odd, here.spread([], 0.0, PIECES), []))  # fmt: skip
            return
        on_host = here.on_host
        digests: list[int] = []
        sums: list[float] = []
        narrows: list[float] = []
        wanted: list[Any] = []
        if normed:
            wanted.append(norms_of(agent.torch, here, taken))
        together = fingerprint.runs(here.parts)
        if on_host:
            digests = fingerprint.digests_of_runs(here.parts, together) if exact else []
            if sketched:
                sums, narrows = sketch_cpu(together, here.places, narrow)
        if scale is not None:
            wanted.append(scale.double().reshape(1))
        if not on_host:
            if exact:
                wanted.append(on_device.digests(here.parts, None))
            if sketched:
                wanted += sketches.sketch(together, here.places, narrow, here.parts[0].device)

        def landed(values: list[Any]) -> None:
            norms = values.pop(0) if normed else []
            factor = values.pop(0)[0] if scale is not None else 1.0
            found, signed, squares = digests, sums, narrows
            if not on_host:
                found = values.pop(0) if exact else []
                signed = values.pop(0) if sketched else []
                squares = roots(values.pop(0)) if sketched and narrow else []
            # the reduced stage may be seen before or after unscaling: its values are reported as they are
            divisor = factor if stage == "local" and factor else 1.0
            odd = list(known_odd)
            for k, norm in enumerate(norms):
                here.l2[here.chosen[k]] = norm / divisor
                if not math.isfinite(norm) and (not on_host or doubtful(here, k, taken)):
                    odd.append(here.entries[here.chosen[k]].index)
            emit(GRAD, (*head, factor, synced),
                 (stage, here.indices, here.l2, here.spread(found, 0) if exact else [], odd,
                  here.spread(signed, 0.0, PIECES) if sketched else [],
                  here.spread(squares, 0.0) if squares else []), step=here.step)  # fmt: skip
            if odd:
                agent.alarm()

        if not on_host:
            here.forget()
        agent.landing.land(wanted, landed)

    def deliver(here: Pass, by: str, wire: str) -> None:
        """`wire` of shards alone: no two ranks need hold the same part, so that fingerprints would say nothing."""
        head = (agent.catalogue.generation, agent.backwards)
        together = fingerprint.runs(here.parts)

        def landed(values: list[Any]) -> None:
            digests = [] if wire else here.spread(values.pop(0), 0)
            signed = here.spread(values[0], 0.0, PIECES)
            emit(DELIVERED, head, (here.indices, digests, signed, by, wire, ""), step=here.step)

        if here.on_host:
            exact = [] if wire else [fingerprint.digests_of_runs(here.parts, together)]
            landed([*exact, sketch_cpu(together, here.places, False)[0]])
        else:
            device = here.parts[0].device
            wanted = [] if wire else [on_device.digests(here.parts, None)]
            wanted += sketches.sketch(together, here.places, False, device)
            here.forget()
            agent.landing.land(wanted, landed)

    def hooked() -> bool:
        return any(hooks_of(d) for _, d, _ in agent.catalogue.ddps())

    def hooks_of(ddp: Any) -> list[str]:
        return torchprivate.communication_hook_names(ddp) + builtin.get(ddp, [])

    def note(ddp: Any, kind: Any) -> None:
        builtin.setdefault(ddp, []).append(str(kind).rpartition(".")[2])

    def builtin_hook(original: Any) -> Any:
        def _register_builtin_comm_hook(ddp: Any, comm_hook_type: Any) -> Any:
            result = original(ddp, comm_hook_type)
            emit.guarded(note, ddp, comm_hook_type)
            return result

        return _register_builtin_comm_hook

    emit.on("forward_begin", forward_begin)
    emit.on("backward_begin", backward_begin)
    emit.on("gradients_local", local)
    emit.on("unit_gradients", units.take)
    emit.on("backward_end", backward_end)
    emit.on("before_update", by_hand)
    emit.on("before_update", reduced)
    emit.on("step_closed", lambda info: hand.forget())
    emit.on("ending", lambda: hand.forget(ending=True))
    emit.on("close", lambda: hand.forget(ending=True))

    parallel = agent.torch.nn.parallel.DistributedDataParallel
    patched = hasattr(parallel, "_register_builtin_comm_hook")
    put_back = replace(parallel, "_register_builtin_comm_hook", builtin_hook) if patched else lambda: None

    def undo() -> None:
        put_back()
        early.forget()
        units.forget()
        hand.forget()
        on_device.clear()
        sketches.clear()

    return undo
