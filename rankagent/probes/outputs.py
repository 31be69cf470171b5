"""Modules whose output is the same for every sample: looked for a few times early on, then followed while it lasts.

Writes    output, constant
Costs     nothing in most steps: no hook is installed then. A search (three, within the first 32 steps of a model) takes
          20 to 50 us a module; where it finds constant outputs, those alone are looked at again at each watched step
Blind to  programs in which torch.compile has compiled anything; FSDP; modules on raw inputs, whose gradient nobody asks
          for; inputs given by keyword; tensor subclasses; forwards that are recomputed; more than 16 such modules;
          modules that become constant after the last search
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from .. import constancy, torchprivate
from ..agent import Emit, StepInfo
from ..catalogue import Entry, clean
from ..patch import Undo
from ..tables import Column, Table

OUTPUT = Table("output", (
    Column("generation", "int32", "", "tensor catalogue of that step"),
    Column("modules", "int32", "", "modules whose outputs were looked at"),
    Column("alike", "int32", "", "of them, those whose first and last sample were equal in every call"),
), "one row per search")  # fmt: skip

CONSTANT = Table("constant", (
    Column("generation", "int32", "", "tensor catalogue that the tensors refer to"),
    Column("model", "int32", "", "model of this process, see tensor"),
    Column("calls", "int32", "", "forward calls with autograd on that were looked at, all before the step's first backward"),
    Column("same", "bool", "", "in each of them all samples of the output were equal"),
    Column("equal", "bool", "", "all elements were"),
    Column("zero", "bool", "", "all elements were 0"),
    Column("ones", "bool", "", "all elements were 1"),
    Column("fed_same", "bool", "", "in each of them all samples of the input were equal too"),
    Column("witness_same", "int32", "", "1 where the layer next below the input gave equal samples too, 0 where it did not, -1 not looked at"),
    Column("searched", "int64", "", "step of the last search before this one in which its output varied; 0 for none"),
    Column("module", "text", "", "name within its model"),
    Column("module_type", "text", "", "its class"),
    Column("op", "text", "", "operation that gave the output its values, e.g. relu"),
    Column("fed_by", "text", "", "operation that gave the input its values"),
    Column("witness", "text", "", "the layer next below the input; empty where that is not constant"),
    Column("tensors", "int64[]", "", "catalogue indices of the weights next below the output, of fed_same those next below the input"),
), "one row per module and look: those that gave the same output for every sample in a search, until they do not; "
   "modules on constant inputs only where the layer next below gives them a reason")  # fmt: skip

TABLES = (OUTPUT, CONSTANT)
SEARCHES = (1, 7, 31)  # steps after the first of a catalogue: most units that die do so in the first large updates
MOST = 16  # modules that are followed: behind a constant one there may be many
CALLS = 8  # of one module in one look


@dataclass
class Watched:
    """A module in one look: flags of its calls' outputs and, of those on inputs that training made, of the inputs."""

    name: str
    model: int
    ref: weakref.ReferenceType[Any]
    calls: int = 0
    outputs: list[list[Any]] = field(default_factory=list)
    inputs: list[list[Any]] = field(default_factory=list)

    @property
    def judged(self) -> bool:
        """It was called, and all of its calls were looked at."""
        return 0 < self.calls <= CALLS and len(self.outputs) == self.calls


@dataclass
class Suspect:
    """A module whose outputs were alike, and what was learnt of its place in the graph at the first look."""

    name: str
    model: int
    searched: int
    learnt: bool = False
    written: bool = False
    connected: bool = False  # its output depends on its input
    op: str = ""
    fed_by: str = ""
    witness: str = ""
    weights: list[int] = field(default_factory=list)  # next below its output
    weights_below: list[int] = field(default_factory=list)  # next below its input


def install(emit: Emit) -> Undo:
    agent = emit.agent
    torch, catalogue = agent.torch, agent.catalogue
    compiling = getattr(torch.compiler, "is_compiling", lambda: False)
    hooking = torch.nn.modules.module
    generation = [0]  # that is searched
    left: list[int] = []  # steps of the searches to come
    varied: dict[tuple[int, str], int] = {}  # last search in which a module's outputs varied
    suspects: dict[tuple[int, str], Suspect] = {}  # in the order in which their forwards return
    look: dict[int, Watched] = {}  # of the look in progress, by the module's id
    order: list[Watched] = []  # of them those that were called
    got: dict[int, list[Any]] = {}  # inputs of calls that have not returned: (flag, operation), None for no such input
    handles: list[Any] = []
    searching = [False]

    def step_closed(info: StepInfo) -> None:
        close()
        if catalogue.generation != generation[0] and catalogue.params:
            generation[0] = catalogue.generation
            left[:] = [info.step + n for n in SEARCHES]
            suspects.clear()
            varied.clear()
        step = info.step + 1
        due = bool(left) and step >= left[0]
        if not (due or suspects) or not agent.governor.watched(step):
            return
        tops = [top for top in catalogue.tops() if top is not None]
        if torchprivate.has_compiled(tops) or any(e.sharing in ("sharded", "outside") for e in catalogue.params):
            left.clear()
            suspects.clear()
            return
        while left and step >= left[0]:
            left.pop(0)
        begin(due)

    def begin(search: bool) -> None:
        searching[0] = search
        wanted = {(s.model, name) for s in suspects.values() for name in (s.name, s.witness) if name}
        for number, top in enumerate(catalogue.tops()):
            for name, module in () if top is None else top.named_modules():
                name = clean(name)
                if (search or (number, name) in wanted) and not isinstance(module, torch.jit.ScriptModule):
                    look[id(module)] = Watched(name, number, weakref.ref(module))
        # not on the modules themselves: there they would be copied and pickled with the model
        if not search:
            handles.append(hooking.register_module_forward_pre_hook(before))
        handles.append(hooking.register_module_forward_hook(after))

    # -------------------------------------------------------- in the forward

    def before(module: Any, args: Any) -> None:
        if not compiling() and (w := look.get(id(module))) is not None and w.ref() is module:
            emit.guarded(note_input, id(module), args)

    def after(module: Any, args: Any, output: Any) -> None:
        if not compiling() and (w := look.get(id(module))) is not None and w.ref() is module:
            emit.guarded(note_output, id(module), w, output)

    def quiet() -> bool:
        return (threading.get_ident() == agent.thread and agent.phase != "backward" and torch.is_grad_enabled()
                and torchprivate.ordinary_forward(torch))  # fmt: skip

    def note_input(key: int, args: Any) -> None:
        x = constancy.first_tensor(args, torch) if quiet() else None
        with torch.no_grad(), torch._C.DisableTorchFunction():
            got.setdefault(key, []).append(None if x is None else ([constancy.same(x.detach())], x.grad_fn))

    def note_output(key: int, w: Watched, output: Any) -> None:
        x = constancy.first_tensor(output, torch) if quiet() else None
        stack = got.get(key)
        given = stack.pop() if stack else None
        if x is None:
            return
        if not w.calls:
            order.append(w)
        w.calls += 1
        if w.calls > CALLS:
            return
        with torch.no_grad(), torch._C.DisableTorchFunction():
            w.outputs.append([constancy.ends_alike(x.detach())] if searching[0] else constancy.flags(x.detach()))
        if given is not None:
            w.inputs.append(given[0])
            suspect = suspects.get((w.model, w.name))
            if suspect is not None and not suspect.learnt:
                learn(suspect, x.grad_fn, given[1])

    def learn(suspect: Suspect, node: Any, below: Any) -> None:
        suspect.learnt = True
        suspect.op, suspect.fed_by = constancy.giver(node), constancy.giver(below)
        suspect.connected = constancy.reaches(node, below)
        suspect.weights = [e.index for e in held(node)]
        layers = [e for e in held(below) if e.model == suspect.model]
        suspect.weights_below = [e.index for e in layers]
        suspect.witness = layers[0].name.rpartition(".")[0] if layers else ""

    def held(node: Any) -> list[Entry]:
        """The weights next below that an optimizer holds; none where it does not hold them all."""
        found = [catalogue.entry(p) for p in constancy.nearest_weights(node)]
        return [e for e in found if e is not None and e.optimizer >= 0] if None not in found else []

    # -------------------------------------------------------- what was seen

    def close(root: Any = None) -> None:
        """The step's first backward begins, or the step is over: no hook is left, and what was asked is read."""
        while handles:
            handles.pop().remove()
        judged = [w for w in order if w.judged]
        asked = [flag for w in judged for call in (*w.outputs, *w.inputs) for flag in call]
        step, number, search = agent.window.step, generation[0], searching[0]
        look.clear()
        order.clear()
        got.clear()
        if not asked:
            return

        def landed(read: list[Any]) -> None:
            answers = iter(read[0])
            for w in judged:
                w.outputs = [[next(answers) for _ in call] for call in w.outputs]
                w.inputs = [[next(answers) for _ in call] for call in w.inputs]
            if number == generation[0]:
                (searched if search else followed)(judged, step)

        # by now outside every mode of the forward, on whatever device
        with torch.no_grad(), torch._C.DisableTorchFunction():
            agent.landing.land([torch.stack([f.to(asked[0].device, non_blocking=True) for f in asked])], landed)

    def searched(judged: list[Watched], step: int) -> None:
        alike = [w for w in judged if all(call[0] for call in w.outputs)]
        emit(OUTPUT, (generation[0], len(judged), len(alike)), step=step)
        for w in alike[: MOST - len(suspects)]:
            key = (w.model, w.name)
            suspects.setdefault(key, Suspect(w.name, w.model, varied.get(key, 0)))
        for w in judged:
            if not all(call[0] for call in w.outputs):
                varied[w.model, w.name] = step

    def followed(judged: list[Watched], step: int) -> None:
        seen = {(w.model, w.name): w for w in judged}
        for key, suspect in list(suspects.items()):
            w = seen.get(key)
            if w is None:
                continue
            known = suspect.written
            if not suspect.learnt or len(w.inputs) != w.calls:
                del suspects[key]
                continue
            same, equal, zero, ones = (all(call[i] for call in w.outputs) for i in range(4))
            fed = all(call[0] for call in w.inputs)
            layer = seen.get((suspect.model, suspect.witness))
            below = -1 if layer is None else int(all(call[0] for call in layer.outputs))
            # on constant inputs it says nothing of itself: it is kept where a layer below varies and is looked at next
            reason = not below or (below < 0 and not known and suspect.witness) if fed else suspect.connected
            if not same or not reason:
                del suspects[key]
            if known or (same and reason):
                suspect.written = True
                module = w.ref()
                emit(CONSTANT, (generation[0], w.model, w.calls, same, equal, zero, ones, fed, below, suspect.searched),
                     (w.name, type(module).__name__ if module is not None else "", suspect.op, suspect.fed_by,
                      suspect.witness if fed else "", suspect.weights_below if fed else suspect.weights), step=step)  # fmt: skip

    emit.on("step_closed", step_closed)
    emit.on("backward_begin", close)
    emit.on("ending", close)
    emit.on("close", close)
    return close
