"""Jobs that halt, and jobs that only seem to: what the run says, and that the job is left as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from kit.job import BIN, Job, job, run

TRAIN = """
import datetime, os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn

how, timeout_s = sys.argv[1], float(sys.argv[2])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
rank = dist.get_rank()
torch.manual_seed(7)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
own = torch.Generator().manual_seed(100 + rank)

def spin():
    os.write(1, b"spins\\n")
    while True:
        pass

def wait_for_file():
    os.write(1, f"pid {os.getpid()}\\n".encode())
    while not os.path.exists("never"):
        time.sleep(0.2)

for step in range(1, 31):
    if (how, rank, step) == ("file", 1, 12):
        wait_for_file()
    if (how, rank, step) == ("spin", 1, 12):
        spin()
    if how == "pause" and step == 12:
        time.sleep(8 if rank == 0 else 0)
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8, generator=own)).square().mean()
    loss.backward()
    optimizer.step()
    if step == 5:
        os.write(1, f"{rank} trains {os.getpid()}\\n".encode())
    if how == "train":
        time.sleep(0.5)
dist.destroy_process_group()
os.write(1, f"{rank} {loss.item().hex()}\\n".encode())
"""


def program(how: str, timeout_s: float, stall_s: float = 4.0, ranks: int = 3):  # type: ignore[no-untyped-def]
    env = {"TDBG_STALL_SECONDS": str(stall_s)}
    return job(TRAIN, ranks=ranks, arguments=[how, str(timeout_s)], env=env)


def test_a_wait_that_torchs_own_timeout_ends_names_the_rank_that_did_not_come(tmp_path: Path) -> None:
    ended = run(tmp_path, program("file", 8.0, stall_s=60.0))
    assert ended.code == 1
    (found,) = ended.found("HANG")
    assert (found["ranks"], found["first_step"], found["severity"]) == ([1], 12, "critical"), ended
    assert "wait_for_file" in found["summary"]
    assert {i["severity"] for i in ended.found("RANK_FAILED")} <= {"warning"}


def test_a_rank_that_spins_is_named_with_its_place_while_the_job_hangs(tmp_path: Path) -> None:
    running = Job(tmp_path / "job", program("spin", 600.0, stall_s=3.0))
    try:
        running.until(lambda out: "spins" in out)
        deadline = time.monotonic() + 120
        while not (found := _hangs(running)) and time.monotonic() < deadline:
            time.sleep(1.0)
    finally:
        running.kill()
        running.finish()
    assert [(f["ranks"], f["first_step"], f["severity"]) for f in found] == [([1], 12, "warning")]
    assert "rank 1 is running, not blocked, and did not arrive: job.py:" in found[0]["summary"]
    assert "ranks 0, 2 have issued all_reduce" in found[0]["summary"]
    assert "rank 1 has not" in found[0]["summary"]


def _hangs(running: Job) -> list[dict[str, Any]]:
    (folder,) = running.store.iterdir()
    said = subprocess.run([str(BIN / "tdbg"), "verdicts", "--json", str(folder)], capture_output=True, text=True)
    return [i for i in json.loads(said.stdout)["incidents"] if i["reason_code"] == "HANG"]


def test_a_job_that_is_stopped_in_mid_training_hangs_nowhere(tmp_path: Path) -> None:
    def stop(running: Job) -> None:
        running.until(lambda out: out.count("trains") == 3)
        running.process.send_signal(signal.SIGTERM)

    ended = run(tmp_path, program("train", 600.0), act=stop)
    assert ended.verdict["status"] == "killed"
    assert ended.alarms == []
    assert ended.rows("SELECT count(*) FROM stall WHERE event = 'stopping'")[0][0] == 3


def test_a_pause_that_ends_is_no_hang_and_changes_no_number(tmp_path: Path) -> None:
    plain, ended = (run(tmp_path, program("pause", 600.0), recorded=r) for r in (False, True))
    losses = [[line for line in e.lines if "trains" not in line] for e in (plain, ended)]
    assert ended.code == plain.code == 0
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert ended.found("HANG") == []


def test_a_rank_stopped_by_a_signal_is_named_and_may_go_on(tmp_path: Path) -> None:
    frozen: list[int] = []

    def freeze(running: Job) -> None:
        out = running.until(lambda out: out.count("trains") == 3)
        frozen.append(next(int(line.split()[2]) for line in out.splitlines() if line.startswith("2 trains")))
        os.kill(frozen[0], signal.SIGSTOP)
        deadline = time.monotonic() + 120
        while _stacks(running) < 3 and time.monotonic() < deadline:
            time.sleep(0.2)
        os.kill(frozen[0], signal.SIGCONT)

    ended = run(tmp_path, program("train", 600.0), act=freeze)
    assert ended.code == 0, ended
    assert ended.found("HANG") == []
    states = dict(ended.rows("SELECT rank, any_value(state) FROM stall WHERE event = 'stall' GROUP BY rank"))
    assert states[2] == "T"


def _stacks(running: Job) -> int:
    (path,) = running.store.glob("*/records/rank-00000.*/stacks")
    return path.read_text().count("most recent call first")
