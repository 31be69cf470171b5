"""When processes end, in which order, with which code, and whether they were stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tdbg.launcher.deaths import Deaths, Process, runs


@pytest.fixture(params=["pidfd", "no pidfd"])
def deaths(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deaths]:
    if request.param == "no pidfd":

        def refused(pid: int, flags: int = 0) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(os, "pidfd_open", refused)
    d = Deaths(on_death=lambda: None)
    d.start()
    yield d
    d.close()


def shell(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", script])


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end, "it did not come to pass within 20 s"
        time.sleep(0.01)


def taken(deaths: Deaths, count: int, last: bool = False) -> list[Process]:
    found: list[Process] = []

    def enough() -> bool:
        found.extend(deaths.take(last))
        return len(found) >= count

    until(enough)
    return found


def test_a_code_is_read_before_the_owner_waits_and_left_for_him(deaths: Deaths) -> None:
    child = shell("sleep 0.2; exit 7")
    deaths.follow([Process(3, 1, child.pid)])
    (p,) = taken(deaths, 1)
    assert (p.rank, p.attempt, p.exit_code, p.stopped) == (3, 1, 7, False)
    assert abs(p.ended_ns - time.time_ns()) < 10e9
    assert child.wait() == 7


def test_the_order_of_ends_is_kept(deaths: Deaths) -> None:
    children = [shell(f"sleep {s}") for s in (0.9, 0.3, 0.6)]
    deaths.follow([Process(i, 0, c.pid) for i, c in enumerate(children)])
    assert [p.rank for p in taken(deaths, 3)] == [1, 2, 0]
    for c in children:
        c.wait()


def test_what_ends_after_the_stop_was_stopped_and_what_had_ended_before_was_not(deaths: Deaths) -> None:
    failed, other = shell("exit 1"), shell("exec sleep 60")
    deaths.follow([Process(0, 0, failed.pid), Process(1, 0, other.pid)])
    until(lambda: not runs(failed.pid))
    deaths.stopping({})  # even when nobody could say who had ended
    other.send_signal(signal.SIGTERM)
    found = {p.rank: (p.exit_code, p.stopped) for p in taken(deaths, 2)}
    assert found == {0: (1, False), 1: (-15, True)}
    failed.wait()
    other.wait()


def test_stopping_a_group_a_second_time_changes_nothing() -> None:
    unwatched = Deaths(on_death=lambda: None)  # its thread is late: it has seen no end when the second stop comes
    child = shell("exec sleep 60")
    unwatched.follow([Process(0, 0, child.pid)])
    unwatched.stopping({})
    child.terminate()
    unwatched.stopping({child.pid: child.wait()})
    (p,) = unwatched.take(last=True)
    assert (p.exit_code, p.stopped) == (-15, True)
    unwatched.close()


def test_a_process_that_is_no_child_of_ours_ends_with_an_unknown_code(deaths: Deaths) -> None:
    out = subprocess.run(["sh", "-c", "sleep 0.3 >/dev/null & echo $!"], capture_output=True, check=True).stdout
    deaths.follow([Process(0, 0, int(out))])
    until(deaths.waiting)
    assert deaths.take() == []
    (p,) = taken(deaths, 1, last=True)
    assert p.exit_code == -1000


def test_a_code_that_torchelastic_reports_later_is_used(deaths: Deaths) -> None:
    child = shell("exit 4")
    child.wait()
    deaths.follow([Process(0, 0, child.pid)])
    until(deaths.waiting)
    assert deaths.take() == []
    deaths.codes({child.pid: 4})
    (p,) = deaths.take()
    assert p.exit_code == 4


def test_watching_sleeps_until_something_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    d = Deaths(on_death=lambda: None)
    d.start()
    child = shell("exec sleep 60")
    d.follow([Process(0, 0, child.pid)])
    time.sleep(0.2)
    (thread,) = [t for t in threading.enumerate() if t.name == "tdbg-deaths"]

    def switches() -> int:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        return int(status.split("voluntary_ctxt_switches:")[1].split()[0])

    before = switches()
    time.sleep(0.6)
    assert switches() - before <= 1
    child.kill()
    child.wait()
    d.close()
    d.close()


def test_a_zombie_does_not_run() -> None:
    child = shell("exit 0")
    until(lambda: not runs(child.pid))
    child.wait()
    assert not runs(child.pid)
    assert runs(os.getpid())
