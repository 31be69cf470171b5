"""Settings of every optimizer and every gradient clipping, written when they change.

Writes    optim, clip
Costs     one dictionary read per parameter group and step; a row only on a change
Blind to  settings kept outside param_groups
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
from typing import Any

from ..afterimport import when
from ..agent import Emit, StepInfo
from ..patch import Undo, replace, undo_all
from ..tables import Column, Table

OPTIM = Table("optim", (
    Column("optimizer", "int32", "", "optimizer of this process, in the order of first steps"),
    Column("group", "int32", "", "parameter group"),
    Column("class_name", "text", "", "class of the optimizer"),
    Column("lr", "float64", "", "learning rate"),
    Column("settings", "text", "", "JSON of all other scalar settings of the group, keys sorted"),
    Column("tensors", "int32", "", "parameters in the group"),
    Column("members", "int64", "", "exclusive or of a digest of each parameter's name: which they are, in any order"),
), "in force from this step on until the next row of the same optimizer and group")  # fmt: skip

CLIP = Table("clip", (
    Column("max_norm", "float64", "", "threshold; for clipping by value, the value"),
    Column("norm_type", "float64", "", "p of the norm; 0 for clipping by value"),
    Column("norm", "float64", "", "total norm before clipping as the call returned it; NaN when it is not known on the host"),
    Column("calls", "int32", "", "calls in this step"),
    Column("scaled", "int32", "", "calls in which the gradients were still multiplied by the loss scale: none had been unscaled in this step"),
), "one row per step with a clipping call (the last call's values)")  # fmt: skip

TABLES = (OPTIM, CLIP)


def install(emit: Emit) -> Undo:
    agent = emit.agent
    last: dict[tuple[int, int], tuple[Any, ...]] = {}
    seen: dict[tuple[int, int], list[Any]] = {}
    members: dict[tuple[int, int], tuple[int, int, int]] = {}  # group -> catalogue generation, parameters, digest
    clips: list[tuple[float, float, Any]] = []
    unscaled = [False]  # a loss scaler divided its scale out of some gradients in this step
    scaled = [0]

    def before_update(optimizer: Any, number: int) -> None:
        for g, group in enumerate(optimizer.param_groups):
            raw = [v for k, v in group.items() if k != "params"]
            before = seen.get((number, g))
            if before is not None and len(before) == len(raw) and all(map(operator.is_, before, raw)):
                continue  # the very same objects: nothing was set (tensors are compared by their values below)
            held = [v for v in raw if hasattr(v, "is_cuda")]
            seen[number, g] = [] if held else raw
            away = [v for v in held if v.is_cuda and v.numel() == 1]
            if away and not agent.watching:
                continue  # reading them takes a copy: only where other passes take one too
            settings = {k: scalar(v) for k, v in group.items() if k != "params"}
            names = [k for k, v in group.items() if any(v is a for a in away)]
            head = (number, g, type(optimizer).__name__, len(group["params"]), named(number, g, group["params"]))
            written = functools.partial(write, head, settings, names, agent.window.step)
            agent.landing.land([v.detach().double().reshape(()) for v in away], written)

    def named(number: int, g: int, params: list[Any]) -> int:
        agent.catalogue.refresh()
        known = members.get((number, g), (-1, -1, 0))
        if known[:2] != (agent.catalogue.generation, len(params)):
            digest = 0
            for entry in map(agent.catalogue.entry, params):
                if entry is not None:
                    digest ^= name_digest(entry.name)
            known = members[number, g] = (agent.catalogue.generation, len(params), digest)
        return known[2]

    def write(head: tuple[int, int, str, int, int], settings: dict[str, Any], names: list[str], step: int,
              read: list[float]) -> None:  # fmt: skip
        """A row when something has changed; `read` are the settings that were on a device, in the order of `names`."""
        number, g, class_name, count, which = head
        settings |= dict(zip(names, read, strict=True))
        values = (count, which, *settings.values())
        if last.get((number, g)) == values:
            return
        last[number, g] = values
        lr = settings.get("lr")
        rest = {k: v for k, v in settings.items() if k != "lr"}
        emit(OPTIM, (number, g, float(lr) if isinstance(lr, (int, float)) else math.nan, count, which),
             (class_name, json.dumps(rest, sort_keys=True, default=str)), step=step)  # fmt: skip

    def clip_norm(original: Any) -> Any:
        def clip_grad_norm_(parameters: Any, max_norm: Any, norm_type: Any = 2.0, *args: Any, **kwargs: Any) -> Any:
            total = original(parameters, max_norm, norm_type, *args, **kwargs)
            emit.guarded(clipped, max_norm, norm_type, total)
            return total

        return clip_grad_norm_

    def clip_value(original: Any) -> Any:
        def clip_grad_value_(parameters: Any, clip_value: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(parameters, clip_value, *args, **kwargs)
            emit.guarded(clipped, clip_value, 0.0, math.nan)
            return result

        return clip_grad_value_

    def clipped(max_norm: Any, norm_type: Any, total: Any) -> None:
        total = getattr(total, "_local_tensor", total)
        on_host = not getattr(total, "is_cuda", False)
        norm = float(total) if on_host else math.nan  # on a device the value is left alone: reading it would wait
        if on_host and norm_type and not math.isfinite(norm) and agent.scale is None:
            agent.alarm()
        clips.append((float(max_norm), float(norm_type), norm))
        # an infinite threshold clips nothing: it only asks for the norm
        scaled[0] += agent.scale is not None and not unscaled[0] and math.isfinite(float(max_norm))

    def unscale(original: Any) -> Any:
        def unscale_(scaler: Any, optimizer: Any) -> Any:
            unscaled[0] = True
            return original(scaler, optimizer)

        return unscale_

    def closed(info: StepInfo) -> None:
        if clips:
            emit(CLIP, (*clips[-1], len(clips), scaled[0]), step=info.step)
            clips.clear()
        unscaled[0], scaled[0] = False, 0

    def patch_sharded(module: Any) -> None:
        """FSDP's scaler unscales in a way of its own."""
        owner = getattr(module, "ShardedGradScaler", None)
        if owner is not None and "unscale_" in vars(owner):
            undos.append(replace(owner, "unscale_", unscale))

    utils = agent.torch.nn.utils
    emit.on("before_update", before_update)
    emit.on("step_closed", closed)
    undos: list[Undo] = [replace(agent.torch.amp.GradScaler, "unscale_", unscale)]
    when("torch.distributed.fsdp.sharded_grad_scaler", lambda module: emit.guarded(patch_sharded, module))
    for owner in (utils, utils.clip_grad):
        undos += [replace(owner, "clip_grad_norm_", clip_norm), replace(owner, "clip_grad_value_", clip_value)]
    return undo_all(undos)


def name_digest(name: str) -> int:
    """64 bits of a name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


def scalar(value: Any) -> Any:
    """A setting as JSON holds it. Tensors on a device are named, not read: that would make the host wait. The name
    leaves out which device of the node it is: every rank has its own."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (tuple, list)) and len(value) <= 8:
        return [scalar(v) for v in value]
    if hasattr(value, "is_cuda"):
        return value.item() if value.numel() == 1 and not value.is_cuda else f"tensor on {value.device.type}"
    return type(value).__name__
