"""Where schedulers stand before each update, whatever their class, without keeping them alive."""

import gc
import math
import weakref

import torch
from torch import nn
from torch.optim import lr_scheduler

from kit.agent import record, running


def train(schedule, steps=4, metric=False):
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = schedule(optimizer)
    for _ in range(steps):
        net(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        scheduler.step(*[1.0] if metric else [])


def positions(rows, number=0):
    return [(r["step"], r["position"]) for r in rows["schedule"] if r["scheduler"] == number]


def test_the_position_before_each_update(tmp_path):
    rows = record(tmp_path, lambda: train(lambda o: lr_scheduler.StepLR(o, 2)))
    assert positions(rows) == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert {(r["class_name"], r["optimizer"], r["bad_epochs"]) for r in rows["schedule"]} == {("StepLR", 0, -1)}


def test_what_a_plateau_counts(tmp_path):
    rows = record(tmp_path, lambda: train(lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=5), metric=True))
    counted = [(r["position"], r["bad_epochs"], r["cooldown"], r["best"]) for r in rows["schedule"]]
    assert counted == [(0, 0, 0, math.inf), (1, 0, 0, 1.0), (2, 1, 0, 1.0), (3, 2, 0, 1.0)]


def test_every_scheduler_of_a_sequence_is_seen(tmp_path):
    def sequence(o):
        parts = [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
        return lr_scheduler.SequentialLR(o, parts, milestones=[2])

    rows = record(tmp_path, lambda: train(sequence))
    assert [p for _, p in positions(rows, 2)] == [0, 1, 2, 3]
    chained = record(
        tmp_path / "c", lambda: train(lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 2)]))
    )
    assert [p for _, p in positions(chained)] == [0, 1, 2, 3]


def test_a_scheduler_that_was_let_go_is_freed(tmp_path):
    with running(tmp_path):
        optimizer = torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)
        scheduler = weakref.ref(lr_scheduler.StepLR(optimizer, 2))
        gc.collect()
        assert scheduler() is None


def test_where_a_schedule_ends_by_its_own_settings(tmp_path):
    def ends(name, schedule):
        return {r["end"] for r in record(tmp_path / name, lambda: train(schedule))["schedule"]}

    assert ends("cosine", lambda o: lr_scheduler.CosineAnnealingLR(o, 7)) == {7}
    assert ends("one", lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9)) == {9}
    assert ends("linear", lambda o: lr_scheduler.LinearLR(o, total_iters=3)) == {3}
    assert ends("lambda", lambda o: lr_scheduler.LambdaLR(o, lambda s: 1.0)) == {-1}
