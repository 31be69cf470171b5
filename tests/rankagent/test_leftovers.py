"""Whether an update's gradient is still there for the next one, whatever the loop looks like."""

import pytest
import torch
from torch import nn

from kit.agent import record


def kept(folder, program, **settings):
    return [(r["step"], r["optimizer"], r["kept"]) for r in record(folder, program, **settings).get("leftover", [])]


def loop(zero, steps=4, accumulate=1, optimizer=torch.optim.SGD, **options):
    torch.manual_seed(1)
    net = nn.Linear(3, 2)
    trained = optimizer(net.parameters(), lr=0.01, **options)
    for step in range(1, steps + 1):
        for _ in range(accumulate):
            loss = net(torch.randn(4, 3)).pow(2).mean()
            zero(trained, net, step, "before backward")
            loss.backward()
        trained.step()
        zero(trained, net, step, "after step")


def never(*_):
    pass


def after_step(optimizer, net, step, where):
    if where == "after step":
        optimizer.zero_grad()


def test_gradients_that_nobody_zeroes_are_used_again_from_the_second_step_on(tmp_path):
    assert kept(tmp_path, lambda: loop(never)) == [(2, 0, True), (3, 0, True), (4, 0, True)]


def in_place(optimizer, net, step, where):
    if where == "before backward":
        optimizer.zero_grad(set_to_none=False)


def by_hand(optimizer, net, step, where):
    if where == "after step":
        for p in net.parameters():
            p.grad = None


@pytest.mark.parametrize("zero", [after_step, in_place, by_hand])
def test_every_way_of_zeroing_is_seen(tmp_path, zero):
    assert kept(tmp_path, lambda: loop(zero)) == [(2, 0, False), (3, 0, False), (4, 0, False)]


def test_a_single_step_that_is_left_out(tmp_path):
    def zero(optimizer, net, step, where):
        if where == "after step" and step != 2:
            optimizer.zero_grad()

    assert kept(tmp_path, lambda: loop(zero)) == [(2, 0, False), (3, 0, True), (4, 0, False)]


def test_accumulation_is_no_leftover_unless_the_window_began_with_one(tmp_path):
    assert kept(tmp_path, lambda: loop(after_step, accumulate=3)) == [(s, 0, False) for s in (2, 3, 4)]
    assert kept(tmp_path / "b", lambda: loop(never, accumulate=3)) == [(s, 0, True) for s in (2, 3, 4)]


def test_two_models_whose_gradients_lie_around_until_their_own_turn(tmp_path):
    def gan():
        torch.manual_seed(1)
        maker, judge = nn.Linear(2, 3), nn.Linear(3, 1)
        first, second = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (judge, maker))
        for _ in range(4):
            made = maker(torch.randn(4, 2))
            first.zero_grad()
            (judge(torch.randn(4, 3)) - judge(made.detach())).mean().backward()
            first.step()
            second.zero_grad()
            judge(made).mean().backward()  # leaves gradients in the judge too
            second.step()

    rows = kept(tmp_path, gan)
    assert {number for _, number, _ in rows} == {0, 1}
    assert not any(is_kept for _, _, is_kept in rows)


def test_a_closure_that_zeroes_by_itself(tmp_path):
    def train():
        torch.manual_seed(1)
        net = nn.Linear(3, 2)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
        x = torch.randn(4, 3)

        def closure():
            optimizer.zero_grad()
            loss = net(x).pow(2).mean()
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)

    assert not any(is_kept for _, _, is_kept in kept(tmp_path, train))


def test_between_watched_steps_only_what_follows_a_watched_one_is_looked_at(tmp_path):
    rows = kept(tmp_path, lambda: loop(never, steps=12), watch_steps=2)
    assert (2, 0, True) in rows
    assert len(rows) < 11


def test_training_is_the_same_to_the_bit(tmp_path):
    results = []

    def train():
        torch.manual_seed(1)
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(5):
            net(torch.ones(4, 3)).pow(2).mean().backward()
            optimizer.step()
        results.append([p.detach().clone() for p in net.parameters()])

    train()
    record(tmp_path, train)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def discarded(folder, program):
    return [r["discarded"] for r in record(folder, program)["step"]]


def test_backwards_whose_gradients_are_zeroed_before_an_update_are_counted(tmp_path):
    def train():
        torch.manual_seed(1)
        net = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for number in range(1, 8):
            net(torch.randn(4, 3)).pow(2).mean().backward()
            if number in (3, 7):
                optimizer.step()
            if number in (3, 5):  # the fourth and fifth are thrown away
                optimizer.zero_grad()

    assert discarded(tmp_path, train) == [0, 2]


def test_two_models_in_turn_and_closures_throw_nothing_away(tmp_path):
    def gan():
        torch.manual_seed(1)
        maker, judge = nn.Linear(2, 3), nn.Linear(3, 1)
        first, second = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (judge, maker))
        for _ in range(3):
            made = maker(torch.randn(4, 2))
            first.zero_grad()
            judge(made.detach()).mean().backward()
            second.zero_grad()
            judge(made).mean().backward()
            first.step()
            second.step()

    def closures():
        net = nn.Linear(3, 2)
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)

        def closure():
            optimizer.zero_grad()
            loss = net(torch.ones(4, 3)).pow(2).mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    assert set(discarded(tmp_path / "gan", gan)) == {0}
    assert set(discarded(tmp_path / "closures", closures)) == {0}
