"""What is to be run, in the words of run.json: from torchrun's parsed arguments or another launcher's command."""

from __future__ import annotations

import os
import socket
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from . import rundir

# (index, count) of this process among those that a scheduler started, for `srun tdbg-run --tdbg-exec -- …`
_TASKS = (("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


@dataclass(frozen=True)
class Job:
    """One launcher's part of a run. `node` is its index among `nodes`, `shared_id` the id that all arrive at."""

    command: list[str]
    script: str
    nnodes: str = "1"
    nproc_per_node: str = ""
    max_restarts: int = 0
    nodes: int = 1
    node: int = 0
    shared_id: str = ""  # "" for a single launcher: its id is new
    torch: str = ""


def of_torchrun(args: Namespace, argv: Sequence[str], env: Mapping[str, str], torch: str) -> Job:
    """`args` is what torchrun's parser made of the command line; what a release lacks there has torchrun's default."""
    nnodes = str(getattr(args, "nnodes", "1"))
    most = nnodes.split(":")[-1]
    nodes = int(most) if most.isdecimal() else 1
    fixed = getattr(args, "rdzv_backend", "static") == "static"
    node_rank = int(getattr(args, "node_rank", 0)) if fixed else None
    address = f"{getattr(args, 'master_addr', '')}:{getattr(args, 'master_port', '')}"
    endpoint = getattr(args, "rdzv_endpoint", "") or address
    script = str(args.training_script)
    return Job(
        command=["tdbg-run", *argv],
        script=script,
        nnodes=nnodes,
        nproc_per_node=str(getattr(args, "nproc_per_node", "")),
        max_restarts=int(getattr(args, "max_restarts", 0)),
        nodes=nodes,
        node=rundir.node_index(env, node_rank, nodes, f"{socket.gethostname()} {os.getpid()} {time.time_ns()}"),
        shared_id=rundir.shared_id(env, str(getattr(args, "rdzv_id", "")), endpoint, script) if nodes > 1 else "",
        torch=torch,
    )


def of_command(command: Sequence[str], env: Mapping[str, str]) -> Job:
    """A run under `--tdbg-exec`. Each task of a scheduler's step has its own launcher; its number is the node's."""
    script = next((c for c in command if c.endswith(".py")), command[0])
    for index, count in _TASKS:
        if env.get(index, "").isdecimal() and env.get(count, "1") not in ("", "1"):
            shared = rundir.shared_id(env, "", "", script)
            nodes = int(env[count]) if env[count].isdecimal() else 2
            return Job(list(command), script, nnodes=str(nodes), nodes=nodes, node=int(env[index]), shared_id=shared)
    return Job(list(command), script)
