"""Who was measured and what was lost: every loss is a sentence and a gap; a whole recording has neither."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from kit.rows import Rows
from kit.runs import parts, record_dirs, write_run
from tdbg.aggregator.presence import Presence, presence
from tdbg.aggregator.store import Store
from tdbg.rankagent.contract import process_dir
from tdbg.rankagent.readback import segments
from tdbg.rankagent.record import Recorder

Copy = Callable[[str], Path]


def _presence(run: Path) -> Presence:
    with Store(run) as store:
        return presence(store)


def _steps(ranks: int, steps: int, attempt: int = 0, rows: Rows | None = None) -> Rows:
    rows = rows or Rows()
    for rank in range(ranks):
        for step in range(1, steps + 1):
            rows.add("step", rank=rank, pid=100 + 10 * attempt + rank, attempt=attempt, step=step, step_ns=10**6)
    return rows


def _warnings(p: Presence) -> str:
    assert not p.quality.complete
    assert len(p.quality.warnings) == 1, p.quality.warnings
    return p.quality.warnings[0]


def test_a_whole_recording_is_complete(templates: Path) -> None:
    for name in ("healthy", "unsealed"):
        p = _presence(templates / name)
        assert p.quality.warnings == ()
        assert p.quality.complete
        assert (p.status, p.world_size, p.steps, p.attempts, p.gaps) == ("finished", 3, 24, 1, ())
        assert p.quality.ranks_seen == (0, 1, 2)
        assert p.quality.last_step == {0: 24, 1: 24, 2: 24}
        assert (p.facts.world_size, p.facts.missing_ranks, p.facts.local_world_size) == (3, (), 3)


def test_a_rank_that_never_wrote_anything_is_missing(tmp_path: Path) -> None:
    p = _presence(write_run(tmp_path, _steps(2, 3), world_size=3))
    assert _warnings(p) == "rank 2 of 3 recorded nothing"
    assert p.facts.missing_ranks == (2,)
    assert [g.table for g in p.gaps] == [""]


def test_a_rank_that_recorded_no_step_is_silent(tmp_path: Path) -> None:
    rows = _steps(2, 3).add("identity", rank=2, pid=102, key="argv", value="x")
    assert "rank 2 recorded no optimizer step, the others did" in _warnings(_presence(write_run(tmp_path, rows)))


def test_a_run_in_which_nobody_stepped_says_so_once(tmp_path: Path) -> None:
    rows = Rows().add("identity", rank=0, pid=100, key="argv").add("identity", rank=1, pid=101, key="argv")
    assert _warnings(_presence(write_run(tmp_path, rows))) == "no rank recorded an optimizer step"


def test_the_world_size_that_a_rank_was_told_counts_without_run_json(tmp_path: Path) -> None:
    rows = _steps(2, 3).add("identity", rank=0, pid=100, key="env.WORLD_SIZE", value="4")
    p = _presence(write_run(tmp_path, rows, describe=False))
    assert p.world_size == 4
    assert p.facts.missing_ranks == (2, 3)
    assert "run.json is missing" in p.quality.warnings[0]


def test_dropped_rows_are_counted_and_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, _steps(1, 3), seal=False, closed=False)
    recorder = Recorder(process_dir(run, "rank", 1, 0, 101), 1, 0, segment_bytes=1 << 16)
    recorder.pid = 101
    from tdbg.rankagent.tables import known_tables

    step = known_tables()["step"]
    assert not recorder.write(step, 1, ("not a number",))
    assert recorder.write(step, 1, (1, 1, False, False, True, 1, 0, 0, 0))
    recorder.close(1)
    p = _presence(run)
    assert p.quality.dropped_events == 1
    assert any("rank 1" in w and "dropped 1 row" in w for w in p.quality.warnings)


def test_a_removed_sealed_part_is_missed(run_of: Copy) -> None:
    run = run_of("healthy")
    parts(run, "param", rank=1)[0].unlink()
    p = _presence(run)
    assert "rank 1" in _warnings(p)
    assert "a part is missing" in _warnings(p)
    assert p.quality.dropped_events > 0


def test_a_removed_segment_is_missed(run_of: Copy) -> None:
    for which in (0, -1):
        run = run_of("unsealed")
        segments(record_dirs(run, 1)[0])[which].unlink()
        p = _presence(run)
        assert any("rank 1" in w and "a file is missing or was cut" in w for w in p.quality.warnings), which
        assert p.quality.dropped_events > 0
        shutil.rmtree(run)


def test_a_removed_record_folder_leaves_a_rank_whose_losses_cannot_be_known(run_of: Copy) -> None:
    run = run_of("healthy")
    shutil.rmtree(record_dirs(run, 2)[0])
    assert "rank 2" in _warnings(_presence(run))
    assert "no folder in records/" in _warnings(_presence(run))


def test_a_lost_state_page_and_a_lost_account_are_said(run_of: Copy) -> None:
    run = run_of("healthy")
    (record_dirs(run, 0)[0] / "state").unlink()
    (record_dirs(run, 1)[0] / "sealed.json").write_text('{"0000')
    text = "\n".join(_presence(run).quality.warnings)
    assert "rank 0 (attempt 0, process 100) left no readable state page" in text
    assert "rank 1 (attempt 0, process 101) has sealed parts without an account" in text


def test_a_damaged_frame_is_counted_and_the_rest_is_read(run_of: Copy) -> None:
    run = run_of("unsealed")
    segment = segments(record_dirs(run, 1)[0])[0]
    content = bytearray(segment.read_bytes())
    middle = content.index(b"env") if b"env" in content[:2000] else 20_000
    content[middle : middle + 4] = b"\xaa\xbb\xcc\xdd"
    segment.write_bytes(content)
    p = _presence(run)
    assert any("damaged record" in w and "rank 1" in w for w in p.quality.warnings)
    assert p.quality.dropped_events >= 1
    assert p.quality.last_step == {0: 24, 1: 24, 2: 24}


def test_a_killed_process_lost_no_completed_step_and_the_warning_says_so(tmp_path: Path) -> None:
    p = _presence(write_run(tmp_path, _steps(2, 3), status="failed", closed=False))
    assert _warnings(p) == ("ranks 0, 1 ended without closing the recording after step 3 (killed or aborted); "
                            "all completed steps are here")  # fmt: skip
    assert p.gaps == ()


def test_a_torn_last_record_of_a_killed_process_is_no_loss(tmp_path: Path) -> None:
    rows = _steps(2, 3).add("step", rank=1, pid=101, step=4, agent_ns=-1)  # no zeros at the end of the last record
    run = write_run(tmp_path, rows, status="failed", closed=False, seal=False)
    segment = segments(record_dirs(run, 1)[0])[-1]
    content = bytearray(segment.read_bytes())
    end = len(bytes(content).rstrip(b"\0"))
    end += -end % 8
    content[end : end + 40] = b"\x01\x02\x03\x04\x30\x00\x00\x00\x01\x00\x00\x00" + b"\x07" * 28
    segment.write_bytes(content)
    p = _presence(run)
    assert "the record being written by rank 1 was cut; all completed steps are here" in _warnings(p)
    assert p.quality.dropped_events == 0


def test_an_open_recording_of_a_running_run_is_no_warning(tmp_path: Path) -> None:
    run = write_run(tmp_path, _steps(2, 3), status="running", closed=False, seal=False, launcher_pid=os.getpid())
    p = _presence(run)
    assert p.status == "running"
    assert p.quality.warnings == ()


def test_a_run_that_says_running_without_its_launcher_was_killed(tmp_path: Path) -> None:
    old = time.time_ns() - 60 * 10**9
    run = write_run(tmp_path, _steps(2, 3), status="running", closed=False, launcher_pid=os.getpid(), heartbeat_ns=old)
    p = _presence(run)
    assert p.status == "killed"
    assert "ended without closing" in _warnings(p)


def test_attempts_are_judged_one_by_one_and_may_differ_in_size(tmp_path: Path) -> None:
    rows = _steps(2, 3, attempt=1, rows=_steps(3, 7))
    p = _presence(write_run(tmp_path, rows, world_size=2))
    assert (p.attempts, p.world_size, p.steps) == (2, 2, 7)
    assert p.quality.complete
    assert p.quality.last_step == {0: 3, 1: 3, 2: 7}


def test_a_rank_missing_in_one_attempt_is_named_with_the_attempt(tmp_path: Path) -> None:
    run = write_run(tmp_path, _steps(1, 3, attempt=1, rows=_steps(2, 3)), world_size=2)
    node = json.loads((run / "node-00000.json").read_text())
    node["attempts"][1]["ranks"]["1"] = {"pid": 111}
    (run / "node-00000.json").write_text(json.dumps(node))
    assert _warnings(_presence(run)) == "rank 1 of 2 recorded nothing in attempt 1"


def test_a_probe_that_switched_itself_off_makes_a_gap_in_its_tables(tmp_path: Path) -> None:
    rows = _steps(2, 3).add("probe", rank=1, pid=101, step=2, name="parameters", state="disabled", reason="no memory")
    rows.add("probe", rank=0, pid=100, name="collectives", state="unavailable", reason="too old a torch")
    p = _presence(write_run(tmp_path, rows))
    assert _warnings(p) == "probe parameters switched itself off on rank 1 at step 2: no memory"
    assert {g.table for g in p.gaps} == {"param", "buffer", "tensor"}


def test_a_run_folder_with_nothing_but_run_json_is_readable(tmp_path: Path) -> None:
    p = _presence(write_run(tmp_path, Rows(), world_size=2))
    assert not p.quality.complete
    assert p.facts.missing_ranks == (0, 1)


def test_a_thousand_missing_ranks_are_one_sentence(tmp_path: Path) -> None:
    assert _warnings(_presence(write_run(tmp_path, _steps(1, 3), world_size=1000))) == (
        "ranks 1-999 of 1000 recorded nothing")  # fmt: skip
