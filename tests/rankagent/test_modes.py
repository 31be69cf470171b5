"""In which mode each model was in the backwards of steps that updated it."""

import torch
from torch import nn

from kit.agent import record


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def step(model, optimizer, backwards=1):
    for _ in range(backwards):
        model(torch.randn(5, 3)).sum().backward()
    optimizer.step()


def modes(rows, model=0):
    return [(r["step"], r["in_eval"], r["before"], r["sensitive"], r["training"], r["names"])
            for r in rows["mode"] if r["model"] == model]  # fmt: skip


def run(tmp_path, switch, steps=5, backwards=1, **settings):
    def program():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(1, steps + 1):
            switch(model, number)
            step(model, optimizer, backwards)

    return modes(record(tmp_path, program, **settings))


def test_a_model_left_in_eval_mode_is_seen_from_the_first_such_step_on(tmp_path):
    def switch(model, number):
        if number == 3:
            model.eval()

    expected = [(1, 0, 0, 0, 0, ""), (3, 1, 2, 2, 0, "1,2")]
    assert run(tmp_path / "a", switch) == expected
    assert run(tmp_path / "b", switch, watch_steps=1) == expected


def test_evaluation_between_steps_leaves_no_row(tmp_path):
    def switch(model, number):
        model.eval()
        with torch.no_grad():
            model(torch.randn(5, 3))
        model.train()

    assert run(tmp_path, switch) == [(1, 0, 0, 0, 0, "")]


def test_parts_in_train_mode_are_counted(tmp_path):
    def switch(model, number):
        model.eval()
        model[3].train()

    assert run(tmp_path, switch) == [(1, 1, 0, 2, 1, "1,2")]


def test_a_model_that_only_others_see_in_eval_mode_is_not_in_eval_mode(tmp_path):
    def program():
        first, second = net(), nn.Sequential(nn.Linear(1, 3))
        mine, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second))
        for _ in range(4):
            first.train()
            step(first, mine)
            first.eval()
            other.zero_grad()
            first(second(torch.randn(5, 1))).sum().backward()
            other.step()

    rows = record(tmp_path, program)
    assert {(r["model"], r["in_eval"] == r["backwards"]) for r in rows["mode"]} == {(0, False), (1, False)}
