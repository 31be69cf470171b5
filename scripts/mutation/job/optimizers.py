"""One or two optimizers behind one call, and their schedules."""

import math
from typing import Any

import torch
from torch import nn

from .fault import Recipe


class Optimizers:
    """One or two optimizers behind one call."""

    def __init__(self, recipe: Recipe, model: nn.Module, own: list[Any] | None = None) -> None:
        name, options = recipe["optimizer"], dict(recipe.get("optimizer_options", {}))
        if own is None:  # parameters, or groups of them
            own = [p for p in model.parameters() if p.requires_grad]
        if name == "two":
            self.all: list[torch.optim.Optimizer] = [
                torch.optim.AdamW([p for p in own if p.dim() > 1], lr=2e-3),
                torch.optim.SGD([p for p in own if p.dim() <= 1], lr=1e-2),
            ]
        elif name == "lbfgs":
            self.all = [
                torch.optim.LBFGS(own, lr=0.05, max_iter=2, history_size=4, tolerance_grad=0, tolerance_change=0)
            ]
        else:
            cls = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
                   "adagrad": torch.optim.Adagrad, "rmsprop": torch.optim.RMSprop}[name]  # fmt: skip
            self.all = [cls(own, **options)]
        self.schedules = [s for o in self.all if (s := schedule(recipe, o)) is not None]

    def zero_grad(self) -> None:
        for o in self.all:
            o.zero_grad()

    def step(self, scaler: Any) -> None:
        for o in self.all:
            if scaler is None:
                o.step()
            else:
                scaler.step(o)

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [g for o in self.all for g in o.param_groups]


def schedule(recipe: Recipe, optimizer: torch.optim.Optimizer) -> Any:
    kind, steps = recipe.get("schedule", ""), recipe["steps"]
    if kind == "warmup_cosine":
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda s: min((s + 1) / 10, 0.5 * (1 + math.cos(math.pi * min(s / (steps + 5), 1.0))))
        )
    if kind == "decay":
        return torch.optim.lr_scheduler.StepLR(optimizer, max(3, steps // 4), gamma=0.5)
    if kind == "plateau":
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    return longer_schedule(kind, recipe, optimizer)


def longer_schedule(kind: str, recipe: Recipe, optimizer: torch.optim.Optimizer) -> Any:
    """`total`: the steps that it is made for, where they aren't those of the job."""
    lrs, lr, total = (
        torch.optim.lr_scheduler,
        optimizer.param_groups[0]["lr"],
        int(recipe.get("total") or recipe["steps"]),
    )
    if kind == "onecycle":  # the loop steps it once a step and once more than it has steps where nothing is left over
        cycles = bool(optimizer.param_groups[0].keys() & {"momentum", "betas"})
        return lrs.OneCycleLR(optimizer, max_lr=3 * lr, total_steps=total + 1, cycle_momentum=cycles)
    if kind == "cosine":
        return lrs.CosineAnnealingLR(optimizer, T_max=total)
    if kind == "restarts":
        return lrs.CosineAnnealingWarmRestarts(optimizer, T_0=max(4, total // 5), T_mult=recipe.get("restart_mult", 1))
    if kind == "warmup_linear":
        up = max(2, total // 8)
        parts: list[lrs.LRScheduler] = [lrs.LinearLR(optimizer, 0.01, total_iters=up),
                 lrs.LinearLR(optimizer, 1.0, 0.0, total_iters=total - up)]  # fmt: skip
        return lrs.SequentialLR(optimizer, parts, milestones=[up])
    if kind == "poly":
        return lrs.PolynomialLR(optimizer, total_iters=total, power=recipe.get("power", 1.0))
    if kind == "lambda_cosine":
        return lrs.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * min(s / total, 1.0))))
    if kind == "exponential":
        return lrs.ExponentialLR(optimizer, 0.97)
    return None
