"""What scripts/mutate runs: recipes for mutate_train.py, drawn from a seed, each with what a run of it must say.

`healthy` draws from every combination that plain torch supports; a fault is drawn into such a job, at a random step,
rank and tensor. `Truth.ranks` are those that the evidence can set apart: with two ranks that disagree, both.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

Recipe = dict[str, Any]


@dataclass(frozen=True)
class Truth:
    """What must be found: one of `codes`; `allow`: codes that may come with it, as consequences that are real.

    `step` None: the fault has none, or none that is exact. `history`: the rule needs more watched steps than a governed
    job of this length has, so there it may abstain.
    """

    codes: tuple[str, ...]
    ranks: tuple[int, ...] | None = None
    step: int | None = None
    history: bool = False
    subject: str = ""
    allow: tuple[str, ...] = ()


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
        words = [r["wrap"], r["model"], r["optimizer"], f"{r['ranks']} ranks", r["loader"]["kind"]]
        words += [f"{k}={r[k]}" for k in ("accumulate", "clip", "schedule", "eval_every", "resume_at") if r.get(k)]
        words += [k for k in ("scaler", "autocast", "own_seeds", "half") if r.get(k)]
        words += [f"{k}={v}" for k, v in r.get("ddp", {}).items()] + list(r.get("extras", ()))
        words += [f"{k}={v}" for k, v in (r.get("fault") or {}).items() if k != "broken"]
        return " ".join(words)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


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


# ---------------------------------------------------------------- faults


@dataclass(frozen=True)
class Drawn:
    """The chance and the healthy job that a fault is put into."""

    chance: random.Random
    recipe: Recipe

    @property
    def ranks(self) -> int:
        return int(self.recipe["ranks"])

    def rank(self) -> int:
        return self.chance.randrange(self.ranks)

    def step(self, first: int = 2, before_end: int = 3) -> int:
        return self.chance.randint(first, self.recipe["steps"] - before_end)

    def tensor(self) -> str:
        return self.chance.choice(PARAMETERS[self.recipe["model"]])

    def apart(self, rank: int) -> tuple[int, ...]:
        """Who is named when one rank differs from all others: it, or both of two."""
        return (rank,) if self.ranks > 2 else tuple(range(self.ranks))

    @property
    def everyone(self) -> tuple[int, ...]:
        return tuple(range(self.ranks))

    def plant(self, kind: str, **more: Any) -> None:
        self.recipe["fault"] = {"kind": kind, **more}


@dataclass(frozen=True)
class Fault:
    """One way to commit a fault: its code, where it may be planted, and the planting, which says the truth."""

    code: str
    name: str
    wanted: Callable[[random.Random], Wanted]
    plant: Callable[[Drawn], Truth]


FAULTS: list[Fault] = []
REPLICAS = ("ddp", "ddp", "ddp", "hand")


def fault(code: str, **limits: Any) -> Callable[[Callable[[Drawn], Truth]], Callable[[Drawn], Truth]]:
    """Registers a fault; `limits` are those of Wanted."""

    def register(plant: Callable[[Drawn], Truth]) -> Callable[[Drawn], Truth]:
        FAULTS.append(Fault(code, plant.__name__, lambda _: Wanted(**{"resume": False, **limits}), plant))
        return plant

    return register


# Gradients of the others enter each rank's momentum, and what is added there by weight decay depends on the rank.
_AFTER_PARAM = ("OPTIM_STATE_DESYNC",)


@fault("PARAM_DESYNC", wraps=REPLICAS)
def parameter_changed(d: Drawn) -> Truth:
    rank, step, name = d.rank(), d.step(), d.tensor()
    how = d.chance.choice(("noise", "scale", "bit"))
    d.plant("param", rank=rank, step=step, tensor=name, how=how, amount=d.chance.choice((1e-3, 0.01, 0.1)),
            element=d.chance.randrange(10**4), bit=d.chance.randint(2, 22))  # fmt: skip
    return Truth(("PARAM_DESYNC",), d.apart(rank), step, False, re.escape(name), _AFTER_PARAM)


@fault("PARAM_DESYNC", wraps=["hsdp"])
def replica_of_a_shard_changed(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step()
    name = d.chance.choice([n for n in PARAMETERS[d.recipe["model"]] if n.endswith("weight") and "head" not in n])
    d.plant("param", rank=rank, step=step, tensor=name, how="noise", amount=0.05)
    pair = tuple(sorted((rank, (rank + 2) % 4)))
    return Truth(("PARAM_DESYNC",), pair, step, False, re.escape(name), _AFTER_PARAM)


@fault("PARAM_DESYNC", wraps=["ddp"], steps=(30, 60))
def reloaded_on_one_rank(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step(5)
    d.plant("reload", rank=rank, step=step)
    return Truth(("PARAM_DESYNC",), d.apart(rank), step, False, "", (*_AFTER_PARAM, "BUFFER_DESYNC"))


@fault("PARAM_DESYNC", wraps=["hand"])
def own_start(d: Drawn) -> Truth:
    d.plant("own_start")
    return Truth(("PARAM_DESYNC",), d.everyone, 1, False, "", _AFTER_PARAM)


@fault("BUFFER_DESYNC", wraps=["ddp"], models=tuple(BUFFERS), ddp={"broadcast_buffers": False})
def buffer_changed(d: Drawn) -> Truth:
    rank, step, name = d.rank(), d.step(), BUFFERS[d.recipe["model"]]
    d.plant("buffer", rank=rank, step=step, tensor=name, how="noise", amount=0.01)
    return Truth(("BUFFER_DESYNC",), d.apart(rank), step, False, re.escape(name))


@fault("GRAD_DESYNC", wraps=["ddp"], optimizers=("sgd", "adam", "adamw"), scaler=False)
def forgot_to_synchronise(d: Drawn) -> Truth:
    step = d.step()
    d.plant("never_synced", step=step)
    return Truth(("GRAD_DESYNC",), d.everyone, step, False, "", ("PARAM_DESYNC", "OPTIM_STATE_DESYNC"))


@fault(
    "GRAD_DESYNC",
    wraps=["ddp"],
    optimizers=("sgd", "adam", "adamw"),
    hooks=("",),
    models=("mlp", "wide", "conv", "lstm", "untied"),
    scaler=False,
)
def bypassed_the_wrapper(d: Drawn) -> Truth:
    step = d.step()
    d.plant("bypassed", step=step)
    allow = ("PARAM_DESYNC", "OPTIM_STATE_DESYNC", "BUFFER_DESYNC")
    return Truth(("GRAD_DESYNC",), d.everyone, step, False, "", allow)


@fault(
    "GRAD_DESYNC",
    wraps=REPLICAS,
    optimizers=("sgd", "adam", "adamw"),
    scaler=False,
    models=("mlp", "frozen", "conv", "lstm", "bag", "untied"),
)
def gradient_edited(d: Drawn) -> Truth:
    rank, step, name = d.rank(), d.step(), d.tensor()
    d.plant("grad_edited", rank=rank, step=step, tensor=name, how="noise", amount=0.05)
    return Truth(("GRAD_DESYNC",), d.apart(rank), step, False, "", ("PARAM_DESYNC", "OPTIM_STATE_DESYNC"))


@fault(
    "GRAD_DESYNC", wraps=["ddp"], optimizers=("sgd", "adam", "adamw"), models=("mlp", "wide"), hooks=("",), scaler=False
)
def head_added_late(d: Drawn) -> Truth:
    d.plant("late_head")
    d.recipe["ddp"] = {k: v for k, v in d.recipe["ddp"].items() if k != "static_graph"}
    d.recipe["eval_every"], d.recipe["extras"] = 0, []
    return Truth(
        ("GRAD_DESYNC", "PARAM_DESYNC"),
        d.everyone,
        1,
        False,
        "tail",
        ("PARAM_DESYNC", "OPTIM_STATE_DESYNC", "GRAD_DESYNC"),
    )


@fault("GRAD_DESYNC", wraps=["fsdp2"], optimizers=("sgd", "adamw"), models=("transformer", "untied", "wide"))
def root_not_sharded(d: Drawn) -> Truth:
    d.plant("no_root")
    d.recipe["half"] = False  # the parts in bf16 would not fit the root's fp32
    d.recipe["clip"] = ""  # no norm over sharded and plain gradients together
    allow = ("PARAM_DESYNC", "GRAD_DESYNC", "OPTIM_STATE_DESYNC")
    return Truth(("GRAD_DESYNC", "PARAM_DESYNC"), d.everyone, 1, False, "embed|norm|head", allow)


@fault("GRAD_DESYNC", wraps=["hand"], optimizers=("sgd", "adam", "adamw"), models=("mlp", "frozen", "untied", "lstm"))
def one_tensor_not_reduced(d: Drawn) -> Truth:
    step, name = d.step(), d.tensor()
    d.plant("hand_forgot", step=step, tensor=name)
    return Truth(("GRAD_DESYNC",), d.everyone, step, False, re.escape(name), ("PARAM_DESYNC", "OPTIM_STATE_DESYNC"))


_REDUCTION = {"wraps": ["ddp"], "hooks": ("",), "models": ("mlp", "wide", "conv", "lstm", "untied"), "scaler": False}


@fault("REDUCTION_WRONG", **_REDUCTION, steps=(30, 60), ddp={"gradient_as_bucket_view": False})
def contribution_lost(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step(14)
    d.plant("lost_contribution", rank=rank, step=step)
    return Truth(("REDUCTION_WRONG",), (rank,), step)


@fault("REDUCTION_WRONG", **_REDUCTION, steps=(30, 60))
def divisor_wrong(d: Drawn) -> Truth:
    step = d.step(14)
    d.plant("wrong_divisor", step=step, amount=d.chance.choice((0.5, 1.0)))
    return Truth(("REDUCTION_WRONG",), None, step)


@fault("REDUCTION_WRONG", **_REDUCTION, steps=(30, 60))
def result_spoilt(d: Drawn) -> Truth:
    step = d.step(14)
    d.plant("spoilt_result", step=step, amount=d.chance.choice((0.5, 3.0)))
    return Truth(("REDUCTION_WRONG",), None, step)


@fault("REDUCTION_WRONG", wraps=["hand"], steps=(30, 60), scaler=False)
def contribution_lost_by_hand(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step(14)
    d.plant("hand_lost", rank=rank, step=step)
    return Truth(("REDUCTION_WRONG",), (rank,), step)


_OUTLIER = {
    "ranks": (3, 3, 4),
    "steps": (70, 100),
    "scaler": False,
    "clips": ("", "norm"),
    "optimizers": ("sgd", "adam", "adamw"),
    "loaders": ("sampler", "tensors"),
}


@fault("GRAD_OUTLIER_RANK", wraps=["ddp"], models=("mlp", "wide", "lstm", "untied"), **_OUTLIER)
def gradient_scaled(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step(10, 50)
    d.plant("grad_scaled", rank=rank, step=step, amount=d.chance.choice((4.0, 8.0, 16.0)))
    return Truth(("GRAD_OUTLIER_RANK",), (rank,), None, True, "", ("GRAD_SPIKE",))


@fault("GRAD_OUTLIER_RANK", wraps=["ddp", "fsdp2"], models=("wide", "untied"), **_OUTLIER)
def backward_scaled(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step(10, 50)
    d.plant("all_scaled", rank=rank, step=step, amount=d.chance.choice((4.0, 8.0, 16.0)))
    return Truth(("GRAD_OUTLIER_RANK",), (rank,), None, True, "", ("GRAD_SPIKE",))


_SETTINGS = {"wraps": (*REPLICAS, "fsdp2"), "optimizers": ("sgd", "adamw", "adam"), "scaler": False}
_AFTER_SETTING = ("PARAM_DESYNC", "OPTIM_STATE_DESYNC")


@fault("HPARAM_DESYNC", **_SETTINGS)
def setting_changed(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step()
    adam = d.recipe["optimizer"] in ("adam", "adamw")
    key = d.chance.choice(["lr", "weight_decay"] + (["betas", "eps"] if adam else ["momentum"]))
    amount = {"lr": 0.0123, "weight_decay": 0.2, "eps": 1e-4, "momentum": 0.7, "betas": 0.0}[key]
    d.plant("hparam", rank=rank, step=step, key=key, amount=amount)
    return Truth(("HPARAM_DESYNC",), d.apart(rank), step, False, key, _AFTER_SETTING)


@fault(
    "HPARAM_DESYNC",
    wraps=("ddp", "hand"),
    clips=("norm",),
    scaler=False,
    optimizers=("sgd", "adam", "adamw"),
    models=("mlp", "wide", "conv", "lstm", "bag", "untied"),
)
def clip_limit_changed(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step()
    d.recipe["limit"] = 0.05
    d.plant("clip", rank=rank, step=step, amount=0.5)
    return Truth(("HPARAM_DESYNC",), d.apart(rank), step, False, "", ("GRAD_DESYNC", *_AFTER_SETTING))


@fault("HPARAM_DESYNC", **_SETTINGS, schedules=("warmup_cosine",))
def scheduler_stands_still(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step(2, 8)
    d.plant("schedule", rank=rank, step=step)
    return Truth(("HPARAM_DESYNC",), d.apart(rank), step + 1, False, "", _AFTER_SETTING)


@fault(
    "OPTIM_STATE_DESYNC",
    wraps=("ddp", "ddp", "hsdp"),
    optimizers=("sgd", "adam", "adamw"),
    scaler=False,
    models=("mlp", "wide", "conv", "lstm", "untied"),
    hooks=("",),
)
def state_changed(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step(3)
    name = d.chance.choice([n for n in PARAMETERS[d.recipe["model"]] if n.endswith("weight")])
    if d.recipe["wrap"] == "hsdp":  # of a head of one row only one rank holds a part
        name = d.chance.choice([n for n in PARAMETERS[d.recipe["model"]] if n.endswith("weight") and "head" not in n])
    adam = d.recipe["optimizer"] != "sgd"
    key = d.chance.choice(("exp_avg", "exp_avg_sq")) if adam else "momentum_buffer"
    d.plant("state", rank=rank, step=step, key=key, tensor=name, amount=d.chance.choice((0.0, 0.5)))
    ranks = tuple(sorted((rank, (rank + 2) % 4))) if d.recipe["wrap"] == "hsdp" else d.apart(rank)
    return Truth(("OPTIM_STATE_DESYNC",), ranks, step, False, "", ("PARAM_DESYNC",))


@fault(
    "OPTIM_STATE_DESYNC",
    wraps=["ddp"],
    optimizers=("sgd", "adamw"),
    scaler=False,
    models=("mlp", "wide", "lstm"),
    hooks=("",),
)
def state_loaded_on_one_rank(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step(6, 6)
    d.plant("optimizer_not_loaded", rank=rank, step=step)
    d.recipe["resume_at"] = step
    return Truth(("OPTIM_STATE_DESYNC",), d.apart(rank), step, False, "", ("PARAM_DESYNC",))


@fault(
    "STEP_DESYNC",
    wraps=["ddp"],
    models=("mlp", "wide", "lstm", "untied"),
    optimizers=("sgd", "adamw"),
    accumulate=(1, 2),
    scaler=False,
    loaders=("tensors",),
)
def more_backwards(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step(2, 12)
    d.recipe["no_sync"] = True
    d.recipe["ddp"].pop("static_graph", None)
    d.plant("more_backwards", rank=rank, step=step)
    return Truth(("STEP_DESYNC",), d.apart(rank), step, False, "", ("GRAD_OUTLIER_RANK",))


@fault(
    "STEP_DESYNC",
    wraps=["ddp", "hand"],
    models=("mlp", "wide", "lstm", "untied"),
    optimizers=("sgd", "adamw"),
    scaler=False,
    steps=(40, 60),
    loaders=("tensors",),
    schedules=("",),
)
def updates_skipped(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step(2, 20)
    d.plant("skipped_updates", rank=rank, step=step)
    allow = ("PARAM_DESYNC", "GRAD_DESYNC", "OPTIM_STATE_DESYNC", "HPARAM_DESYNC")
    return Truth(("STEP_DESYNC",), d.apart(rank), step, False, "", allow)


@fault("SEED_MISMATCH", wraps=("ddp", "fsdp2"), ranks=(3, 4), loaders=("sampler", "tensors", "subset"))
def seeded_otherwise(d: Drawn) -> Truth:
    rank = d.rank()
    d.recipe["own_seeds"] = False
    d.plant("seed", rank=rank)
    # a buffer drawn at the start is another one there, unless the wrapper sends it to all
    return Truth(("SEED_MISMATCH",), (rank,), None, False, "", ("BUFFER_DESYNC",))


_SAMPLED = {"wraps": ("ddp", "ddp", "fsdp2"), "loaders": ("sampler",), "steps": (30, 60)}
_AFTER_SAMPLER = ("SHARD_OVERLAP", "SHARD_MISSING", "EPOCH_NOT_RESHUFFLED")


@fault("SAMPLER_SEED_MISMATCH", **_SAMPLED)
def sampler_seeded_otherwise(d: Drawn) -> Truth:
    rank = d.rank()
    d.plant("sampler_seed", rank=rank)
    return Truth(("SAMPLER_SEED_MISMATCH",), d.apart(rank), None, False, "", _AFTER_SAMPLER)


@fault("SAMPLER_SEED_MISMATCH", **_SAMPLED, accumulate=(1,))
def epoch_not_set_on_one_rank(d: Drawn) -> Truth:
    rank = d.rank()
    d.plant("set_epoch_not_here", rank=rank)
    return Truth(("SAMPLER_SEED_MISMATCH",), d.apart(rank), None, False, "", _AFTER_SAMPLER)


@fault("SHARD_OVERLAP", wraps=("ddp", "fsdp2"), loaders=("batch_sampler", "sampler"), workers=(0, 0, 2))
def data_not_split(d: Drawn) -> Truth:
    d.recipe["loader"]["kind"] = "sampler"
    d.plant("no_sampler")
    return Truth(("SHARD_OVERLAP",), d.everyone, None, False, "", ("RNG_DUPLICATED", "SHARD_MISSING"))


@fault("SHARD_OVERLAP", wraps=("ddp", "fsdp2"), loaders=("stream",), workers=(0, 2))
def stream_not_split_by_rank(d: Drawn) -> Truth:
    d.plant("not_split_by_rank")
    return Truth(("SHARD_OVERLAP",), d.everyone, None, False, "", ("RNG_DUPLICATED", "SHARD_MISSING"))


@fault("SHARD_OVERLAP", wraps=("ddp",), loaders=("subset",), workers=(0,))
def slice_taken_twice(d: Drawn) -> Truth:
    rank = d.rank()
    d.plant("same_slice", rank=rank)
    return Truth(("SHARD_OVERLAP",), tuple(sorted((rank, (rank + 1) % d.ranks))), None, False, "", ("SHARD_MISSING",))


@fault("SHARD_MISSING", wraps=("ddp", "fsdp2"), loaders=("subset",), workers=(0,), accumulate=(1,), steps=(40, 60))
def slice_with_a_hole(d: Drawn) -> Truth:
    rank = d.rank()
    d.plant("slice_hole", rank=rank, batches=d.chance.choice((2, 3)))
    return Truth(("SHARD_MISSING",), None, None, False, "", ("SHARD_UNEVEN",))


@fault("SHARD_UNEVEN", wraps=("ddp",), loaders=("sampler", "batch_sampler", "stateful"), workers=(0,), accumulate=(1,))
def batch_size_differs(d: Drawn) -> Truth:
    rank = d.rank()
    d.plant("batch_size", rank=rank)
    return Truth(("SHARD_UNEVEN",), d.apart(rank), None, False, "", ("SHARD_MISSING",))


@fault("EPOCH_NOT_RESHUFFLED", **_SAMPLED, accumulate=(1,))
def epoch_never_set(d: Drawn) -> Truth:
    d.plant("no_set_epoch")
    return Truth(("EPOCH_NOT_RESHUFFLED",), d.everyone, None, False)


@fault("SAMPLES_DROPPED", wraps=("ddp", "fsdp2"), loaders=("sampler",), steps=(24, 40), accumulate=(1,))
def a_third_dropped(d: Drawn) -> Truth:
    batch = d.recipe["loader"]["batch"] * 4
    share = int(batch * d.chance.choice((1.5, 1.6)))
    d.recipe["loader"] |= {"batch": batch, "samples": share * d.ranks, "drop_last": True}
    d.plant("samples_dropped")
    return Truth(("SAMPLES_DROPPED",), d.everyone, None, False, "", ("SHARD_MISSING",))


@fault("DATA_REPEATED", wraps=("ddp", "fsdp2"), loaders=("stream",), workers=(2,))
def stream_not_split_by_worker(d: Drawn) -> Truth:
    d.recipe["loader"] |= {"workers": 2, "augment": False}
    d.plant("not_split_by_worker")
    return Truth(("DATA_REPEATED",), d.everyone, None, False, "", ("SHARD_MISSING",))


@fault("TRAIN_EVAL_OVERLAP", wraps=("ddp", "fsdp2"), loaders=("sampler", "batch_sampler"), workers=(0,))
def evaluates_on_training_data(d: Drawn) -> Truth:
    d.recipe["eval_every"] = 8
    d.recipe["loader"]["augment"] = False
    d.recipe["extras"] = [e for e in d.recipe["extras"] if e != "eval_on_rank0"]
    d.plant("eval_overlap", count=d.chance.choice((24, 40)), how=d.chance.choice(("same", "copied")))
    return Truth(("TRAIN_EVAL_OVERLAP",), None, None, False)


_SWALLOWED = {"wraps": ("ddp",), "loaders": ("sampler",), "accumulate": (1,), "steps": (30, 50), "schedules": ("",)}


def broken_samples(d: Drawn, share: float) -> list[int]:
    many = d.recipe["loader"]["samples"]
    return sorted(d.chance.sample(range(many), max(4, int(many * share))))


@fault("DATA_ERROR_SWALLOWED", **_SWALLOWED, workers=(0, 2))
def neighbour_handed_out(d: Drawn) -> Truth:
    d.plant("swallow_neighbour", broken=broken_samples(d, 0.08))
    return Truth(("DATA_ERROR_SWALLOWED",), None, None, False, "", ("DATA_REPEATED", "SHARD_OVERLAP"))


@fault("DATA_ERROR_SWALLOWED", **_SWALLOWED, workers=(0, 2))
def nothing_handed_out(d: Drawn) -> Truth:
    d.plant("swallow_none", broken=broken_samples(d, 0.08))
    return Truth(("DATA_ERROR_SWALLOWED",), None, None, False, "", ("SHARD_UNEVEN", "SHARD_MISSING", "SAMPLES_DROPPED"))


@fault("DATA_ERROR_SWALLOWED", **_SWALLOWED, workers=(2,))
def batch_left_out(d: Drawn) -> Truth:
    d.recipe["loader"] |= {"workers": 2}
    d.plant("swallow_loop", broken=broken_samples(d, 0.0))
    return Truth(("DATA_ERROR_SWALLOWED",), None, None, False, "", ("SHARD_UNEVEN", "SHARD_MISSING", "SAMPLES_DROPPED"))


_AUGMENTED = {"wraps": ("ddp",), "models": ("mlp", "conv"), "loaders": ("sampler",), "workers": (2,), "steps": (24, 40)}


@fault("WORKER_SEED_DUPLICATED", **_AUGMENTED)
def workers_seeded_alike(d: Drawn) -> Truth:
    d.recipe["loader"] |= {"workers": 2, "augment": True}
    d.plant("worker_seed")
    return Truth(("WORKER_SEED_DUPLICATED",), d.everyone, None, False, "", ("RNG_DUPLICATED",))


@fault("WORKER_SEED_DUPLICATED", **_AUGMENTED)
def generator_copied_to_workers(d: Drawn) -> Truth:
    d.recipe["loader"] |= {"workers": 2, "augment": True}
    d.plant("generator_copied")
    return Truth(("WORKER_SEED_DUPLICATED",), d.everyone, None, False, "", ("RNG_DUPLICATED",))


# What a number that is not finite leads to is real: all of it may be told.
_CHAIN = ("NONFINITE_LOSS", "NONFINITE_GRAD", "NONFINITE_PARAM", "NONFINITE_INPUT")
_NONFINITE = {"wraps": ("ddp", "ddp", "fsdp2", "single"), "optimizers": ("sgd", "adamw"), "scaler": False}


@fault("NONFINITE_INPUT", **_NONFINITE, models=("mlp", "wide", "frozen"))
def input_not_finite(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step()
    d.plant(
        "input_nonfinite", rank=rank, step=step, element=d.chance.randrange(8), value=d.chance.choice(("nan", "inf"))
    )
    return Truth(("NONFINITE_INPUT",), (rank,), step, False, "", _CHAIN)


@fault("NONFINITE_LOSS", **_NONFINITE, models=("mlp", "wide", "untied"))
def loss_not_finite(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step()
    d.plant("loss_nonfinite", rank=rank, step=step, value=d.chance.choice(("nan", "-inf")))
    return Truth(("NONFINITE_LOSS",), (rank,), step, False, "", _CHAIN)


@fault(
    "NONFINITE_GRAD", wraps=["ddp"], optimizers=("sgd", "adamw"), scaler=False, models=("mlp", "wide", "conv", "untied")
)
def gradient_not_finite(d: Drawn) -> Truth:
    rank, step, name = d.rank(), d.step(), d.tensor()
    d.plant(
        "grad_nonfinite",
        rank=rank,
        step=step,
        tensor=name,
        element=d.chance.randrange(100),
        value=d.chance.choice(("nan", "inf")),
    )
    subject = "" if d.recipe.get("clip") == "norm" else re.escape(name)
    return Truth(("NONFINITE_GRAD",), (rank,), step, False, subject, _CHAIN)


@fault(
    "NONFINITE_PARAM",
    wraps=("ddp", "fsdp2"),
    optimizers=("sgd", "adamw"),
    scaler=False,
    models=("mlp", "wide", "untied"),
)
def parameter_not_finite(d: Drawn) -> Truth:
    step, name = d.step(), d.tensor()
    if d.recipe["wrap"] == "fsdp2":
        name = d.chance.choice([n for n in PARAMETERS[d.recipe["model"]] if n.endswith("weight") and "head" not in n])
    d.plant("param_nonfinite_all", step=step, tensor=name, value="nan")
    return Truth(("NONFINITE_PARAM",), None, step, False, "", _CHAIN)


@fault("IDENTITY_MISMATCH", wraps=("ddp", "fsdp2", "hand"))
def flags_differ(d: Drawn) -> Truth:
    rank = d.rank()
    d.plant(d.chance.choice(("deterministic", "precision")), rank=rank)
    return Truth(("IDENTITY_MISMATCH",), d.apart(rank), None, False)


@fault("RANK_FAILED", wraps=("ddp", "fsdp2", "hand", "single"))
def rank_ended(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step(4)
    d.plant(d.chance.choice(("exception", "kill", "exit")), rank=rank, step=step)
    return Truth(("RANK_FAILED",), (rank,), step)


def codes() -> list[str]:
    """All codes that have a fault, in the order of this file."""
    return list(dict.fromkeys(f.code for f in FAULTS))


def faulty(seed: int, number: int, only: str = "") -> Case:
    """Every way to commit a fault once, in an order of the seed's, then again; what it strikes is random.

    `only` is a code or the name of one way.
    """
    chance = random.Random(f"faulty {seed} {number} {only}")
    ways = [f for f in FAULTS if only in ("", f.code, f.name)]
    if not ways:
        raise ValueError(f"no fault is called {only}; there are {', '.join(codes())}")
    turn, place = divmod(number, len(ways))
    random.Random(f"order {seed} {turn} {only}").shuffle(ways)
    way = ways[place]
    drawn = Drawn(chance, draw(chance, way.wanted(chance)))
    truth = way.plant(drawn)
    if drawn.recipe["wrap"] == "single":
        truth = replace(truth, ranks=(0,) if truth.ranks else None)
    return Case(number, way.code, drawn.recipe, truth)
