"""The watch loop and the looks that feed it: cheap, paced, ended by the run or a key."""

from __future__ import annotations

import io
import os
import pty
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from kit.rows import Rows
from kit.runs import write_run
from tdbg.aggregator import watching
from tdbg.aggregator.findings import DataQuality, Verdict
from tdbg.aggregator.outputs import live
from tdbg.aggregator.outputs.live import keys_of, watch
from tdbg.aggregator.ranks import RankRow
from tdbg.aggregator.store import Store
from tdbg.aggregator.watching import Look, Watcher
from tdbg.rankagent.contract import process_dir
from tdbg.rankagent.record import Recorder
from tdbg.rankagent.tables import known_tables

VERDICT = Verdict("r", "/s/r", "running", 1, 3, 1, DataQuality(True), (), ())


def _look(step: int, running: bool = True) -> Look:
    return Look(VERDICT, "running" if running else "finished", (RankRow(0, pid=1, steps=step),))


def _terminal() -> Console:
    return Console(file=io.StringIO(), width=80, height=24, force_terminal=True)


def test_the_loop_draws_until_the_run_has_ended_and_leaves_the_last_screen() -> None:
    looks = iter([_look(1), _look(2), _look(3, running=False)])
    console = _terminal()
    with open(os.devnull) as keyboard:
        watch(lambda: next(looks), console, keyboard, interval_s=0.001)
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    assert next(looks, None) is None
    assert "\x1b[?1049h" in drawn
    last = drawn.split("\x1b[?1049l")[-1]
    assert "finished" in last
    assert "q quits" not in last


def test_a_finished_run_and_a_pipe_get_one_plain_screen() -> None:
    for console, running in ((_terminal(), False), (Console(file=io.StringIO(), width=80), True)):
        calls: list[int] = []
        watch(lambda: calls.append(1) or _look(1, running), console)  # type: ignore[func-returns-value]  # noqa: B023
        drawn = console.file.getvalue()  # type: ignore[attr-defined]
        assert calls == [1]
        assert "\x1b[?1049h" not in drawn


@pytest.fixture
def keyboard() -> Callable[[], tuple[int, io.TextIOWrapper]]:
    def make() -> tuple[int, io.TextIOWrapper]:
        master, slave = pty.openpty()
        return master, os.fdopen(slave, "r")

    return make


def test_q_ends_the_loop_while_the_run_goes_on(keyboard: Callable[[], tuple[int, io.TextIOWrapper]]) -> None:
    master, typed = keyboard()
    threading.Timer(0.1, lambda: os.write(master, b"q")).start()
    began = time.monotonic()
    watch(lambda: _look(1), _terminal(), typed, interval_s=5)
    assert time.monotonic() - began < 4


def test_p_stops_looking_until_it_is_pressed_again(keyboard: Callable[[], tuple[int, io.TextIOWrapper]]) -> None:
    master, typed = keyboard()
    with keys_of(typed) as pressed:
        os.write(master, b"pPx")
        assert [pressed(1), pressed(1), pressed(1), pressed(0.01)] == ["p", "p", "x", ""]
    looks: list[int] = []

    def look() -> Look:
        looks.append(1)
        if len(looks) == 2:  # the first look is made before the terminal listens
            os.write(master, b"p")
            threading.Timer(0.4, lambda: os.write(master, b"q")).start()
        return _look(1)

    watch(look, _terminal(), typed, interval_s=0.02)
    assert len(looks) == 2


def test_a_costly_look_is_followed_by_a_longer_pause() -> None:
    waits: list[float] = []

    def look() -> Look:
        time.sleep(0.05)
        return _look(1, running=len(waits) < 3)

    @contextmanager
    def listening(_: object) -> Iterator[Callable[[float], str]]:
        yield lambda seconds: waits.append(seconds) or ""  # type: ignore[func-returns-value]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "keys_of", listening)
        watch(look, _terminal(), io.StringIO(), interval_s=0.01)
    assert waits[0] == 0.01
    assert min(waits[1:]) >= 4 * 0.05


def test_the_terminal_is_as_before_after_the_loop(keyboard: Callable[[], tuple[int, io.TextIOWrapper]]) -> None:
    import termios

    _, typed = keyboard()
    before = termios.tcgetattr(typed.fileno())
    with keys_of(typed):
        assert termios.tcgetattr(typed.fileno()) != before
    assert termios.tcgetattr(typed.fileno()) == before

    def fail() -> Look:
        raise RuntimeError("while looking")

    looks = iter([lambda: _look(1), fail])
    with pytest.raises(RuntimeError, match="while looking"):
        watch(lambda: next(looks)(), _terminal(), typed, interval_s=0.01)
    assert termios.tcgetattr(typed.fileno()) == before


def test_without_a_keyboard_the_loop_only_waits() -> None:
    with keys_of(io.StringIO()) as pressed:
        assert pressed(0.001) == ""


class _Growing:
    """A running one-rank job that writes a step when told."""

    def __init__(self, store: Path) -> None:
        self.run = write_run(store, Rows(), status="running", launcher_pid=os.getpid(), world_size=1)
        self.recorder = Recorder(process_dir(self.run, "rank", 0, 0, os.getpid()), 0, 0, segment_bytes=1 << 14)
        self.step = 0

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.recorder.write(known_tables()["step"], self.step, (1, 1, False, False, True, 1, 10**6, 10, 0))
            self.recorder.update_state(self.step, time.time_ns())


def test_a_look_sees_what_was_written_since_the_last(tmp_path: Path) -> None:
    job = _Growing(tmp_path)
    job.go(3)
    with Store(job.run, live=True) as store:
        watcher = Watcher(store)
        first = watcher.look()
        assert (first.status, first.ranks[0].steps) == ("running", 3)
        job.go(1000)
        assert watcher.look().ranks[0].steps == 1003
        assert store.rows("SELECT count(*) FROM step") == [(1003,)]
        # the newest segments only: what a look reads does not grow with the run
        assert store.rows("SELECT count(*) FROM recent.step")[0][0] < 500


def test_verdicts_are_paced_by_what_they_cost_and_made_anew_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _Growing(tmp_path)
    job.go(3)
    now, made = [0.0], []

    def slow(store: Store) -> Verdict:
        made.append(now[0])
        now[0] += 2.0
        return VERDICT

    monkeypatch.setattr(watching, "judge", slow)
    with Store(job.run, live=True) as store:
        watcher = Watcher(store, lambda: now[0])
        for _ in range(20):
            watcher.look()
            now[0] += 1.0
        assert made == [0.0, 10.0, 20.0]
        job.recorder.close(3)
        (job.run / "run.json").write_text((job.run / "run.json").read_text().replace('"running"', '"finished"'))
        assert watcher.look().status == "finished"
        assert len(made) == 4
