"""Two launchers of one job, each with a folder of its own, as on two machines without a shared disk."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path
from typing import Any

from kit.job import TDBG_RUN, environment
from tdbg.aggregator.cli import main

TRAIN = """
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 21):
    if step == 12 and dist.get_rank() == 1:
        with torch.no_grad():
            model.module.bias += 1
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_the_merged_folders_of_two_nodes_give_the_verdict_of_the_whole_job(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launchers = [
        subprocess.Popen(
            [TDBG_RUN, "--tdbg-dir", str(tmp_path / f"node-{n}"), "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id",
             "job-17", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "train.py"],
            cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for n in (0, 1)
    ]  # fmt: skip
    errors = [launcher.communicate(timeout=150)[1] for launcher in launchers]
    folders = [str(tmp_path / f"node-{n}" / "job-17") for n in (0, 1)]
    assert main(["merge", *folders, "-o", str(tmp_path / "merged"), "--json"]) == 0, errors
    said = json.loads(capsys.readouterr().out)
    assert (said["ranks"], said["missing_nodes"], len(said["nodes"])) == ([0, 1], 0, 2)
    assert main(["verdicts", str(tmp_path / "merged"), "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["data_quality"]["complete"], judged["data_quality"]
    found = next(i for i in judged["incidents"] if i["reason_code"] == "PARAM_DESYNC")
    assert (found["ranks"], found["first_step"], found["severity"]) == ([0, 1], 12, "critical")
