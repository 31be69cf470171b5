"""What run.json will say about the job, from torchrun's own parser or from another launcher's command."""

from __future__ import annotations

from torch.distributed.run import get_args_parser

from tdbg.launcher.job import Job, of_command, of_torchrun


def job(*argv: str, env: dict[str, str] | None = None) -> Job:
    return of_torchrun(get_args_parser().parse_args(list(argv)), argv, env or {}, "2.13")


def test_a_single_node_has_index_0_and_no_shared_id() -> None:
    j = job("--standalone", "--nproc-per-node", "auto", "--max-restarts", "2", "train.py", "--lr", "1")
    assert (j.node, j.nodes, j.shared_id, j.script) == (0, 1, "", "train.py")
    assert (j.nproc_per_node, j.max_restarts) == ("auto", 2)
    assert j.command[0] == "tdbg-run"


def test_static_nodes_take_torchruns_rank_and_share_an_id() -> None:
    zero = job("--nnodes", "2", "--node-rank", "0", "--master-addr", "h", "--master-port", "1", "t.py")
    one = job("--nnodes", "2", "--node-rank", "1", "--master-addr", "h", "--master-port", "1", "t.py")
    assert (zero.node, one.node) == (0, 1)
    assert zero.shared_id == one.shared_id != ""


def test_an_elastic_rendezvous_gives_the_id_and_the_scheduler_the_index() -> None:
    argv = ("--nnodes", "1:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1", "--rdzv-id", "exp", "t.py")
    j = job(*argv, env={"SLURM_NODEID": "3"})
    assert (j.nnodes, j.nodes, j.node, j.shared_id) == ("1:4", 4, 3, "exp")


def test_a_command_under_a_scheduler_shares_its_run_with_the_other_tasks() -> None:
    alone = of_command(["accelerate", "launch", "train.py"], {})
    assert (alone.script, alone.nodes, alone.shared_id) == ("train.py", 1, "")
    env = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "9", "SLURM_STEP_ID": "1"}
    task = of_command(["python", "train.py"], env)
    assert (task.nodes, task.node, task.shared_id) == (4, 2, "slurm-9-1")
