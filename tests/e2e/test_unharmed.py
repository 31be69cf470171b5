"""Training under `tdbg-run` beside the same under `torchrun`: bit for bit the same, however it is started or ends.

Each job prints its losses as hex, a digest of its final parameters and of its random streams; stdout and the exit
code must be equal. Some variants share a job, so that the whole file stays short.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from kit.job import Ended, Job, Spec, both, job

COMMON = """
import contextlib, hashlib, json, os, random, signal, sys, time
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

rank = int(os.environ["RANK"])
DDP = nn.parallel.DistributedDataParallel

def say(*words):
    os.write(1, (" ".join(map(str, (rank, *words))) + "\\n").encode())  # one write, so lines of two ranks never mix

def net():
    torch.manual_seed(7), np.random.seed(7 + rank), random.seed(7 + rank)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))

def batch(step):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))

def digest(*parts):
    h = hashlib.sha256()
    for part in parts:
        h.update(part if isinstance(part, bytes) else repr(part).encode())
    return h.hexdigest()[:16]

def finish(model, name=""):
    say(name, "parameters", digest(*(p.detach().numpy().tobytes() for p in model.parameters())))
    _, keys, at, *_ = np.random.get_state()
    streams = torch.get_rng_state().numpy().tobytes(), keys.tobytes(), at, random.getstate()
    say(name, "streams", digest(*streams))
"""

VARIANTS = (
    COMMON
    + """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.checkpoint import checkpoint

class Branches(nn.Module):
    \"\"\"One of two layers is used, in turn: what find_unused_parameters is for.\"\"\"
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.a, self.b, self.out, self.calls = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 1), 0
    def forward(self, x):
        self.calls += 1
        return self.out((self.a if self.calls % 2 else self.b)(x).tanh())

class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()
    def forward(self, x):
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)

def variant(name):
    options = {
        "static": {"static_graph": True}, "recomputed": {"static_graph": True}, "buckets": {"bucket_cap_mb": 0.001},
        "branches": {"find_unused_parameters": True}, "views": {"gradient_as_bucket_view": True},
    }.get(name, {})
    model = DDP({"branches": Branches, "recomputed": Recomputed}.get(name, net)(), **options)
    torch.manual_seed(rank)
    if name == "lbfgs":
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=name in ("scaler", "overflow"))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if name == "hook first":
        model.register_comm_hook(None, fp16_compress_hook)
    compute = lambda x: model(x).square().mean()
    if name == "compiled":
        def whole(x):
            optimizer.zero_grad()
            loss = compute(x)
            loss.backward()
            optimizer.step()
            return loss
        whole = torch.compile(whole, backend="eager")
    for step in range(5):
        if name == "hook later" and step == 1:
            model.register_comm_hook(None, fp16_compress_hook)
        if name == "compiled":
            loss = whole(batch(step))
        elif name == "lbfgs":
            def closure():
                optimizer.zero_grad()
                loss = compute(batch(step))
                loss.backward()
                return loss
            loss = optimizer.step(closure)
        elif name == "no_sync":
            optimizer.zero_grad()
            for micro in range(3):
                with model.no_sync() if micro < 2 else contextlib.nullcontext():
                    loss = compute(batch(10 * step + micro)) / 3
                    loss.backward()
            optimizer.step()
        else:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=scaler.is_enabled()):
                loss = compute(batch(step))
            if name == "overflow" and step == 2:
                loss = loss * 1e30
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            say(name, "norm", norm.item().hex(), scaler.get_scale())
        if name != "overflow":
            schedule.step()
        say(name, step, loss.item().hex())
    finish(model, name)

dist.init_process_group("gloo")
for name in ("compiled", "plain", "static", "views", "buckets", "branches", "recomputed", "lbfgs", "scaler", "overflow",
             "no_sync", "hook first", "hook later"):
    variant(name)
    if name == "compiled":
        from torch._dynamo.utils import counters
        with open(f"dynamo-{rank}", "w") as out:
            json.dump({key: sum(counters[key].values()) for key in ("graph_break", "frames")}, out)
dist.destroy_process_group()
"""
)

ENDS = (
    COMMON
    + """
what, attempt = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"]
# a file of its own for each attempt: in torchrun's store a second attempt may find the addresses of the first
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet-{attempt}", rank=rank, world_size=2)
model = DDP(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
while True:
    step += 1
    optimizer.zero_grad()
    loss = model(batch(step)).square().mean()
    loss.backward()
    optimizer.step()
    if step <= 3:
        say(step, loss.item().hex())
    if step == 3:
        dist.barrier()  # what both ranks have said so far is out, whoever ends now
        time.sleep(0.2)
        if what == "exception" and rank == 1:
            raise ValueError("planted")
        if what == "exit" and rank == 1:
            sys.exit(3)
        if what == "kill" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "attempts" and attempt == "0" and rank == 1:
            raise ValueError("planted")
        if what == "attempts" and attempt != "0":
            break
    time.sleep(0.005)
finish(model)
dist.destroy_process_group()
"""
)

WORKERS = (
    COMMON
    + """
from torch.utils.data import DataLoader, Dataset

class Augmented(Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return torch.full((8,), float(i)) + torch.rand(8) + random.random() + float(np.random.rand())

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for start in ("fork", "spawn", "forkserver"):
        model = DDP(net())
        torch.manual_seed(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        data = Augmented()
        sampler = torch.utils.data.DistributedSampler(data)
        loader = DataLoader(data, 3, sampler=sampler, num_workers=2, multiprocessing_context=start)
        for epoch in range(2 if start == "fork" else 1):
            sampler.set_epoch(epoch)
            for x in loader:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                say(start, epoch, loss.item().hex(), x.double().sum().item().hex())
        finish(model, start)
    dist.destroy_process_group()
"""
)

STARTED = (
    COMMON
    + """
for module in ("launcher", "rankagent", "aggregator", "tdbg"):
    with contextlib.suppress(ImportError):
        say(module, getattr(__import__(module), "WHOSE", "nobody's"))
argv = [a.replace(os.getcwd(), "here") for a in sys.argv]
say(argv, __name__, sys.path[0] == os.path.dirname(os.path.abspath(__file__)), os.environ.get("FROM_SITE"))
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = model(batch(step)).square().mean()
    loss.backward()
    optimizer.step()
    say(step, loss.item().hex())
finish(model)
"""
)

USERS_SITE = "import os\nos.environ['FROM_SITE'] = 'the user was here'\n"


def assert_alike(plain: Ended, recorded: Ended) -> None:
    assert recorded.lines == plain.lines, (plain, recorded)
    assert recorded.code == plain.code, (plain, recorded)


def assert_recorded(ended: Ended, steps: int, ranks: int = 2, attempt: int = 0) -> None:
    """The agent was there: every rank has these steps, no probe failed, nothing was dropped."""
    found = ended.rows(f"SELECT rank, count(*) FROM step WHERE attempt = {attempt} GROUP BY rank ORDER BY rank")
    assert found == [(rank, steps) for rank in range(ranks)]
    assert ended.rows("SELECT name, state, reason FROM probe WHERE state <> 'installed'") == []
    assert ended.verdict["data_quality"]["dropped_events"] == 0


def test_every_way_of_training_gives_the_same_bits(tmp_path: Path) -> None:
    plain, recorded = both(tmp_path, job(VARIANTS))
    assert_alike(plain, recorded)
    assert (plain.code, len(plain.lines)) == (0, 2 * (13 * 7 + 10 * 5)), plain
    assert_recorded(recorded, 13 * 5)
    for rank in range(2):
        with_, without = (json.loads((e.folder / f"dynamo-{rank}").read_text()) for e in (recorded, plain))
        assert without["frames"] > 0
        assert with_["graph_break"] <= without["graph_break"] + 2  # DDP's own breaks, seen from the wrappers around it
        assert with_["frames"] <= without["frames"] + 2
    warned = [sum("torch/_dynamo" in line for line in e.err.splitlines()) for e in (recorded, plain)]
    assert warned[0] <= warned[1] + 2


def test_loader_workers_of_every_start_method_draw_the_same_numbers(tmp_path: Path) -> None:
    plain, recorded = both(tmp_path, job(WORKERS))
    assert_alike(plain, recorded)
    assert (plain.code, len(plain.lines)) == (0, 2 * (4 * 4 + 3 * 2)), plain
    assert_recorded(recorded, 16)
    starts = recorded.rows("SELECT DISTINCT worker_start FROM loader WHERE workers = 2 ORDER BY ALL")
    assert starts == [("fork",), ("forkserver",), ("spawn",)]


@pytest.mark.parametrize("what", ["exception", "exit", "kill"])
def test_a_rank_that_fails_ends_the_job_in_the_same_way(what: str, tmp_path: Path) -> None:
    plain, recorded = both(tmp_path, job(ENDS, arguments=(what,)))
    assert_alike(plain, recorded)
    assert (plain.code, len(plain.lines)) == (1, 6), plain
    (incident,) = recorded.found("RANK_FAILED")
    assert (incident["ranks"], incident["first_step"]) == ([1], 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_training_in_the_same_way(number: signal.Signals, tmp_path: Path) -> None:
    def act(running: Job) -> None:
        running.until(lambda out: out.count("\n") == 6)
        running.process.send_signal(number)

    plain, recorded = both(tmp_path, job(ENDS, arguments=("signal",)), act)
    assert_alike(plain, recorded)
    assert len(plain.lines) == 6
    assert recorded.verdict["status"] == "killed"
    assert recorded.verdict["steps"] >= 3
    assert [i["reason_code"] for i in recorded.alarms if i["reason_code"] != "RANK_FAILED"] == []


def test_a_restart_trains_again_and_both_attempts_are_kept(tmp_path: Path) -> None:
    spec = job(ENDS, arguments=("attempts",), options=("--max-restarts", "1"))
    plain, recorded = both(tmp_path, spec)
    assert_alike(plain, recorded)
    assert (plain.code, len(plain.lines)) == (0, 2 * (3 + 3 + 2)), plain
    assert_recorded(recorded, 3, attempt=0)
    assert_recorded(recorded, 3, attempt=1)
    assert recorded.verdict["attempts"] == 2


SHADOWS = {
    "launcher/__init__.py": "WHOSE = 'mine'\n", "rankagent/__init__.py": "WHOSE = 'mine'\n",
    "aggregator/__init__.py": "WHOSE = 'mine'\n", "src/tdbg.py": "WHOSE = 'mine'\n",
}  # fmt: skip
STARTS: dict[str, Any] = {
    "as a module, beside the user's own sitecustomize": Spec(
        {"pack/__init__.py": "", "pack/job.py": STARTED, "site/sitecustomize.py": USERS_SITE},
        ranks=1, script=("-m", "pack.job"), arguments=("--lr", "1", "--tdbg-live"), env={"PYTHONPATH": "site"},
    ),
    "as a program of its own": Spec(
        {"job.py": STARTED}, ranks=1, script=("--no-python", sys.executable, "-u", "job.py"), arguments=("a b", "")
    ),
    "among folders with our names": Spec(
        {"src/job.py": STARTED, **SHADOWS}, ranks=1, script=("src/job.py",), env={"PYTHONPATH": "."}
    ),
}  # fmt: skip


@pytest.mark.parametrize("how", STARTS)
def test_a_script_sees_what_it_sees_under_torchrun(how: str, tmp_path: Path) -> None:
    plain, recorded = both(tmp_path, STARTS[how])
    assert_alike(plain, recorded)
    assert plain.code == 0, plain
    assert ("the user was here" in plain.out) == ("sitecustomize" in how)
    assert plain.out.count("mine") == (4 if "names" in how else 0)
    assert_recorded(recorded, 3, ranks=1)
