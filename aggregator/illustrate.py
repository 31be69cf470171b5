"""What shows an incident: the metrics that its rule speaks of, or which ranks held the same bits at each step.

A picture repeats the evidence, it adds none: where nothing of it was recorded there is no picture.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from .findings import Incident
from .modes import MODES
from .series import Series, series
from .store import Store

# Metrics by failure mode, then by code where a code is about something narrower. The first recorded ones are drawn.
BY_MODE: Final = {
    "crash": ("step_ns",), "out of memory": ("cuda_allocated_bytes", "rss_bytes"), "non-finite": ("loss",),
    "silent error": ("loss", "grad_norm_local"), "metric error": ("loss",), "not reproducible": (),
    "slow training": ("step_ns",), "slow data": ("data_ns", "step_ns"),
}  # fmt: skip
BY_CODE: Final = {
    "NONFINITE_GRAD": ("grad_norm_local",), "GRAD_SPIKE": ("grad_norm_local",), "GRAD_VANISHED": ("grad_norm_local",),
    "GRAD_OUTLIER_RANK": ("grad_norm_local",), "REDUCTION_WRONG": ("grad_norm_local", "grad_norm"),
    "AMP_OVERFLOW": ("loss_scale",), "LR_EXHAUSTED": ("lr", "loss"), "HPARAM_DESYNC": ("lr", "loss"),
    "GRAD_NOT_ZEROED": ("grad_norm_local", "loss"), "CLIP_BEFORE_UNSCALE": ("clip_norm", "loss_scale"),
    "CHECKPOINT_STALL": ("checkpoint_ns", "evaluation_ns", "step_ns"), "NO_VALIDATION": (), "RESTARTED": (),
    "SHARD_OVERLAP": (), "SHARD_MISSING": (), "SHARD_UNEVEN": (), "SAMPLES_DROPPED": (), "EPOCH_NOT_RESHUFFLED": (),
    "SAMPLER_SEED_MISMATCH": (), "DATA_REPEATED": (), "TRAIN_EVAL_OVERLAP": (), "RNG_DUPLICATED": (),
    "WORKER_SEED_DUPLICATED": (), "INIT_SUSPECT": (),
}  # fmt: skip
MOST = 2  # pictures of one incident
# Code -> (source, stage) of the fingerprints that its rule compares.
PRINTS: Final = {"PARAM_DESYNC": ("param", "end"), "GRAD_DESYNC": ("grad", "reduced"),
                 "BUFFER_DESYNC": ("buffer", "end"), "TIE_BROKEN": ("param", "end")}  # fmt: skip
PHASES: Final = ("data_ns", "forward_ns", "backward_ns", "optimizer_ns", "communication_ns", "checkpoint_ns",
                 "evaluation_ns")  # fmt: skip
MOST_COLUMNS = 120  # steps of an agreement: as many as can be told apart in the picture
MOST_RANKS = 64


@dataclass(frozen=True)
class Agreement:
    """Which ranks held the same bits of one tensor: at each step group 0 is the largest, 1 the next; None unmeasured.

    `groups` is ranks x steps. Without a majority group 0 is the one with the lowest rank: no side is right.
    """

    tensor: str
    what: str
    attempt: int
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    groups: tuple[tuple[int | None, ...], ...]


Picture = Series | Agreement


def pictures(store: Store, incident: Incident) -> tuple[Picture, ...]:
    """Up to two pictures. Cost: a few queries over one table each."""
    f, code = incident.finding, incident.reason_code
    found: list[Picture] = []
    if code in PRINTS and f.subject and (agreement := _agreement(store, incident)):
        found.append(agreement)
    mode = next((m.name for m in MODES if code in m.codes), "")
    wanted = BY_CODE.get(code, BY_MODE.get(mode, ()))
    if f.subject + "_ns" in PHASES:  # a rule of time names the phase
        wanted = (f"{f.subject}_ns", *wanted)
    for metric in wanted:
        if len(found) < MOST and (drawn := series(store, metric, f.attempt, f.ranks)):
            found.append(drawn)
    return tuple(found)


def _agreement(store: Store, incident: Incident) -> Agreement | None:
    f = incident.finding
    source, stage = PRINTS[incident.reason_code]
    rows = store.rows(
        "SELECT step, rank, any_value(digest) FROM replica WHERE source = ? AND stage = ? AND name = ? AND attempt = ? "
        "AND digest IS NOT NULL AND step > 0 GROUP BY ALL ORDER BY step, rank",
        [source, stage, f.subject, f.attempt],
    )
    if not rows:
        return None
    by_step: dict[int, dict[int, object]] = {}
    for step, rank, digest in rows:
        by_step.setdefault(step, {})[rank] = digest
    every = sorted({rank for _, rank, _ in rows})
    ranks = (
        every if len(every) <= MOST_RANKS else sorted({*list(f.ranks)[: MOST_RANKS // 2], *every[: MOST_RANKS // 2]})
    )
    steps = _some(sorted(by_step), f.first_step)
    columns = [_groups(by_step[s]) for s in steps]
    what = {"param": "parameter", "grad": "reduced gradient", "buffer": "buffer"}[source]
    return Agreement(f.subject, what, f.attempt,
                     tuple(steps), tuple(ranks), tuple(tuple(c.get(r) for c in columns) for r in ranks))  # fmt: skip


def _some(steps: list[int], around: int | None) -> list[int]:
    """All steps, or those evenly spaced with the ones next to the incident's first step."""
    if len(steps) <= MOST_COLUMNS:
        return steps
    width = -(-len(steps) // (MOST_COLUMNS - 8))
    near = sorted(steps, key=lambda s: abs(s - (around or 0)))[:8]
    return sorted({*steps[::width], *near})


def _groups(held: dict[int, object]) -> dict[int, int]:
    """Rank -> the place of its value among the values of one step, the commonest first, then by lowest rank."""
    count = Counter(held.values())
    lowest = {v: min(r for r, w in held.items() if w == v) for v in count}
    order = {v: i for i, v in enumerate(sorted(count, key=lambda v: (-count[v], lowest[v])))}
    return {rank: order[v] for rank, v in held.items()}
