"""Stacks of real processes: had from whatever they are stuck in, and no process is harmed by the asking."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tdbg.launcher import dumps
from tdbg.rankagent.readback import read_state, segments

# A rank's process without torch: the recorder and the stacks' own part of the agent.
RANK = """
import os, select, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from tdbg.rankagent import stacks
from tdbg.rankagent.record import Recorder
recorder = Recorder(Path(sys.argv[1]), 0, 0)
if sys.argv[2] == "taken":
    for number in stacks.CANDIDATES:
        signal.signal(number, lambda *_: None)
agent = SimpleNamespace(recorder=recorder, live=True, switch_off=lambda name: print)
undo = stacks.install(agent)
def wait_here():
    {wait}
print(os.getpid(), flush=True)
wait_here()
print("done", flush=True)
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[object]:
    """`started(wait)`: (process, its folder) once it stands in `wait`."""
    running: list[subprocess.Popen[str]] = []

    def start(wait: str, kind: str = "free") -> tuple[subprocess.Popen[str], Path]:
        folder = tmp_path / f"rank-0000{len(running)}.0.1"
        process = subprocess.Popen([sys.executable, "-c", RANK.replace("{wait}", wait), str(folder), kind],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
        running.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.1)
        return process, folder

    yield start
    for process in running:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate("x\n", timeout=60)
    return process.returncode, out.strip()


WAITS = {
    "sleep": "time.sleep(1.5)",
    "select": "select.select([], [], [], 1.5)",
    "epoll": "select.epoll().poll(1.5)",
    "read": "sys.stdin.readline()",
    "lock": "import threading; threading.Lock(); threading.Event().wait(1.5)",
    "child": "import subprocess; subprocess.run(['sleep', '1.5'], check=True)",
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_rank_that_waits_tells_where_and_goes_on_waiting(started, wait: str) -> None:  # type: ignore[no-untyped-def]
    process, folder = started(wait)
    began = time.monotonic()
    for _ in range(20):
        frames = dumps.ask([(process.pid, folder)], 5.0)
        assert "wait_here" in frames[process.pid], frames
    assert process.poll() is None
    if "1.5" in wait:
        process.wait(60)
        assert time.monotonic() - began > 1.0  # the wait was not cut short
    assert ended(process) == (0, "done")


def test_frames_are_outermost_first(started) -> None:  # type: ignore[no-untyped-def]
    process, folder = started("time.sleep(60)")
    lines = dumps.ask([(process.pid, folder)], 5.0)[process.pid].splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["<module>", "wait_here"]


def test_the_training_thread_is_asked_where_it_is_not_the_main_one(started) -> None:  # type: ignore[no-untyped-def]
    wait = "import threading; undo(); t = threading.Thread(target=elsewhere); t.start(); t.join()"
    wait += "\ndef elsewhere():\n    stacks.install(agent); time.sleep(60)"
    process, folder = started(wait)
    time.sleep(0.3)
    assert "elsewhere" in dumps.ask([(process.pid, folder)], 5.0)[process.pid]


def test_a_program_that_takes_the_signal_for_itself_gets_it_and_is_not_asked(started) -> None:  # type: ignore[no-untyped-def]
    take = "n = [n for n in stacks.CANDIDATES if signal.getsignal(n) == signal.SIG_IGN][0]; "
    process, folder = started(take + "signal.signal(n, lambda *_: print('mine')); time.sleep(1.5)")
    assert dumps.ask([(process.pid, folder)], 0.3) == {}
    assert ended(process) == (0, "done")


def test_a_program_that_resets_every_signal_is_not_asked(started) -> None:  # type: ignore[no-untyped-def]
    process, folder = started(
        "import _signal; [_signal.signal(n, _signal.SIG_DFL) for n in range(34, 64)]; time.sleep(1)"
    )
    assert dumps.ask([(process.pid, folder)], 0.3) == {}
    assert ended(process) == (0, "done")


def test_a_file_that_has_our_descriptor_is_not_written_to(started, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    other = tmp_path / "theirs"
    process, folder = started(f"os.closerange(3, 50); [open({str(other)!r}, 'w') for _ in range(9)]; f = "
                              f"[os.open({str(other)!r}, os.O_WRONLY) for _ in range(9)]; time.sleep(1)")  # fmt: skip
    assert dumps.ask([(process.pid, folder)], 0.3) == {}
    assert ended(process) == (0, "done")
    assert other.read_text() == ""


def test_what_the_rank_becomes_by_exec_is_not_asked_and_its_forks_survive_the_signal(started) -> None:  # type: ignore[no-untyped-def]
    process, folder = started("os.execvp('sh', ['sh', '-c', 'sleep 1; echo done'])")
    assert dumps.ask([(process.pid, folder)], 0.3) == {}
    assert ended(process) == (0, "done")
    forks = "pid = os.fork(); "
    process, folder = started(
        forks + "pid or (time.sleep(1), os._exit(0)); print(pid, flush=True); print(os.wait()[1])"
    )
    assert process.stdout is not None
    child, state = int(process.stdout.readline()), read_state(folder)
    assert state is not None
    os.kill(child, state.signal)
    assert ended(process) == (0, "0\ndone")


def test_the_signal_harms_nothing_while_the_interpreter_closes(started) -> None:  # type: ignore[no-untyped-def]
    process, folder = started("import atexit; atexit.register(time.sleep, 0.5); time.sleep(0.1)")
    state = read_state(folder)
    assert state is not None
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        os.kill(process.pid, state.signal)
        time.sleep(0.001)
    assert process.returncode == 0


def test_without_a_free_signal_the_rank_says_so(started) -> None:  # type: ignore[no-untyped-def]
    from tdbg.rankagent.readback import read_segment

    process, folder = started("time.sleep(0.1)", "taken")
    assert dumps.ask([(process.pid, folder)], 0.3) == {}
    assert ended(process)[0] == 0
    rows = [row for s in segments(folder) for table, row in read_segment(s) if table.name == "probe"]
    assert [(r["name"], r["state"]) for r in rows] == [("stacks", "unavailable")]


def test_processes_that_are_gone_or_stopped_do_not_answer(started) -> None:  # type: ignore[no-untyped-def]
    process, folder = started("time.sleep(60)")
    process.send_signal(signal.SIGSTOP)
    assert dumps.ask([(process.pid, folder)], 0.2) == {}
    process.kill()
    process.wait()
    assert dumps.ask([(process.pid, folder)], 0.2) == {}


def test_what_faulthandler_prints_is_read() -> None:
    dump = b'Current thread 0x00007f01 [name] (most recent call first):\n  File "/a b/x.py", line 3 in inner\n'
    dump += (
        b'  File "/a b/x.py", line 9 in <module>\n\nThread 0x02 (most recent call first):\n  File "y.py", line 1 in z\n'
    )
    assert dumps.frames_of(dump) == "/a b/x.py:9 <module>\n/a b/x.py:3 inner"
    assert dumps.frames_of(b"") == ""
