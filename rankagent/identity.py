"""Which process is this: a rank's main process, or a child of one.

The first process that has a rank in its environment and imports torch claims it by writing its pid to a variable that
its children inherit. A process that finds another pid there is a loader worker, a fork server or the like.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from . import contract

# (rank, world size, local rank) variables of torchrun, Open MPI, PMI and Slurm, first match wins
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


@dataclass(frozen=True)
class Role:
    """A rank's main process. `world_size` and `local_rank` are -1 where the launcher does not say."""

    rank: int
    world_size: int
    local_rank: int
    attempt: int
    node: int
    run: str


def claim(environment: MutableMapping[str, str], pid: int) -> Role | None:
    """The role of process `pid`, None when it is not a rank's main process. Writes the claim into `environment`."""
    run = environment.get(contract.RUN_DIR, "")
    if not run or environment.get(contract.OFF):
        return None
    holder = environment.get(contract.CLAIM)
    if holder and holder != str(pid):
        return None
    for names in _LAUNCHERS:
        if environment.get(names[0], "").isdigit():
            rank, world, local = (_number(environment.get(n), -1) for n in names)
            environment[contract.CLAIM] = str(pid)
            attempt = _number(environment.get("TORCHELASTIC_RESTART_COUNT"), 0)
            return Role(rank, world, local, attempt, _number(environment.get(contract.NODE), 0), run)
    return None


def _number(text: str | None, default: int) -> int:
    return int(text) if text and text.isdigit() else default


def current() -> Role | None:
    """The role of this process."""
    return claim(os.environ, os.getpid())


def parents_folder(environment: Mapping[str, str]) -> Path | None:
    """Record folder of the rank that this process is a child of; None when it is no such child."""
    holder = environment.get(contract.CLAIM, "")
    run = environment.get(contract.RUN_DIR, "")
    if not run or environment.get(contract.OFF) or not holder.isdigit() or int(holder) == os.getpid():
        return None
    for names in _LAUNCHERS:
        if environment.get(names[0], "").isdigit():
            attempt = _number(environment.get("TORCHELASTIC_RESTART_COUNT"), 0)
            return contract.process_dir(run, "rank", int(environment[names[0]]), attempt, int(holder))
    return None
