"""Sealing: records become Parquet once and whole, and nothing is lost when it stops half-way."""

import duckdb
import pyarrow.parquet as pq
import pytest

from tdbg.rankagent import contract, seal
from tdbg.rankagent.readback import segments
from tdbg.rankagent.record import Recorder
from tdbg.rankagent.tables import Column, Table, known_tables

TABLE = Table("s", (Column("n", "int64", "ns", "a number"), Column("ids", "int64[]", "", "numbers")))


def recorded(run, rows=300):
    folder = contract.process_dir(run, "rank", 2, 1, 77)
    r = Recorder(folder, 2, 1, segment_bytes=4096)
    for n in range(rows):
        r.write(TABLE, n, (n,), ([n],))
    return folder, r


def query(run, sql):
    return duckdb.sql(sql.format(t=f"read_parquet('{run}/tables/s/*/*.parquet', hive_partitioning=false)")).fetchall()


def test_full_segments_are_sealed_while_the_process_writes_and_the_rest_at_its_end(tmp_path):
    folder, r = recorded(tmp_path)
    seal.seal_process(tmp_path, folder, ended=False)
    assert len(segments(folder)) == 1
    r.write(TABLE, 300, (300,), ([300],))
    seal.seal_process(tmp_path, folder, ended=True)
    assert segments(folder) == []
    assert query(tmp_path, "SELECT count(*), max(n), min(rank), max(attempt), max(pid) FROM {t}") == [
        (301, 300, 2, 1, r.pid)
    ]


def test_units_and_meaning_travel_in_the_parquet_schema(tmp_path):
    folder, _ = recorded(tmp_path)
    seal.seal_process(tmp_path, folder, ended=True)
    part = next((tmp_path / "tables" / "s" / "rank=00002").glob("part-1-77-*.parquet"))
    field = pq.read_schema(part).field("n")
    assert field.metadata == {b"unit": b"ns", b"meaning": b"a number"}


def test_a_failure_half_way_leaves_the_segment_and_no_visible_half_part(tmp_path, monkeypatch):
    folder, _ = recorded(tmp_path)
    before = len(segments(folder))

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(seal.os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        seal.seal_process(tmp_path, folder, ended=True)
    assert len(segments(folder)) == before
    assert list((tmp_path / "tables").rglob("part-*")) == []
    assert list((tmp_path / "tables").rglob(".part-*")) == []


def test_counts_of_sealed_segments_are_kept(tmp_path):
    folder, _ = recorded(tmp_path)
    seal.seal_process(tmp_path, folder, ended=True)
    assert sum(d.frames for d in seal.sealed_damage(folder)) == 300


def test_every_known_table_has_a_schema_and_a_meaning():
    for table in known_tables().values():
        assert seal.arrow_schema(table).names
        assert all(c.meaning for c in table.columns), table.name
