"""What is needed to run a step again: the samples of each rank, learning rate, loss scale, random streams.

A detector that names steps gives `REPLAY` a query `sought` (attempt, step, rank) of few rows, selects the structs that
come out and hands them to `kit`. Sought are candidates: which of them are findings is not known to a query.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from .findings import Evidence

IDS = 32  # samples listed for a rank and step
RANKS = 8  # ranks that are listed

# CTE bodies over a relation `sought` with columns attempt, step, rank; the result is `kit`, one struct for each.
# A checkpoint's table may be joined here in the same way: the latest one saved at or before the step.
REPLAY: Final = f"""
fed AS (
    SELECT attempt, step, rank, flatten(list(ids ORDER BY seq))[1:{IDS}] AS ids,
           flatten(list(digests ORDER BY seq))[1:{IDS}] AS digests, sum(samples)::BIGINT AS samples
    FROM training_batch WHERE (attempt, step, rank) IN (SELECT (attempt, step, rank) FROM sought) GROUP BY ALL
),
drawn AS (
    SELECT s.attempt, s.step, s.rank, max(r.step) AS at, arg_max(r.torch_digest, r.step) AS torch,
           arg_max(r.numpy_digest, r.step) AS numpy, arg_max(r.python_digest, r.step) AS python
    FROM sought s JOIN rng r ON r.attempt = s.attempt AND r.rank = s.rank AND r.step < s.step GROUP BY ALL
),
paced AS (
    SELECT s.attempt, s.step, s.rank, arg_max(o.lr, o.step) AS lr
    FROM sought s JOIN optim o ON o.attempt = s.attempt AND o.rank = s.rank AND o.step <= s.step
    WHERE o.optimizer = 0 AND o."group" = 0 GROUP BY ALL
),
kit AS (
    SELECT {{'attempt': s.attempt, 'step': s.step, 'rank': s.rank, 'ids': f.ids, 'digests': f.digests,
             'samples': f.samples, 'lr': p.lr, 'scale': l.scale, 'at': d.at, 'torch': d.torch, 'numpy': d.numpy,
             'python': d.python}} AS item
    FROM sought s LEFT JOIN fed f USING (attempt, step, rank) LEFT JOIN drawn d USING (attempt, step, rank)
    LEFT JOIN paced p USING (attempt, step, rank)
    LEFT JOIN (SELECT attempt, step, rank, max(scale) AS scale FROM loss GROUP BY ALL) l USING (attempt, step, rank)
)
"""

Item = Mapping[str, Any]


def kit(items: Iterable[Item], attempt: int, step: int, ranks: Iterable[int]) -> Iterator[Evidence]:
    """Evidence for running `step` again, of the ranks that are concerned; nothing where nothing was recorded."""
    known = {i["rank"]: i for i in items if i["attempt"] == attempt and i["step"] == step}
    for rank in sorted(ranks)[:RANKS]:
        item = known.get(rank)
        if item is None:
            continue
        if item["ids"]:
            yield Evidence(rank, step, "ids of the batch's samples", _cut(item["ids"], item["samples"]))
        elif item["digests"]:
            yield Evidence(rank, step, "content digests of the batch's samples", _cut(item["digests"], item["samples"]))
        if item["at"] is not None:
            streams = ", ".join(f"{name} {_digits(item[name])}" for name in ("torch", "numpy", "python") if item[name])
            yield Evidence(rank, item["at"], "random streams after this step, the last seen before", streams)
    first = next((known[r] for r in sorted(ranks) if r in known), None)
    if first is not None and first["lr"] is not None:
        yield Evidence(first["rank"], step, "learning rate", f"{first['lr']:.6g}")
    if first is not None and first["scale"] not in (None, 0.0, 1.0):
        yield Evidence(first["rank"], step, "loss scale", f"{first['scale']:.6g}")


def _cut(values: list[int], samples: int | None) -> str:
    more = f" and {samples - len(values)} more" if samples and samples > len(values) else ""
    return ", ".join(map(str, values)) + more


def _digits(digest: int) -> str:
    return f"{digest & (1 << 64) - 1:016x}"
