"""The numbers of a run by rank and step, under one name each: what `tdbg metrics` prints and exporters hand on."""

from __future__ import annotations

from dataclasses import dataclass

from ..rankagent.contract import TdbgError
from .gradnorm import is_sharded, sharded_norms
from .store import Store


@dataclass(frozen=True)
class Metric:
    """Where a number comes from: `value` is an expression over one row of `table`."""

    table: str
    value: str
    unit: str
    meaning: str
    where: str = "TRUE"
    lasts: bool = False  # a row is written when it changes, and holds until the next


_NORM = "sqrt(list_sum([x * x for x in l2 if NOT x < 0]))"

METRICS: dict[str, Metric] = {
    "loss": Metric("loss", "total / greatest(backwards, 1)", "",
                   "mean loss of the step's backwards, without the loss scale"),
    "loss_scale": Metric("loss", "scale", "", "loss scale in force", "scale <> 1"),
    "grad_norm": Metric("grad", _NORM, "",
                        "norm of the gradient that the optimizer got; of a sharded one, of all parts",
                        "stage = 'reduced'"),
    "grad_norm_local": Metric("grad", _NORM, "", "norm of the rank's own gradient", "stage = 'local' AND valid"),
    "clip_norm": Metric("clip", "norm", "", "norm that the clipping call returned", "NOT isnan(norm)"),
    "lr": Metric("optim", "lr", "", "learning rate of the first group, from this step on",
                 'optimizer = 0 AND "group" = 0', lasts=True),
    "step_ns": Metric("step", "step_ns", "ns", "wall time of the step", "step_ns > 0"),
    "data_ns": Metric("phase", "data_ns", "ns", "of it, waiting for data"),
    "forward_ns": Metric("phase", "forward_ns", "ns", "of it, in the root module's forward"),
    "backward_ns": Metric("phase", "backward_ns", "ns", "of it, in backward"),
    "optimizer_ns": Metric("phase", "optimizer_ns", "ns", "of it, in the optimizer"),
    "reduce_wait_ns": Metric("phase", "reduce_wait_ns", "ns", "of backward, waiting for the reduction",
                             "reduce_wait_ns >= 0"),
    "communication_ns": Metric("phase", "communication_ns", "ns", "of the step, in collectives outside of backward",
                               "communication_ns > 0"),
    "checkpoint_ns": Metric("phase", "checkpoint_ns", "ns", "of the step, saving checkpoints", "checkpoint_ns > 0"),
    "evaluation_ns": Metric("phase", "evaluation_ns", "ns", "of the step, in evaluation", "evaluation_ns > 0"),
    "cpu_wait_ns": Metric("phase", "cpu_wait_ns", "ns", "of the step, the training thread waited for a core",
                          "cpu_wait_ns >= 0"),
    "agent_ns": Metric("step", "agent_ns", "ns", "of it, spent in the agent"),
    "rss_bytes": Metric("memory", "rss_bytes", "B", "resident memory of the rank's process"),
    "cuda_allocated_bytes": Metric("memory", "cuda_allocated_bytes", "B", "device memory in tensors",
                                   "cuda_allocated_bytes >= 0"),
}  # fmt: skip


@dataclass(frozen=True)
class MetricRow:
    """One number."""

    metric: str
    attempt: int
    step: int
    rank: int
    value: float


def metric_rows(store: Store, name: str | None = None) -> list[MetricRow]:
    """All rows of one metric, or of every one, by metric, attempt, step and rank. TdbgError for an unknown name."""
    if name is not None and name not in METRICS:
        raise TdbgError(f"no metric {name!r}", f"there are: {', '.join(METRICS)}")
    found = []
    for n in METRICS if name is None else (name,):
        m = METRICS[n]
        if n == "grad_norm" and is_sharded(store):  # a row of the table holds the parts of one rank only
            whole = [(attempt, step, rank, norm) for rank, attempt, step, norm in sharded_norms(store) if step > 0]
            found += [MetricRow(n, *r) for r in sorted(whole)]
            continue
        rows = store.rows(f"SELECT attempt, step, rank, CAST({m.value} AS DOUBLE) AS value FROM {m.table} "
                          f"WHERE ({m.where}) AND step > 0 ORDER BY attempt, step, rank")  # fmt: skip
        found += [MetricRow(n, *r) for r in rows if r[3] is not None]
    return found
