"""What the trainers probe records of a trainer shaped like Hugging Face's; the real one is in tests/e2e."""

from __future__ import annotations

import math
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from kit.agent import record


class Trainer:
    """Its training steps and its log, as far as the probe touches them."""

    def __init__(self, on_log=None):
        self.state = SimpleNamespace(global_step=0, log_history=[])
        self.net = torch.nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.0)
        torch.nn.init.ones_(self.net.weight)
        self.on_log = on_log
        self.callback_handler = SimpleNamespace(callbacks=[self])

    def training_step(self, model, inputs):
        loss = model(inputs).sum()
        loss.backward()
        return loss.detach()

    def log(self, logs, start_time=None):
        self.state.log_history.append({**logs, "step": self.state.global_step})
        if self.on_log:
            self.on_log(logs)

    def train(self, values, window=1, every=1):
        total, seen = 0.0, 0
        for n, value in enumerate(values, start=1):
            total += self.training_step(self.net, torch.tensor([[value]])).item()
            if n % window == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.state.global_step += 1
                seen += 1
                if seen % every == 0:
                    self.log({"loss": total / every})
                    total = 0.0
        self.log({"train_loss": 0.0})


@pytest.fixture
def trainer(monkeypatch):
    """A class of its own for each test, in the module that the probe awaits."""
    own = type("Trainer", (), dict(vars(Trainer)))
    module = types.ModuleType("transformers.trainer")
    module.Trainer = own
    monkeypatch.setitem(sys.modules, "transformers.trainer", module)
    return own


def test_entries_hold_what_the_steps_returned_and_what_stands(tmp_path, trainer):
    rows = record(tmp_path, lambda: trainer().train([1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 1.0, 9.0], window=2, every=2))
    assert [(r["first"], r["step"], r["global_step"], r["updates"], r["micros"]) for r in rows["logged"]] == [
        (1, 2, 2, 2, 4), (3, 4, 4, 2, 4)
    ]  # fmt: skip
    assert [(r["returned"], r["entered"], r["stands"], r["history"]) for r in rows["logged"]] == [
        (10.0, 5.0, 5.0, 5.0), (22.0, 11.0, 11.0, 11.0)
    ]  # fmt: skip
    assert {r["callbacks"] for r in rows["logged"]} == {"Trainer"}


def test_a_callback_that_changes_the_figure_is_seen(tmp_path, trainer):
    rows = record(tmp_path, lambda: trainer(lambda logs: logs.update(loss="0.25")).train([1.0, 2.0]))
    assert [(r["entered"], r["stands"], r["history"]) for r in rows["logged"]] == [(1.0, 0.25, 1.0), (2.0, 0.25, 2.0)]


def test_a_figure_that_the_program_logs_within_a_step_is_not_the_trainers(tmp_path, trainer):
    class Chatty(trainer):
        def compute(self):
            self.log({"loss": 99.0})

        def train(self, values):
            self.net.register_forward_hook(lambda *_: self.compute())
            super().train(values)

    rows = record(tmp_path, lambda: Chatty().train([1.0, 2.0]))
    assert [r["entered"] for r in rows["logged"]] == [1.0, 2.0]


def test_a_step_that_raised_leaves_the_sum_unknown_and_the_error_untouched(tmp_path, trainer):
    def program():
        mine = trainer()
        with pytest.raises(TypeError):
            mine.training_step(mine.net, None)
        mine.train([1.0, 2.0])

    rows = record(tmp_path, program)
    assert [math.isnan(r["returned"]) for r in rows["logged"]] == [True, False]


def test_what_a_training_left_unlogged_is_not_in_the_next_ones_first_entry(tmp_path, trainer):
    def program():
        mine = trainer()
        mine.train([1.0, 2.0, 4.0], every=2)
        mine.train([8.0, 16.0], every=2)

    rows = record(tmp_path, program)
    assert [(r["returned"], r["updates"]) for r in rows["logged"]] == [(3.0, 2), (24.0, 2)]


def test_the_trainer_is_left_as_it_was(tmp_path, trainer):
    before = dict(vars(trainer))
    record(tmp_path, lambda: trainer().train([1.0]))
    assert dict(vars(trainer)) == before
