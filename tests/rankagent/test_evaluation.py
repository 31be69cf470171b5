"""What ran without autograd over the batches of an evaluation, in which mode, and what is no evaluation."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.data import DataLoader

from kit.agent import record, running

HELD = torch.randn(6, 3)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def train(between, steps=6):
    """A loop over a loader that calls `between` before each backward, with the step's number and the model."""

    def program():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        held = DataLoader(HELD, 2)
        for number, x in enumerate(DataLoader(torch.randn(5 * steps, 3), 5), start=1):
            between(number, model, held)
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    return program


def evaluate(model, held, times=1):
    with torch.no_grad():
        for x in held:
            for _ in range(times):
                model(x)


def found(tmp_path, between, **settings):
    rows = record(tmp_path, train(between, **settings)).get("evaluation", [])
    columns = ("step", "backwards", "iterator", "forwards", "in_eval", "dropout", "norms", "names")
    return [tuple(r[c] for c in columns) for r in rows]


def test_one_row_per_evaluation_says_in_which_mode_it_ran(tmp_path):
    def between(number, model, held):
        if number == 3:
            evaluate(model, held)
        if number == 5:
            model.eval()
            evaluate(model, held)
            model.train()

    assert found(tmp_path, between) == [(3, 2, 0, 1, False, 1, 1, "1,2"), (5, 4, 1, 1, True, 0, 0, "")]


def test_autograd_may_be_off_within_the_loop_alone(tmp_path):
    def between(number, model, held):
        if number == 3:
            for x in held:
                with torch.inference_mode():
                    model(x)

    assert found(tmp_path, between) == [(3, 2, 0, 1, False, 1, 1, "1,2")]


def test_repeated_forwards_are_counted(tmp_path):
    rows = found(tmp_path, lambda number, model, held: number == 3 and evaluate(model, held, times=4))
    assert [r[3] for r in rows] == [4]


def test_statistics_that_are_estimated_anew_do_not_count(tmp_path):
    def between(number, model, held):
        if number == 3:
            model[1].momentum = None
            evaluate(model, held)

    assert [r[5:] for r in found(tmp_path, between)] == [(1, 0, "2")]


@torch.no_grad()
def peek(number, model, held):
    model(HELD)  # training's own batch, a teacher's, a first forward for the shapes


def with_autograd(number, model, held):
    for x in held:
        model(x)


def averaged(number, model, held):
    other = net()
    with torch.no_grad():
        for x in held:
            other(x)


@pytest.mark.parametrize("between", [peek, with_autograd, averaged])
def test_what_is_no_evaluation_of_a_trained_model_leaves_no_row(tmp_path, between):
    assert found(tmp_path, between, steps=12) == []


def test_batches_taken_ahead_of_their_backwards_are_no_evaluation(tmp_path):
    def program():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = iter(DataLoader(torch.randn(60, 3), 3))
        for _ in range(10):
            window = [next(batches), next(batches)]
            with torch.no_grad():
                model(window[0])  # as reentrant checkpointing does, and contrastive learning in chunks
            for x in window:
                model(x).sum().backward()
            optimizer.step()

    assert "evaluation" not in record(tmp_path, program)


def test_a_program_that_compiles_is_left_alone(tmp_path):
    torch._dynamo.reset()
    seen = []

    def between(number, model, held):
        if number == 3:
            compiled = torch.compile(model, backend="eager")
            with torch.no_grad():
                for x in held:
                    seen.append(len(torch_module._global_forward_pre_hooks))
                    compiled(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert found(tmp_path, between) == []
    torch._dynamo.reset()
    assert set(seen) == {0}


def test_an_error_of_ours_ends_the_look_and_not_the_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr("tdbg.rankagent.probes.evaluation.reacting", lambda model: 1 / 0)
    rows = record(tmp_path, train(lambda number, model, held: number in (3, 5) and evaluate(model, held)))
    assert "evaluation" not in rows
    assert [(r["name"], r["reason"].split(":")[0]) for r in rows["probe"] if r["state"] == "disabled"] == [
        ("evaluation", "ZeroDivisionError")
    ]
    assert not torch_module._global_forward_pre_hooks


def test_no_hook_outlives_the_batch_that_is_looked_at(tmp_path):
    hooks = []

    def between(number, model, held):
        evaluate(model, held)
        hooks.append(len(torch_module._global_forward_pre_hooks))

    with running(tmp_path):
        train(between)()
    assert set(hooks) == {0}
    assert not torch_module._global_forward_pre_hooks
