"""Gradients that the program itself hands to an all-reduce, between a backward and the optimizer's step (torch 2.14).

torch calls a process group's hooks before each collective, whoever issues it. Ours compares where tensors lie, and
nothing else: no value is read, and no tensor is held.
"""

from __future__ import annotations

import threading
from typing import Any

from . import guard, torchprivate
from .agent import Emit
from .catalogue import Entry

# Hooks of a group are told apart by numbers that each caller chooses; one number twice, and the later hook replaces the
# earlier. Torch's own count up from four letters read as a number, a user's from small ones: these are eight letters.
HOOK_ID = int.from_bytes(b"tdbghand", "big")
# No wrapper reduces these. ("late", "ignored": inside a DDP module, which leaves them out.)
UNREDUCED = ("plain", "outside", "late", "ignored")
# Threads that issue no collectives: those of loaders' pinned memory and worker queues, and of a progress bar.
_QUIET = ("_pin_memory_loop", "QueueFeederThread")

Place = tuple[int, int, int]


class HandReductions:
    """`watch()` when a backward has ended; `handed()` before the update. Between these the groups hold a hook."""

    def __init__(self, emit: Emit) -> None:
        self._emit, self._agent = emit, emit.agent
        self._groups: list[Any] = []
        self._open = False
        self._known: dict[Place, Entry] | None = None
        self._handed: dict[str, set[int]] = {}
        self._generation = 0

    def watch(self) -> None:
        """See what is handed over from now on, where torch can tell and a model is there that no wrapper reduces."""
        self.forget()
        agent = self._agent
        if self._groups or not any(e.sharing in UNREDUCED for e in agent.catalogue.params) or not alone():
            return
        for group in torchprivate.groups_with_hooks(agent.torch):
            guard.attempt(lambda e: None, self._register, group)  # a backend may refuse
        self._open = bool(self._groups)

    def _register(self, group: Any) -> None:
        agent, ranks = self._agent, ",".join(map(str, self._agent.torch.distributed.get_process_group_ranks(group)))

        def before_collective(args: Any) -> None:
            if self._open and threading.get_ident() == agent.thread:
                self._emit.guarded(self._see, ranks, args)

        group.register_pre_hook(HOOK_ID, before_collective)
        self._groups.append(group)

    def _see(self, ranks: str, args: Any) -> None:
        if args.name.name != "ALLREDUCE":
            return
        if self._known is None:
            self._known = self._places()
        for tensor in args.input_tensors:
            place = place_of(self._agent.torch, tensor)
            entry = self._known.get(place) if place is not None else None
            p = entry.ref() if entry is not None else None
            # a gradient that has been replaced since may have left its memory to some other tensor
            if entry is not None and p is not None and place_of(self._agent.torch, p.grad) == place:
                self._handed.setdefault(ranks, set()).add(entry.index)

    def _places(self) -> dict[Place, Entry]:
        catalogue, found = self._agent.catalogue, {}
        self._generation = catalogue.generation
        for entry in catalogue.params:
            p = entry.ref() if entry.sharing in UNREDUCED else None
            place = place_of(self._agent.torch, p.grad) if p is not None else None
            if place is not None:
                found[place] = entry
        return found

    def handed(self) -> list[tuple[int, str, list[int]]]:
        """Catalogue generation, ranks of the group and tensors of what was handed over since. Ends the watch."""
        found = [(self._generation, ranks, sorted(indices)) for ranks, indices in self._handed.items()]
        self.forget()
        return found

    def forget(self, ending: bool = False) -> None:
        """No hook stays, but where another thread may be in a group's hooks this moment: then until the next chance.

        `ending`: the groups end now, or the process does, and none may outlive the interpreter.
        """
        self._open, self._known = False, None
        self._handed.clear()
        if self._groups and (ending or alone()):
            while self._groups:
                guard.attempt(lambda e: None, self._groups.pop().unregister_pre_hook, HOOK_ID)


def alone() -> bool:
    """Whether no other thread can be issuing a collective: torch keeps a group's hooks in a map without a lock."""
    here = threading.get_ident()
    return all(
        t.ident == here or type(t).__name__ == "TMonitor" or any(q in t.name for q in _QUIET)
        for t in threading.enumerate()
    )


def place_of(torch: Any, tensor: Any) -> Place | None:
    """Where an ordinary dense tensor lies; None for any other, which may have no memory of its own."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.numel()
