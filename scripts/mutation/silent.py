"""Silent faults of numbers: losses and gradients that leap or vanish, loss scales, parameters that are left behind."""

from __future__ import annotations

import re

from .faults import Drawn, silent
from .recipes import PARAMETERS, Truth

# What a number that is not finite leads to is real: all of it may be told.
CHAIN = ("NONFINITE_LOSS", "NONFINITE_GRAD", "NONFINITE_PARAM", "NONFINITE_INPUT")
WRAPS = ("ddp", "ddp", "fsdp2", "single", "hand")
PLAIN = ("ddp", "ddp", "single", "hand")  # parameters are what the program made them, whole
VECTORS = ("mlp", "wide", "conv")
USUAL = ("mlp", "wide", "conv", "lstm", "untied", "transformer", "bag")
OPTIMIZERS = ("sgd", "adam", "adamw")
# Rules of chance need a past, and an update with a huge gradient is held back, so that what follows is ordinary again.
_LEAP = {"optimizers": OPTIMIZERS, "clips": ("norm",), "steps": (64, 90), "scaler": False, "hooks": ("",)}


def whose(d: Drawn) -> tuple[dict[str, int], tuple[int, ...]]:
    """On one rank or on all: for plant, and for the truth."""
    if d.chance.random() < 0.5:
        return {}, d.everyone
    rank = d.rank()
    return {"rank": rank}, (rank,)


def scaled(d: Drawn) -> None:
    d.recipe.update({"scaler": True, "autocast": True})


@silent("LOSS_SPIKE", wraps=WRAPS, models=VECTORS, **_LEAP)
def labels_spoilt(d: Drawn) -> Truth:
    where, ranks = whose(d)
    how = "scale" if where and d.chance.random() < 0.5 else "offset"
    step, amount = d.step(40, 12), d.chance.choice((20.0, 60.0, 200.0) if how == "scale" else (6.0, 15.0, 40.0))
    d.plant("labels_spoilt", step=step, extent=d.chance.choice((1, 1, 2)), how=how, amount=amount, **where)
    return Truth(("LOSS_SPIKE",), ranks, step, False, "", ("GRAD_SPIKE",))


@silent("LOSS_SPIKE", wraps=WRAPS, models=("lstm", "untied", "transformer", "bag"), **_LEAP)
def loss_weighed_wrong(d: Drawn) -> Truth:
    where, ranks = whose(d)
    step = d.step(40, 12)
    d.plant("loss_weight", step=step, extent=d.chance.choice((1, 1, 3)), amount=d.chance.choice((30.0, 100.0)), **where)
    return Truth(("LOSS_SPIKE",), ranks, step, False, "", ("GRAD_SPIKE",))


# a single tensor leaps beside the others, and three of them have no median that says what all do
@silent("GRAD_SPIKE", wraps=PLAIN, models=tuple(m for m in USUAL if m != "bag"), **_LEAP)
def one_gradient_leaps(d: Drawn) -> Truth:
    where, ranks = whose(d)
    step, name = d.step(48, 12), d.tensor()
    amount = d.chance.choice((1e3, 1e4, 1e5))
    d.plant("grad_tensor", step=step, extent=d.chance.choice((1, 1, 2)), tensor=name, amount=amount, **where)
    own = None if d.recipe["wrap"] == "hand" else ranks  # reduced by hand all ranks have it
    return Truth(("GRAD_SPIKE",), own, step, True, re.escape(name))


@silent("GRAD_SPIKE", wraps=WRAPS, models=USUAL, **_LEAP)
def whole_gradient_leaps(d: Drawn) -> Truth:
    where, ranks = whose(d)
    step = d.step(48, 12)
    amount, extent = d.chance.choice((100.0, 1e3, 1e4)), d.chance.choice((1, 1, 3))
    d.plant("grad_through", step=step, extent=extent, module="", amount=amount, **where)
    return Truth(("GRAD_SPIKE",), None if d.recipe["wrap"] == "hand" else ranks, step, True)


_FOR_GOOD = 10**6


@silent("GRAD_VANISHED", wraps=WRAPS, models=USUAL, optimizers=OPTIMIZERS, scaler=False, steps=(40, 70))
def gradient_collapses(d: Drawn) -> Truth:
    step, amount = d.step(8, 14), d.chance.choice((0.0, 1e-12, 1e-7))
    d.plant("grad_through", step=step, extent=_FOR_GOOD, module="", amount=amount)
    return Truth(("GRAD_VANISHED",), d.everyone, step, True)


@silent(
    "GRAD_VANISHED",
    wraps=("ddp", "single", "hand"),
    models=("untied",),
    optimizers=OPTIMIZERS,
    steps=(30, 60),
    scaler=False,
)
def first_layers_starve(d: Drawn) -> Truth:
    step, amount = d.step(1, 8), d.chance.choice((1e-9, 1e-12))
    d.plant("grad_through", step=step, extent=_FOR_GOOD, module="blocks.0", amount=amount)
    return Truth(("GRAD_VANISHED",), d.everyone, step, True, "embed", ("GRAD_SPIKE",))


@silent("GRAD_VANISHED", wraps=("ddp", "single"), models=("mlp",), optimizers=OPTIMIZERS, scaler=False)
def deep_and_saturated(d: Drawn) -> Truth:
    """No wrong line: a dozen sigmoids in a row."""
    d.recipe.update({"model": "deep", "depth": d.chance.randint(12, 16)})
    d.plant("too_deep")
    return Truth(("GRAD_VANISHED",), d.everyone, 1, True, "layers")


_AMP = {"wraps": PLAIN, "models": USUAL, "optimizers": OPTIMIZERS, "hooks": ("",), "clips": ("", "norm")}


@silent("AMP_OVERFLOW", **_AMP)
def scaler_made_anew(d: Drawn) -> Truth:
    scaled(d)
    step = d.step(1, 8)
    d.plant("scaler_anew", step=step, amount=2.0 ** d.chance.choice((40, 60)))
    return Truth(("AMP_OVERFLOW",), d.everyone, step, False)


@silent("AMP_OVERFLOW", **_AMP, steps=(40, 70))
def no_scale_helps(d: Drawn) -> Truth:
    scaled(d)
    d.plant("grad_nan", step=d.step(1, 24), tensor=d.tensor())
    # the scale falls from 256 and is below 1 after nine steps: from where on none can help is a matter of taste
    return Truth(("AMP_OVERFLOW",), d.everyone, None, False, "", CHAIN)


@silent("NONFINITE_LOSS", wraps=WRAPS, models=VECTORS, optimizers=OPTIMIZERS, scaler=False)
def labels_overflow_half(d: Drawn) -> Truth:
    rank, step = d.rank(), d.step()
    d.plant("label_overflow", rank=rank, step=step, amount=7e4)
    return Truth(("NONFINITE_LOSS",), (rank,), step, False, "", CHAIN)


@silent(
    "NONFINITE_GRAD",
    wraps=("ddp", "fsdp2", "single"),
    models=USUAL,
    optimizers=OPTIMIZERS,
    scaler=False,
    hooks=("",),
)
def root_of_zero(d: Drawn) -> Truth:
    """The loss is finite, its gradient is not."""
    rank, step = d.rank(), d.step()
    d.plant("sqrt_of_zero", rank=rank, step=step, amount=0.1)
    return Truth(("NONFINITE_GRAD",), (rank,), step, False, "", CHAIN, once=True)


# ---------------------------------------------------------------- parameters that are left behind

_HELD = {"models": USUAL, "optimizers": OPTIMIZERS, "steps": (30, 60), "scaler": False, "hooks": ("",)}

_MANY = True  # more watched updates are asked for than a governed job may have: 20, and 3 after a step


@silent("PARAM_NOT_OPTIMIZED", wraps=PLAIN, **_HELD)
def adapter_after_the_optimizer(d: Drawn) -> Truth:
    d.plant("adapter_late")
    return Truth(("PARAM_NOT_OPTIMIZED",), d.everyone, 1, False, "adapter|side")


@silent("PARAM_NOT_OPTIMIZED", wraps=WRAPS, **_HELD)
def left_out_of_the_groups(d: Drawn) -> Truth:
    # a list written by hand, of weights alone, or without the head
    names = PARAMETERS[d.recipe["model"]]
    left = d.chance.choice(([n for n in names if n.endswith("bias")], [n for n in names if "head" in n], names[:2]))
    left = left or names[:2]
    d.plant("left_out", tensors=left)
    return Truth(("PARAM_NOT_OPTIMIZED",), d.everyone, 1, False, "|".join(map(re.escape, left)))


@silent("PARAM_NOT_OPTIMIZED", wraps=("single", "hand"), **(_HELD | {"models": ("mlp", "wide", "untied", "lstm")}))
def head_replaced(d: Drawn) -> Truth:
    """The optimizer keeps the old head, the model has a new one."""
    step = d.step(4, 12)
    d.plant("head_replaced", step=step)
    return Truth(("PARAM_NOT_OPTIMIZED",), d.everyone, step, _MANY, "head", ("PARAM_NEVER_UPDATED", "LOSS_SPIKE"))


@silent("PARAM_NEVER_UPDATED", wraps=WRAPS, **_HELD, ddp={"find_unused_parameters": True})
def branch_cut_off(d: Drawn) -> Truth:
    d.recipe.get("ddp", {}).pop("static_graph", None)
    d.plant("branch_cut", cut=d.chance.choice(("detach", "data", "tensor")))
    return Truth(("PARAM_NEVER_UPDATED",), d.everyone, 1, _MANY, "side")


@silent("PARAM_NEVER_UPDATED", wraps=PLAIN, **_HELD)
def group_without_lr(d: Drawn) -> Truth:
    names = PARAMETERS[d.recipe["model"]]
    d.plant("lr_zero", tensors=d.chance.sample(names, min(2, len(names) - 1)))
    return Truth(("PARAM_NEVER_UPDATED",), d.everyone, 1, _MANY, "", mild=True)  # a rate of zero may be meant


@silent("PARAM_NEVER_UPDATED", wraps=PLAIN, **_HELD)
def gradient_set_to_none(d: Drawn) -> Truth:
    names = PARAMETERS[d.recipe["model"]]
    left = d.chance.sample(names, min(2, len(names) - 1))
    d.plant("grad_none", tensors=left)
    # no gradient at the update: which may be how a program freezes
    return Truth(("PARAM_NEVER_UPDATED",), d.everyone, 1, _MANY, "|".join(map(re.escape, left)), mild=True)


@silent("PARAM_NEVER_UPDATED", wraps=PLAIN, **_HELD)
def gradient_masked(d: Drawn) -> Truth:
    names = PARAMETERS[d.recipe["model"]]
    left = d.chance.sample(names, min(2, len(names) - 1))
    d.recipe["optimizer_options"]["weight_decay"] = 0.0  # which would change it without a gradient
    d.plant("grad_masked", tensors=left)
    # a mask may be meant, as in pruning
    return Truth(("PARAM_NEVER_UPDATED",), d.everyone, 1, _MANY, "|".join(map(re.escape, left)), mild=True)


@silent("TIE_BROKEN", wraps=PLAIN, **(_HELD | {"models": ("transformer",)}))
def tie_broken(d: Drawn) -> Truth:
    step = d.step()
    d.recipe.get("ddp", {}).pop("static_graph", None)
    # an average of the parameters goes by their order, which a new one changes
    d.recipe["extras"] = [e for e in d.recipe["extras"] if e != "ema"]
    d.plant("untied", step=step, how=d.chance.choice(("parameter", "deepcopy", "registered")))
    # the new tensor is in no optimizer and, under a wrapper, in no reduction
    allow = ("PARAM_NOT_OPTIMIZED", "PARAM_NEVER_UPDATED", "GRAD_DESYNC", "PARAM_DESYNC", "OPTIM_STATE_DESYNC")
    return Truth(("TIE_BROKEN",), d.everyone, step, False, "head|embed", allow)
