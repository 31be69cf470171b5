"""Exact fingerprints and norms of parameters and buffers.

Writes    param, buffer, tensor
Costs     0.4 ms per million elements and watched step; of models above 4 M elements a moving window of 2,040
          elements per tensor instead (2 us a tensor), and full sweeps before the first update and at the end
Blind to  what of a sharded tensor other ranks hold; memory that FSDP has freed
"""

from __future__ import annotations

import math
from typing import Any

from .. import fingerprint, torchprivate
from ..agent import Emit
from ..catalogue import REPLICATED, Entry
from ..patch import Undo, replace
from ..tables import Column, Table

PARAM = Table("param", (
    Column("stage", "text", "", "start: before the first update of an attempt; end: after the step's update; final: when the process ended"),
    Column("generation", "int32", "", "tensor catalogue that the tensors refer to"),
    Column("tensors", "int64[]", "", "catalogue index per entry; empty: all parameters in catalogue order"),
    Column("l2", "float64[]", "", "L2 norm per tensor, -2 for one without; empty where no norms were taken"),
    Column("digest", "int64[]", "", "exact fingerprint of the bits; in models above 4 M elements at stage end of the step's window"),
    Column("nonfinite", "int64[]", "", "catalogue indices of tensors that hold NaN or Inf"),
), "one row per watched step")  # fmt: skip

BUFFER = Table("buffer", (
    Column("stage", "text", "", "sync: right after DDP's broadcast, before the forward changes them; end, final: as for param"),
    Column("generation", "int32", "", "tensor catalogue that the tensors refer to"),
    Column("tensors", "int64[]", "", "catalogue index per entry; empty: all buffers in catalogue order"),
    Column("digest", "int64[]", "", "exact fingerprint of the bits; in models above 4 M elements at stage end of the step's window"),
), "one row per watched step; none when the model has no buffers")  # fmt: skip

TENSOR = Table("tensor", (
    Column("generation", "int32", "", "number of this catalogue, from 1; a new one when models or optimizers change"),
    Column("index", "int32", "", "position in it, parameters first"),
    Column("kind", "text", "", "param or buffer"),
    Column("name", "text", "", "name within its model, without wrappers' prefixes"),
    Column("model", "int32", "", "model of this process, in the order in which optimizers first held them"),
    Column("model_type", "text", "", "class of the model"),
    Column("shape", "text", "", "e.g. 4x16; scalar for none; of the whole tensor where this rank holds a part"),
    Column("dtype", "text", "", "e.g. float32"),
    Column("numel", "int64", "", "elements that this rank holds"),
    Column("trainable", "bool", "", "requires_grad"),
    Column("optimizer", "int32", "", "optimizer that holds it, -1 for none"),
    Column("sharing", "text", "", "ddp: DDP reduces it; late: in a DDP module, but added after wrapping; ignored: DDP was told to leave it; "
           "sharded: a DTensor or FSDP's, of which this rank holds a part; outside: in a model that FSDP shards, yet outside what it shards; "
           "plain: no wrapper; hook: reduced by a user's communication hook that may not average over all"),
    Column("peers", "text", "", "global ranks that hold a replica (of the same part, where sharded), comma separated; empty: none or not known"),
    Column("broadcast", "int32", "", "buffers: 1 DDP broadcasts them, 0 told not to, -1 no DDP"),
    Column("full_numel", "int64", "", "elements of the whole tensor; under tensor parallelism of what FSDP gathers"),
    Column("shard_start", "int64", "", "first flat element of the whole that this rank holds; -1: its part is not one piece of it"),
    Column("shards", "text", "", "sharded: global ranks over which its gradient is reduced; empty for others and where not known"),
    Column("mesh", "text", "", "sharded: global ranks that together hold all parts of it"),
    Column("aliases", "text", "", "other names under which its model holds the same tensor, comma separated"),
), "one row per tensor and catalogue")  # fmt: skip

TABLES = (PARAM, BUFFER, TENSOR)
UNMEASURED = -2.0
# Small tensors that are looked at before each watched update as well: an average made by hand between two updates
# brings the ranks together there, and only there.
SENTINELS = 8
WHOLE_ELEMENTS = 4_000_000  # up to 1.5 ms on one core; in the windows of a larger model a local change shows later
NORM_STEPS = 16  # parameter norms move slowly: on a host they are taken at the first, the last and every 16th step


def install(emit: Emit) -> Undo:
    agent = emit.agent
    catalogue = agent.catalogue
    on_device = fingerprint.DeviceSweep()
    described = [0]  # catalogue generation that the tensor table holds
    passed = [-1, 0]  # step and generation of the last whole pass
    began = [0]  # step whose first update has been seen
    synced: dict[int, int] = {}  # DDP module -> step of its last sync row

    def before_update(optimizer: Any, number: int) -> None:
        step = agent.window.step
        if step > 1 and not agent.watching:
            return
        catalogue.refresh()
        if describe():
            sweep("start", step, everything=True)
        elif began[0] != step:
            fingerprints(PARAM, "start", step, sentinels(catalogue.params), False)
        began[0] = step

    def step_end() -> None:
        if agent.watching:
            catalogue.refresh()
            describe()
            sweep("end", agent.window.step)

    def ending() -> None:
        step = agent.window.step - 1
        if step > 0 and passed != [step, catalogue.generation]:
            sweep("final", step, everything=True)

    def describe() -> bool:
        """Write the catalogue down when it is new."""
        if described[0] == catalogue.generation or not catalogue.params:
            return False
        described[0] = catalogue.generation
        for e in (*catalogue.params, *catalogue.buffers):
            t = e.tensor
            if t is not None:
                emit(TENSOR, (catalogue.generation, e.index, e.model, e.numel, t.requires_grad, e.optimizer,
                              e.broadcast, e.full_numel, e.shard_start),
                     (e.kind, e.name, e.model_type, e.shape, str(t.dtype).removeprefix("torch."), e.sharing, e.peers,
                      e.shards, e.mesh, e.aliases))  # fmt: skip
        return True

    def sweep(stage: str, step: int, everything: bool = False) -> None:
        fingerprints(PARAM, stage, step, catalogue.params, everything)
        if everything and stage == "final":
            passed[:] = [step, catalogue.generation]
        if catalogue.buffers and stage != "start":
            fingerprints(BUFFER, stage, step, catalogue.buffers, everything)

    def buffers_synced(ddp: Any) -> None:
        number = next((i for i, d, _ in catalogue.ddps() if d is ddp), -1)
        step = agent.window.step
        if not agent.watching or synced.get(number) == step or not agent.torch.is_grad_enabled():
            return
        synced[number] = step
        fingerprints(BUFFER, "sync", step, [b for b in catalogue.buffers if b.ddp == number], False)

    def fingerprints(table: Table, stage: str, step: int, entries: list[Entry], everything: bool) -> None:
        alive, tensors = [], []
        for e in entries:
            t = e.ref()
            if t is None or t.is_sparse or t.device.type == "meta":
                continue
            t = torchprivate.local_shard(t) if e.sharing == "sharded" else t
            if e.sharing in REPLICATED or torchprivate.readable(t):
                alive.append(e)
                tensors.append(t)
        if not alive:
            return
        indices = [] if table is PARAM and len(alive) == len(catalogue.params) else [e.index for e in alive]
        generation, on_host = catalogue.generation, not any(t.is_cuda for t in tensors)
        normed = table is PARAM and (not on_host or everything or agent.odd or step % NORM_STEPS == 0)
        measured = [k for k, t in enumerate(tensors) if t.is_floating_point() and t.numel()] if normed else []
        # buffers: the same window at every step, so that one that nothing updates keeps its fingerprint
        whole = everything or sum(e.numel for e in entries) <= WHOLE_ELEMENTS
        part = None if whole else step if table is PARAM else 0
        digests, suspects = fingerprint.sweep_cpu(tensors, part, finite=table is PARAM) if on_host else ([], [])
        wanted = [fingerprint.norms([tensors[k].detach() for k in measured])] if measured else []
        if not on_host:
            wanted.append(on_device.digests(tensors, part))

        def landed(read: list[Any]) -> None:
            norms = read.pop(0) if measured else []
            found = digests or read[0]
            if table is BUFFER:
                emit(BUFFER, (generation,), (stage, indices, found), step=step)
                return
            l2 = [UNMEASURED] * len(tensors) if measured else []
            for k, norm in zip(measured, norms, strict=True):
                l2[k] = norm
            doubtful = {k for k, norm in zip(measured, norms, strict=True) if not math.isfinite(norm)} | set(suspects)
            odd = [alive[k].index for k in sorted(doubtful)
                   if not on_host or fingerprint.has_nonfinite(tensors[k].detach())]  # fmt: skip
            if odd:
                agent.alarm()
            emit(PARAM, (generation,), (stage, indices, l2, found, odd), step=step)

        agent.landing.land(wanted, landed)

    def register(original: Any) -> Any:
        def register_parameter(module: Any, name: Any, param: Any) -> Any:
            if not compiling():
                catalogue.changed()
            return original(module, name, param)

        return register_parameter

    def module_set(module: Any, name: Any, part: Any) -> None:  # a copy registers no parameter, only itself
        if not compiling():
            catalogue.changed()

    compiling = getattr(agent.torch.compiler, "is_compiling", lambda: False)
    put_back = replace(agent.torch.nn.Module, "register_parameter", register)
    unhook = agent.torch.nn.modules.module.register_module_module_registration_hook(module_set).remove
    emit.on("before_update", before_update)
    emit.on("step_end", step_end)
    emit.on("buffers_synced", buffers_synced)
    emit.on("ending", ending)
    emit.on("close", ending)

    def undo() -> None:
        put_back()
        unhook()
        on_device.clear()

    return undo


def sentinels(params: list[Entry]) -> list[Entry]:
    """The tensors to look at before an update, in catalogue order."""
    held = [e for e in params if e.optimizer >= 0]
    chosen = {e.index for e in [e for e in held if e.numel <= fingerprint.WINDOW_ELEMENTS][-SENTINELS:]}
    # what a wrapper leaves out is averaged on its own, if at all: one of those, whatever its size
    left_out = [e for e in held if e.sharing in ("outside", "ignored")]
    if left_out:
        chosen.add(min(left_out, key=lambda e: e.numel).index)
    return [e for e in held if e.index in chosen]
