"""What torchelastic tells us about real small groups of processes (shells, so that they start at once)."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic import multiprocessing as elastic
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tdbg.launcher import torchelastic
from tdbg.launcher.torchelastic import Group


class Heard:
    """A listener that keeps what it was told."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.before: list[dict[int, int]] = []
        self.after: list[dict[int, int]] = []
        self.stills = 0

    def started(self, group: Group) -> None:
        self.groups.append(group)

    def stopping(self, ended: Mapping[int, int]) -> None:
        self.before.append(dict(ended))

    def stopped(self, codes: Mapping[int, int]) -> None:
        self.after.append(dict(codes))

    def still(self) -> AbstractContextManager[object]:
        self.stills += 1
        return nullcontext()


@pytest.fixture
def heard() -> Iterator[Heard]:
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    listener = Heard()
    undo, why_not = torchelastic.observe(listener)
    assert why_not == ""
    yield listener
    undo()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def group(*scripts: str, attempt: int = 0) -> elastic.PContext:
    envs = {
        i: {"RANK": str(4 + i), "WORLD_SIZE": "8", "TORCHELASTIC_RESTART_COUNT": str(attempt), "LOCAL_RANK": str(i)}
        for i in range(len(scripts))
    }
    args: dict[int, tuple[Any, ...]] = {i: ("-c", s) for i, s in enumerate(scripts)}
    return elastic.start_processes("test", "/bin/sh", args, envs, elastic.DefaultLogsSpecs())


def test_a_group_is_announced_with_global_ranks_pids_and_attempt(heard: Heard) -> None:
    context = group("exit 0", "exit 0", attempt=2)
    assert context.wait(timeout=20, period=0.02) is not None
    (told,) = heard.groups
    assert (told.attempt, told.world_size) == (2, 8)
    assert dict(told.pids) == {4 + local: pid for local, pid in context.pids().items()}


def test_codes_of_a_success_are_known_and_none_was_stopped(heard: Heard) -> None:
    context = group("exit 0", "exit 0")
    context.wait(timeout=20, period=0.02)
    assert heard.before[0] == dict.fromkeys(context.pids().values(), 0)


def test_the_first_failure_is_told_from_those_that_were_stopped_for_it(heard: Heard) -> None:
    context = group("sleep 60", "exit 3", "kill -9 $$")
    time.sleep(0.5)
    assert context.wait(timeout=20, period=0.02) is not None
    sleeper, failed, killed = (context.pids()[i] for i in range(3))
    assert heard.before[0] == {failed: 3, killed: -9}
    assert heard.after[-1] == {failed: 3, killed: -9, sleeper: -15}


def test_a_signal_to_the_launcher_passes_through_and_the_group_counts_as_stopped(heard: Heard) -> None:
    context = group("sleep 60")
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM))
    timer.start()
    with pytest.raises(SignalException) as caught:
        context.wait(timeout=20, period=0.02)
    assert torchelastic.was_signal(caught.value)
    context.close(signal.SIGTERM)
    assert heard.before == [{}]
    assert list(heard.after[-1].values()) == [-15]


def test_an_exit_status_that_was_peeked_at_is_still_there_for_its_owner() -> None:
    child = subprocess.Popen(["sh", "-c", "exit 5"])
    while torchelastic.peek_exit_code(child.pid) is None:
        time.sleep(0.01)
    assert torchelastic.peek_exit_code(child.pid) == 5
    assert child.wait() == 5
    assert torchelastic.peek_exit_code(child.pid) is None


def test_undoing_restores_the_very_functions() -> None:
    before = (elastic.PContext.start, elastic.PContext.close)
    undo, _ = torchelastic.observe(Heard())
    assert elastic.PContext.start is not before[0]
    undo()
    assert (elastic.PContext.start, elastic.PContext.close) == before


def test_a_torch_without_these_methods_is_said_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(elastic.PContext, "close")
    undo, why_not = torchelastic.observe(Heard())
    assert "exit codes may be unknown" in why_not
    undo()


@pytest.mark.parametrize("context", [SimpleNamespace(), SimpleNamespace(pids=lambda: {0: 1}, envs={0: {}}), None])
def test_a_context_of_another_shape_is_no_group_and_no_error(context: Any) -> None:
    assert torchelastic.group_of(context) is None
    assert torchelastic.exit_codes(context) == {}


def test_a_forking_group_starts_while_our_threads_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    monkeypatch.setattr(elastic.PContext, "start", lambda self: "started")
    undo, _ = torchelastic.observe(heard)
    try:
        context: Any = SimpleNamespace(start_method="fork")
        assert elastic.PContext.start(context) == "started"
        assert heard.stills == 1
    finally:
        undo()


def test_torchruns_own_report_gives_codes_by_pid() -> None:
    error = ChildFailedError("x", {3: ProcessFailure(local_rank=0, pid=77, exitcode=-9, error_file="none")})
    assert torchelastic.failures(error) == {77: -9}
    assert torchelastic.failures(ValueError()) == {}
    assert not torchelastic.was_signal(error)
    assert torchelastic.was_signal(KeyboardInterrupt())
