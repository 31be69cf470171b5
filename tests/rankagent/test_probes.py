"""Promises of every probe: torch is as it was afterwards, and an error of a probe never reaches training."""

import importlib
import pkgutil
import random
import sys
import threading

import numpy
import pytest
import torch
from torch import nn

from kit.agent import record, running
from tdbg.rankagent import probes
from tdbg.rankagent.agent import Emit

NAMES = [i.name for i in pkgutil.iter_modules(probes.__path__)]
PATCHED = [
    (torch.autograd, "backward"),
    (torch, "manual_seed"), (torch.random, "manual_seed"), (torch, "seed"), (torch.cuda, "manual_seed_all"),
    (random, "seed"), (numpy.random, "seed"),
    (nn.utils, "clip_grad_norm_"), (nn.utils.clip_grad, "clip_grad_norm_"), (nn.utils, "clip_grad_value_"),
    (nn.Module, "register_parameter"), (torch.optim.Optimizer, "__init__"), (torch.optim.Optimizer, "load_state_dict"),
    *[(getattr(torch.optim.lr_scheduler, n), "__init__") for n in ("LRScheduler", "ReduceLROnPlateau", "SequentialLR")],
    (torch.amp.GradScaler, "scale"), (torch.amp.GradScaler, "_maybe_opt_step"),
    (torch.distributed, "destroy_process_group"), (torch.distributed.algorithms.join.Join, "__enter__"),
    (sys, "excepthook"), (threading, "excepthook"),
    *[(nn.parallel.DistributedDataParallel, n) for n in ("__init__", "_pre_forward", "_post_forward", "_sync_buffers")],
    *[(torch.utils.data.dataloader._BaseDataLoaderIter, n) for n in ("_next_index", "__next__")],
    (torch.utils.data.dataloader._MultiProcessingDataLoaderIter, "_reset"),
    *[(torch.utils.data.DistributedSampler, n) for n in ("__init__", "__iter__", "set_epoch")],
]  # fmt: skip


def train(steps=3, into=None):
    torch.manual_seed(1)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(torch.randn(4 * steps, 3), batch_size=4):
        optimizer.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if into is not None:
            into.append(loss.item())


def test_everything_that_is_patched_is_put_back(tmp_path):
    before = [vars(owner)[name] for owner, name in PATCHED]
    hooks = sys.modules["torch.optim.optimizer"]
    counts = [len(hooks._global_optimizer_pre_hooks), len(hooks._global_optimizer_post_hooks)]
    with running(tmp_path):
        changed = [vars(owner)[name] is not b for (owner, name), b in zip(PATCHED, before, strict=True)]
        assert all(changed), [n for (_, n), c in zip(PATCHED, changed, strict=True) if not c]
        train()
    assert [vars(owner)[name] for owner, name in PATCHED] == before
    assert [len(hooks._global_optimizer_pre_hooks), len(hooks._global_optimizer_post_hooks)] == counts


@pytest.mark.parametrize("name", NAMES)
def test_each_probe_alone_leaves_torch_as_it_was(tmp_path, name):
    from tdbg.rankagent import identity
    from tdbg.rankagent.agent import Agent
    from tdbg.rankagent.governor import Governor
    from tdbg.rankagent.record import Recorder

    before = [vars(owner)[n] for owner, n in PATCHED]
    role = identity.Role(0, 1, 0, 0, 0, str(tmp_path))
    agent = Agent(torch, role, Recorder(tmp_path / "records" / "rank-00000.0.1", 0, 0), Governor(10, 0.01))
    importlib.import_module(f"{probes.__name__}.{name}").install(Emit(agent, name))()
    assert [vars(owner)[n] for owner, n in PATCHED] == before


@pytest.mark.parametrize("name", NAMES)
def test_a_probe_that_raises_is_switched_off_and_said_and_training_goes_on(tmp_path, name, monkeypatch):
    plain, watched = [], []
    train(into=plain)
    module = importlib.import_module(f"{probes.__name__}.{name}")

    def install(emit):
        def fail(*args):
            raise RuntimeError("ours")

        for event in ("backward_begin", "gradients_local", "before_update", "step_end", "step_closed", "close"):
            emit.on(event, fail)
        return lambda: None

    monkeypatch.setattr(module, "install", install)
    rows = record(tmp_path, lambda: train(into=watched))
    assert watched == plain
    said = [r for r in rows["probe"] if r["state"] == "disabled"]
    assert [r["name"] for r in said] == [name]
    assert "RuntimeError: ours" in said[0]["reason"]


@pytest.mark.parametrize("name", NAMES)
def test_a_probe_that_can_not_be_installed_leaves_the_others_at_work(tmp_path, name, monkeypatch):
    module = importlib.import_module(f"{probes.__name__}.{name}")

    def install(emit):
        raise AttributeError("this torch lacks it")

    monkeypatch.setattr(module, "install", install)
    rows = record(tmp_path, train)
    assert [r["name"] for r in rows["probe"] if r["state"] == "disabled"] == [name]
    assert len(rows["step" if name != "step" else "loss"]) == 3


def test_an_error_in_the_step_counting_ends_the_recording_not_the_training(tmp_path, monkeypatch):
    from tdbg.rankagent import hooks

    monkeypatch.setattr(hooks.Hooks, "_end_backward", lambda self: 1 // 0)
    losses = []
    rows = record(tmp_path, lambda: train(into=losses))
    assert len(losses) == 3
    assert [r["name"] for r in rows["probe"] if r["state"] == "disabled"] == ["hooks"]


def test_signatures_and_names_of_patched_functions_are_the_originals(tmp_path):
    import inspect

    before = [inspect.signature(torch.manual_seed), inspect.signature(nn.utils.clip_grad_norm_)]
    with running(tmp_path):
        assert [inspect.signature(torch.manual_seed), inspect.signature(nn.utils.clip_grad_norm_)] == before
        assert torch.manual_seed.__name__ == "manual_seed"


def test_settings_are_written_when_they_change(tmp_path):
    def train():
        net = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for _ in range(4):
            net(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            schedule.step()

    rows = record(tmp_path, train)["optim"]
    assert [(r["step"], r["lr"]) for r in rows] == [(1, 0.1), (3, 0.05)]
    assert '"betas": [0.9, 0.999]' in rows[0]["settings"]


def test_the_parameters_of_a_group_are_known_in_any_order(tmp_path):
    def train(order):
        net = nn.Linear(3, 1)
        params = [net.weight, net.bias][::order]
        optimizer = torch.optim.SGD([{"params": params}, {"params": [nn.Parameter(torch.ones(1))]}], lr=0.1)
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    one, two = (record(tmp_path / str(n), lambda n=n: train(n))["optim"] for n in (1, -1))
    assert [r["members"] for r in one] == [r["members"] for r in two]
    assert len({r["members"] for r in one}) == 2


def test_seeds_and_streams_are_recorded(tmp_path):
    def program():
        random.seed(11)
        numpy.random.seed(12)
        torch.manual_seed(13)
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            net(torch.randn(2, 3)).sum().backward()
            optimizer.step()

    rows = record(tmp_path, program)
    assert [(r["library"], r["seed"]) for r in rows["seed"]] == [("random", "11"), ("numpy", "12"), ("torch", "13")]
    assert all("test_probes.py" in r["where"] for r in rows["seed"])
    assert [r["step"] for r in rows["rng"]] == [0, 1, 2]
    start = rows["rng"][0]
    assert (start["torch_seed"], start["torch_seeded"], start["numpy_seed"], start["python_seed"]) == (
        13,
        True,
        "12",
        "11",
    )
    assert len({r["torch_digest"] for r in rows["rng"]}) == 2  # randn of step 2 moved it; step 1 drew before row 0


def test_reading_the_streams_does_not_move_them(tmp_path):
    def draws():
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        train()
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    plain = draws()
    with running(tmp_path):
        assert draws() == plain


def test_no_secret_variable_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for name in ("HF_TOKEN", "TORCH_SECRET_THING", "NCCL_AUTH", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD"):
        monkeypatch.setenv(name, "hunter2")
    rows = record(tmp_path, train)["identity"]
    assert "hunter2" not in str(rows)
    assert ("env.OMP_NUM_THREADS", "3") in [(r["key"], r["value"]) for r in rows]


def test_flags_set_before_the_first_step_are_seen(tmp_path):
    def program():
        torch.set_float32_matmul_precision("medium")
        train()

    try:
        rows = record(tmp_path, program)["identity"]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert [r["value"] for r in rows if r["key"] == "flag.float32_matmul_precision"] == ["medium"]


def test_clipping_is_recorded_as_it_was_asked_for(tmp_path):
    rows = record(tmp_path, train)["clip"]
    assert [(r["step"], r["max_norm"], r["norm_type"], r["calls"]) for r in rows] == [
        (k, 1.0, 2.0, 1) for k in (1, 2, 3)
    ]


def test_memory_and_phases_have_a_row_a_step(tmp_path):
    rows = record(tmp_path, train)
    assert [r["step"] for r in rows["memory"]] == [r["step"] for r in rows["phase"]] == [1, 2, 3]
    assert all(0 < r["rss_bytes"] <= r["vms_bytes"] for r in rows["memory"])
    assert all(r["backward_ns"] > 0 and r["optimizer_ns"] > 0 for r in rows["phase"])


def test_a_nan_gradient_names_its_tensors(tmp_path):
    def train():
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for k in range(3):
            out = net[0](torch.ones(2, 3))
            if k == 1:
                out = (out * 0).sqrt()  # the derivative of sqrt at 0 is infinite, times 0 is NaN
            net[1](out).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    rows = [r for r in record(tmp_path, train)["grad"] if r["stage"] == "local"]
    assert [(r["step"], r["nonfinite"]) for r in rows][:2] == [(1, []), (2, [0, 1])]


def test_device_values_without_room_are_counted_as_dropped_rows(tmp_path):
    from tdbg.rankagent.readback import read_state

    with running(tmp_path) as agent:
        agent.landing.dropped = 2
        train(1)
    assert read_state(tmp_path / "records" / "rank-00000.0.1").dropped == 2


def test_a_flag_that_torch_refuses_to_tell_hides_no_other(monkeypatch):
    def refuse():
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    found = importlib.import_module("tdbg.rankagent.probes.identity").flags(torch)
    assert "float32_matmul_precision" not in found
    assert found["deterministic_algorithms"] is False
    assert found["mkldnn.enabled"] is True


def test_after_the_last_batch_of_a_pass_the_phase_is_no_longer_data(tmp_path):
    with running(tmp_path) as agent:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in torch.utils.data.DataLoader(torch.arange(4.0), batch_size=2):
            model(batch.view(2, 1)).sum().backward()
            optimizer.step()
        assert agent.phase == "other"


def test_streams_that_were_drawn_from_are_named_with_the_phase(tmp_path):
    def program():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            model(torch.ones(4, 2)).sum().backward()
            torch.rand(1)
            optimizer.step()

    rows = record(tmp_path, program)["rng"]
    assert [r["moved"] for r in rows] == ["", "", *["torch:forward, torch:backward"] * 3]
