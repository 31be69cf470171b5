"""Opening a run: sealed, unsealed, half sealed, damaged, foreign. Damage is a warning, never an error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kit.runs import parts, record_dirs
from tdbg.aggregator.store import Store
from tdbg.rankagent.contract import part_path
from tdbg.rankagent.readback import Damage, segments
from tdbg.rankagent.seal import rows_by_table, write_part
from tdbg.rankagent.tables import COMMON, Column, Table, known_tables

Copy = Callable[[str], Path]
COUNT = "SELECT rank, count(*), max(step) FROM step GROUP BY rank ORDER BY rank"
WHOLE = [(0, 24, 24), (1, 24, 24), (2, 24, 24)]


def _everything(run: Path, live: bool = False) -> dict[str, list[str]]:
    """Every row as text, in which one NaN is like another."""
    with Store(run, live) as store:
        assert store.warnings == ()
        rows = {t: store.rows(f'SELECT * EXCLUDE (time_ns) FROM "{t}" ORDER BY ALL') for t in known_tables()}
        return {table: [*map(repr, several)] for table, several in rows.items()}


@pytest.mark.parametrize("live", [False, True])
def test_sealed_and_unsealed_runs_read_the_same(templates: Path, live: bool) -> None:
    sealed = _everything(templates / "healthy", live)
    assert sealed == _everything(templates / "unsealed", live)
    assert len(sealed["step"]) == 72


def test_tables_that_nobody_wrote_are_empty_views_with_their_columns(templates: Path) -> None:
    with Store(templates / "healthy") as store:
        for table in known_tables().values():
            names = store.query(f'SELECT * FROM "{table.name}" LIMIT 0')[0]
            assert names[: len(COMMON)] == [c.name for c in COMMON]
            assert {c.name for c in table.columns} <= set(names)
        assert store.rows("SELECT count(*) FROM gpu") == [(0,)]


def test_a_segment_that_still_exists_is_the_truth_and_its_parts_are_ignored(run_of: Copy) -> None:
    run = run_of("unsealed")
    folder = record_dirs(run, 1)[0]
    segment = segments(folder)[0]
    for table, rows in rows_by_table(segment, Damage()).values():  # the launcher died before it removed the segment
        write_part(part_path(run, table.name, "rank", 1, 0, 101, int(segment.stem)), table, rows)
    with Store(run) as store:
        assert store.rows(COUNT) == WHOLE


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("harm", ["empty", "cut", "text"])
def test_a_part_that_cannot_be_opened_is_left_out_and_named(run_of: Copy, harm: str, live: bool) -> None:
    run = run_of("healthy")
    bad = parts(run, "step", rank=1)[0]
    content = {"empty": b"", "cut": bad.read_bytes()[:-20], "text": b"hello" * 100}[harm]
    bad.write_bytes(content)
    with Store(run, live) as store:
        assert [w for w in store.warnings if str(bad.relative_to(run)) in w]
        assert len(store.warnings) == 1
        assert [r for r, *_ in store.rows(COUNT)] != []
        assert store.rows(COUNT)[0] == WHOLE[0]
        assert store.damaged_tables == {"step": {("rank", 1, 0, 101)}}


@pytest.mark.parametrize("live", [False, True])
def test_damage_inside_a_part_is_found_when_it_is_read(run_of: Copy, live: bool) -> None:
    run = run_of("healthy")
    bad = parts(run, "loss", rank=2)[0]
    content = bytearray(bad.read_bytes())
    content[4:200] = b"\xff" * 196  # pages are gone, the footer is whole
    bad.write_bytes(content)
    with Store(run, live) as store:
        rows = store.rows("SELECT DISTINCT rank FROM (SELECT rank, total, last, scale FROM loss) ORDER BY rank")
        assert rows[:2] == [(0,), (1,)]
        assert [w for w in store.warnings if str(bad.relative_to(run)) in w]


def test_a_parquet_file_of_another_program_or_table_is_left_out(run_of: Copy) -> None:
    run = run_of("healthy")
    foreign = parts(run, "step")[0].with_name("part-0-7-00000.parquet")
    pq.write_table(pa.table({"x": [1]}), foreign)
    shutil.copy(parts(run, "loss")[0], part_path(run, "step", "rank", 0, 0, 8, 0))
    with Store(run) as store:
        assert len(store.warnings) == 2
        assert store.rows(COUNT) == WHOLE


def test_foreign_files_and_folders_are_left_out_with_a_warning_each(run_of: Copy) -> None:
    run = run_of("healthy")
    (run / "tables" / "step" / "notes.txt").write_text("hello")
    (run / "tables" / "Not A Table").mkdir()
    (run / "tables" / "step" / "rank=x").mkdir()
    (run / "records" / "vinyl").mkdir()
    (parts(run, "step")[0].parent / "copy.parquet").write_text("hello")
    (run / "tables" / ".DS_Store").write_text("hello")
    with Store(run) as store:
        assert len(store.warnings) == 5
        assert all("was not made by tdbg" in w for w in store.warnings)
        assert store.rows(COUNT) == WHOLE


def test_a_part_being_written_is_passed_over_in_silence(run_of: Copy) -> None:
    run = run_of("healthy")
    (parts(run, "step")[0].parent / ".part-0-100-00009.parquet").write_bytes(b"PAR1")
    with Store(run) as store:
        assert store.warnings == ()


def test_links_that_lead_out_of_the_run_are_not_followed(run_of: Copy, tmp_path: Path) -> None:
    run = run_of("healthy")
    outside = tmp_path / "outside"
    outside.mkdir()
    bad = parts(run, "step", rank=1)[0]
    shutil.move(bad, outside / "part.parquet")
    bad.symlink_to(outside / "part.parquet")
    shutil.move(run / "tables" / "loss", outside / "loss")
    (run / "tables" / "loss").symlink_to(outside / "loss")
    with Store(run) as store:
        assert sum("leads out of the run" in w for w in store.warnings) == 2
        assert store.rows("SELECT count(*) FROM loss") == [(0,)]


def test_a_pipe_in_place_of_a_file_does_not_block_the_reader(run_of: Copy) -> None:
    run = run_of("unsealed")
    os.mkfifo(record_dirs(run, 0)[0] / "00077.rec")
    os.mkfifo(run / "tables")
    with Store(run) as store:
        assert any("neither a file nor a folder" in w for w in store.warnings)
        assert store.rows(COUNT) == WHOLE


def test_a_foreign_segment_is_left_out_and_named(run_of: Copy) -> None:
    run = run_of("unsealed")
    (record_dirs(run, 0)[0] / "00077.rec").write_bytes(b"not a record file" * 100)
    with Store(run) as store:
        assert [w for w in store.warnings if "00077.rec" in w]
        assert store.rows(COUNT) == WHOLE


def test_a_reserved_segment_that_was_never_written_is_no_damage(run_of: Copy) -> None:
    run = run_of("unsealed")
    (record_dirs(run, 0)[0] / "00077.rec").write_bytes(bytes(4096))
    with Store(run) as store:
        assert store.warnings == ()


def test_a_table_of_a_newer_or_private_probe_gets_the_columns_it_describes(run_of: Copy) -> None:
    run = run_of("healthy")
    private = Table("my_probe", (Column("heat", "float64", "K", ""), Column("who", "text", "", "")))
    common = {c.name: 0 for c in COMMON}
    write_part(part_path(run, "my_probe", "rank", 0, 0, 100, 0), private, [{**common, "heat": 3.5, "who": "me"}])
    with Store(run) as store:
        assert store.rows("SELECT heat, who FROM my_probe") == [(3.5, "me")]


def test_parts_of_an_older_version_without_a_column_show_it_as_null(run_of: Copy) -> None:
    run = run_of("healthy")
    known = known_tables()["step"]
    older = Table("step", tuple(c for c in known.columns if c.name != "cadence"))
    for path in parts(run, "step", rank=1):
        rows = pq.read_table(path, partitioning=None).drop_columns(["cadence"]).to_pylist()
        write_part(path, older, rows)
    with Store(run) as store:
        assert store.rows("SELECT rank, any_value(cadence) FROM step GROUP BY rank ORDER BY rank") == [
            (0, 1), (1, None), (2, 1)]  # fmt: skip
        assert store.warnings == ()


def test_the_connection_reads_nothing_outside_the_run(templates: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a,b\n1,2\n")
    with Store(templates / "healthy") as store:
        for sql in (f"SELECT * FROM read_csv('{secret}')", f"ATTACH '{tmp_path}/x.db'", f"COPY step TO '{secret}'",
                    "SET enable_external_access = true"):  # fmt: skip
            with pytest.raises(duckdb.Error):
                store.connection.execute(sql)
    assert secret.read_text() == "a,b\n1,2\n"


def test_reading_changes_nothing_in_the_run_folder(run_of: Copy) -> None:
    run = run_of("unsealed")
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    with Store(run) as store:
        store.refresh()
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before


def test_a_path_with_quotes_and_wildcards_is_only_a_path(run_of: Copy, tmp_path: Path) -> None:
    odd = tmp_path / "we[i]rd *'x?"
    odd.mkdir()
    run = shutil.move(run_of("healthy"), odd / "run")
    with Store(Path(run)) as store:
        assert store.warnings == ()
        assert store.rows(COUNT) == WHOLE


def test_a_refresh_decodes_only_segments_that_changed(run_of: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("unsealed")
    decoded: list[str] = []

    def watch(segment: Path, damage: Damage) -> object:
        decoded.append(segment.parent.name)
        return rows_by_table(segment, damage)

    monkeypatch.setattr("tdbg.rankagent.seal.rows_by_table", watch)
    with Store(run, live=True) as store:
        assert decoded
        decoded.clear()
        store.refresh()
        assert decoded == []
        segment = segments(record_dirs(run, 1)[0])[-1]
        content = bytearray(segment.read_bytes())
        content[-1] = 1
        segment.write_bytes(content)
        store.refresh()
        assert decoded == [record_dirs(run, 1)[0].name]
        assert store.rows(COUNT) == WHOLE
