"""Rows of models that several ranks hold: catalogues and sweeps, a line each, for the tests of the replica rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .rows import Rows


def catalogue(
    rows: Rows,
    ranks: int,
    *names: str,
    kind: str = "param",
    sharing: str = "ddp",
    peers: str | None = None,
    **more: Any,
) -> Rows:
    """The same tensors on every rank; `peers` None means all of them."""
    everyone = ",".join(map(str, range(ranks))) if peers is None else peers
    columns = {"model_type": "Net", "shape": "4", "dtype": "float32", "numel": 4, "generation": 1, "broadcast": -1}
    columns |= {"trainable": kind == "param", "optimizer": 0 if kind == "param" else -1}
    for rank in range(ranks):
        first = rows.connection.execute("SELECT count(*) FROM tensor WHERE rank = ?", [rank]).fetchall()[0][0]
        for index, name in enumerate(names, start=first):
            row = columns | {"rank": rank, "index": index, "kind": kind, "name": name} | more
            rows.add("tensor", **row, sharing=sharing, peers=everyone)
    return rows


def sweep(rows: Rows, table: str, step: int, digests: Mapping[int, Sequence[int]], stage: str, **more: Any) -> Rows:
    """One sweep of every rank: `digests` by rank, one for each tensor from index 0 on unless `tensors` says else."""
    for rank, digest in digests.items():
        norms = {} if table == "buffer" else {"l2": [1.0] * len(digest)}
        rows.add(
            table,
            **(norms | {"rank": rank, "step": step, "stage": stage, "generation": 1, "digest": list(digest)} | more),
        )
        if stage in ("end", "reduced"):
            rows.add("step", rank=rank, step=step, optimizers=1, backwards=1)
    return rows


def losses(rows: Rows, ranks: int, steps: int, own: bool = True) -> Rows:
    """A loss of every rank and step: its own, or the same on all."""
    for rank in range(ranks):
        for step in range(1, steps + 1):
            rows.add("loss", rank=rank, step=step, backwards=1, total=step + rank * own, scale=1.0, first_nonfinite=-1)
    return rows
