"""What is saved, loaded and put back, and what stands at the update after it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from kit.agent import record, running
from tdbg.rankagent.checkpointparts import parts_of


class Training:
    """A small loop that can be saved and built anew."""

    def __init__(self) -> None:
        self.net = nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.scheduler = lr_scheduler.StepLR(self.optimizer, 2)

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.net(torch.ones(2, 3)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epoch": 3,
            "rng": torch.get_rng_state(),
        }


def of(rows: Any, event: str) -> list[dict[str, Any]]:
    return [r for r in rows.get("checkpoint", []) if r["event"] == event]


def resume(path: Any, *parts: str) -> None:
    first = Training()
    first.go(4)
    torch.save(first.state(), path)
    del first
    second = Training()
    state = torch.load(path)
    second.net.load_state_dict(state["model"])
    if "optimizer" in parts:
        second.optimizer.load_state_dict(state["optimizer"])
    if "scheduler" in parts:
        second.scheduler.load_state_dict(state["scheduler"])
    if "rng" in parts:
        torch.set_rng_state(state["rng"])
    second.go(3)


def test_a_file_with_everything_in_it_is_told_by_its_structure(tmp_path: Any) -> None:
    rows = record(tmp_path, lambda: resume(tmp_path / "c.pt", "optimizer", "scheduler", "rng"))
    (saved,), (loaded,) = of(rows, "save"), of(rows, "load")
    held = json.loads(saved["parts"])
    assert held == json.loads(loaded["parts"])
    assert held == {"model": 2, "optimizer": 2, "lr": pytest.approx(0.001), "scheduler": 4, "counters": {"epoch": 3},
                    "rng": True}  # fmt: skip
    assert saved["path"] == loaded["path"] == str(tmp_path / "c.pt")
    assert saved["size_bytes"] == (tmp_path / "c.pt").stat().st_size
    assert saved["digest"] == loaded["digest"] != -1
    assert (saved["step"], saved["position"], saved["backwards"]) == (5, 4, 4)


def test_what_is_put_back_and_where_it_came_from(tmp_path: Any) -> None:
    rows = record(tmp_path, lambda: resume(tmp_path / "c.pt", "optimizer", "scheduler", "rng"))
    applied = {r["part"]: r for r in of(rows, "apply")}
    assert set(applied) == {"model", "optimizer", "scheduler", "rng"}
    assert applied["model"]["source"] == of(rows, "load")[0]["number"]
    assert (applied["model"]["params"], applied["model"]["entries"]) == (2, 2)
    assert (applied["optimizer"]["entries"], applied["scheduler"]["position"]) == (2, 4)


def test_what_stands_at_the_two_updates_after_it(tmp_path: Any) -> None:
    rows = record(tmp_path, lambda: resume(tmp_path / "c.pt"))
    stood = [(r["part"], r["nth"], r["step"], r["entries"], r["covered"], r["position"]) for r in of(rows, "update")]
    assert stood == [
        ("optimizer", 1, 5, 0, 2, -1), ("scheduler", 1, 5, -1, -1, 0),
        ("optimizer", 2, 6, 2, 2, -1), ("scheduler", 2, 6, -1, -1, 1),
    ]  # fmt: skip


def test_an_update_without_a_backward_is_not_the_one_that_follows(tmp_path: Any) -> None:
    def program() -> None:
        training = Training()
        training.net.load_state_dict(training.net.state_dict())
        for p in training.net.parameters():
            p.grad = torch.zeros_like(p)
        training.optimizer.step()  # as torch.distributed.checkpoint makes state before it loads it
        training.go(1)

    rows = record(tmp_path, program)
    assert [(r["entries"], r["nth"]) for r in of(rows, "update") if r["part"] == "optimizer"] == [(2, 1)]


def test_weights_that_the_state_lacked_are_counted_and_tied_ones_are_not_missed(tmp_path: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    rows = record(tmp_path, lambda: net.load_state_dict({"0.weight": torch.ones(3, 3)}, strict=False))
    (applied,) = of(rows, "apply")
    assert (applied["params"], applied["entries"]) == (3, 1)


def test_a_step_without_checkpoints_writes_nothing(tmp_path: Any) -> None:
    rows = record(tmp_path, lambda: Training().go(3))
    assert "checkpoint" not in rows


def test_files_that_are_no_checkpoint_and_states_set_at_any_time_are_left_out(tmp_path: Any) -> None:
    def program() -> None:
        torch.save([1.0, "a"], tmp_path / "x.pt")
        torch.load(tmp_path / "x.pt")
        random.setstate(random.getstate())
        with torch.random.fork_rng():
            torch.rand(1)

    assert "checkpoint" not in record(tmp_path, program)


def test_a_load_that_fails_raises_what_it_raised_and_torch_is_left_as_it_was(tmp_path: Any) -> None:
    before = (
        torch.load,
        torch.save,
        nn.Module.load_state_dict,
        torch.set_rng_state,
        lr_scheduler.LambdaLR.load_state_dict,
    )
    with running(tmp_path), pytest.raises(FileNotFoundError):
        torch.load(tmp_path / "none.pt")
    after = (
        torch.load,
        torch.save,
        nn.Module.load_state_dict,
        torch.set_rng_state,
        lr_scheduler.LambdaLR.load_state_dict,
    )
    assert before == after


@pytest.mark.parametrize(
    ("value", "held"),
    [
        ({"state_dict": {"w": torch.ones(1)}, "global_step": 7}, {"model": 1, "counters": {"global_step": 7}}),
        ({"optimizer_states": [{"state": {0: {}}, "param_groups": [{"lr": 0.1}]}]}, {"optimizer": 1, "lr": 0.1}),
        ({"lr_schedulers": [{"last_epoch": 5, "_step_count": 6}]}, {"scheduler": 5}),
        ({"scale": 2.0, "growth_factor": 2.0, "_growth_tracker": 1}, {"scaler": True}),
        ({"python": random.getstate()}, {"rng": True}),
        ({"cpu": torch.get_rng_state()}, {"rng": True}),
        ({"sampler": {"offset": 3}}, {"data": True}),
        ({"name": "x", "width": 3}, {}),
        ([torch.ones(2)], {}),
    ],
)
def test_parts(value: Any, held: Any) -> None:
    assert parts_of(value).held == held


def test_a_huge_object_is_not_looked_at_whole() -> None:
    parts = parts_of(
        {"a": [{"b": {"x": i, "y": "z"}} for i in range(8)], **{f"k{i}": {"n": "v"} for i in range(10_000)}}
    )
    assert parts.left < 0
