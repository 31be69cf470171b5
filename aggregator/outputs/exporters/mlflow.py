"""MLflow: one run of it in the experiment `tdbg`, a metric a rank, incidents as a JSON artifact and as tags.

Goes to the tracking store of -o, else of MLFLOW_TRACKING_URI, else ./mlflow.db (SQLite). NaN and Inf are kept.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

from ...exporting import Point
from ...findings import Verdict
from .. import json as as_json
from . import Target, series_name

EXTRA = ("mlflow", "mlflow")
EXPERIMENT = "tdbg"
BATCH, PARAMS, PARAM_CHARACTERS = 1000, 100, 6000  # what MLflow takes in one call
STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED", "running": "RUNNING"}


class Mlflow:
    """One run, by the client that says where to."""

    def __init__(self, client: Any, entities: Any, run_id: str) -> None:
        self.where = f"run {run_id} at {client.tracking_uri}"
        self._client, self._entities, self._id = client, entities, run_id

    def points(self, points: Sequence[Point]) -> None:
        metrics = [self._entities.Metric(series_name(p.metric, p.rank, p.attempt), p.value, p.time_ns // 10**6, p.step)
                   for p in points]  # fmt: skip
        for begin_ in range(0, len(metrics), BATCH):
            self._client.log_batch(self._id, metrics=metrics[begin_ : begin_ + BATCH])

    def incidents(self, verdict: Verdict) -> None:
        self._client.set_tag(self._id, "tdbg.incidents", str(len(verdict.incidents)))
        self._client.set_tag(self._id, "tdbg.data_complete", str(verdict.data_quality.complete).lower())
        self._client.log_text(self._id, as_json.dumps(as_json.incidents(verdict)), "incidents.json")

    def close(self, status: str) -> None:
        self._client.set_terminated(self._id, STATUS[status])


def begin(target: Target) -> Mlflow:
    from mlflow import entities
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):  # which tell of each table that they make
        logging.getLogger(name).setLevel(logging.WARNING)
    uri = target.output or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    number = experiment.experiment_id if experiment else client.create_experiment(EXPERIMENT)
    run = client.create_run(number, run_name=target.run)
    params = [entities.Param(k, v[:PARAM_CHARACTERS]) for k, v in list(target.params.items())[:PARAMS]]
    client.log_batch(run.info.run_id, params=params)
    return Mlflow(client, entities, run.info.run_id)
