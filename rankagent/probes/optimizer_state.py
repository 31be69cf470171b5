"""Exact fingerprints of what optimizers remember: moments, momentum, step counters, whatever `optimizer.state` holds.

Writes    optim_state, optim_loaded
Costs     per watched step and optimizer the state of 2 small parameters before and after the update and of 4 others in
          turn after it (windows of 2,040 elements), 2 us a tensor; everything, 0.4 ms per million elements, before the
          first two updates of an optimizer, after load_state_dict and at the end
Blind to  state in lists and dicts (LBFGS's history); tensors that no other rank holds, of which only the presence is
          noted; ZeroRedundancyOptimizer, whose state is spread over the ranks by design
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

from .. import fingerprint, torchprivate
from ..agent import Emit
from ..catalogue import REPLICATED, Entry
from ..patch import Undo, replace
from ..tables import Column, Table

OPTIM_STATE = Table("optim_state", (
    Column("optimizer", "int32", "", "optimizer of this process, see optim"),
    Column("generation", "int32", "", "tensor catalogue that the tensors refer to"),
    Column("stage", "text", "", "start: before the update (2 small parameters; all before the first two updates and after a load); "
           "end: after the step's update (the same 2 and 4 others in turn); final: when the process ended (all)"),
    Column("keys", "text", "", "JSON object: name of each state, e.g. exp_avg, and what stands for it in `digest`: digest or number; "
           "empty when the optimizer has no state yet"),
    Column("tensors", "int64[]", "", "catalogue index of each parameter looked at; none under ZeroRedundancyOptimizer"),
    Column("digest", "int64[]", "", "per key, per parameter: exact fingerprint (stage end, above 2,040 elements: of the step's window), "
           "or a number's float64 bits; -1 without this state, 0 present and not looked at"),
), "one row per optimizer before and after each watched update")  # fmt: skip

LOADED = Table("optim_loaded", (
    Column("optimizer", "int32", "", "optimizer of this process, see optim"),
    Column("entries", "int32", "", "parameters for which it has state then"),
    Column("class_name", "text", "", "its class"),
), "one row per load_state_dict of an optimizer, at the step in progress")  # fmt: skip

TABLES = (OPTIM_STATE, LOADED)

ABSENT, PRESENT = -1, 0
SENTINELS = 2  # small parameters whose state is looked at before and after each watched update
IN_TURN = 4  # others after it: what is done to state is done to many tensors, and it shows in the parameters
WHOLE_STARTS = 2  # before the first update there is no state yet, unless it was loaded
LOAD_WATCH_PAUSE = 20  # close watches after loads may take a twentieth of the steps: some programs load at every step


def install(emit: Emit) -> Undo:
    agent = emit.agent
    catalogue = agent.catalogue
    on_device = fingerprint.DeviceSweep()
    whole_left: dict[int, int] = {}  # optimizer -> whole sweeps that are still due before its next updates
    began: dict[int, int] = {}  # optimizer -> step whose first update has been seen
    held: dict[int, Held] = {}  # optimizer -> its parameters
    known = [-1]  # catalogue generation that `held` is made from
    ended = [0]
    watched_from = [0]  # step of the last load that began a close watch

    def refresh() -> None:
        catalogue.refresh()
        if known[0] != catalogue.generation:
            known[0] = catalogue.generation
            held.clear()
            for number in catalogue.optimizers():
                held[number] = Held([e for e in catalogue.params if e.optimizer == number])

    def before_update(optimizer: Any, number: int) -> None:
        step = agent.window.step
        if (step > 1 and not agent.watching) or began.get(number) == step:
            return
        began[number] = step
        refresh()
        if torchprivate.spreads_state(optimizer):
            if step == 1:
                emit(OPTIM_STATE, (number, catalogue.generation), ("start", "", [], []), step=step)
            held[number] = NONE
            return
        left = whole_left.get(number, WHOLE_STARTS)
        if left:
            whole_left[number] = left - 1
            sweep(optimizer, number, "start", step, held.get(number, NONE).all, None)
        else:
            sweep(optimizer, number, "start", step, held.get(number, NONE).sentinels, None)

    def step_end() -> None:
        if agent.watching:
            refresh()
            for number, optimizer in catalogue.optimizers().items():
                step = agent.window.step
                sweep(optimizer, number, "end", step, held.get(number, NONE).turn(step), step)

    def ending() -> None:
        step = agent.window.step - 1
        if step > ended[0]:
            ended[0] = step
            for number, optimizer in catalogue.optimizers().items():
                if number in held and known[0] == catalogue.generation:  # a new catalogue is no longer written down
                    sweep(optimizer, number, "final", step, held[number].shared, None)

    def sweep(optimizer: Any, number: int, stage: str, step: int, entries: list[Entry], part: int | None) -> None:
        if not entries:
            return
        indices = [e.index for e in entries]
        keys: dict[str, list[Any]] = {}
        for at, e in enumerate(entries):
            p = e.ref()
            for key, value in (optimizer.state.get(p) or {}).items() if p is not None else ():
                if isinstance(value, (int, float)) or readable(value, e):
                    keys.setdefault(str(key), [None] * len(entries))[at] = value
        head = (number, catalogue.generation)
        marks = {key: [ABSENT if v is None else PRESENT for v in values] for key, values in keys.items()}
        places, tensors, numbers = sorted_out(keys, entries)
        counted = {key for key, _, _ in numbers} - {key for key, _ in places}
        kinds = {key: "number" if key in counted else "digest" for key in keys}
        names = json.dumps(kinds) if kinds else ""

        def landed(read: list[Any]) -> None:
            for (key, chosen, _), values in zip(numbers, read, strict=False):
                for at, value in zip(chosen, values, strict=True):
                    marks[key][at] = bits(value)
            found = digests if on_host else read[-1]
            for (key, at), digest in zip(places, found, strict=True):
                marks[key][at] = digest
            emit(
                OPTIM_STATE, head, (stage, names, indices, [m for digest in marks.values() for m in digest]), step=step
            )

        on_host = not any(t.is_cuda for t in tensors)
        digests = fingerprint.sweep_cpu(tensors, part)[0] if on_host else []
        wanted = [together(values) for _, _, values in numbers]
        if not on_host:
            wanted.append(on_device.digests(tensors, part))
        agent.landing.land(wanted, landed)

    def sorted_out(keys: dict[str, list[Any]], entries: list[Entry]) -> tuple[list[Any], list[Any], list[Any]]:
        """What is to be fingerprinted, as (key, place) and tensors; what is read as numbers, as (key, places, values)."""
        places, tensors, numbers = [], [], []
        comparable = [at for at, e in enumerate(entries) if shared(e)]
        for key, values in keys.items():
            chosen = [at for at in comparable if values[at] is not None]
            counts = [at for at in chosen if is_number(values[at], entries[at])]
            if counts:
                numbers.append((key, counts, [values[at] for at in counts]))
            rest = chosen if not counts else [at for at in chosen if at not in counts]
            places += [(key, at) for at in rest]
            tensors += [torchprivate.local_shard(values[at]) for at in rest]
        return places, tensors, numbers

    def together(values: list[Any]) -> Any:
        """Numbers, in tensors of one element or not, as one float64 vector where they are."""
        torch = agent.torch
        if all(hasattr(v, "is_cuda") for v in values) and len({(v.dtype, v.device) for v in values}) == 1:
            return torchprivate.flatten([v.detach() for v in values]).double()
        on_device = next((v.device for v in values if getattr(v, "is_cuda", False)), None)
        if on_device is None:
            return torch.tensor([float(v) for v in values], dtype=torch.float64)
        return torch.stack([torch.as_tensor(v, dtype=torch.float64).reshape(()).to(on_device, non_blocking=True)
                            for v in values])  # fmt: skip

    def loaded(optimizer: Any) -> None:
        step = agent.window.step
        number = catalogue.add_optimizer(optimizer)
        entries = sum(1 for state in optimizer.state.values() if state)
        emit(LOADED, (number, entries), (type(optimizer).__name__,))
        whole_left[number] = max(1, whole_left.get(number, WHOLE_STARTS))
        pause = LOAD_WATCH_PAUSE * agent.governor.watch_steps
        if step > 1 and (not watched_from[0] or step - watched_from[0] >= pause):
            watched_from[0] = step
            agent.watch_again()

    def load_state_dict(original: Any) -> Any:
        def load_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(optimizer, *args, **kwargs)
            emit.guarded(loaded, optimizer)
            return result

        return load_state_dict

    emit.on("before_update", before_update)
    emit.on("step_end", step_end)
    emit.on("ending", ending)
    emit.on("close", ending)
    optim = __import__("torch.optim.optimizer", fromlist=["optimizer"])
    restore = replace(optim.Optimizer, "load_state_dict", load_state_dict)

    def undo() -> None:
        restore()
        on_device.clear()

    return undo


class Held:
    """The parameters of one optimizer and which of them a sweep looks at; the same on all ranks that hold the same."""

    def __init__(self, entries: list[Entry]) -> None:
        self.all = entries
        self.shared = [e for e in entries if shared(e)]
        small = [e for e in self.shared if e.numel <= fingerprint.WINDOW_ELEMENTS]
        self.sentinels = small[-SENTINELS:]
        chosen = {e.index for e in self.sentinels}
        self._others = [e for e in self.shared if e.index not in chosen]

    def turn(self, step: int) -> list[Entry]:
        """The sentinels and the others whose turn it is: a function of the step alone."""
        others = len(self._others)
        # watched steps are multiples of a power of two: an odd number of turns lets them come round to each
        turns = -(-others // IN_TURN) | 1
        start = max(min(step % turns * IN_TURN, others - IN_TURN), 0)
        return sorted(self.sentinels + self._others[start : start + IN_TURN], key=lambda e: e.index)


NONE = Held([])


def shared(entry: Entry) -> bool:
    """Whether another rank holds the same, so that there is somebody to compare with."""
    return "," in entry.peers and entry.sharing != "hook"


def readable(value: Any, entry: Entry) -> bool:
    """Whether this is a dense tensor whose memory is there."""
    if not hasattr(value, "is_cuda") or value.is_sparse or value.is_quantized or value.device.type == "meta":
        return False
    return entry.sharing in REPLICATED or torchprivate.readable(torchprivate.local_shard(value))


def is_number(value: Any, entry: Entry) -> bool:
    """Whether it is read as a number: a counter, not what goes with the only element of a parameter. Decided for each
    value by itself, so that it does not depend on which others a sweep looks at."""
    if not hasattr(value, "is_cuda"):
        return True
    single = value.numel() == 1 and (value.dim() == 0 or entry.numel > 1)
    return single and not value.is_complex()


def bits(value: float) -> int:
    """A number's float64 bits, as the signed integer that the column holds."""
    packed: Sequence[int] = struct.unpack("<q", struct.pack("<d", value))
    return packed[0]
