"""Runs with holes, for scripts/mutate: jobs, what is taken out of their recording, and what may then still be said.

Taken out are a rank's whole recording, one table of one rank, or the rows of some steps; other jobs never had enough
(two ranks, one process, few steps, a model cut by hand). A rule whose input is gone must abstain: never CLEAR, and
never an alarm that names ranks which the truth does not.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute
import pyarrow.parquet

Recipe = dict[str, Any]
Damage = Callable[[Path], None]
ABSTAINS = ("INSUFFICIENT_EVIDENCE", "NOT_APPLICABLE")
CROSS_RANK = ("PARAM_DESYNC", "BUFFER_DESYNC", "GRAD_DESYNC", "HPARAM_DESYNC", "STEP_DESYNC", "SHARD_OVERLAP",
              "SHARD_MISSING", "SAMPLER_SEED_MISMATCH", "IDENTITY_MISMATCH")  # fmt: skip
OF_TABLE = {
    "param": ("PARAM_DESYNC",), "grad": ("GRAD_DESYNC",), "buffer": ("BUFFER_DESYNC",), "optim": ("HPARAM_DESYNC",),
    "batch": ("SHARD_OVERLAP", "SHARD_MISSING"), "loader": ("SHARD_MISSING",), "input": ("NONFINITE_INPUT",),
    "loss": ("NONFINITE_LOSS",), "identity": ("IDENTITY_MISMATCH",), "step": ("STEP_DESYNC",),
    "sampler": ("SAMPLER_SEED_MISMATCH",), "tensor": ("PARAM_DESYNC", "GRAD_DESYNC", "BUFFER_DESYNC"),
}  # fmt: skip


@dataclass(frozen=True)
class Hole:
    """One case: the job, what is taken out, the codes that must abstain, and what may be named all the same.

    `named`: code -> ranks that an incident of it may name, or None for any. `open`: every incident of `named` must say
    what it can't conclude. `incomplete`: the recording must be shown as not whole.
    """

    name: str
    job: str
    abstain: tuple[str, ...] = ()
    damage: Damage | None = None
    named: tuple[tuple[str, tuple[int, ...]], ...] = ()
    open: bool = False
    incomplete: bool = False


def jobs(seed: int) -> dict[str, Recipe]:
    """The recipes by name; what is random is which rank and step the faults strike."""
    chance = random.Random(f"holes {seed}")
    whole: Recipe = {
        "seed": chance.randint(1, 10**6), "ranks": 3, "steps": 40, "wrap": "ddp", "model": "mlp", "optimizer": "adamw",
        "optimizer_options": {"lr": 2e-3}, "accumulate": 1, "clip": "norm", "limit": 1.0, "eval_every": 10,
        "extras": [], "ddp": {"broadcast_buffers": False},
        "loader": {"kind": "sampler", "batch": 4, "samples": 3 * 4 * 16},
    }  # fmt: skip
    pair = whole | {"ranks": 2, "loader": whole["loader"] | {"samples": 2 * 4 * 16}}
    param = {"kind": "param", "tensor": "body.3.weight", "how": "noise", "amount": 0.1, "step": chance.randint(8, 30)}
    return {
        "whole": whole,
        "odd": whole | {"fault": param | {"rank": 1}},
        "pair": pair | {"fault": param | {"rank": chance.randrange(2)}},
        "pair-lr": pair | {"fault": {"kind": "hparam", "key": "lr", "amount": 0.01, "rank": chance.randrange(2),
                                     "step": chance.randint(4, 30)}},
        "pair-seed": pair | {"fault": {"kind": "seed", "rank": chance.randrange(2)}},
        "one": whole | {"ranks": 1, "wrap": "single", "loader": whole["loader"] | {"samples": 64}},
        "split": whole | {"wrap": "split", "loader": whole["loader"] | {"kind": "tensors"}},
        "killed": whole | {"fault": {"kind": "kill", "rank": chance.randrange(3), "step": 11}},
        "short": whole | {"steps": 4},
    }  # fmt: skip


def cases(seed: int) -> Iterator[Hole]:
    recipes, chance = jobs(seed), random.Random(f"damage {seed}")
    struck = recipes["odd"]["fault"]["step"]
    yield Hole("the odd rank's recording is gone", "odd", ("PARAM_DESYNC",), without_rank(1), incomplete=True)
    for gone, left in ((0, (1, 2)), (2, (0, 1))):
        yield Hole(f"rank {gone}'s recording is gone, two that differ are left", "odd", (), without_rank(gone),
                   (("PARAM_DESYNC", left), ("OPTIM_STATE_DESYNC", left)), True, True)  # fmt: skip
    hole = without_steps("param", struck - 2, struck + 3)
    yield Hole("rows around the fault are gone on every rank", "odd", (), hole,
               (("PARAM_DESYNC", (1,)), ("OPTIM_STATE_DESYNC", (1,))))  # fmt: skip
    for gone in range(3):
        yield Hole(f"a healthy run without rank {gone}'s recording", "whole", CROSS_RANK, without_rank(gone),
                   incomplete=True)  # fmt: skip
    for table, codes in OF_TABLE.items():
        rank = chance.randrange(3)
        yield Hole(f"a healthy run without table {table} of rank {rank}", "whole", codes, without_table(table, rank))
    for table in ("param", "grad"):
        rank = chance.randrange(3)
        yield Hole(f"a healthy run without steps 9 to 13 in {table} of rank {rank}", "whole", OF_TABLE[table],
                   without_steps(table, 9, 13, rank))  # fmt: skip
    both = (0, 1)
    yield Hole("two ranks whose parameters differ", "pair", (), None,
               (("PARAM_DESYNC", both), ("OPTIM_STATE_DESYNC", both)), True)  # fmt: skip
    yield Hole("two ranks whose settings differ", "pair-lr", (), None,
               (("HPARAM_DESYNC", both), ("PARAM_DESYNC", both), ("OPTIM_STATE_DESYNC", both)), True)  # fmt: skip
    yield Hole("two ranks with two seeds", "pair-seed", ("SEED_MISMATCH",))
    yield Hole("two ranks have no outlier", "pair-seed", ("GRAD_OUTLIER_RANK",))
    yield Hole("a single process", "one", ("PARAM_DESYNC", "GRAD_DESYNC", "STEP_DESYNC", "SHARD_OVERLAP"))
    yield Hole("a model that is cut by hand", "split", ("PARAM_DESYNC", "GRAD_DESYNC"))
    killed = (recipes["killed"]["fault"]["rank"],)
    yield Hole("a rank killed in its first pass over the data", "killed", ("SHARD_MISSING", "EPOCH_NOT_RESHUFFLED"),
               None, (("RANK_FAILED", killed),))  # fmt: skip
    yield Hole("four steps only", "short", ("GRAD_OUTLIER_RANK", "SHARD_MISSING", "EPOCH_NOT_RESHUFFLED"))


# ---------------------------------------------------------------- taking out


def without_rank(rank: int) -> Damage:
    def take(run: Path) -> None:
        for folder in [*(run / "tables").glob(f"*/rank={rank:05d}"), *(run / "records").glob(f"rank-{rank:05d}.*")]:
            shutil.rmtree(folder)

    return take


def without_table(table: str, rank: int) -> Damage:
    def take(run: Path) -> None:
        shutil.rmtree(run / "tables" / table / f"rank={rank:05d}")

    return take


def without_steps(table: str, first: int, last: int, rank: int | None = None) -> Damage:
    """Rows of these steps are gone, as if they had been dropped; of all ranks or one."""

    def take(run: Path) -> None:
        ranks = "*" if rank is None else f"rank={rank:05d}"
        for path in (run / "tables" / table).glob(f"{ranks}/*.parquet"):
            rows = pyarrow.parquet.ParquetFile(path).read()
            step = rows["step"]
            kept = pyarrow.compute.or_(pyarrow.compute.less(step, first), pyarrow.compute.greater(step, last))
            pyarrow.parquet.write_table(rows.filter(kept), path)

    return take


# ---------------------------------------------------------------- what may be said


def wrongs(hole: Hole, said: dict[str, Any]) -> list[str]:
    """Everything in the verdict that the hole does not allow; empty when it abstains as it should."""
    outcomes = {v["reason_code"]: v for v in said["verdicts"]}
    named = dict(hole.named)
    found = []
    for code in hole.abstain:
        if outcomes[code]["outcome"] not in ABSTAINS:
            found.append(f"{code} says {outcomes[code]['outcome']}: {outcomes[code]['why']}")
    for code in list(named)[:1]:  # the others are what may come of it
        if outcomes[code]["outcome"] == "CLEAR":
            found.append(f"{code} says CLEAR: {outcomes[code]['why']}")
    for i in said["incidents"]:
        if i["severity"] == "note":
            continue
        if tuple(sorted(i["ranks"])) != named.get(i["reason_code"]):
            found.append(f"{i['reason_code']} names ranks {i['ranks']}: {i['summary']}")
        elif hole.open and not i["cannot_conclude"]:
            found.append(f"{i['reason_code']} does not say that the right side is unknown: {i['summary']}")
    if hole.incomplete and said["data_quality"]["complete"]:
        found.append("the recording is shown as whole")
    return found
