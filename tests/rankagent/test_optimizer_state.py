"""What is recorded of an optimizer's state, when all of it and when a part, and that reading it changes nothing."""

import gc
import json
import weakref

import pytest
import torch
from torch import nn

from kit.agent import record, running
from kit.rows import bits
from tdbg.rankagent.probes import optimizer_state


@pytest.fixture(autouse=True)
def replicated(monkeypatch):
    """As if another rank held the same."""
    monkeypatch.setattr(optimizer_state, "shared", lambda entry: True)


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))


def step(model, optimizer, size=4):
    optimizer.zero_grad()
    model(torch.ones(2, size)).sum().backward()
    optimizer.step()


def train(optimizer=torch.optim.AdamW, steps=4, make=net, **settings):
    model = make()
    chosen = optimizer(model.parameters(), **({"lr": 0.1} | settings))
    for _ in range(steps):
        step(model, chosen)


def sweeps(rows):
    return [(r["step"], r["stage"]) for r in rows["optim_state"]]


def by_key(row):
    """{key: {catalogue index: mark}} of one row."""
    keys, tensors = list(json.loads(row["keys"] or "{}")), row["tensors"]
    marks = [row["digest"][n * len(tensors) : (n + 1) * len(tensors)] for n in range(len(keys))]
    return {k: dict(zip(tensors, m, strict=True)) for k, m in zip(keys, marks, strict=True)}


def test_state_is_recorded_before_and_after_each_watched_update(tmp_path):
    rows = record(tmp_path, train)
    assert sweeps(rows) == [(k, stage) for k in (1, 2, 3, 4) for stage in ("start", "end")]
    assert (rows["optim_state"][0]["keys"], rows["optim_state"][0]["tensors"]) == ("", [0, 1, 2, 3, 4, 5])
    after = by_key(rows["optim_state"][1])
    assert set(after) == {"step", "exp_avg", "exp_avg_sq"}
    assert json.loads(rows["optim_state"][1]["keys"])["step"] == "number"
    assert after["step"] == dict.fromkeys(range(6), bits(1.0))
    assert len(set(after["exp_avg"].values())) == 6


def test_what_one_update_leaves_the_next_one_finds(tmp_path):
    rows = record(tmp_path, train)["optim_state"]
    for end, start in zip(rows[1::2], rows[2::2], strict=False):
        left, found = by_key(end), by_key(start)
        for key in found:
            assert found[key].items() <= left[key].items()


def test_only_a_few_parameters_are_looked_at_once_the_first_updates_are_over(tmp_path):
    def deep():
        torch.manual_seed(3)
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)])

    rows = record(tmp_path, lambda: train(make=deep, steps=20))["optim_state"]
    counts = {(r["step"] > 2, r["stage"]): len(r["tensors"]) for r in rows}
    few = optimizer_state.SENTINELS
    more = few + optimizer_state.IN_TURN
    assert counts == {(False, "start"): 60, (False, "end"): more, (True, "start"): few, (True, "end"): more}
    assert len({i for r in rows if r["stage"] == "end" for i in r["tensors"]}) == 60


def test_loading_state_is_recorded_and_looked_at_in_whole(tmp_path):
    def program():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for k in range(5):
            if k == 3:
                optimizer.load_state_dict(optimizer.state_dict())
            step(model, optimizer)

    rows = record(tmp_path, program)
    assert [(r["step"], r["optimizer"], r["class_name"], r["entries"]) for r in rows["optim_loaded"]] == [
        (4, 0, "SGD", 6)
    ]
    starts = {r["step"]: len(r["tensors"]) for r in rows["optim_state"] if r["stage"] == "start"}
    assert starts == {1: 6, 2: 6, 3: 2, 4: 6, 5: 2}


def test_a_load_after_the_close_watch_begins_another_but_not_every_load_does(tmp_path):
    def program():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for k in range(60):
            if k >= 40 and k % 5 == 0:
                optimizer.load_state_dict(optimizer.state_dict())
            step(model, optimizer)

    rows = record(tmp_path, program, watch_steps=4)
    ends = [r["step"] for r in rows["optim_state"] if r["stage"] == "end" and r["step"] % 8]
    assert ends == [1, 2, 3, 4, 41, 42, 43, 44]


def test_a_parameter_without_a_gradient_has_no_state(tmp_path):
    def program():
        model = net()
        model[0].bias.requires_grad_(False)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optimizer)
        step(model, optimizer)
        assert len(optimizer.state) == 5

    row = record(tmp_path, program)["optim_state"][1]
    assert [i for i, mark in by_key(row)["exp_avg"].items() if mark == optimizer_state.ABSENT] == [1]


def test_without_a_replica_only_the_presence_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(optimizer_state, "shared", lambda entry: False)
    rows = record(tmp_path, train)
    assert sweeps(rows) == [(1, "start"), (2, "start")]
    assert set(rows["optim_state"][1]["digest"]) == {optimizer_state.PRESENT}


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Rprop, torch.optim.RMSprop,
                                  torch.optim.Adagrad, torch.optim.Adamax,
                                  *([torch.optim.Adafactor] if hasattr(torch.optim, "Adafactor") else [])])  # fmt: skip
def test_every_kind_of_state_is_read_and_left_alone(tmp_path, kind):
    def result():
        model = net()
        optimizer = kind(model.parameters(), lr=0.01)
        for _ in range(3):
            step(model, optimizer)
        return [p.detach().clone() for p in model.parameters()]

    plain = result()
    watched = []
    rows = record(tmp_path, lambda: watched.extend(result()))
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert not [r for r in rows["probe"] if r["state"] != "installed"]
    assert len(by_key(rows["optim_state"][-1])) > 0


def test_lists_in_the_state_are_left_out(tmp_path):
    def program():
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    rows = record(tmp_path, program)
    assert not [r for r in rows["probe"] if r["state"] != "installed"]
    keys = json.loads(rows["optim_state"][-1]["keys"])
    assert keys["n_iter"] == "number"
    assert "old_dirs" not in keys


def test_numbers_in_state_may_be_of_any_type(tmp_path):
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for n, p in enumerate(p for g in self.param_groups for p in g["params"]):
                self.state[p] |= {"half": torch.tensor(0.5, dtype=torch.float16), 7: n, "note": "text", "none": None}
                self.state[p]["mixed"] = torch.ones(3) if n % 2 else 2
                self.state[p]["sparse"] = torch.eye(2).to_sparse()

    rows = record(tmp_path, lambda: train(Odd))
    assert not [r for r in rows["probe"] if r["state"] != "installed"]
    last = rows["optim_state"][-1]
    assert json.loads(last["keys"]) == {"half": "number", "7": "number", "mixed": "digest"}
    assert by_key(last)["7"] == {n: bits(n) for n in range(6)}
    assert by_key(last)["half"] == dict.fromkeys(range(6), bits(0.5))


def test_the_state_of_a_model_that_was_let_go_is_freed(tmp_path):
    with running(tmp_path):
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optimizer)
        step(model, optimizer)
        moment = weakref.ref(next(iter(optimizer.state.values()))["exp_avg"])
        del model, optimizer
        gc.collect()
        assert moment() is None
