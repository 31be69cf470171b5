"""Running another launcher's command as a child."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tdbg.launcher.execute import execute
from tdbg.rankagent.contract import TdbgError


def run(*command: str) -> tuple[int, bool]:
    return execute(command, os.environ, on_stop=lambda: None)


def test_the_childs_exit_code_is_ours() -> None:
    assert run("sh", "-c", "exit 3") == (3, False)
    assert run("true") == (0, False)


def test_a_child_that_a_signal_ended_gives_the_shells_number() -> None:
    assert run("sh", "-c", "kill -9 $$") == (137, False)


def test_the_child_gets_the_environment_given() -> None:
    assert execute(["sh", "-c", 'test "$TDBG_NODE" = 4'], {**os.environ, "TDBG_NODE": "4"}, lambda: None)[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_signals_go_on_to_the_child_and_our_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    told: list[float] = []

    def later() -> None:
        time.sleep(0.5)
        os.kill(os.getpid(), number)

    threading.Thread(target=later).start()
    script = f"trap 'exit 5' {number.name[3:]}; while :; do sleep 0.05; done"
    code, stopped = execute(["sh", "-c", script], os.environ, on_stop=lambda: told.append(1))
    assert code == 5
    assert stopped == bool(told) == (number != signal.SIGUSR1)
    assert signal.getsignal(number) == before


def test_a_command_that_does_not_exist_is_named() -> None:
    with pytest.raises(TdbgError, match=r"no-such-launcher: No such file"):
        run("no-such-launcher")
