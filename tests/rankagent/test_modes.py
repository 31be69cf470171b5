"""In which mode each model, and each part of it, was in the backwards of steps that updated it."""

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


class Parted(nn.Module):
    """An encoder with batch normalisation and dropout, and a head."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
        )
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.encoder(x))


HELD = torch.utils.data.DataLoader(torch.randn(4, 3), 2)


def parts(tmp_path, switch, update=step):
    """(step, parts, turned, sensitive, names, eval_loader) per row; `switch` acts between the steps."""

    def program():
        model = Parted()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(1, 7):
            switch(model, number)
            optimizer.zero_grad()
            update(model, optimizer)

    return [(r["step"], r["parts"], r["turned"], r["sensitive"], r["names"], r["eval_loader"])
            for r in record(tmp_path, program)["mode"]]  # fmt: skip


@torch.no_grad()
def features(model):
    model.encoder.eval()
    for x in HELD:
        model.encoder(x)


def test_a_part_left_in_eval_mode_after_an_evaluation_is_seen_at_its_first_step(tmp_path):
    def switch(model, number):
        if number == 3:
            features(model)
        if number == 5:
            model.train()

    expected = [
        (1, "", "", 0, "", -1),
        (3, "encoder", "encoder", 2, "encoder.1,encoder.2.0", 0),
        (5, "", "", 0, "", -1),
    ]
    assert parts(tmp_path, switch) == expected


def test_a_part_that_was_switched_off_without_an_evaluation_has_none(tmp_path):
    def freeze(model, number):
        if number == 3:
            model.encoder[2].eval()

    assert [r[1:3] + r[5:] for r in parts(tmp_path / "a", freeze)] == [("", "", -1), ("encoder.2", "encoder.2", -1)]
    rows = parts(tmp_path / "b", lambda model, number: model.encoder.eval())
    assert rows == [(1, "encoder", "", 0, "", -1)]


def test_frozen_statistics_and_parts_without_gradients_are_no_parts(tmp_path):
    def norms(model, number):
        if number == 3:
            model.encoder[1].eval()

    def frozen(model, number):
        if number == 3:
            features(model)
            model.encoder.requires_grad_(False)

    for switch in (norms, frozen):
        assert {r[1:] for r in parts(tmp_path / switch.__name__, switch)} == {("", "", 0, "", -1)}


def test_an_evaluation_of_a_model_that_is_in_eval_mode_itself_tells_nothing_of_its_parts(tmp_path):
    def switch(model, number):
        if number == 3:
            model.eval()
            features(model)
            model.train()
            model.encoder.eval()

    assert parts(tmp_path, switch)[1][1:] == ("encoder", "encoder", 2, "encoder.1,encoder.2.0", -1)
