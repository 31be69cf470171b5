"""Faults that make a number NaN or infinite, ranks that run otherwise, and ranks that end."""

from __future__ import annotations

import re

from .faults import Drawn, fault
from .recipes import PARAMETERS, Truth

# What a number that is not finite leads to is real: all of it may be told.
_CHAIN = ("NONFINITE_LOSS", "NONFINITE_GRAD", "NONFINITE_PARAM", "NONFINITE_INPUT")
_NONFINITE = {"wraps": ("ddp", "ddp", "fsdp2", "single"), "optimizers": ("sgd", "adamw"), "scaler": False}


@fault("NONFINITE_INPUT", **_NONFINITE, models=("mlp", "wide", "frozen"))
def input_not_finite(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step()
    d.plant(
        "input_nonfinite", rank=rank, step=step, element=d.chance.randrange(8), value=d.chance.choice(("nan", "inf"))
    )
    return Truth(("NONFINITE_INPUT",), (rank,), step, False, "", _CHAIN, once=True)


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
    return Truth(("NONFINITE_GRAD",), (rank,), step, False, subject, _CHAIN, once=True)


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
