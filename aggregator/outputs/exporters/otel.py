"""OpenTelemetry: gauges by rank over OTLP/HTTP, each point at the time at which it was recorded; incidents as a gauge.

Goes to the address of -o (the full one, ending in /v1/metrics), else where OTEL_EXPORTER_OTLP_ENDPOINT says, else to
the collector on this machine. NaN and Inf are kept.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ....rankagent.contract import TdbgError
from ...exporting import Point
from ...findings import Verdict
from ...metrics import METRICS
from . import Target

EXTRA = ("opentelemetry.exporter.otlp.proto.http", "otel")
UNITS = {"ns": "ns", "B": "By", "": "1"}


class Otel:
    """Points as the SDK's own values, sent by its exporter: its instruments would stamp them with the time of now."""

    def __init__(self, sender: Any, library: Any, target: Target) -> None:
        self.where = target.output or "the collector of OTEL_EXPORTER_OTLP_ENDPOINT"
        self._sender, self._library, self._target = sender, library, target
        self._last_ns = 0

    def points(self, points: Sequence[Point]) -> None:
        by_metric: dict[str, list[tuple[int, float, dict[str, Any]]]] = {}
        for p in points:
            labels = {"rank": p.rank, "attempt": p.attempt, "host.name": self._target.hosts.get(p.rank, "")}
            by_metric.setdefault(p.metric, []).append((p.time_ns, p.value, labels))
            by_metric.setdefault("step", []).append((p.time_ns, float(p.step), labels))
            self._last_ns = max(self._last_ns, p.time_ns)
        self._send(by_metric)

    def incidents(self, verdict: Verdict) -> None:
        count: dict[tuple[str, str], int] = {}
        for i in verdict.incidents:
            key = (i.reason_code, i.finding.severity)
            count[key] = count.get(key, 0) + 1
        found = [(self._last_ns, float(n), {"reason_code": code, "severity": severity})
                 for (code, severity), n in count.items()]  # fmt: skip
        complete = [(self._last_ns, float(verdict.data_quality.complete), dict[str, Any]())]
        self._send({"incidents": found, "recording_complete": complete})

    def close(self, status: str) -> None:
        self._sender.shutdown()

    def _send(self, by_metric: Mapping[str, Sequence[tuple[int, float, Mapping[str, Any]]]]) -> None:
        export, resource, scope = self._library
        metrics = [
            export.Metric(
                name=f"tdbg.{name}", description=METRICS[name].meaning if name in METRICS else name,
                unit=UNITS[METRICS[name].unit] if name in METRICS else "1",
                data=export.Gauge([export.NumberDataPoint(labels, None, at, value) for at, value, labels in points]),
            )
            for name, points in by_metric.items() if points
        ]  # fmt: skip
        of = resource.Resource({"service.name": "tdbg", "tdbg.run": self._target.run})
        inner = export.ScopeMetrics(scope("tdbg"), metrics, "")
        said = self._sender.export(export.MetricsData([export.ResourceMetrics(of, [inner], "")]))
        if said is not export.MetricExportResult.SUCCESS:
            raise TdbgError("the OpenTelemetry collector did not take the points",
                            "-o gives its address, e.g. http://localhost:4318/v1/metrics")  # fmt: skip


def begin(target: Target) -> Otel:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk import resources
    from opentelemetry.sdk.metrics import export
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # what it can't send is said once, by us
    sender = OTLPMetricExporter(endpoint=target.output) if target.output else OTLPMetricExporter()
    return Otel(sender, (export, resources, InstrumentationScope), target)
