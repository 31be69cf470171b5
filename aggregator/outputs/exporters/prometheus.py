"""Prometheus text format: the latest value of each metric by rank, the incidents, whether the recording is whole.

Goes to the file of -o (replaced whole at each look: fit for node_exporter's textfile collector), else to standard
output at the end. NaN and Inf are kept: the format knows them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ...exporting import Point
from ...findings import Verdict
from ...metrics import METRICS
from . import Target

EXTRA = ("prometheus_client", "prometheus")
STATES = ("running", "finished", "failed", "killed")
# Prometheus wants base units in names: seconds and bytes.
SCALE = {"ns": 1e-9}


class Prometheus:
    """Gauges in a registry of their own."""

    def __init__(self, library: Any, target: Target) -> None:
        self.where = target.output
        self._library, self._target = library, target
        self._registry = library.CollectorRegistry()
        self._gauges: dict[str, Any] = {}

    def points(self, points: Sequence[Point]) -> None:
        for p in points:
            m = METRICS[p.metric]
            name = p.metric.removesuffix("_ns") + "_seconds" if m.unit == "ns" else p.metric
            labels = {"run": self._target.run, "rank": str(p.rank), "host": self._target.hosts.get(p.rank, "")}
            self._gauge(name, m.meaning, labels).set(p.value * SCALE.get(m.unit, 1))
            self._gauge("step", "last step that was exported", labels).set(p.step)
            self._gauge("attempt", "number of the elastic restart, 0 before the first", labels).set(p.attempt)
        self._write()

    def incidents(self, verdict: Verdict) -> None:
        if "incident" in self._gauges:
            self._gauges["incident"].clear()
        for i in verdict.incidents:
            f = i.finding
            labels = {"run": self._target.run, "reason_code": i.reason_code, "severity": f.severity}
            self._gauge("incident", "incidents of this code and severity", labels).inc()
        whole = {"run": self._target.run}
        self._gauge("recording_complete", "1 where nothing of the recording is missing", whole).set(
            verdict.data_quality.complete
        )
        self._status(verdict.status)
        self._write()

    def close(self, status: str) -> None:
        self._status(status)
        self._write()
        if self._target.output in ("", "-"):
            sys.stdout.write(self._library.generate_latest(self._registry).decode())

    def _status(self, status: str) -> None:
        for state in STATES:
            labels = {"run": self._target.run, "status": state}
            self._gauge("run_status", "1 for the run's status", labels).set(state == status)

    def _gauge(self, name: str, words: str, labels: dict[str, str]) -> Any:
        if name not in self._gauges:
            self._gauges[name] = self._library.Gauge(f"tdbg_{name}", words, list(labels), registry=self._registry)
        return self._gauges[name].labels(**labels)

    def _write(self) -> None:
        if self._target.output not in ("", "-"):
            self._library.write_to_textfile(self._target.output, self._registry)


def begin(target: Target) -> Prometheus:
    import prometheus_client

    return Prometheus(prometheus_client, target)
