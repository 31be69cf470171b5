"""When a halt is noticed, what is written about each rank, and what is taken for progress: a clock moved by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tdbg.launcher import dumps, flights, stalls
from tdbg.launcher.node.process import Work
from tdbg.launcher.processes import Folder
from tdbg.launcher.stalls import Stalls
from tdbg.rankagent import contract
from tdbg.rankagent.record import Recorder
from tdbg.rankagent.tables import Column, Table

OTHER = Table("other", (Column("value", "int64", "", "a number"),))


class Node:
    """Two ranks (both this process) whose state is written by hand, and the watch over them."""

    def __init__(self, folder: Path, rows_of: Any, floor_s: float = 30.0, ranks: int = 2) -> None:
        self.now_s, self.rows_of = 1000.0, rows_of
        self.recorder = Recorder(folder / "records" / "node-00000.0.1", -1, 0)
        self.stalls = Stalls(0, self.recorder, floor_s, lambda pid: [], lambda: self.now_s, self.now_ns)
        self.ranks, self.folders = [], []
        for rank in range(ranks):
            path = contract.process_dir(folder, "rank", rank, 0, 100 + rank)
            self.ranks.append(Recorder(path, rank, 0))
            self.folders.append(Folder(path, rank, 0, 100 + rank))

    def now_ns(self) -> int:
        return int(self.now_s * 1e9)

    def step(self, number: int, seconds: float) -> None:
        """Every rank completes a step after so many seconds of one look each."""
        self.wait(seconds)
        for rank in self.ranks:
            rank.update_state(number, self.now_ns())
        self.stalls.look(self.folders)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self.stalls.look(self.folders)
        self.now_s += seconds % 1.0

    def rows(self, table: str = "stall") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.rows_of(Path(self.recorder.folder), table)
        return found


@pytest.fixture
def node(tmp_path: Path, rows_of: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Node]:
    def ask(processes: Iterable[tuple[int, Path]], seconds: float) -> dict[int, str]:
        return {pid: f"train.py:{pid} main" for pid, _ in processes}

    used = {"busy": 0}

    def work(pid: int, workers: list[int]) -> Work:
        used["busy"] += 1_000_000
        return Work(used["busy"], 0, 0, "S")

    monkeypatch.setattr(dumps, "ask", ask)
    monkeypatch.setattr(stalls, "work", work)
    return lambda **settings: Node(tmp_path, rows_of, **settings)


def test_a_halt_is_noted_at_the_limit_with_three_stacks_of_each_rank(node: Callable[..., Node]) -> None:
    n = node()
    for step in range(1, 4):
        n.step(step, 1.0)
    n.ranks[1].enter("data")
    n.stalls.look(n.folders)
    n.wait(29)
    assert n.rows() == []
    n.wait(2)
    rows = n.rows()
    assert [(r["rank"], r["event"], r["step"], r["samples"]) for r in rows] == [(0, "stall", 3, 3), (1, "stall", 3, 3)]
    assert rows[1]["phase"] == "data"
    assert 30 <= rows[0]["quiet_ns"] / 1e9 <= 31
    assert rows[0]["limit_ns"] == 30 * 10**9
    assert 3.5e9 <= rows[0]["window_ns"] <= 4.5e9
    assert rows[0]["busy_ns"] > 0
    stacks = n.rows("stack")
    assert [(s["rank"], s["sample"], s["frames"]) for s in stacks[:3]] == [
        (0, i, "train.py:100 main") for i in (1, 2, 3)
    ]


@pytest.mark.parametrize("sign", ["phase", "row", "step"])
def test_any_sign_of_one_rank_is_progress_of_the_job(node: Callable[..., Node], sign: str) -> None:
    n = node()
    for step in range(1, 4):
        n.step(step, 1.0)
    for i in range(6):
        n.wait(25)
        if sign == "phase":
            n.ranks[1].enter("forward")
        elif sign == "row":
            n.ranks[1].write(OTHER, 3, (i,))
        else:
            n.ranks[1].update_state(4 + i, n.now_ns())
    assert n.rows() == []


def test_leaving_a_phase_is_no_progress(node: Callable[..., Node]) -> None:
    n = node()
    for step in range(1, 4):
        n.step(step, 1.0)
    n.wait(20)
    n.ranks[1].enter("other")
    n.wait(12)
    assert [r["event"] for r in n.rows()] == ["stall", "stall"]


def test_slow_steps_and_long_pauses_make_the_limit_longer(node: Callable[..., Node]) -> None:
    n = node()
    for step in range(1, 8):
        n.step(step, 5.0)
    assert 95 <= n.stalls.limit_s() <= 105  # 20 x 5 s
    n = node()
    for step in range(1, 4):
        n.step(step, 1.0)
    n.step(4, 25.0)
    for step in range(5, 300):
        n.step(step, 1.0)
    assert 70 <= n.stalls.limit_s() <= 80  # 3 x 25 s; one step of 25 s is no pace


def test_before_the_second_step_there_is_ten_times_the_patience(node: Callable[..., Node]) -> None:
    n = node()
    n.step(1, 200.0)
    n.wait(290)
    assert n.rows() == []
    n.wait(15)
    assert [r["event"] for r in n.rows()] == ["stall", "stall"]


def test_the_wait_for_the_first_step_is_no_measure_for_later_ones(node: Callable[..., Node]) -> None:
    n = node()
    n.step(1, 200.0)
    n.step(2, 100.0)
    for step in range(3, 200):
        n.step(step, 0.5)
    assert n.stalls.limit_s() < 200.0


def test_a_job_that_goes_on_is_noted_and_may_halt_again(node: Callable[..., Node]) -> None:
    n = node()
    for step in range(1, 4):
        n.step(step, 1.0)
    n.wait(32)
    n.step(4, 1.0)
    assert [(r["event"], r["stall"]) for r in n.rows()] == [("stall", 1)] * 2 + [("resumed", 1)] * 2
    n.wait(110)
    assert [(r["event"], r["stall"]) for r in n.rows()][4:] == [("stall", 2)] * 2


def test_a_failure_that_is_written_down_does_not_end_the_stall(node: Callable[..., Node]) -> None:
    n = node()
    for step in range(1, 4):
        n.step(step, 1.0)
    n.wait(32)
    n.ranks[0].write(OTHER, 3, (1,))
    n.wait(5)
    assert [r["event"] for r in n.rows()] == ["stall"] * 2


def test_a_long_stall_is_looked_at_again_ever_more_seldom(node: Callable[..., Node]) -> None:
    n = node()
    for step in range(1, 4):
        n.step(step, 1.0)
    n.wait(3600)
    looks = [r["look"] for r in n.rows() if r["rank"] == 0]
    assert looks == list(range(1, len(looks) + 1))
    assert 6 <= len(looks) <= 12


def test_a_pause_of_the_launcher_itself_is_no_stall_of_the_ranks(node: Callable[..., Node]) -> None:
    n = node()
    for step in range(1, 4):
        n.step(step, 1.0)
    n.now_s += 500.0  # the whole group was stopped, or starved
    n.stalls.look(n.folders)
    n.wait(20)
    assert n.rows() == []


def test_a_new_attempt_starts_anew(node: Callable[..., Node]) -> None:
    n = node()
    for step in range(1, 4):
        n.step(step, 1.0)
    n.wait(20)
    for f in n.folders:
        f.attempt = 1
    n.wait(25)
    assert n.rows() == []


def test_ranks_that_are_about_to_be_stopped_give_a_last_stack(node: Callable[..., Node]) -> None:
    n = node()
    for step in range(1, 4):
        n.step(step, 1.0)
    n.stalls.stopping(n.folders)
    assert n.rows() == []  # rows are the other thread's to write
    n.stalls.write()
    assert [(r["event"], r["samples"], r["window_ns"]) for r in n.rows()] == [("stopping", 1, 0)] * 2
    assert len(n.rows("stack")) == 2


def test_each_rank_is_asked_once_a_stall_what_it_issued_last(
    node: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    n = node()
    asked: list[Path] = []
    rows = '[[3, [7, -1], ["0", [0, 1], "barrier", "", "a.py:3 f", "", "call"]]]'

    def ask(folders: Iterable[Path]) -> list[Path]:
        several = list(folders)
        asked.extend(several)
        (several[0] / flights.ANSWER).write_text(rows)
        (several[1] / flights.ANSWER).write_text("[[3,")  # half an answer
        return several

    monkeypatch.setattr(flights, "ask", ask)
    for step in range(1, 4):
        n.step(step, 1.0)
    n.wait(100)
    assert asked == [f.path for f in n.folders]
    assert {(r["rank"], r["look"], r["told"]) for r in n.rows()} == {
        (0, 1, True), (1, 1, False), (0, 2, True), (1, 2, False)}  # fmt: skip
    assert [(r["rank"], r["step"], r["op"], r["position"]) for r in n.rows("collective")] == [(0, 3, "barrier", 7)]
    n.step(4, 1.0)
    n.wait(400)  # three times the pause that was got over
    assert len(asked) == 4


def test_a_late_answer_to_an_earlier_question_is_none_to_the_next(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / flights.FIFO)
    reader = os.open(tmp_path / flights.FIFO, os.O_RDWR | os.O_NONBLOCK)
    (tmp_path / flights.ANSWER).write_text("[]")
    assert flights.wait(flights.ask([tmp_path]), 0.05) == set()
    (tmp_path / flights.ANSWER).write_text("[]")
    assert flights.wait([tmp_path], 0.05) == {tmp_path}
    os.close(reader)


def test_work_of_a_real_process_is_told_from_sleep() -> None:
    before = stalls.work(os.getpid(), [])
    sum(range(3_000_000))
    used = stalls.work(os.getpid(), []).since(before)
    assert used.busy_ns >= 10_000_000
    assert used.io_bytes >= 0
    assert used.state
