"""One or two optimizers behind one call, and their schedules."""

import math
from typing import Any

import torch
from torch import nn

from .fault import Recipe


class Optimizers:
    """One or two optimizers behind one call."""

    def __init__(self, recipe: Recipe, model: nn.Module) -> None:
        name, options = recipe["optimizer"], dict(recipe.get("optimizer_options", {}))
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
    return None
