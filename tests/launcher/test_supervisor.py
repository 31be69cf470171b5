"""The watcher's rounds: folders made by the recorder itself, real small processes, a clock that is moved by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tdbg.launcher import rundir
from tdbg.launcher.node.host import Host
from tdbg.launcher.node.process import Tree
from tdbg.launcher.sampling import Sampler
from tdbg.launcher.supervisor import Supervisor
from tdbg.launcher.torchelastic import Group
from tdbg.rankagent import contract
from tdbg.rankagent.readback import segments
from tdbg.rankagent.record import Recorder
from tdbg.rankagent.tables import Column, Table

LOSS = Table("loss_like", (Column("value", "float64", "", "a number"),))


class Node:
    """A run folder with a supervisor whose thread is not started: the test calls `round`."""

    def __init__(self, run: Path) -> None:
        self.run, self.now = run, 1000.0
        (run / "records").mkdir()
        self.node_file, self.run_file = rundir.node_json(run, 0, "host"), rundir.run_json(run, cwd=str(run))
        folder = contract.process_dir(run, "node", 0, 0, 1)
        self.recorder = Recorder(folder, rank=-1, attempt=0)
        self.supervisor = Supervisor(
            run, 0, self.node_file, self.run_file, self.recorder,
            make_sampler=lambda s: Sampler(self.recorder, 0, 1.0, Host(run), Tree(), None), clock=lambda: self.now,
        )  # fmt: skip
        self.supervisor._begin()

    def json(self, name: str) -> Any:
        return json.loads((self.run / name).read_text())

    def rows(self, table: str) -> list[dict[str, Any]]:
        parts = sorted((self.run / "tables" / table).glob("node=*/*.parquet"))
        return [row for p in parts for row in pq.read_table(p).to_pylist()]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    n = Node(tmp_path)
    n.supervisor.deaths.start()
    yield n
    n.supervisor.deaths.close()


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"])


def recording(run: Path, rank: int, pid: int, rows: int, attempt: int = 0) -> Recorder:
    """What a rank's agent would leave behind: small segments, so that `rows` fill several."""
    recorder = Recorder(contract.process_dir(run, "rank", rank, attempt, pid), rank, attempt, segment_bytes=4096)
    for step in range(rows):
        recorder.write(LOSS, step + 1, (float(step),))
    recorder.update_state(rows, time.time_ns())
    return recorder


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end, "it did not come to pass within 20 s"
        time.sleep(0.01)


def parts(run: Path, rank: int) -> int:
    return sum(pq.read_metadata(p).num_rows for p in run.glob(f"tables/loss_like/rank={rank:05d}/*.parquet"))


def test_full_segments_are_sealed_while_the_rank_runs_and_the_rest_when_it_has_ended(node: Node) -> None:
    child = sleeper()
    recording(node.run, 0, child.pid, rows=200)
    folder = contract.process_dir(node.run, "rank", 0, 0, child.pid)
    node.supervisor.started(Group(0, 1, {0: child.pid}, time.time_ns()))
    node.supervisor.round()
    assert len(segments(folder)) == 1
    while_running = parts(node.run, 0)
    assert 0 < while_running < 200
    child.kill()
    until(lambda: node.supervisor.deaths.waiting() or not node.supervisor.deaths.running())
    node.supervisor.round()
    assert segments(folder) == []
    assert parts(node.run, 0) == 200
    child.wait()


def test_each_death_is_a_row_with_its_last_step_and_an_entry_in_the_nodes_file(node: Node) -> None:
    child = sleeper()
    recording(node.run, 3, child.pid, rows=12, attempt=1)
    node.supervisor.started(Group(1, 8, {3: child.pid}, 5))
    node.supervisor.round()
    child.kill()
    child_pid = child.pid
    until(node.supervisor.deaths.waiting)
    node.supervisor.round()
    child.wait()
    node.supervisor.finish()
    (row,) = node.rows("exit")
    assert (row["rank"], row["attempt"], row["step"], row["of_pid"]) == (3, 1, 12, child_pid)
    assert (row["exit_code"], row["stopped_by_launcher"]) == (-9, False)
    (attempt,) = node.json("node-00000.json")["attempts"]
    assert attempt["attempt"] == 1
    assert attempt["start_ns"] == 5
    assert attempt["ranks"]["3"]["exit_code"] == -9
    assert attempt["ranks"]["3"]["ended_ns"] == row["ended_ns"]
    assert node.json("run.json")["world_size"] == 8


def test_ranks_that_torchrun_stopped_are_marked(node: Node) -> None:
    child = sleeper()
    node.supervisor.started(Group(0, 1, {0: child.pid}, 0))
    node.supervisor.stopping({})
    child.terminate()
    code = child.wait()
    node.supervisor.stopped({child.pid: code})
    node.supervisor.finish()
    (row,) = node.rows("exit")
    assert (row["exit_code"], row["stopped_by_launcher"]) == (-15, True)


def test_another_nodes_folders_on_a_shared_disk_are_left_alone(node: Node) -> None:
    child = sleeper()
    node.supervisor.started(Group(0, 2, {0: child.pid}, 0))
    recording(node.run, 1, child.pid, rows=200)  # the other node's process happens to have the same pid
    node.supervisor.round()
    child.kill()
    child.wait()
    node.supervisor.finish()
    assert parts(node.run, 1) == 0


def test_a_recorder_below_a_shell_wrapper_is_sampled_and_the_exit_is_the_wrappers(node: Node) -> None:
    wrapper = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
    assert wrapper.stdout is not None
    inner = int(wrapper.stdout.readline())
    recording(node.run, 0, inner, rows=3)
    node.supervisor.started(Group(0, 1, {0: wrapper.pid}, 0))
    node.supervisor.round()
    subprocess.run(["kill", "-9", str(inner)], check=True)
    wrapper.kill()
    wrapper.wait()
    node.supervisor.finish()
    assert {r["of_pid"] for r in node.rows("proc")} == {inner}
    assert {r["of_pid"] for r in node.rows("exit")} == {wrapper.pid}
    assert node.rows("exit")[0]["step"] == 3


def test_the_heartbeat_moves_on_every_second_and_no_oftener(node: Node) -> None:
    node.supervisor.round()
    first = node.json("node-00000.json")["heartbeat_ns"]
    node.now += 0.5
    node.supervisor.round()
    assert node.json("node-00000.json")["heartbeat_ns"] == first
    node.now += 0.6
    node.supervisor.round()
    assert node.json("node-00000.json")["heartbeat_ns"] > first
    assert node.json("node-00000.json")["end_ns"] is None


def test_samples_come_at_their_interval(node: Node) -> None:
    for step in range(5):
        node.now = 1000.0 + step * 0.5
        node.supervisor.round()
    node.supervisor.finish()
    assert len(node.rows("host")) == 3


def test_a_segment_that_can_not_be_sealed_stays_and_is_noted_and_the_rest_goes_on(node: Node) -> None:
    children = [sleeper(), sleeper()]
    for rank, child in enumerate(children):
        recording(node.run, rank, child.pid, rows=200)
    foreign = contract.process_dir(node.run, "rank", 0, 0, children[0].pid) / "00000.rec"
    foreign.write_bytes(b"not ours" * 100)
    node.supervisor.started(Group(0, 2, {r: c.pid for r, c in enumerate(children)}, 0))
    for _ in range(5):
        node.supervisor.round()
    for child in children:
        child.kill()
        child.wait()
    node.supervisor.finish()
    assert foreign.exists()
    assert parts(node.run, 1) == 200
    notes = [n["text"] for n in node.json("node-00000.json")["notes"] if n["about"] == "seal"]
    assert len(notes) == 1
    assert "is not a tdbg record file" in notes[0]
    assert [r["text"] for r in node.rows("node_note") if r["about"] == "seal"] == notes


def test_an_error_of_the_watcher_is_a_note_and_the_other_parts_go_on(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("no such sensor")

    monkeypatch.setattr(Host, "sample", lambda self: broken())
    child = sleeper()
    node.supervisor.started(Group(0, 1, {0: child.pid}, 0))
    for _ in range(3):
        node.now += 1.0
        node.supervisor.round()
    child.kill()
    child.wait()
    node.supervisor.finish()
    texts = [n["text"] for n in node.json("node-00000.json")["notes"]]
    assert texts == ["RuntimeError: no such sensor"]
    assert len(node.rows("exit")) == 1


def test_a_disk_that_is_full_costs_rows_and_nothing_else(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object) -> None:
        raise OSError(28, "No space left on device", "node-00000.json")

    child = sleeper()
    node.supervisor.started(Group(0, 1, {0: child.pid}, 0))
    with monkeypatch.context() as m:
        m.setattr(rundir.JsonFile, "write", full)
        node.supervisor.round()
        node.now += 2.0
        node.supervisor.round()
    node.now += 2.0
    node.supervisor.round()
    child.kill()
    child.wait()
    node.supervisor.finish()
    assert "No space left on device" in node.json("node-00000.json")["notes"][0]["text"]
    assert node.json("node-00000.json")["attempts"][0]["ranks"]["0"]["pid"] == child.pid


def test_the_thread_samples_at_once_and_closes_in_order(node: Node) -> None:
    supervisor = node.supervisor
    node.supervisor._thread.start()
    until(lambda: supervisor._sample_due > 0)
    assert supervisor.close(10.0)
    assert len(node.rows("host")) >= 1
    assert node.json("node-00000.json")["end_ns"] is not None
    assert not [t for t in threading.enumerate() if t.name == "tdbg-supervisor"]


def test_ranks_of_another_launcher_are_found_among_our_descendants(node: Node) -> None:
    node.supervisor.ranks.told = False
    code = (
        "import sys, os, time; from pathlib import Path; from tdbg.rankagent.record import Recorder;"
        "from tdbg.rankagent import contract;"
        "r = Recorder(contract.process_dir(Path(sys.argv[1]), 'rank', 2, 0, os.getpid()), 2, 0);"
        "r.update_state(9, 1); print('x', flush=True); input()"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(node.run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    recording(node.run, 7, 1, rows=1)  # pid 1 is no descendant of ours
    node.supervisor.round()
    child.communicate(b"\n")
    node.supervisor.finish()
    (row,) = node.rows("exit")
    assert (row["rank"], row["step"], row["of_pid"]) == (2, 9, child.pid)
    assert node.json("node-00000.json")["attempts"][0]["ranks"].keys() == {"2"}


def test_an_oom_kill_shortly_before_a_death_is_counted_with_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = [5]
    monkeypatch.setattr(Host, "oom_kills", lambda self: kills[0])
    node.supervisor._oom_kills.clear()
    node.supervisor._oom_kills.extend([(0, 2), (100_000_000_000, 4), (119_000_000_000, 5)])
    assert node.supervisor._new_oom_kills(120_000_000_000) == 1
    kills[0] = -1
    assert node.supervisor._new_oom_kills(120_000_000_000) == -1
