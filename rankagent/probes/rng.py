"""Seeds and digests of the random streams of torch, numpy and python.

Writes    rng, seed
Costs     50 us at watched steps; one row per seeding call
Blind to  generators that user code makes for itself; seeding through C
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

from ..afterimport import when
from ..agent import Emit
from ..patch import Undo, replace, undo_all
from ..streams import numpy_digest, python_digest, seedings, torch_digest
from ..tables import Column, Table

RNG = Table("rng", (
    Column("torch_digest", "int64", "", "digest of torch's CPU generator state"),
    Column("numpy_digest", "int64", "", "digest of numpy's global generator state; 0 when numpy.random is not loaded"),
    Column("python_digest", "int64", "", "digest of random's state; 0 when not loaded"),
    Column("torch_seed", "int64", "", "initial_seed of torch's CPU generator (wrapped to 64 bits, signed)"),
    Column("torch_seeded", "bool", "", "somebody seeded it: the seed is not the library's default"),
    Column("numpy_seeded", "bool", "", "a seeding call was seen"),
    Column("python_seeded", "bool", "", "a seeding call was seen"),
    Column("numpy_seed", "text", "", "last seed given to numpy.random.seed; empty for none"),
    Column("python_seed", "text", "", "last seed given to random.seed; empty for none"),
    Column("moved", "text", "", "which stream was drawn from in which phase of this step, e.g. 'torch:data, torch:forward'; "
           "data ends where the root forward begins, forward holds both where no wrapper tells; "
           "empty: from none, or not looked at (steps 2 to 4 are)"),
    Column("cuda_seed", "int64", "", "initial_seed of the current CUDA device's generator; 0 without CUDA"),
), "at the end of the first 4 steps and of every 4th watched one; one with step 0 before the first update")  # fmt: skip

SEED = Table("seed", (
    Column("library", "text", "", "torch, torch.cuda, numpy or random"),
    Column("call", "text", "", "function called"),
    Column("seed", "text", "", "seed given; empty when drawn from the system"),
    Column("where", "text", "", "file:line of the caller outside torch, numpy and this agent"),
), "one row per seeding call in the rank's main process, at most 1,000 an attempt")  # fmt: skip

TABLES = (RNG, SEED)


FIRST_STEPS, EVERY_STEPS = 4, 4  # streams that part stay apart: after the first steps every 4th shows them
SEED_CALLS_LIMIT = 1000
NAMES = ("torch", "numpy", "random")


def install(emit: Emit) -> Undo:
    agent = emit.agent
    last: dict[str, str] = {}
    calls = [0]
    unseeded = emit.agent.torch.default_generator.initial_seed()  # torch draws it at import, anew in each process
    inside: list[bool] = []

    def seeded(library: str, call: str, seed: Any) -> None:
        last[library] = "" if seed is None else str(seed)[:200]
        calls[0] += 1
        if calls[0] <= SEED_CALLS_LIMIT:
            emit(SEED, (), (library, call, last[library], caller()))

    def watch(library: str, owner: Any, name: str) -> Undo:
        def make(original: Any) -> Any:
            def seed(*args: Any, **kwargs: Any) -> Any:
                inside.append(True)  # torch.manual_seed seeds the devices through their own functions
                try:
                    result = original(*args, **kwargs)
                finally:
                    inside.pop()
                if inside:
                    return result
                seedings[library] += 1  # in a forked worker too, where nothing is emitted
                given = args[0] if args else next(iter(kwargs.values()), None)
                emit.guarded(seeded, library, name, result if name == "seed" and library == "torch" else given)
                return result

            return seed

        return replace(owner, name, make)

    def states() -> tuple[int, int, int]:
        return torch_digest(agent.torch), numpy_digest(), python_digest()

    def reached(phase: str) -> None:
        """This phase of the step is over: what moved since the last look was drawn from in it."""
        if not known:
            return
        now = states()
        moves.update({f"{name}:{phase}": None for name, a, b in zip(NAMES, known, now, strict=True) if a != b})
        known[:] = now

    def streams(step: int) -> None:
        torch = agent.torch
        generator = torch.default_generator
        initial = generator.initial_seed()
        cuda = torch.cuda.initial_seed() if torch.cuda.is_initialized() else 0
        emit(RNG, (*states(), signed(initial),
                   initial != unseeded or "torch" in last, "numpy" in last, "random" in last, signed(cuda)),
             (last.get("numpy", ""), last.get("random", ""), ", ".join(moves)), step=step)  # fmt: skip

    first = [True]

    known: list[int] = []  # states at the last look; empty outside of the steps that are looked at closely
    moves: dict[str, None] = {}

    def before_update(optimizer: Any, number: int) -> None:
        reached("backward")
        if first[0]:
            first[0] = False
            streams(0)

    def step_end() -> None:
        step = agent.window.step
        reached("optimizer")
        if agent.watching and (step <= FIRST_STEPS or step % EVERY_STEPS == 0):
            streams(step)
        moves.clear()
        known[:] = states() if agent.watching and step < FIRST_STEPS else ()

    torch = agent.torch
    undos = [
        watch("torch", torch, "manual_seed"), watch("torch", torch.random, "manual_seed"),
        watch("torch", torch, "seed"), watch("torch", torch.random, "seed"),
        watch("torch.cuda", torch.cuda, "manual_seed"), watch("torch.cuda", torch.cuda, "manual_seed_all"),
        watch("random", random, "seed"),
    ]  # fmt: skip

    def numpy_came(module: Any) -> None:
        undos.append(watch("numpy", module, "seed"))

    when("numpy.random", lambda module: emit.guarded(numpy_came, module))
    emit.on("before_update", before_update)
    emit.on("forward_begin", lambda module, args, kwargs: reached("data"))
    emit.on("backward_begin", lambda root: reached("forward"))
    emit.on("step_end", step_end)
    return undo_all(undos)


def signed(number: int) -> int:
    """An unsigned 64-bit seed as the signed number that a table holds."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def caller() -> str:
    """file:line of the nearest frame outside torch, numpy and this agent; empty when there is none."""
    frame = sys._getframe(1)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(here) and f"{os.sep}torch{os.sep}" not in path and f"{os.sep}numpy{os.sep}" not in path:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
