"""Checkpoints: what was saved and loaded, what was put back into the program, and what stood at the update after it.

Writes    checkpoint
Costs     nothing in a step without; per file saved or loaded its size and 128 KiB of it, read from the page cache, and up
          to 1 ms to see what the object holds; the two updates after weights were loaded 1 us a parameter
Blind to  weights that are copied in place, or read in other ways than torch.load, torch.distributed.checkpoint and
          safetensors' load_file; state of ZeroRedundancyOptimizer; training that never calls backward
"""

from __future__ import annotations

import json
import math
import random
import threading
import weakref
from typing import Any

from .. import torchprivate
from ..afterimport import when
from ..agent import Emit, now_ns
from ..checkpointfiles import identity_of, path_of, pick, target
from ..checkpointparts import Parts, parts_of
from ..patch import Undo, replace, undo_all
from ..tables import Column, Table

TABLE = Table("checkpoint", (
    Column("number", "int32", "", "save or load of this process, in order; -1 for other events"),
    Column("source", "int32", "", "apply: the load whose tensors these are, else the last one of weights since the last backward; -1 unknown"),
    Column("backwards", "int64", "", "backward calls before it; of event update: before what was applied last"),
    Column("object", "int32", "", "optimizer (see optim) or scheduler concerned; -1 for none"),
    Column("nth", "int32", "", "event update: 1 or 2, the updates of this optimizer after weights or state were applied; 0 for others"),
    Column("params", "int32", "", "trainable parameters of the model that was applied to, or of the optimizer; -1 unknown"),
    Column("entries", "int32", "", "those of them that were in what was applied, or that have state in the optimizer; -1 unknown"),
    Column("covered", "int32", "", "event update: parameters of the optimizer whose weights were applied; -1 for others"),
    Column("position", "int64", "", "last_epoch of the scheduler (event save: the furthest there is); -1 for none"),
    Column("lr", "float64", "", "learning rate in force; of a scheduler: right after it was made; NaN unknown"),
    Column("duration_ns", "int64", "ns", "time that the program spent in it"),
    Column("size_bytes", "int64", "B", "size of the file; -1 unknown"),
    Column("mtime_ns", "int64", "ns", "its time of change; 0 unknown"),
    Column("inode", "int64", "", "its inode; 0 unknown"),
    Column("digest", "int64", "", "crc32 of size, first and last 64 KiB of the file; -1 not read"),
    Column("event", "text", "", "save, load, apply, or update (what stands right before an update that follows an apply)"),
    Column("part", "text", "", "apply and update: model, optimizer, scheduler, scaler, rng or data"),
    Column("path", "text", "", "save and load: absolute path; empty for a file object without a name"),
    Column("class_name", "text", "", "function that saved or loaded, or class of the object concerned"),
    Column("parts", "text", "", "save and load: JSON of what the object holds: tensors of the model, parameters with optimizer state, "
           "last_epoch of the scheduler, counters by name, whether there is state of scaler, rng, data"),
), "one row per file saved or loaded and per state put back; at most 1,000 of each event an attempt")  # fmt: skip

ROWS_LIMIT = 1000  # some programs load a file per sample, or weights at every step
REMEMBERED = 8  # loads whose tensors are known again
WATCHED_UPDATES = 64  # after weights were applied, over all optimizers


class Applied:
    """What was put back since the last backward, until the updates after it."""

    def __init__(self, backwards: int) -> None:
        self.backwards = backwards
        self.modules: list[tuple[weakref.ReferenceType[Any], frozenset[str]]] = []  # and the names that it lacked
        self.updates: dict[int, int] = {}

    def loaded(self) -> set[int]:
        """Ids of the parameters whose weights were applied."""
        return {
            id(p)
            for ref, lacking in self.modules
            if (module := ref()) is not None
            for name, p in module.named_parameters(remove_duplicate=False)
            if name not in lacking
        }


class Known:
    """Objects made by the program, held weakly, with what was noted of each."""

    def __init__(self) -> None:
        self.made: list[tuple[weakref.ReferenceType[Any], Any]] = []

    def note(self, thing: Any, about: Any) -> None:
        if not any(ref() is thing for ref, _ in self.made):
            self.made.append((weakref.ref(thing), about))

    def alive(self) -> list[tuple[int, Any, Any]]:
        return [(n, thing, about) for n, (ref, about) in enumerate(self.made) if (thing := ref()) is not None]


def install(emit: Emit) -> Undo:
    agent = emit.agent
    torch = agent.torch
    counts: dict[str, int] = {}
    files = [0]
    origins: dict[int, tuple[weakref.ReferenceType[Any], int]] = {}  # id of a loaded tensor -> itself, its load
    recent: list[tuple[int, int]] = []  # loads of weights: number, backwards
    pending: list[Applied | None] = [None]
    schedulers, scalers = Known(), Known()
    inside: list[str] = []
    undos: list[Undo] = []

    def write(event: str, part: str, class_name: str, path: str = "", parts: str = "", **values: Any) -> None:
        counts[event] = counts.get(event, 0) + 1
        if counts[event] <= ROWS_LIMIT:
            row = BLANK | {"backwards": agent.backwards_total} | values
            emit(TABLE, [row[c.name] for c in TABLE.fixed], (event, part, path, class_name, parts))

    # -------------------------------------------------------- files

    def watch_file(owner: Any, name: str, event: str, of: Any) -> None:
        """Record calls of a function that saves or loads; `of(args, kwargs, result)` gives (object, file)."""

        def make(original: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                if inside or not agent.live or threading.get_ident() != agent.thread:
                    return original(*args, **kwargs)
                inside.append(name)
                started, before = now_ns(), agent.phase
                agent.enter("checkpoint" if event == "save" else "load")
                try:
                    result = original(*args, **kwargs)
                finally:
                    inside.pop()
                    agent.enter(before)
                    if event == "save":
                        agent.add_phase("checkpoint", now_ns() - started)
                emit.guarded(note_file, event, name, now_ns() - started, of, args, kwargs, result)
                return result

            return call

        if name in vars(owner):
            undos.append(replace(owner, name, make))

    def note_file(event: str, name: str, duration_ns: int, of: Any, args: Any, kwargs: Any, result: Any) -> None:
        if counts.get(event, 0) >= ROWS_LIMIT:
            return
        value, file = of(args, kwargs, result)
        parts = parts_of(value)
        if not parts.held:
            return
        number = files[0] = files[0] + 1
        if event == "load":
            remember(number, parts)
        path = path_of(file)
        about: dict[str, float] = dict(identity_of(path))
        if event == "save":
            about["position"] = max([p for _, s, _ in schedulers.alive() if (p := position(s)) >= 0], default=-1)
            about["lr"] = next((lr_of(o) for o in agent.catalogue.optimizers().values()), math.nan)
        write(event, "", name, path, json.dumps(parts.held), number=number, duration_ns=duration_ns, **about)

    def remember(number: int, parts: Parts) -> None:
        if "model" in parts.held:
            recent.append((number, agent.backwards_total))
            del recent[:-REMEMBERED]
        oldest = recent[0][0] if recent else number
        for key in [k for k, (ref, n) in origins.items() if n < oldest or ref() is None]:
            del origins[key]
        for tensor in parts.tensors:
            origins[id(tensor)] = (weakref.ref(tensor), number)

    def source_of(state: Any) -> int:
        for tensor in list(state.values())[:8] if hasattr(state, "values") else ():
            known = origins.get(id(tensor))
            if known is not None and known[0]() is tensor:
                return known[1]
        return next((n for n, backwards in reversed(recent) if backwards == agent.backwards_total), -1)

    # -------------------------------------------------------- what is put back

    def begun() -> Applied:
        applied = pending[0]
        if applied is None or applied.backwards != agent.backwards_total:
            applied = pending[0] = Applied(agent.backwards_total)
        return applied

    def watch_apply(owner: Any, name: str, note: Any) -> None:
        """Call `note(object, args, kwargs, result)` after a method that puts state back; its own calls are not seen."""

        def make(original: Any) -> Any:
            def apply(*args: Any, **kwargs: Any) -> Any:
                if name in inside or not agent.live or threading.get_ident() != agent.thread:
                    return original(*args, **kwargs)
                inside.append(name)
                try:
                    result = original(*args, **kwargs)
                finally:
                    inside.remove(name)
                emit.guarded(note, args, kwargs, result)
                return result

            return apply

        if name in vars(owner):
            undos.append(replace(owner, name, make))

    def to_model(args: Any, kwargs: Any, result: Any) -> None:
        module, state = args[0], args[1] if len(args) > 1 else kwargs.get("state_dict")
        if counts.get("apply", 0) >= ROWS_LIMIT:
            return
        lacking = frozenset(getattr(result, "missing_keys", ()))
        found: dict[int, bool] = {}  # a tied parameter counts as applied under any of its names
        for name, p in module.named_parameters(remove_duplicate=False):
            if p.requires_grad:
                found[id(p)] = found.get(id(p), False) or name not in lacking
        if found:
            begun().modules.append((weakref.ref(module), lacking))
            write("apply", "model", type(module).__name__, source=source_of(state), params=len(found),
                  entries=sum(found.values()))  # fmt: skip

    def to_optimizer(args: Any, kwargs: Any, result: Any) -> None:
        begun()
        write("apply", "optimizer", type(args[0]).__name__, object=agent.catalogue.add_optimizer(args[0]),
              entries=filled(args[0]), lr=lr_of(args[0]))  # fmt: skip

    def to_scheduler(args: Any, kwargs: Any, result: Any) -> None:
        write("apply", "scheduler", type(args[0]).__name__, position=position(args[0]))

    def to_scaler(args: Any, kwargs: Any, result: Any) -> None:
        write("apply", "scaler", type(args[0]).__name__)

    def to_data(args: Any, kwargs: Any, result: Any) -> None:
        write("apply", "data", type(args[0]).__name__)

    def to_rng(args: Any, kwargs: Any, result: Any) -> None:
        # recomputation and forked streams set states too, at any time; what counts follows weights, before any backward
        if (pending[0] is not None and pending[0].backwards == agent.backwards_total) or recently():
            write("apply", "rng", "")

    def recently() -> bool:
        return any(backwards == agent.backwards_total for _, backwards in recent)

    # -------------------------------------------------------- the updates after it

    def before_update(optimizer: Any, number: int) -> None:
        applied = pending[0]
        if applied is None or agent.backwards_total == applied.backwards:
            return  # also an update without a backward, by which frameworks create the state that they then load
        nth = applied.updates[number] = applied.updates.get(number, 0) + 1
        if sum(applied.updates.values()) >= WATCHED_UPDATES:
            pending[0] = None
        if nth > 2 or torchprivate.spreads_state(optimizer):
            return
        params = {id(p) for g in optimizer.param_groups for p in g["params"] if p.requires_grad}
        at: dict[str, Any] = {"backwards": applied.backwards, "nth": nth}
        write("update", "optimizer", type(optimizer).__name__, object=number, params=len(params), entries=filled(optimizer),
              covered=len(params & applied.loaded()), lr=lr_of(optimizer), **at)  # fmt: skip
        for _, scheduler, lr in schedulers.alive():
            steered = getattr(scheduler, "optimizer", None)
            if getattr(steered, "optimizer", steered) is optimizer:
                write("update", "scheduler", type(scheduler).__name__, object=number, position=position(scheduler), lr=lr,
                      **at)  # fmt: skip
        if nth == 1 and agent.scale is not None:
            for _, scaler, made in scalers.alive():
                if made == agent.window.step and scaler.is_enabled():
                    write("update", "scaler", type(scaler).__name__, object=number, **at)

    # -------------------------------------------------------- who is watched

    def made_scheduler(original: Any) -> Any:
        def __init__(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            original(scheduler, *args, **kwargs)
            emit.guarded(lambda: schedulers.note(scheduler, lr_of(getattr(scheduler, "optimizer", None))))

        return __init__

    def made_scaler(original: Any) -> Any:
        def __init__(scaler: Any, *args: Any, **kwargs: Any) -> None:
            original(scaler, *args, **kwargs)
            emit.guarded(scalers.note, scaler, agent.window.step)

        return __init__

    def soon(module: str, *watched: tuple[str, str, Any]) -> None:
        """Watch functions of a module that may be imported later; classes' methods by their dotted names."""

        def there(found: Any) -> None:
            for name, event, of in watched:
                owner, _, method = name.rpartition(".")
                holder = getattr(found, owner, None) if owner else found
                if holder is not None and event == "apply":
                    watch_apply(holder, method, of)
                elif holder is not None:
                    watch_file(holder, method, event, of)

        when(module, lambda found: emit.guarded(there, found))

    for owner in (torch, torch.serialization):
        watch_file(owner, "save", "save", lambda a, k, r: (pick(a, k, 0, "obj"), pick(a, k, 1, "f")))
        watch_file(owner, "load", "load", lambda a, k, r: (r, pick(a, k, 0, "f")))
    watch_apply(torch.nn.Module, "load_state_dict", to_model)
    watch_apply(__import__("torch.optim.optimizer", fromlist=["optimizer"]).Optimizer, "load_state_dict", to_optimizer)
    watch_apply(torch.amp.GradScaler, "load_state_dict", to_scaler)
    undos.append(replace(torch.amp.GradScaler, "__init__", made_scaler))
    for kind in vars(__import__("torch.optim.lr_scheduler", fromlist=["lr_scheduler"])).values():
        if isinstance(kind, type) and hasattr(kind, "last_epoch") | (kind.__name__ in ROOTS) | hasattr(
            kind, "get_last_lr"
        ):
            watch_apply(kind, "load_state_dict", to_scheduler)
            if kind.__name__ in ROOTS and "__init__" in vars(kind):
                undos.append(replace(kind, "__init__", made_scheduler))
    for owner in (torch, torch.random):
        watch_apply(owner, "set_rng_state", to_rng)
    watch_apply(random, "setstate", to_rng)
    soon("numpy.random", ("set_state", "apply", to_rng))
    checkpointed = "torch.distributed.checkpoint.state_dict_"
    soon(checkpointed + "saver", *((name, "save", lambda a, k, r: (pick(a, k, 0, "state_dict"), target(a, k)))
                                   for name in ("save", "async_save", "save_state_dict")))  # fmt: skip
    soon(checkpointed + "loader", *((name, "load", lambda a, k, r: (pick(a, k, 0, "state_dict"), target(a, k)))
                                    for name in ("load", "load_state_dict")))  # fmt: skip
    soon("safetensors.torch",
         ("save_file", "save", lambda a, k, r: (pick(a, k, 0, "tensors"), pick(a, k, 1, "filename"))),
         ("load_file", "load", lambda a, k, r: (r, pick(a, k, 0, "filename"))))  # fmt: skip
    soon("torchdata.stateful_dataloader.stateful_dataloader", ("StatefulDataLoader.load_state_dict", "apply", to_data))
    emit.on("before_update", before_update)
    return undo_all(undos)


ROOTS = ("LRScheduler", "ReduceLROnPlateau", "SequentialLR")  # whose constructors every scheduler of torch runs
BLANK: dict[str, Any] = {
    "number": -1, "source": -1, "object": -1, "nth": 0, "params": -1, "entries": -1, "covered": -1, "position": -1,
    "lr": math.nan, "duration_ns": 0, "size_bytes": -1, "mtime_ns": 0, "inode": 0, "digest": -1,
}  # fmt: skip


def filled(optimizer: Any) -> int:
    """Parameters for which an optimizer remembers anything."""
    return sum(1 for state in optimizer.state.values() if any(v is not None for v in state.values()))


def position(scheduler: Any) -> int:
    """How often a scheduler was stepped; -1 unknown."""
    value = getattr(scheduler, "last_epoch", None)
    return int(value) if isinstance(value, (int, float)) and math.isfinite(value) else -1


def lr_of(optimizer: Any) -> float:
    """The learning rate of the first group; NaN where it is no plain number."""
    groups = getattr(optimizer, "param_groups", None) or [{}]
    value = groups[0].get("lr")
    return float(value) if isinstance(value, (int, float)) else math.nan
