"""Where a step's time went: evaluation between steps, checkpoints, waiting for a core."""

from __future__ import annotations

import os
import shutil
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from kit.agent import record
from tdbg.rankagent.cputime import UNKNOWN, ThreadClock
from tdbg.rankagent.pauses import Pauses

NAP = 0.02
NAP_NS = int(NAP * 1e9)


class Slow(Dataset):
    """Each sample takes NAP."""

    def __init__(self, n):
        self.x = torch.randn(n, 3)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        time.sleep(NAP)
        return self.x[i]


def train(after=lambda number, model: None, steps=3, data=None):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, x in enumerate(DataLoader(torch.randn(steps, 3) if data is None else data, 1), start=1):
        model(x).sum().backward()
        optimizer.step()
        after(number, model)


def phases(tmp_path, program):
    return {r["step"]: r for r in record(tmp_path, program)["phase"]}


@pytest.mark.parametrize("inside", [True, False], ids=["fetched without autograd", "run without autograd"])
def test_an_evaluation_is_a_phase_of_the_step_that_it_delays_and_no_wait_for_training_data(tmp_path, inside):
    def evaluate(number, model):
        if number == 2:
            with torch.set_grad_enabled(not inside):
                for x in DataLoader(Slow(4), 2):
                    with torch.no_grad():
                        model(x)

    rows = phases(tmp_path, lambda: train(evaluate))
    assert rows[3]["evaluation_ns"] >= 4 * NAP_NS
    assert all(r["data_ns"] < NAP_NS for r in rows.values())
    assert rows[1]["evaluation_ns"] == rows[2]["evaluation_ns"] == 0


def test_waiting_for_the_batches_of_training_is_no_evaluation(tmp_path):
    rows = phases(tmp_path, lambda: train(data=Slow(4)))
    assert all(r["data_ns"] >= NAP_NS and r["evaluation_ns"] == 0 for r in rows.values())


def test_a_save_and_what_brings_it_to_the_disk_is_checkpoint_time(tmp_path, monkeypatch):
    slow = os.fsync

    def fsync(fd):
        time.sleep(NAP)
        slow(fd)

    monkeypatch.setattr(os, "fsync", fsync)

    def save(number, model):
        if number != 2:
            return
        with (tmp_path / "a.pt").open("wb") as f:
            torch.save(model.state_dict(), f)
            os.fsync(f.fileno())
        shutil.copyfile(tmp_path / "a.pt", tmp_path / "b.pt")

    rows = phases(tmp_path, lambda: train(save))
    assert rows[3]["checkpoint_ns"] >= NAP_NS
    assert rows[1]["checkpoint_ns"] == rows[2]["checkpoint_ns"] == 0
    assert os.fsync is fsync


def test_writing_other_files_is_no_checkpoint(tmp_path):
    def log(number, model):
        with (tmp_path / "log").open("w") as f:
            os.fsync(f.fileno())

    assert all(r["checkpoint_ns"] == 0 for r in phases(tmp_path, lambda: train(log)).values())


def test_the_training_threads_time_on_a_core_is_told_from_sleep(tmp_path):
    rows = phases(tmp_path, lambda: train(lambda number, model: time.sleep(NAP)))
    if rows[2]["cpu_ns"] < 0:
        pytest.skip("this system does not say")
    assert 0 < rows[3]["cpu_ns"] < NAP_NS + rows[3]["data_ns"] + rows[3]["forward_ns"] + rows[3]["backward_ns"]


def test_without_the_file_it_is_unknown(tmp_path):
    assert ThreadClock(str(tmp_path / "none")).lap() == UNKNOWN
    (tmp_path / "odd").write_text("no numbers")
    assert ThreadClock(str(tmp_path / "odd")).lap() == UNKNOWN


def test_a_window_of_batches_fetched_ahead_is_training(tmp_path):
    pauses = Pauses()
    for at, end in ((10, False), (20, False), (21, True)):
        pauses.given((0, 0), at, 5, 2, end, grad=True)
    pauses.backward()
    pauses.backward()
    assert pauses.take() == (0, 0, 0)


def test_a_pass_that_ended_before_another_ones_batch_is_an_evaluation(tmp_path):
    pauses = Pauses()
    for at, end in ((10, False), (20, False), (30, True)):
        pauses.given((1, 0), at, 5, 2, end, grad=True)
    pauses.given((0, 0), 50, 5, 2, False, grad=True)
    pauses.backward()
    assert pauses.take() == (25, 15, 4)


def test_the_end_of_a_training_pass_alone_is_nothing(tmp_path):
    pauses = Pauses()
    pauses.given((0, 0), 10, 5, 2, True, grad=True)
    pauses.given((0, 1), 20, 5, 2, False, grad=True)
    pauses.backward()
    assert pauses.take() == (0, 0, 0)


def test_an_evaluation_that_is_broken_off_ends_where_training_asks_for_data(tmp_path):
    pauses = Pauses()
    pauses.given((1, 0), 10, 5, 2, False, grad=False)
    pauses.given((0, 1), 40, 10, 2, False, grad=True)
    pauses.backward()
    assert pauses.take() == (25, 5, 2)


def test_two_training_loaders_are_none():
    pauses = Pauses()
    pauses.given((0, 0), 10, 5, 2, False, grad=True)
    pauses.given((1, 0), 20, 5, 2, False, grad=True)
    pauses.backward()
    assert pauses.take() == (0, 0, 0)
