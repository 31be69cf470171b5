"""The record format: what is written is read, whatever happens to the process, the file or the disk."""

import errno
import itertools
import os
import struct
import subprocess
import sys
import textwrap

import pytest

from tdbg.rankagent import record
from tdbg.rankagent.contract import TdbgError
from tdbg.rankagent.readback import Damage, read_segment, read_state, segments
from tdbg.rankagent.record import Recorder
from tdbg.rankagent.tables import Column, Table

TABLE = Table("t", (
    Column("n", "int64", "", ""), Column("x", "float64", "", ""), Column("ok", "bool", "", ""),
    Column("text", "text", "", ""), Column("ids", "int64[]", "", ""), Column("l2", "float64[]", "", ""),
))  # fmt: skip
SMALL = Table("s", (Column("n", "int64", "", ""),))


def write(recorder, n):
    return recorder.write(TABLE, n, (n, n / 3, n % 2 == 0), (f"row {n} é", [n, 2 * n], [0.5, float("nan")]))


def rows(folder):
    return [row for s in segments(folder) for _, row in read_segment(s)]


def test_rows_come_back_in_order_over_many_segments(tmp_path):
    r = Recorder(tmp_path / "p", 3, 1, segment_bytes=4096)
    assert all(write(r, n) for n in range(200))
    back = rows(tmp_path / "p")
    assert len(segments(tmp_path / "p")) > 3
    assert [b["n"] for b in back] == list(range(200))
    assert [b["seq"] for b in back] == list(range(200))
    first = back[7]
    assert (first["rank"], first["attempt"], first["step"], first["x"], first["ok"]) == (3, 1, 7, 7 / 3, False)
    assert (first["text"], first["ids"], first["l2"][0]) == ("row 7 é", [7, 14], 0.5)


def test_integers_beyond_32_bits_keep_their_value(tmp_path):
    r = Recorder(tmp_path / "p", 0, 0)
    wide = [2**62, -(2**63), 1]
    r.write(TABLE, 1, (1, 1.0, True), ("", wide, []))
    assert rows(tmp_path / "p")[0]["ids"] == wide


def test_a_row_that_does_not_fit_its_table_is_dropped_and_counted(tmp_path):
    r = Recorder(tmp_path / "p", 0, 0)
    assert not r.write(TABLE, 1, ("no number", 1.0, True), ("", [], []))
    assert not r.write(TABLE, 1, (1, 1.0, True), ("", []))
    assert write(r, 5)
    r.update_state(5, 1)
    assert r.dropped == 2
    assert read_state(tmp_path / "p").dropped == 2
    assert [b["n"] for b in rows(tmp_path / "p")] == [5]


def test_a_row_larger_than_a_segment_gets_a_segment_of_its_own(tmp_path):
    r = Recorder(tmp_path / "p", 0, 0, segment_bytes=4096)
    r.write(TABLE, 1, (1, 1.0, True), ("", list(range(10_000)), []))
    write(r, 2)
    back = rows(tmp_path / "p")
    assert back[0]["ids"] == list(range(10_000))
    assert back[1]["n"] == 2


def test_everything_written_survives_kill_9(tmp_path):
    program = textwrap.dedent(f"""
        import os, signal, pathlib
        from tdbg.rankagent.record import Recorder
        from tdbg.rankagent.tables import Column, Table
        r = Recorder(pathlib.Path({str(tmp_path)!r}) / "p", 0, 0)
        t = Table("s", (Column("n", "int64", "", ""),))
        for n in range(777):
            r.write(t, n, (n,))
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert [b["n"] for b in rows(tmp_path / "p")] == list(range(777))
    assert read_state(tmp_path / "p").closed == 0


def test_a_torn_last_frame_is_left_out_and_said(tmp_path):
    r = Recorder(tmp_path / "p", 0, 0)
    for n in range(5):
        write(r, n)
    path = segments(tmp_path / "p")[0]
    data = bytearray(path.read_bytes())
    end = len(bytes(data).rstrip(b"\0"))
    data[end - 9 : end] = bytes(9)
    path.write_bytes(data)
    damage = Damage()
    assert [row["n"] for _, row in read_segment(path, damage)] == [0, 1, 2, 3]
    assert damage.torn
    assert damage.damaged == 0


def test_a_flipped_bit_costs_one_row_and_is_counted(tmp_path):
    r = Recorder(tmp_path / "p", 0, 0)
    for n in range(5):
        r.write(SMALL, n, (n,))
    path = segments(tmp_path / "p")[0]
    data = bytearray(path.read_bytes())
    at = bytes(data).find(struct.pack("<q", 2), record.HEADER_BYTES + 200)
    data[at] ^= 0x10
    path.write_bytes(data)
    damage = Damage()
    assert [row["n"] for _, row in read_segment(path, damage)] == [0, 1, 3, 4]
    assert (damage.damaged, damage.torn) == (1, False)


@pytest.mark.parametrize("cut", [0, 10, 63, 64, 100, 1000])
def test_a_truncated_segment_gives_what_is_whole(tmp_path, cut):
    r = Recorder(tmp_path / "p", 0, 0)
    for n in range(50):
        write(r, n)
    path = segments(tmp_path / "p")[0]
    path.write_bytes(path.read_bytes()[:cut])
    if 0 < cut < record.HEADER_BYTES:
        with pytest.raises(TdbgError, match="not a tdbg record"):
            list(read_segment(path))
    else:
        assert [row["n"] for _, row in read_segment(path)] == list(range(len(list(read_segment(path)))))


def test_a_foreign_file_and_a_newer_format_are_refused_by_name(tmp_path):
    foreign = tmp_path / "00000.rec"
    foreign.write_bytes(b"PAR1" + bytes(200))
    with pytest.raises(TdbgError, match=r"00000\.rec is not a tdbg record"):
        list(read_segment(foreign))
    r = Recorder(tmp_path / "p", 0, 0)
    write(r, 1)
    path = segments(tmp_path / "p")[0]
    data = bytearray(path.read_bytes())
    data[8:12] = struct.pack("<I", 99)
    path.write_bytes(data)
    with pytest.raises(TdbgError, match="format 99"):
        list(read_segment(path))


def test_a_full_disk_drops_rows_counts_them_and_recovers(tmp_path, monkeypatch):
    r = Recorder(tmp_path / "p", 0, 0, segment_bytes=4096)
    write(r, 0)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "posix_fallocate", full)
        results = [write(r, n) for n in range(1, 100)]
    assert results[0]
    assert not results[-1]
    lost = results.count(False)
    assert r.dropped == lost
    later = [write(r, n) for n in range(100, 100 + record.RETRY_ROWS + 10)]
    assert later[-1]
    back = rows(tmp_path / "p")
    assert back[-1]["n"] == 100 + record.RETRY_ROWS + 9
    gaps = sum(b["seq"] - a["seq"] - 1 for a, b in itertools.pairwise(back))
    assert gaps == r.dropped


def test_a_store_that_cannot_be_written_is_an_error_at_construction_only(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OSError, match="file"):
        Recorder(blocked / "p", 0, 0)


def test_rows_after_the_end_are_dropped_quietly(tmp_path):
    r = Recorder(tmp_path / "p", 0, 0)
    write(r, 1)
    r.close(1)
    assert not write(r, 2)
    assert read_state(tmp_path / "p").closed == 1
    assert len(rows(tmp_path / "p")) == 1


def test_the_folder_is_private(tmp_path):
    Recorder(tmp_path / "run" / "records" / "p", 0, 0)
    assert (tmp_path / "run").stat().st_mode & 0o077 == 0


def test_state_of_a_foreign_folder_is_none(tmp_path):
    assert read_state(tmp_path) is None
    (tmp_path / "state").write_bytes(b"x" * 500)
    assert read_state(tmp_path) is None


def test_a_file_system_that_cannot_reserve_blocks_is_filled_with_zeros(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    r = Recorder(tmp_path / "p", 0, 0)
    write(r, 1)
    path = segments(tmp_path / "p")[0]
    assert path.stat().st_blocks * 512 >= record.SEGMENT_BYTES
    assert rows(tmp_path / "p")[0]["n"] == 1


def test_a_disk_that_is_full_from_the_start_takes_no_row_and_keeps_the_state_page(tmp_path, monkeypatch):
    r = Recorder(tmp_path / "p", 4, 0)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    assert not any(write(r, n) for n in range(200))
    r.update_state(200, 1)
    state = read_state(tmp_path / "p")
    assert (state.rank, state.step, state.dropped) == (4, 200, 200)
