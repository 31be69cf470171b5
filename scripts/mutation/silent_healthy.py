"""Healthy jobs of the silent family: what looks like its faults and is meant.

Every shape once in an order of the seed's, then again; what a shape leaves open is random. Those of LOOPS are loops of
their own, in job/styles.py and job/networks.py; the others are habits of the usual loop, in job/silent.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .recipes import VECTOR_MODELS, Case, Recipe, Wanted, draw

Pick = Callable[[Any], Any]
PLAIN = ("ddp", "ddp", "single", "hand")
WRAPS = (*PLAIN, "fsdp2")
OPTIMIZERS = ("sgd", "adam", "adamw", "rmsprop", "adagrad")
VECTORS = tuple(m for m in VECTOR_MODELS if m != "branches")
MODELS = (*VECTORS, "transformer", "untied", "lstm", "bag")


@dataclass(frozen=True)
class Shape:
    """`limits`: those of Wanted; `more` draws what the usual job has not."""

    limits: dict[str, Any]
    more: Callable[[Pick, Recipe], Recipe] = lambda pick, recipe: {}

    def drawn(self, chance: random.Random) -> Recipe:
        usual: dict[str, Any] = {
            "wraps": WRAPS,
            "models": MODELS,
            "optimizers": OPTIMIZERS,
            "ranks": (2, 2, 2, 3),
            "scaler": False,
            "resume": False,
        }
        recipe = draw(chance, Wanted(**(usual | self.limits)))
        return recipe | {"program": "job.silent"} | self.more(chance.choice, recipe)


def scheduled(kind: str) -> Shape:
    return Shape({"schedules": (kind,), "steps": (40, 80)}, lambda pick, _: {"restart_mult": pick((1, 2))})


def windows(at_end: str) -> Callable[[Pick, Recipe], Recipe]:
    """Passes that leave micro-batches over, which are stepped on or left alone."""

    def more(pick: Pick, recipe: Recipe) -> Recipe:
        many, loader = recipe["accumulate"], recipe["loader"]
        batches = many * pick(range(5, 11)) + pick(range(1, many))
        return {"at_end": at_end, "loader": loader | {"samples": batches * loader["batch"] * recipe["ranks"],
                                                      "drop_last": False}}  # fmt: skip

    return more


def settling(pick: Pick, _: Recipe) -> Recipe:
    """As fp16 does: gradients beyond its largest number are infinite until the scale has come down."""
    return {"scaler": True, "autocast": True, "fp16": True, "init_scale": 2.0 ** pick((16, 20, 24, 28))}


def labelled(*kinds: str) -> Callable[[Pick, Recipe], Recipe]:
    return lambda pick, recipe: {"labels": pick(kinds), "curriculum_at": int(recipe["steps"] * pick((0.5, 0.7)))}


def resumed(pick: Pick, recipe: Recipe) -> Recipe:
    amp = pick((False, True))
    return {"resume_at": recipe["steps"] // 2, "rng": pick((False, True)), "scaler": amp, "autocast": amp}


def small(pick: Pick, recipe: Recipe) -> Recipe:
    batch = pick((1, 2))
    loader = recipe["loader"]
    return {"loader": loader | {"batch": batch, "samples": loader["samples"] * batch // loader["batch"]}}


_NOISY = {"models": VECTORS, "steps": (60, 110)}
_WINDOWS = {"loaders": ("sampler",), "accumulate": (2, 3, 4), "steps": (30, 60)}
SHAPES: dict[str, Shape] = {
    **{kind: scheduled(kind) for kind in ("warmup_linear", "cosine", "onecycle", "restarts", "poly", "exponential")},
    "amp": Shape({"wraps": PLAIN, "optimizers": ("sgd", "adam", "adamw"), "steps": (40, 80), "hooks": ("",)}, settling),
    "amp_clipped": Shape({"wraps": PLAIN, "optimizers": ("sgd", "adamw"), "clips": ("norm", "value")}, settling),
    # without clipping some of them diverge to Inf, truly
    "heavy_tails": Shape(_NOISY | {"clips": ("norm",)}, labelled("student", "lognormal")),
    "heavy_tails_accumulated": Shape(_NOISY | {"clips": ("norm",), "accumulate": (2, 3)},
                                     labelled("student", "lognormal")),
    "noisy_labels": Shape(_NOISY | {"steps": (100, 150)}, labelled("noisy")),
    "curriculum": Shape(_NOISY, labelled("curriculum", "shifted")),
    "small_batches": Shape({"steps": (60, 100), "models": ("mlp", "wide", "lstm", "untied")}, small),
    "lbfgs": Shape({"wraps": ("ddp", "single"), "models": ("mlp", "lstm"), "optimizers": ("lbfgs",)}),
    "frozen_part": Shape({"models": ("frozen",), "wraps": PLAIN}),
    "short_last_window": Shape(_WINDOWS, windows("step")),
    "leftovers_not_used": Shape(_WINDOWS, windows("drop")),
    "evaluated": Shape({"models": ("conv", "transformer", "mlp")},
                       lambda pick, _: {"eval_every": pick((3, 7)), "dropout": 0.2}),
    "tied": Shape({"models": ("transformer",), "wraps": (*WRAPS, "fsdp2")}),
    "frozen_by_lr": Shape({"models": ("mlp", "wide", "lstm", "untied"), "wraps": PLAIN},
                          lambda _, recipe: {"lr_zero": "body.0" if recipe["model"] in ("mlp", "wide") else "embed"}),
    "clipped": Shape({"clips": ("norm", "value"), "steps": (60, 100)}, lambda pick, _: {"limit": pick((0.05, 0.3))}),
    "resumed": Shape({"wraps": PLAIN, "optimizers": ("sgd", "adam", "adamw"),
                      "schedules": ("decay", "poly", "exponential", "warmup_cosine", "")}, resumed),
    "averaged": Shape({"wraps": PLAIN}, lambda pick, _: {"extras": ["ema", "checkpoint", "final_eval"]}),
}  # fmt: skip


@dataclass(frozen=True)
class Loop:
    """A style, the wraps it is written for, and what its options may be."""

    options: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    wraps: tuple[str, ...] = ("ddp", "single")
    optimizers: tuple[str, ...] = ("sgd", "adam", "adamw")
    batch: tuple[int, ...] = (4, 8)


_YES = (False, True)
_HAND = ("hand", "single")
LOOPS: dict[str, Loop] = {
    "fine_tuned": Loop({"frozen": ("all", "statistics")}),
    "unfrozen": Loop({"at": (15, 25)}, _HAND),
    "zero_initialised": Loop({"depth": (2, 4), "gated": _YES}),
    "updated_in_backward": Loop({"sgd": _YES}, ("single",)),
    "recomputed": Loop({"reentrant": _YES}),
    "smoothed": Loop({"weight": (1.0, 6.0)}),
    "tiny": Loop({"hidden": (1, 3)}, batch=(1, 2)),
    "two_losses": Loop({"apart": _YES}, _HAND),
    "sharpness": Loop({}, _HAND),
    "penalised": Loop({}, _HAND),
    "adversarial": Loop({"wasserstein": _YES, "frozen": _YES, "turns": (1, 1, 3)}, _HAND, batch=(8, 16)),
    "policy": Loop({"baseline": _YES, "episodes": (4, 16)}, _HAND),
    "temporal_difference": Loop({"soft": _YES}, _HAND),
    "contrastive": Loop({}, batch=(8, 16)),
    "self_distilled": Loop({"teacher": _YES}),
    "variational": Loop({"weight": (0.1, 1.0), "rise": (10, 30)}),
}
LR = {"sgd": {"lr": 0.02, "momentum": 0.9}, "adam": {"lr": 2e-3}, "adamw": {"lr": 2e-3, "weight_decay": 0.05}}


def of_loop(chance: random.Random, name: str, loop: Loop) -> Recipe:
    pick = chance.choice
    wrap, optimizer, batch = pick(loop.wraps), pick(loop.optimizers), pick(loop.batch)
    ranks = 1 if wrap == "single" else pick((2, 2, 3))
    return {
        "program": "job.styles", "style": name, "model": name, "wrap": wrap, "ranks": ranks, "optimizer": optimizer,
        "optimizer_options": LR[optimizer], "seed": chance.randint(1, 10**6), "steps": chance.randint(50, 100),
        "schedule": pick(("", "", "cosine", "warmup_linear")), "ddp": {},
        "loader": {"kind": "sampler", "batch": batch, "samples": batch * ranks * chance.randint(7, 18)},
        "options": {k: pick(v) for k, v in loop.options.items()},
    }  # fmt: skip


def healthy(seed: int, number: int) -> Case:
    names = [*SHAPES, *LOOPS]
    turn, place = divmod(number, len(names))
    random.Random(f"silent shapes {seed} {turn}").shuffle(names)
    chance, name = random.Random(f"silent healthy {seed} {number}"), names[place]
    recipe = SHAPES[name].drawn(chance) if name in SHAPES else of_loop(chance, name, LOOPS[name])
    return Case(number, "healthy", recipe | {"shape": name})
