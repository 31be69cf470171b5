"""What the launchers say, and when a run that says it is running is believed."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from tdbg.aggregator.about import FRESH_NS, About, Node, read_about, status_of
from tdbg.rankagent.contract import TdbgError

NOW = 10**18
HERE = socket.gethostname()
GONE = 2**22 + 1  # above the kernel's largest pid


def _running(host: str, pid: int, age_ns: int) -> About:
    return About("r", found=True, said_status="running", nodes=(Node(0, host, pid, NOW - age_ns),))


def test_a_fresh_heartbeat_of_a_living_launcher_means_running() -> None:
    assert status_of(_running(HERE, os.getpid(), 10**9), False, NOW) == "running"


def test_a_run_whose_launcher_is_gone_or_silent_was_killed() -> None:
    assert status_of(_running(HERE, GONE, 10**9), False, NOW) == "killed"
    assert status_of(_running(HERE, os.getpid(), FRESH_NS + 1), False, NOW) == "killed"


def test_on_another_host_the_heartbeat_alone_decides() -> None:
    assert status_of(_running("elsewhere", GONE, 10**9), False, NOW) == "running"
    assert status_of(_running("elsewhere", GONE, FRESH_NS + 1), False, NOW) == "killed"


def test_one_living_node_of_several_keeps_the_run_running() -> None:
    nodes = (Node(0, HERE, GONE, NOW), Node(1, "elsewhere", 7, NOW))
    assert status_of(About("r", found=True, said_status="running", nodes=nodes), False, NOW) == "running"


def test_before_the_first_heartbeat_the_launchers_start_counts() -> None:
    about = About("r", found=True, said_status="running", start_ns=NOW - 10**9, host=HERE, launcher_pid=os.getpid())
    assert status_of(about, False, NOW) == "running"
    assert status_of(about, False, NOW + FRESH_NS) == "killed"


@pytest.mark.parametrize("said", ["finished", "failed", "killed"])
def test_an_ended_run_keeps_the_status_it_was_given(said: str) -> None:
    assert status_of(About("r", found=True, said_status=said), False, NOW) == said


def test_without_run_json_the_ranks_own_word_counts() -> None:
    assert status_of(About("r"), True, NOW) == "finished"
    assert status_of(About("r"), False, NOW) == "killed"


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"x"', '{"world_size": "four", "command": 3, "settings": []}'])
def test_an_odd_run_json_is_read_as_far_as_it_makes_sense(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    (tmp_path / "node-00000.json").write_text(text)
    about = read_about(tmp_path)
    assert about.world_size is None
    assert about.command == ()


def test_node_files_tell_which_ranks_each_attempt_started(tmp_path: Path) -> None:
    (tmp_path / "node-00001.json").write_text(json.dumps({
        "node": 1, "host": "h", "heartbeat_ns": 5,
        "attempts": [{"attempt": 0, "ranks": {"2": {}, "3": {}}}, {"attempt": 1, "ranks": {"2": {}, "x": {}}}, 7],
    }))  # fmt: skip
    assert read_about(tmp_path).nodes == (Node(1, "h", 0, 5, False, {0: (2, 3), 1: (2,)}),)


def test_a_run_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"schema": "tdbg.run/2", "format": 99}))
    with pytest.raises(TdbgError, match="has format 99"):
        read_about(tmp_path)
