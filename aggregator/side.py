"""One run as `tdbg compare` lays it beside another: the values of its last attempt by rank and step.

Reads     step, tensor, training_batch, optim, loss, grad, param, buffer, optim_state, checkpoint, rng, identity
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Final

Rows = Callable[[str], list[tuple[Any, ...]]]
Place = tuple[int, int]  # rank, step
Series = dict[Place, Any]

# Fingerprints that are taken through a window which moves with the step number are alike in two runs only at equal
# numbers. Up to this many elements parameters and buffers are looked at whole (ELEMENTS_PER_PASS of the agent's).
WHOLE_ELEMENTS = 4 << 20

_LAST = "(SELECT max(attempt) FROM step)"
_CATALOGUE = f"""
catalogue AS (
    SELECT rank, pid, generation, hash(list(concat(model, ':', name, ' ', shape) ORDER BY index)) AS names
    FROM tensor WHERE attempt = {_LAST} GROUP BY ALL
)"""


def _prints(table: str, stage: str) -> str:
    return f"""
WITH {_CATALOGUE}
SELECT t.rank, t.step, hash(list(hash(c.names, t.tensors, t.digest) ORDER BY t.seq))
FROM {table} t JOIN catalogue c USING (rank, pid, generation)
WHERE t.attempt = {_LAST} AND t.stage = '{stage}' AND len(t.digest) > 0 AND t.step > 0 GROUP BY t.rank, t.step
"""


QUERIES: Final[Mapping[str, str]] = {
    "samples": f"""
SELECT rank, step, hash(list(ids ORDER BY seq)) FROM training_batch
WHERE attempt = {_LAST} AND len(ids) > 0 AND step > 0 GROUP BY rank, step""",
    "content of samples": f"""
SELECT rank, step, hash(list(digests ORDER BY seq)) FROM training_batch
WHERE attempt = {_LAST} AND step > 0 GROUP BY rank, step HAVING min(len(digests)) > 0""",
    "loss": f"SELECT rank, step, any_value(total) FROM loss WHERE attempt = {_LAST} AND step > 0 GROUP BY rank, step",
    "gradient norm": f"""
SELECT rank, step, max(sqrt(list_sum([x * x for x in l2 if NOT x < 0]))) FROM grad
WHERE attempt = {_LAST} AND stage = 'local' AND valid AND step > 0 GROUP BY rank, step""",
    "reduced gradient": _prints("grad", "reduced"),
    "buffer": _prints("buffer", "end"),
    "parameter": _prints("param", "end"),
}
# What the optimizer holds, as it met the first update.
# Names of the state that an optimizer held as it met an update; none before its first.
STATE = f"""
SELECT rank, step, optimizer, any_value(keys) FROM optim_state
WHERE attempt = {_LAST} AND stage = 'start' AND step > 0 GROUP BY rank, step, optimizer
"""
START = f"""
WITH {_CATALOGUE}
SELECT t.rank, hash([hash(c.names, t.tensors, t.digest)]) FROM param t JOIN catalogue c USING (rank, pid, generation)
WHERE t.attempt = {_LAST} AND t.stage = 'start' AND len(t.digest) > 0
QUALIFY row_number() OVER (PARTITION BY t.rank ORDER BY t.seq) = 1
"""


IDENTITY = f"""
SELECT key, string_agg(DISTINCT value, ' | ' ORDER BY value)
FROM (SELECT key, rank, arg_max(value, (step, seq)) AS value FROM identity
      WHERE attempt = {_LAST} AND rule IN ('must', 'should') AND step <= 2 GROUP BY ALL)
GROUP BY key ORDER BY key
"""


@dataclass
class Side:
    """Values of one run. Steps are the run's own, from 1."""

    run: str
    world_size: int
    steps: int  # that all its ranks took
    whole: bool  # nothing of the recording is missing
    model: dict[str, str] = field(default_factory=dict)  # parameter -> shape, of all ranks
    elements: int = 0  # of parameters and buffers that a rank holds
    low_precision: bool = False
    series: dict[str, Series] = field(default_factory=dict)
    settings: dict[tuple[int, str], dict[int, str]] = field(default_factory=dict)  # (rank, key) -> step -> value
    state: dict[tuple[int, int, int], str] = field(default_factory=dict)  # (rank, step, optimizer) -> what it held
    start: dict[int, int] = field(default_factory=dict)  # rank -> fingerprint of the first parameters
    random: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # rank -> digests before the first update
    seeds: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    identity: dict[str, str] = field(default_factory=dict)
    saved: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)  # (digest, size) -> steps taken, path
    loaded: dict[tuple[int, int], str] = field(default_factory=dict)  # (digest, size) -> path, before the first step

    @property
    def ranks(self) -> set[int]:
        return {rank for rank, _ in self.series["loss"]}


def read(rows: Rows, run: str, world_size: int, whole: bool) -> Side:
    """Everything of one run. Cost: 10 queries; memory grows with ranks times steps."""
    ends = [last for (last,) in rows(f"SELECT max(step) FROM step WHERE attempt = {_LAST} GROUP BY rank")]
    side = Side(run, world_size, min(ends, default=0), whole)
    side.series = {kind: {(r, s): v for r, s, v in rows(sql)} for kind, sql in QUERIES.items()}
    side.identity = dict(rows(IDENTITY))
    _model(side, rows)
    for rank, step, optimizer, group, name, lr, settings in rows(
        f'SELECT rank, step, optimizer, "group", class_name, lr, settings FROM optim WHERE attempt = {_LAST} '
        "ORDER BY seq"
    ):
        where = f"optimizer {optimizer} group {group}"
        for key, value in (("class", name), ("lr", repr(lr)), ("settings", settings)):
            side.settings.setdefault((rank, f"{key} of {where}"), {})[max(step, 1)] = value
    side.state = {(r, s, o): ", ".join(json.loads(keys or "{}")) for r, s, o, keys in rows(STATE)}
    side.start = dict(rows(START))
    for rank, *values in rows(
        f"SELECT rank, torch_digest, numpy_digest, python_digest, torch_seed, torch_seeded, numpy_seed, python_seed "
        f"FROM rng WHERE attempt = {_LAST} AND step <= 1 QUALIFY row_number() OVER (PARTITION BY rank ORDER BY seq) = 1"
    ):
        side.random[rank], side.seeds[rank] = tuple(values[:3]), tuple(values[3:])
    for digest, size, step, path, event in rows(
        f"SELECT digest, size_bytes, step, path, event FROM checkpoint WHERE digest <> -1 AND (event = 'save' OR "
        f"event = 'load' AND attempt = {_LAST} AND step <= 1) ORDER BY attempt, seq"
    ):
        if event == "save":
            side.saved[digest, size] = (step - 1, path)  # its step is the one in progress
        else:
            side.loaded[digest, size] = path
    return side


def _model(side: Side, rows: Rows) -> None:
    for name, shape, dtypes in rows(
        f"SELECT concat('model', nullif(model, 0), '.', name), string_agg(DISTINCT shape, ' | ' ORDER BY shape), "
        f"string_agg(DISTINCT dtype, ' ') FROM tensor WHERE attempt = {_LAST} AND kind = 'param' AND generation = 1 "
        f"GROUP BY model, name ORDER BY model, name"
    ):
        side.model[name] = shape
        side.low_precision |= "float16" in dtypes  # bfloat16 too
    side.low_precision |= side.identity.get("autocast", "off") != "off"
    held = rows(f"SELECT max(n) FROM (SELECT rank, pid, generation, sum(numel) AS n FROM tensor "
                f"WHERE attempt = {_LAST} GROUP BY ALL)")  # fmt: skip
    side.elements = int(held[0][0] or 0) if held else 0


def names(rows: Rows, kind: str, rank: int, step: int) -> dict[str, Any]:
    """Fingerprint by tensor name of one rank and step, to say which of them differ."""
    source, stage = {
        "parameter": ("param", "end"),
        "reduced gradient": ("grad", "reduced"),
        "buffer": ("buffer", "end"),
    }[kind]
    return dict(rows(
        f"SELECT name, digest FROM replica WHERE source = '{source}' AND stage = '{stage}' AND attempt = {_LAST} "
        f"AND rank = {int(rank)} AND step = {int(step)} AND digest IS NOT NULL ORDER BY index"
    ))  # fmt: skip


def in_force(changes: Mapping[int, str], steps: Sequence[int]) -> dict[int, str]:
    """The value at each of these steps, which ascend."""
    found: dict[int, str] = {}
    ahead = sorted(changes)
    at, value = 0, None
    for step in steps:
        while at < len(ahead) and ahead[at] <= step:
            value = changes[ahead[at]]
            at += 1
        if value is not None:
            found[step] = value
    return found


def folded(rows: Rows, side: Side) -> Side:
    """A run as if it had one rank: the samples of a step in any order, the mean loss. For unequal world sizes."""
    losses: dict[int, list[float]] = {}
    for (_, step), value in side.series["loss"].items():
        losses.setdefault(step, []).append(value)
    series: dict[str, Series] = {kind: {} for kind in side.series}
    series["loss"] = {(0, s): fmean(values) for s, values in losses.items() if len(values) == side.world_size}
    series["samples"] = {(0, s): v for s, v in rows(
        f"SELECT step, hash(list_sort(flatten(list(ids)))) FROM training_batch "
        f"WHERE attempt = {_LAST} AND len(ids) > 0 AND step > 0 GROUP BY step")}  # fmt: skip
    return replace(side, series=series, start={}, state={})
