"""Loops over one network that are no plain loop, all healthy: `python -m job.styles recipe.json`.

Each function is one style that people train in; the recipe's `style` names it, its `options` vary it.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .models import FEATURES, Images, Regression
from .networks import NETWORKS
from .setting import Setting, update

mse = nn.functional.mse_loss


def fine_tuned(s: Setting) -> None:
    """A backbone with batch normalisation: frozen in eval mode, or only its statistics are."""
    model = Images()
    backbone = model.layers[:6]
    all_frozen = s.option("frozen") == "all"
    if all_frozen:
        backbone.requires_grad_(False)
    wrapped, optimizers, batches = s.wrap(model), s.optimizers(model), s.batches()
    for step in s.steps:
        wrapped.train()
        for m in backbone.modules():
            if all_frozen or isinstance(m, nn.BatchNorm2d):
                m.eval()
        x, y = next(batches)
        update(optimizers, mse(wrapped(x), y))
        if step % 15 == 0:
            wrapped.eval()
            with torch.no_grad():
                model(x)


def unfrozen(s: Setting) -> None:
    """The body is frozen until a step, then added to the optimizer with a smaller lr."""
    model = Regression(20, 0.0)
    model.body.requires_grad_(False)
    optimizers, batches = s.optimizers(model), s.batches()
    for step in s.steps:
        if step == s.option("at"):
            model.body.requires_grad_(True)
            group = optimizers.groups[0]
            optimizers.all[0].add_param_group({"params": list(model.body.parameters()), "lr": group["lr"] / 5})
        x, y = next(batches)
        loss = mse(model(x), y)
        optimizers.zero_grad()
        loss.backward()
        s.average_gradients(model)
        optimizers.step(None)


class Residual(nn.Module):
    """Branches whose last layer begins at zero, with or without a gate that does."""

    def __init__(self, depth: int, gated: bool) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, 1)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(depth)
        )
        self.gates = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(depth)) if gated else None
        for b in self.branches if not gated else ():
            last = cast("nn.Linear", b.get_submodule("3"))
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for n, branch in enumerate(self.branches):
            h = h + branch(h) * (self.gates[n] if self.gates is not None else 1.0)
        return cast("Tensor", self.head(h))


def zero_initialised(s: Setting) -> None:
    model = Residual(s.option("depth", 3), s.option("gated", False))
    wrapped, optimizers, batches = s.wrap(model), s.optimizers(model), s.batches()
    for _ in s.steps:
        x, y = next(batches)
        update(optimizers, mse(wrapped(x), y))


def updated_in_backward(s: Setting) -> None:
    """One optimizer a parameter, which steps as soon as its gradient is there."""
    model, batches = Regression(24, 0.0), s.batches()
    lr = s.option("lr", 2e-3)
    cls = torch.optim.SGD if s.option("sgd") else torch.optim.AdamW
    own = {p: cls([p], lr=lr) for p in model.parameters()}

    def step_on(p: Tensor) -> None:
        own[cast("nn.Parameter", p)].step()
        own[cast("nn.Parameter", p)].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_on)
    for _ in s.steps:
        x, y = next(batches)
        mse(model(x), y).backward()


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.head, self.reentrant = nn.Linear(FEATURES, 24), nn.Linear(24, 1), reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = cast("Tensor", checkpoint(block, h, use_reentrant=self.reentrant))
        return cast("Tensor", self.head(h))


def recomputed(s: Setting) -> None:
    """Activation checkpointing."""
    model = Recomputed(s.option("reentrant", False))
    wrapped, optimizers, batches = s.wrap(model), s.optimizers(model), s.batches()
    for _ in s.steps:
        x, y = next(batches)
        update(optimizers, mse(wrapped(x), y))


def smoothed(s: Setting) -> None:
    """Classes with label smoothing and weights of classes, of which some are rare."""
    classes = 5
    model = nn.Sequential(nn.Linear(FEATURES, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, classes))
    loss_of = nn.CrossEntropyLoss(torch.linspace(1, s.option("weight", 3.0), classes), label_smoothing=0.1)
    wrapped, optimizers, batches = s.wrap(model), s.optimizers(model), s.batches()
    for _ in s.steps:
        x, _ = next(batches)
        update(optimizers, loss_of(wrapped(x), (x[:, 0] * 1.3 + 2.5).clamp(0, classes - 1).long()))


def tiny(s: Setting) -> None:
    """Next to no parameters, batches of one or two, labels that are mostly noise."""
    hidden = s.option("hidden", 3)
    model = nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    wrapped, optimizers, batches = s.wrap(model), s.optimizers(model), s.batches()
    for _ in s.steps:
        x, y = next(batches)
        update(optimizers, mse(wrapped(x), y + 0.5 * s.noise(*y.shape)))


def two_losses(s: Setting) -> None:
    """Two tasks over one body, each with a backward of its own on the same batch; or their weighted sum."""
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(FEATURES, 24), nn.GELU()), "one": nn.Linear(24, 1),
                           "two": nn.Linear(24, 1)})  # fmt: skip
    optimizers, batches = s.optimizers(model), s.batches()
    for _ in s.steps:
        x, y = next(batches)
        optimizers.zero_grad()
        h = model["body"](x)
        first, second = mse(model["one"](h), y), nn.functional.l1_loss(model["two"](h), x[:, :1] * y)
        if s.option("apart"):
            first.backward(retain_graph=True)
            second.backward()
        else:
            (first + 0.3 * second).backward()
        s.average_gradients(model)
        optimizers.step(None)


def sharpness(s: Setting) -> None:
    """SAM: a gradient to climb by, thrown away, then the one that is stepped on."""
    model = Regression(20, 0.0)
    optimizers, batches = s.optimizers(model), s.batches()
    for _ in s.steps:
        x, y = next(batches)
        mse(model(x), y).backward()
        s.average_gradients(model)
        grads = [p.grad for p in model.parameters()]
        norm = torch.stack([g.norm() for g in grads if g is not None]).norm() + 1e-12
        moves = [0.05 * g / norm if g is not None else None for g in grads]
        with torch.no_grad():
            for p, e in zip(model.parameters(), moves, strict=True):
                if e is not None:
                    p.add_(e)
        optimizers.zero_grad()
        mse(model(x), y).backward()
        s.average_gradients(model)
        with torch.no_grad():
            for p, e in zip(model.parameters(), moves, strict=True):
                if e is not None:
                    p.sub_(e)
        optimizers.step(None)
        optimizers.zero_grad()


def penalised(s: Setting) -> None:
    """The norm of the input's gradient is part of the loss: backward through a backward."""
    model = Regression(20, 0.0)
    optimizers, batches = s.optimizers(model), s.batches()
    for _ in s.steps:
        x, y = next(batches)
        x = x.clone().requires_grad_(True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        optimizers.zero_grad()
        (mse(out, y) + 0.05 * slope.square().mean()).backward()
        s.average_gradients(model)
        optimizers.step(None)


STYLES: dict[str, Callable[[Setting], None]] = {
    f.__name__: f
    for f in (fine_tuned, unfrozen, zero_initialised, updated_in_backward, recomputed, smoothed, tiny, two_losses,
              sharpness, penalised)
} | NETWORKS  # fmt: skip


def main() -> None:
    recipe: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    setting = Setting(recipe)
    STYLES[recipe["style"]](setting)
    setting.end()


if __name__ == "__main__":
    main()
