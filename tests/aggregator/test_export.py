"""Exporters: what each wrote is read back by the tracker's own reader, once each, also while the run goes on."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kit.healthy import STEPS, healthy
from kit.plants import PLANTS
from kit.rows import Rows
from kit.runs import describe_run, write_run
from tdbg.aggregator.cli import main
from tdbg.aggregator.commands.export import TRACKERS
from tdbg.aggregator.exporting import Point, export
from tdbg.aggregator.findings import Verdict
from tdbg.aggregator.metrics import METRICS, metric_rows
from tdbg.aggregator.outputs import exporters
from tdbg.aggregator.store import Store

RANKS = 3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A faulty run with a NaN and an Inf among its losses."""
    rows = healthy(RANKS)
    PLANTS["PARAM_DESYNC"].apply(rows)
    rows.connection.execute("UPDATE loss SET total = 'nan' WHERE rank = 1 AND step = 20")
    rows.connection.execute("UPDATE loss SET total = 'inf' WHERE rank = 1 AND step = 21")
    return write_run(tmp_path / "store", rows, "r")


def _export(run: Path, *words: object) -> None:
    assert main(["export", str(run), *map(str, words)]) == 0


def _losses(run: Path) -> dict[tuple[int, int], float]:
    with Store(run) as store:
        return {(r.rank, r.step): r.value for r in metric_rows(store, "loss")}


def _same(found: dict[tuple[int, int], float], wanted: dict[tuple[int, int], float], digits: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        if math.isfinite(value):
            assert found[key] == pytest.approx(value, rel=digits)
        else:
            assert str(found[key]) == str(value)


def test_every_tracker_of_the_folder_is_offered_and_has_what_a_tracker_has() -> None:
    assert sorted(TRACKERS) == sorted(exporters.names())
    for name in TRACKERS:
        module = exporters.load(name)
        assert callable(module.begin)
        assert module.EXTRA is None or len(module.EXTRA) == 2
        assert "NaN and Inf" in (module.__doc__ or "")


def test_csv(run: Path, tmp_path: Path, capsys: Any) -> None:
    _export(run, "--to", "csv", "-o", tmp_path / "x.csv")
    lines = list(csv.DictReader((tmp_path / "x.csv").open()))
    assert list(lines[0]) == ["run", "attempt", "step", "rank", "metric", "unit", "value", "time_ns"]
    with Store(run) as store:
        assert len(lines) == len({(r.metric, r.attempt, r.step, r.rank) for r in metric_rows(store)})
    _same(
        {(int(x["rank"]), int(x["step"])): float(x["value"]) for x in lines if x["metric"] == "loss"}, _losses(run), 0
    )
    assert {x["value"] for x in lines if x["step"] in ("20", "21") and x["rank"] == "1" and x["metric"] == "loss"} == {
        "NaN", "Infinity"}  # fmt: skip
    capsys.readouterr()
    _export(run, "--to", "csv")
    assert capsys.readouterr().out == (tmp_path / "x.csv").read_text()


def test_a_name_that_a_spreadsheet_would_run_does_not_run(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path, healthy(1), "=cmd()")
    _export(run, "--to", "csv")
    assert next(csv.DictReader(capsys.readouterr().out.splitlines()))["run"] == "'=cmd()"


def test_tensorboard(run: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    _export(run, "--to", "tensorboard", "-o", tmp_path / "tb")
    found = {}
    for rank in range(RANKS):
        reader = accumulator.EventAccumulator(str(tmp_path / "tb" / f"rank-{rank:05d}"), {"scalars": 0})
        reader.Reload()
        found |= {(rank, e.step): e.value for e in reader.Scalars("loss")}
        assert set(reader.Tags()["scalars"]) <= set(METRICS)
    _same(found, _losses(run))
    reader = accumulator.EventAccumulator(str(tmp_path / "tb" / "incidents"))
    reader.Reload()
    (text,) = reader.Tensors("incidents")
    assert b"PARAM_DESYNC" in text.tensor_proto.string_val[0]


def test_prometheus(run: Path, tmp_path: Path, capsys: Any) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    _export(run, "--to", "prometheus", "-o", tmp_path / "x.prom")
    capsys.readouterr()
    _export(run, "--to", "prometheus")
    text = capsys.readouterr().out
    assert text == (tmp_path / "x.prom").read_text()
    found = {(s.name, s.labels.get("rank", ""), s.labels.get("reason_code") or s.labels.get("status") or ""): s.value
             for family in parser.text_string_to_metric_families(text) for s in family.samples}  # fmt: skip
    losses = _losses(run)
    for rank in range(RANKS):
        assert found["tdbg_loss", str(rank), ""] == pytest.approx(losses[rank, STEPS])
        assert found["tdbg_step", str(rank), ""] == STEPS
        with Store(run) as store:
            last = [r.value for r in metric_rows(store, "step_ns") if r.rank == rank][-1]
        assert found["tdbg_step_seconds", str(rank), ""] == pytest.approx(last / 1e9)
    assert found["tdbg_incident", "", "PARAM_DESYNC"] == 1
    assert found["tdbg_recording_complete", "", ""] == 1
    assert [found["tdbg_run_status", "", s] for s in ("running", "finished")] == [0, 1]


def test_wandb_offline(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2 as records

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    _export(run, "--to", "wandb", "--offline")
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found: dict[tuple[int, int], float] = {}
    for data in _log_records(path.read_bytes()):
        record = records.Record()
        record.ParseFromString(data)
        row = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
        for rank in range(RANKS):
            if (name := f"loss/rank-{rank:05d}") in row:
                found[rank, row["step"]] = float(row[name])
    _same(found, _losses(run))


def _log_records(data: bytes) -> Iterator[bytes]:
    """Records of a file in LevelDB's log format, which wandb writes behind 7 bytes of its own."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # full, or the last piece
            yield whole
            whole = b""


def test_mlflow(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path / 'm.db'}"
    _export(run, "--to", "mlflow", "-o", uri)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tdbg")
    assert experiment is not None
    (logged,) = client.search_runs([experiment.experiment_id])
    assert (logged.info.run_name, logged.info.status) == ("r", "FINISHED")
    assert logged.data.params["code.model"] == "c0ffee"
    assert logged.data.tags["tdbg.data_complete"] == "true"
    found = {(rank, m.step): m.value for rank in range(RANKS)
             for m in client.get_metric_history(logged.info.run_id, f"loss/rank-{rank:05d}")}  # fmt: skip
    wanted = _losses(run)
    wanted[1, 21] = found[1, 21]  # SQL has no Inf: MLflow keeps its largest number instead
    assert found[1, 21] > 1e308
    _same(found, wanted)


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """A collector on this machine: its address and the bodies that it got."""
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1/metrics", got
    server.shutdown()
    server.server_close()


def test_opentelemetry(run: Path, collector: tuple[str, list[bytes]]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    address, got = collector
    _export(run, "--to", "otel", "-o", address)
    losses, incidents = [], {}
    for body in got:
        request = ExportMetricsServiceRequest()
        request.ParseFromString(body)
        for metric in (m for r in request.resource_metrics for s in r.scope_metrics for m in s.metrics):
            for point in metric.gauge.data_points:
                labels = {a.key: a.value.int_value or a.value.string_value for a in point.attributes}
                if metric.name == "tdbg.loss":
                    losses.append((labels.get("rank") or 0, point.as_double))
                    assert point.time_unix_nano > 0
                elif metric.name == "tdbg.incidents":
                    incidents[labels["reason_code"]] = point.as_double
    wanted = [(rank, value) for (rank, _), value in _losses(run).items()]
    assert sorted(map(str, losses)) == sorted(map(str, wanted))
    assert incidents["PARAM_DESYNC"] == 1


def test_a_library_that_is_absent_is_one_clear_line(run: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TRACKERS:
        extra = exporters.load(name).EXTRA
        if extra is None:
            continue
        monkeypatch.setitem(sys.modules, extra[0].split(".")[0], None)  # importing it fails now
        for module in [m for m in sys.modules if m.startswith(extra[0].split(".")[0] + ".")]:
            monkeypatch.delitem(sys.modules, module)
        assert main(["export", str(run), "--to", name]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 2)
        assert f"pip install 'tdbg[{extra[1]}]'" in err


@pytest.mark.parametrize("name", ["csv", "prometheus", "tensorboard"])
def test_a_place_that_can_not_be_written_is_said(run: Path, tmp_path: Path, capsys: Any, name: str) -> None:
    pytest.importorskip({"prometheus": "prometheus_client"}.get(name, name))
    (tmp_path / "file").write_text("")
    assert main(["export", str(run), "--to", name, "-o", str(tmp_path / "file" / "x")]) == 3
    out, err = capsys.readouterr()
    assert (out, len(err.splitlines())) == ("", 2)
    assert str(tmp_path / "file") in err


# ------------------------------------------------------------ while the run goes on


class _Kept:
    """An exporter that keeps what it gets."""

    where = "here"

    def __init__(self) -> None:
        self.got: list[Point] = []
        self.looks: list[int] = []
        self.said: list[tuple[str, ...]] = []
        self.closed = ""

    def points(self, points: Sequence[Point]) -> None:
        assert not self.closed
        self.got += points
        self.looks.append(max(p.step for p in points))

    def incidents(self, verdict: Verdict) -> None:
        self.said.append(tuple(i.reason_code for i in verdict.incidents))

    def close(self, status: str) -> None:
        self.closed = status


def _until(rows: Rows, step: int, late: int = 0) -> Rows:
    """The rows up to a step, of the last rank `late` steps fewer."""
    part = Rows()
    for (name,) in rows.connection.execute("SELECT table_name FROM information_schema.tables "
                                           "WHERE table_type = 'BASE TABLE'").fetchall():  # fmt: skip
        found = rows.connection.execute(
            f'SELECT * FROM "{name}" WHERE step <= CASE rank WHEN {RANKS - 1} THEN {step - late} ELSE {step} END'
        )
        names = [d[0] for d in found.description or ()]
        for values in found.fetchall():
            part.add(name, **dict(zip(names, values, strict=True)))
    return part


def _grow(store: Path, rows: Rows, status: str, into: Path | None = None) -> Path:
    """The run with more rows; `into` an earlier state of it, as its ranks would go on writing."""
    run = write_run(store, rows, "r", seal=False, closed=status != "running", describe=False)
    describe_run(run, status, RANKS, {(0, r) for r in range(RANKS)}, launcher_pid=os.getpid())
    if into is not None:
        shutil.copytree(run, into, dirs_exist_ok=True)
    return run


@pytest.mark.parametrize("end", ["finished", "killed", "interrupt"])
def test_following_hands_over_each_number_once_and_ends_with_the_run(tmp_path: Path, end: str) -> None:
    rows, kept = healthy(RANKS), _Kept()
    run = _grow(tmp_path / "0", _until(rows, 6, late=3), "running")

    def interrupt() -> None:
        raise KeyboardInterrupt

    def goes_on(n: int, step: int, late: int, status: str) -> Callable[[], object]:
        return lambda: _grow(tmp_path / str(n), _until(rows, step, late), status, run)

    last = interrupt if end == "interrupt" else goes_on(3, STEPS, 0, end)
    stages = [goes_on(1, 12, 2, "running"), lambda: None, last]
    with Store(run, live=True) as store:
        said = export(store, kept, follow=True, wait=lambda: stages.pop(0)() and None)
    keys = [(p.metric, p.attempt, p.step, p.rank) for p in kept.got]
    assert len(keys) == len(set(keys)) == said.points
    losses = {(p.rank, p.step) for p in kept.got if p.metric == "loss"}
    late = RANKS - 1
    if end == "interrupt":  # the newest step of each rank is held back
        assert kept.closed == "running"
        assert losses == {(r, s) for r in range(RANKS) for s in range(1, 10 if r == late else 12)}
    else:
        assert kept.closed == end
        assert losses == {(r, s) for r in range(RANKS) for s in range(1, STEPS + 1)}
    assert kept.looks[0] == 5
    assert kept.said  # at the first look; again only when something changed
