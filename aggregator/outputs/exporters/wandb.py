"""Weights & Biases: one run of it, a series a rank, incidents as a table and in the summary.

Goes to the project of -o, else `tdbg`. With --offline or WANDB_MODE=offline nothing leaves the machine: the files lie
below ./wandb, and `wandb sync` sends them later. NaN and Inf are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ...exporting import Point
from ...findings import Verdict
from ..clean import clean
from . import Target, series_name

EXTRA = ("wandb", "wandb")
HEAD = ("reason_code", "severity", "evidence_state", "ranks", "first_step", "subject", "summary")


class Wandb:
    """A run of wandb. Its own step only ever grows, so the training step is a value: `step`, the axis of all others."""

    def __init__(self, library: Any, run: Any) -> None:
        self.where = run.url or f"wandb sync {Path(run.dir).parent}"
        self._library, self._run, self._known = library, run, set[str]()
        run.define_metric("step")

    def points(self, points: Sequence[Point]) -> None:
        for (_, step), group in groupby(points, key=lambda p: (p.attempt, p.step)):
            row: dict[str, Any] = {series_name(p.metric, p.rank, p.attempt): p.value for p in group}
            for name in row.keys() - self._known:
                self._run.define_metric(name, step_metric="step")
            self._known |= row.keys()
            self._run.log({"step": step, **row})

    def incidents(self, verdict: Verdict) -> None:
        rows = [[i.reason_code, f.severity, f.evidence_state, str(sorted(f.ranks)), f.first_step, clean(f.subject),
                 clean(f.summary)] for i in verdict.incidents for f in (i.finding,)]  # fmt: skip
        self._run.summary["incidents"] = len(rows)
        self._run.summary["data_complete"] = verdict.data_quality.complete
        self._run.log({"incidents": self._library.Table(columns=list(HEAD), data=rows)})

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status in ("failed", "killed") else 0)


def begin(target: Target) -> Wandb:
    import wandb

    run = wandb.init(
        project=target.output or "tdbg", name=target.run, id=None, config=dict(target.params),
        mode="offline" if target.offline else None,
        settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True, disable_git=True,
                                disable_code=True, save_code=False),
    )  # fmt: skip
    return Wandb(wandb, run)
