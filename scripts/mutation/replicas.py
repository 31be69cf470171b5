"""Faults after which replicas differ, or agree on something wrong."""

from __future__ import annotations

import re

from .faults import Drawn, fault
from .recipes import BUFFERS, PARAMETERS, Truth

REPLICAS = ("ddp", "ddp", "ddp", "hand")


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


@fault(
    "GRAD_DESYNC",
    wraps=["ddp"],
    optimizers=("sgd", "adam", "adamw"),
    models=("mlp", "wide", "conv", "lstm", "untied"),
    scaler=False,
)
def forgot_to_synchronise(d: Drawn) -> Truth:
    step = d.step()
    # under no_sync from some step on, torch's own reducer raises when it was told to look for unused parameters
    d.recipe["ddp"] = {k: v for k, v in d.recipe["ddp"].items() if k != "find_unused_parameters"}
    d.plant("never_synced", step=step)
    allow = ("PARAM_DESYNC", "OPTIM_STATE_DESYNC")
    return Truth(("GRAD_DESYNC",), d.everyone, step, False, "", allow, once=True)


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
    return Truth(("GRAD_DESYNC",), d.apart(rank), step, False, "", ("PARAM_DESYNC", "OPTIM_STATE_DESYNC"), once=True)


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
    allow = ("PARAM_DESYNC", "OPTIM_STATE_DESYNC")
    return Truth(("GRAD_DESYNC",), d.everyone, step, False, re.escape(name), allow, once=True)


_LAW = True  # what a hook, or the program itself, reduces is held against what it did at three watched steps before
_REDUCTION = {"wraps": ["ddp"], "hooks": ("",), "models": ("mlp", "wide", "conv", "lstm", "untied"), "scaler": False}


@fault("REDUCTION_WRONG", **_REDUCTION, steps=(30, 60), ddp={"gradient_as_bucket_view": False})
def contribution_lost(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step(14)
    d.plant("lost_contribution", rank=rank, step=step)
    return Truth(("REDUCTION_WRONG",), (rank,), step, _LAW)


@fault("REDUCTION_WRONG", **_REDUCTION, steps=(30, 60))
def divisor_wrong(d: Drawn) -> Truth:
    step = d.step(14)
    d.plant("wrong_divisor", step=step, amount=d.chance.choice((0.5, 1.0)))
    return Truth(("REDUCTION_WRONG",), None, step, _LAW)


@fault("REDUCTION_WRONG", **_REDUCTION, steps=(30, 60))
def result_spoilt(d: Drawn) -> Truth:
    step = d.step(14)
    d.plant("spoilt_result", step=step, amount=d.chance.choice((0.5, 3.0)))
    # that it is no combination of the ranks' own may be meant, as by a hook that compresses after a warm-up
    return Truth(("REDUCTION_WRONG",), None, step, _LAW, mild=True)


@fault("REDUCTION_WRONG", wraps=["hand"], steps=(30, 60), scaler=False)
def contribution_lost_by_hand(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step(14)
    d.plant("hand_lost", rank=rank, step=step)
    return Truth(("REDUCTION_WRONG",), (rank,), step, _LAW)


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
    rank, step = d.rank(), d.step(24, 44)
    d.plant("grad_scaled", rank=rank, step=step, amount=d.chance.choice((4.0, 8.0, 16.0)))
    return Truth(("GRAD_OUTLIER_RANK",), (rank,), None, True, "", ("GRAD_SPIKE",))


@fault("GRAD_OUTLIER_RANK", wraps=["ddp", "fsdp2"], models=("wide", "untied"), **_OUTLIER)
def backward_scaled(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step(24, 44)
    d.plant("all_scaled", rank=rank, step=step, amount=d.chance.choice((4.0, 8.0, 16.0)))
    return Truth(("GRAD_OUTLIER_RANK",), (rank,), None, True, "", ("GRAD_SPIKE",))


_SETTINGS = {
    "wraps": (*REPLICAS, "fsdp2"),
    "optimizers": ("sgd", "adamw", "adam"),
    "models": tuple(m for m in PARAMETERS if m != "sparse_bag"),  # weight decay takes no sparse gradient
    "scaler": False,
}
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
    # the settings are part of what is loaded, so that a schedule's lr comes with them
    return Truth(("OPTIM_STATE_DESYNC",), d.apart(rank), step, False, "", ("PARAM_DESYNC", "HPARAM_DESYNC"))


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
