"""What scripts/mutate runs: recipes for the training program in job/, each with what a run of it must say.

`healthy` draws from every combination that plain torch supports; a fault (faults.py) is drawn into such a job.
`Truth.ranks` are those that the evidence can set apart: with two ranks that disagree, both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Recipe = dict[str, Any]


@dataclass(frozen=True)
class Truth:
    """What must be found: one of `codes`; `allow`: codes that may come with it, as consequences that are real.

    `step` None: the fault has none, or none that is exact. `history`: the rule needs more watched steps than a governed
    job of this length has, so there it may abstain. `mild`: a note will do, since a program may mean it so. `once`: it
    is there in that step alone; where that is not watched, what it left in the next watched one must be found. `after`:
    the rule looks that many steps after a watched one.
    """

    codes: tuple[str, ...]
    ranks: tuple[int, ...] | None = None
    step: int | None = None
    history: bool = False
    subject: str = ""
    allow: tuple[str, ...] = ()
    mild: bool = False
    once: bool = False
    after: int = 0


@dataclass(frozen=True)
class Case:
    """One job. `kind` is the fault's reason code, or "healthy"."""

    number: int
    kind: str
    recipe: Recipe
    truth: Truth | None = None

    @property
    def ranks(self) -> int:
        return int(self.recipe["ranks"])

    @property
    def name(self) -> str:
        return f"{self.number:03d}-{self.kind.lower()}"

    def about(self) -> str:
        """The job in one line."""
        r = self.recipe
        words = [r["shape"]] if r.get("shape", r["model"]) != r["model"] else []
        words += [r["wrap"], r["model"], r["optimizer"], f"{r['ranks']} ranks", r["loader"]["kind"]]
        words += [f"{k}={r[k]}" for k in ("accumulate", "clip", "schedule", "eval_every", "resume_at") if r.get(k)]
        words += [k for k in ("scaler", "autocast", "own_seeds", "half") if r.get(k)]
        words += [f"{k}={v}" for k, v in r.get("ddp", {}).items()] + list(r.get("extras", ()))
        words += [f"{k}={v}" for k, v in (r.get("fault") or {}).items() if k != "broken"]
        words += [f"{k}={r[k]}" for k in ("at_end", "labels", "total", "options") if r.get(k)]
        return " ".join(words)


# ---------------------------------------------------------------- healthy jobs

VECTOR_MODELS = ("mlp", "wide", "frozen", "conv", "branches")
TOKEN_MODELS = ("transformer", "untied", "lstm", "bag", "sparse_bag")
SHARDED_MODELS = ("mlp", "wide", "transformer", "untied")
_MLP = [f"{m}.{k}" for m in ("body.0", "body.3", "head") for k in ("weight", "bias")]
_BLOCKS = [f"blocks.{b}.{m}.{k}" for b in (0, 1) for m in ("norm", "norm2", "qkv", "out", "mlp.0", "mlp.2")
           for k in ("weight", "bias")]  # fmt: skip
PARAMETERS: dict[str, list[str]] = {
    "mlp": _MLP, "wide": _MLP, "frozen": _MLP[2:],
    "transformer": ["embed.weight", "norm.weight", "norm.bias", *_BLOCKS],
    "untied": ["embed.weight", "norm.weight", "norm.bias", "head.weight", *_BLOCKS],
    "conv": ["layers.0.weight", "layers.1.weight", "layers.1.bias", "layers.3.weight", "layers.4.weight",
             "layers.4.bias", "layers.7.weight", "layers.7.bias"],
    "branches": ["stem.weight", "stem.bias"],
    "lstm": ["embed.weight", "lstm.weight_ih_l0", "lstm.weight_hh_l0", "lstm.bias_ih_l0", "head.weight", "head.bias"],
    "bag": ["bag.weight", "head.weight", "head.bias"], "sparse_bag": ["head.weight", "head.bias"],
}  # fmt: skip
BUFFERS = {"mlp": "center", "wide": "center", "frozen": "center", "transformer": "position", "untied": "position"}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "sgd": [{"lr": 0.05, "momentum": 0.9}, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
            {"lr": 0.05, "momentum": 0.9, "fused": True}],
    "adam": [{"lr": 2e-3}, {"lr": 2e-3, "amsgrad": True}, {"lr": 2e-3, "foreach": True}],
    "adamw": [{"lr": 2e-3, "weight_decay": 0.05}, {"lr": 2e-3, "fused": True}, {"lr": 2e-3, "betas": [0.8, 0.9]}],
    "adagrad": [{"lr": 0.02}],
    "rmsprop": [{"lr": 1e-3}, {"lr": 1e-3, "momentum": 0.5, "centered": True}],
    "two": [{}], "lbfgs": [{}],
}  # fmt: skip


@dataclass
class Wanted:
    """What the draw of a job may choose from; a fault narrows it to where the fault can be committed."""

    wraps: Sequence[str] = ("ddp", "ddp", "ddp", "ddp", "fsdp2", "fsdp2", "hsdp", "hand", "localsgd", "join", "single")
    models: Sequence[str] = (*VECTOR_MODELS, *TOKEN_MODELS)
    optimizers: Sequence[str] = ("sgd", "adam", "adamw", "adamw", "adagrad", "rmsprop", "two", "lbfgs")
    loaders: Sequence[str] = (
        "sampler", "sampler", "stream", "weighted", "subset", "batch_sampler", "stateful", "tensors"
    )  # fmt: skip
    ranks: Sequence[int] = (2, 2, 2, 3, 3, 4)
    steps: tuple[int, int] = (24, 60)
    accumulate: Sequence[int] = (1, 1, 1, 2, 3)
    workers: Sequence[int] = (0, 0, 0, 2)
    hooks: Sequence[str] = ("", "", "", "fp16", "bf16", "default")
    clips: Sequence[str] = ("", "", "norm", "value")
    schedules: Sequence[str] = ("", "", "warmup_cosine", "decay", "plateau")
    scaler: bool = True
    ddp: dict[str, Any] = field(default_factory=dict)
    resume: bool = True


def draw(chance: random.Random, wanted: Wanted) -> Recipe:
    """A job that plain torch runs without fault. Every line that drops an option says which torch rule asks for it."""
    pick = chance.choice
    wrap = pick(wanted.wraps)
    sharded = wrap in ("fsdp2", "hsdp")
    models = [m for m in wanted.models if not sharded or m in SHARDED_MODELS]
    if wrap in ("hand", "localsgd", "join"):  # no reduction of unused or sparse gradients by hand
        models = [m for m in models if m not in ("branches", "sparse_bag")]
    model = pick(models)
    optimizers = [
        o for o in wanted.optimizers if o != "lbfgs" or (wrap in ("ddp", "single") and model in ("mlp", "lstm"))
    ]
    if model == "sparse_bag":
        optimizers = [o for o in optimizers if o == "adagrad"] or ["adagrad"]  # the others take no sparse gradient
    optimizer = pick(optimizers)
    options = dict(pick(OPTIONS[optimizer]))
    if sharded or model == "branches":
        options.pop("fused", None)  # takes no sharded tensors and, with momentum, no gradient that is missing
    ranks = {"hsdp": 4, "single": 1}.get(wrap) or pick(wanted.ranks)
    plain = optimizer == "lbfgs" or model == "sparse_bag"  # closures run the backward; sparse gradients have no norm
    accumulate = 1 if plain or wrap == "join" or model == "branches" else pick(wanted.accumulate)
    clip = "" if plain else pick(wanted.clips)
    steps = chance.randint(*wanted.steps)
    recipe: Recipe = {
        "seed": chance.randint(1, 10**6), "ranks": ranks, "steps": steps, "wrap": wrap, "model": model,
        "optimizer": optimizer, "optimizer_options": options, "accumulate": accumulate,
        "clip": "norm" if sharded and clip else clip, "limit": pick((0.3, 1.0, 5.0)),
        "dropout": pick((0.0, 0.0, 0.1)), "own_seeds": pick((False, False, True)), "no_sync": pick((True, True, False)),
        "schedule": "" if wrap in ("join", "localsgd") else pick(wanted.schedules),
    }  # fmt: skip
    if recipe["model"] == "branches":
        recipe["no_sync"] = True
    recipe["loader"] = loader(chance, wanted, recipe)
    if wrap in ("ddp", "join"):
        recipe["ddp"] = ddp(chance, wanted, recipe)
    if sharded:
        recipe["half"] = pick((False, True))
    if (
        wanted.scaler
        and wrap in ("ddp", "single", "hand")
        and not plain
        and optimizer != "two"
        and chance.random() < 0.15
    ):
        recipe |= {"scaler": True, "autocast": True}
    if wrap != "join":
        recipe["eval_every"] = pick((0, 0, 5, 12))
    extras = ["print"] * (chance.random() < 0.5)
    extras += [e for e in ("ema", "checkpoint", "final_eval", "eval_on_rank0") if not sharded and chance.random() < 0.2]
    recipe["extras"] = extras
    if wanted.resume and wrap in ("ddp", "single") and not plain and not recipe.get("scaler") and chance.random() < 0.1:
        recipe["resume_at"] = steps // 2
    return recipe


def loader(chance: random.Random, wanted: Wanted, recipe: Recipe) -> Recipe:
    kind, batch = chance.choice(wanted.loaders), chance.choice((4, 8))
    share = batch * recipe["accumulate"] * chance.randint(7, 18)  # of a rank and epoch
    samples = share * recipe["ranks"] + (chance.randrange(0, recipe["ranks"] * 2) if kind == "sampler" else 0)
    about: Recipe = {"kind": kind, "batch": batch, "samples": samples}
    workers = chance.choice(wanted.workers)
    if workers and kind != "tensors":
        about |= {"workers": workers, "persistent": chance.random() < 0.5}
    if kind == "sampler":
        about["drop_last"] = chance.random() < 0.3
    about["augment"] = chance.random() < 0.2
    return about


def ddp(chance: random.Random, wanted: Wanted, recipe: Recipe) -> Recipe:
    model, pick = recipe["model"], chance.choice
    made: Recipe = {}
    if model == "branches":
        made["find_unused_parameters"] = True
    elif recipe["wrap"] == "ddp":
        made |= pick(({}, {}, {"find_unused_parameters": True}, {"static_graph": True}))
        if recipe["accumulate"] > 1 or recipe["optimizer"] == "lbfgs":
            made.pop("static_graph", None)  # DDP's static graph wants one backward a step
    if model != "sparse_bag":
        made |= pick(({}, {}, {"gradient_as_bucket_view": True}))
        made |= pick(({}, {"bucket_cap_mb": 0.001}))
        if recipe["wrap"] == "ddp" and (hook := pick(wanted.hooks)):
            made["comm_hook"] = hook
    made |= pick(({}, {}, {"broadcast_buffers": False}))
    return made | wanted.ddp


FORCED: tuple[dict[str, Any], ...] = (  # shapes that each whole run has at least once, whatever the seed draws
    {"wraps": ["ddp"], "models": ["conv"], "ddp": {"broadcast_buffers": True}},
    {"wraps": ["ddp"], "models": ["conv"], "ddp": {"broadcast_buffers": False}},
    {"wraps": ["ddp"], "models": ["transformer"]}, {"wraps": ["ddp"], "models": ["lstm"]},
    {"wraps": ["ddp"], "models": ["sparse_bag"]}, {"wraps": ["ddp"], "models": ["bag"]},
    {"wraps": ["ddp"], "models": ["branches"]}, {"wraps": ["ddp"], "models": ["frozen"]},
    {"wraps": ["ddp"], "models": ["mlp"], "ddp": {"static_graph": True}, "accumulate": [1]},
    {"wraps": ["ddp"], "hooks": ["fp16"], "models": ["mlp", "transformer"]},
    {"wraps": ["ddp"], "hooks": ["bf16"], "models": ["wide", "lstm"]},
    {"wraps": ["ddp"], "ddp": {"gradient_as_bucket_view": True}, "models": ["wide", "untied"]},
    {"wraps": ["ddp"], "accumulate": [3], "models": ["mlp", "untied", "conv"]},
    {"wraps": ["fsdp2"], "models": ["transformer"]}, {"wraps": ["fsdp2"], "models": ["wide"]}, {"wraps": ["hsdp"]},
    {"wraps": ["ddp"], "optimizers": ["lbfgs"], "models": ["mlp"]}, {"wraps": ["ddp"], "optimizers": ["two"]},
    {"wraps": ["ddp"], "optimizers": ["rmsprop"]}, {"wraps": ["ddp"], "schedules": ["plateau"]},
    {"wraps": ["ddp"], "loaders": ["sampler"], "workers": [2]},
    {"wraps": ["ddp"], "loaders": ["stream"], "workers": [2]},
    {"wraps": ["ddp"], "loaders": ["weighted"]}, {"wraps": ["ddp"], "loaders": ["stateful"]},
    {"wraps": ["join"]}, {"wraps": ["hand"]}, {"wraps": ["localsgd"]}, {"wraps": ["single"]},
    {"wraps": ["ddp"], "steps": (100, 130)}, {"wraps": ["fsdp2"], "steps": (100, 130)},
)  # fmt: skip


def healthy(seed: int, number: int) -> Case:
    """The first are the forced shapes, the rest free draws."""
    chance = random.Random(f"healthy {seed} {number}")
    wanted = Wanted(**FORCED[number]) if number < len(FORCED) else Wanted()
    return Case(number, "healthy", draw(chance, wanted))
