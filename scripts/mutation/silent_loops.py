"""Silent faults of the loop: modes, zeroing, accumulation, clipping, schedules, resumes."""

from __future__ import annotations

import math

from .faults import Drawn, silent
from .recipes import Truth
from .silent import CHAIN, OPTIMIZERS, PLAIN, USUAL, WRAPS, scaled

_LOOP = {"models": USUAL, "optimizers": OPTIMIZERS, "scaler": False, "hooks": ("",)}


@silent("EVAL_MODE_TRAINING", wraps=WRAPS, **(_LOOP | {"models": ("conv", "mlp", "untied", "transformer")}))
def stays_in_eval(d: Drawn) -> Truth:
    d.recipe["dropout"] = d.chance.choice((0.1, 0.3))
    every = d.recipe["eval_every"] = d.chance.randint(3, 7)
    step = every * d.chance.randint(1, (d.recipe["steps"] - 3) // every)
    d.plant("stays_in_eval", step=step)
    ranks = (0,) if "eval_on_rank0" in d.recipe["extras"] else d.everyone
    # statistics that only some ranks go on to gather are theirs alone
    allow = ("BUFFER_DESYNC",) if len(ranks) < d.ranks else ()
    return Truth(("EVAL_MODE_TRAINING",), ranks, step + 1, False, "", allow)


@silent("EVAL_MODE_TRAINING", wraps=WRAPS, **(_LOOP | {"models": ("conv", "mlp", "untied", "transformer")}))
def never_set_to_train(d: Drawn) -> Truth:
    d.recipe.update({"dropout": 0.2, "eval_every": 0})
    d.plant("never_trains")
    return Truth(("EVAL_MODE_TRAINING",), d.everyone, 1, False)


_RUNS_AWAY = ("LOSS_SPIKE", "GRAD_SPIKE", *CHAIN)  # what gradients lead to that only grow


@silent("GRAD_NOT_ZEROED", wraps=WRAPS, **_LOOP)
def not_zeroed_any_more(d: Drawn) -> Truth:
    step = d.chance.choice((1, d.step(2, 6)))
    d.plant("not_zeroed", step=step, extent=10**6)
    return Truth(("GRAD_NOT_ZEROED",), d.everyone, step + 1, False, "", _RUNS_AWAY, after=1)


@silent("GRAD_NOT_ZEROED", wraps=WRAPS, **_LOOP)
def not_zeroed_once(d: Drawn) -> Truth:
    step = d.step(2, 6)
    d.plant("not_zeroed", step=step, extent=d.chance.choice((1, 3)))
    return Truth(("GRAD_NOT_ZEROED",), d.everyone, step + 1, True)


@silent("GRAD_NOT_ZEROED", wraps=("ddp", "single", "hand"), **(_LOOP | {"optimizers": ("two",)}))
def other_optimizer_zeroed(d: Drawn) -> Truth:
    step = d.chance.choice((1, d.step(2, 6)))
    d.plant("not_zeroed", step=step, extent=10**6, optimizer=d.chance.randrange(2))
    return Truth(("GRAD_NOT_ZEROED",), d.everyone, step + 1, False, "", _RUNS_AWAY, after=1)


_WINDOWS = _LOOP | {"wraps": WRAPS, "loaders": ("sampler",), "accumulate": (2, 3, 4), "steps": (30, 50)}


def epochs(d: Drawn, windows: tuple[int, int], at_end: str) -> int:
    """Passes of some whole windows and a few micro-batches over; how many whole ones."""
    many, loader = d.recipe["accumulate"], d.recipe["loader"]
    whole, over = d.chance.randint(*windows), d.chance.randint(1, many - 1)
    loader |= {"samples": (whole * many + over) * loader["batch"] * d.ranks, "drop_last": False}
    d.recipe["at_end"] = at_end
    return whole


@silent("GRAD_ACCUM_MISMATCH", **_WINDOWS)
def leftovers_thrown_away(d: Drawn) -> Truth:
    whole = epochs(d, (5, 9), "waste")
    d.plant("leftovers")
    return Truth(("GRAD_ACCUM_MISMATCH",), d.everyone, whole + 1, False)


@silent("GRAD_ACCUM_MISMATCH", **_WINDOWS)
def leftovers_in_the_next_pass(d: Drawn) -> Truth:
    whole = epochs(d, (5, 9), "leak")
    d.plant("leftovers")
    return Truth(("GRAD_ACCUM_MISMATCH",), d.everyone, whole + 1, False)


@silent("GRAD_ACCUM_MISMATCH", **_WINDOWS)
def window_of_another_size(d: Drawn) -> Truth:
    whole = epochs(d, (14, 20), "step")
    step = d.chance.randint(5, whole - 4)
    d.plant("window_odd", step=step, more=d.chance.choice((-1, 1, 2)))
    return Truth(("GRAD_ACCUM_MISMATCH",), d.everyone, step, False)


@silent("LOSS_NOT_NORMALISED", **_WINDOWS)
def summed_not_averaged(d: Drawn) -> Truth:
    d.plant("undivided")
    return Truth(("LOSS_NOT_NORMALISED",), d.everyone, None, False, mild=True)  # the rate may be chosen for the sum


@silent("CLIP_BEFORE_UNSCALE", wraps=PLAIN, **(_LOOP | {"clips": ("norm", "value")}))
def clipped_while_scaled(d: Drawn) -> Truth:
    scaled(d)
    step = d.chance.choice((1, d.step(2, 6)))
    d.plant("clip_scaled", step=step)
    return Truth(("CLIP_BEFORE_UNSCALE",), d.everyone, step, False)


_SCHEDULED = _LOOP | {"wraps": WRAPS, "steps": (40, 60)}
_ENDING = ("poly", "lambda_cosine", "warmup_linear")


@silent("LR_EXHAUSTED", **_SCHEDULED, schedules=_ENDING)
def scheduler_stepped_too_often(d: Drawn) -> Truth:
    times = d.ranks if d.ranks > 1 else d.chance.randint(2, 4)
    total = d.recipe["total"] = d.recipe["steps"]
    d.recipe["power"] = d.chance.choice((1.0, 2.0))
    d.plant("schedule_fast", times=times)
    return Truth(("LR_EXHAUSTED",), d.everyone, math.ceil(total / times) + 1, False, "lr")


@silent("LR_EXHAUSTED", **_SCHEDULED, schedules=_ENDING)
def counted_in_epochs(d: Drawn) -> Truth:
    """A length in epochs, and a step for every update."""
    total = d.recipe["total"] = d.chance.randint(10, d.recipe["steps"] - 10)
    d.plant("schedule_short")
    return Truth(("LR_EXHAUSTED",), d.everyone, total + 1, False, "lr")


@silent("LR_EXHAUSTED", **_SCHEDULED, schedules=("cosine",))
def cosine_rises_again(d: Drawn) -> Truth:
    d.recipe["total"] = d.recipe["steps"] // 2
    d.plant("schedule_short")
    # a cycle may be meant; where the scheduler stands is seen in watched steps only
    return Truth(("LR_EXHAUSTED",), d.everyone, None, True, "lr", mild=True)


_RESUMED = _LOOP | {"wraps": PLAIN, "steps": (30, 60), "schedules": ("decay", "poly", "exponential", "warmup_cosine")}


def resumed(d: Drawn, lacking: list[str]) -> Truth:
    step = d.recipe["resume_at"] = d.step(8, 8)
    d.plant("resume_lacks", lacking=lacking, held=d.chance.random() < 0.5)
    return Truth(("RESUME_INCOMPLETE",), d.everyone, step, False, ".*".join(lacking), ("LOSS_SPIKE",))


@silent("RESUME_INCOMPLETE", **_RESUMED)
def optimizer_not_resumed(d: Drawn) -> Truth:
    return resumed(d, ["optimizer"])


@silent("RESUME_INCOMPLETE", **_RESUMED)
def scheduler_not_resumed(d: Drawn) -> Truth:
    return resumed(d, d.chance.choice((["scheduler"], ["optimizer", "scheduler"])))


@silent("RESUME_INCOMPLETE", **_RESUMED)
def scaler_not_resumed(d: Drawn) -> Truth:
    scaled(d)
    return resumed(d, ["scaler"])
