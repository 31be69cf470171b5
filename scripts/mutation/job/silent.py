"""The loop of job.train with what leaves no trace in a log: `python -m job.silent recipe.json`.

Faults of numbers and of the loop itself, each at its moment, and habits that healthy programs have: labels of odd
distributions, windows of micro-batches that end with the epoch, a loss scaler that has to settle, groups without lr.
"""

import copy
from collections.abc import Iterator
from itertools import count
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .fault import Recipe, Scaled
from .models import FEATURES, WORDS, of_tokens
from .optimizers import Optimizers
from .train import Training, main

HALF_MAX = 65504.0  # of fp16, in which a gradient beyond is infinite


class Silent(Training):
    """Every fault is asked for where it strikes; without one, all of this is job.train and its habits."""

    def __init__(self, recipe: Recipe, rank: int, ranks: int) -> None:
        self.early: Optimizers | None = None
        super().__init__(recipe, rank, ranks)
        self.micros = self.of_epochs()
        if self.fault.kind == "never_trains":
            self.model.eval()

    def during(self, kind: str, step: int) -> bool:
        """On this rank, in the `extent` steps from the fault's on."""
        return self.fault.here(kind) and self.fault.step <= step < self.fault.step + self.fault.about.get("extent", 1)

    def everywhere(self, kind: str, step: int) -> bool:
        return self.fault.kind == kind and step == self.fault.step

    # ------------------------------------------------ what is built

    def make_model(self) -> nn.Module:
        model = super().make_model()
        kind = self.fault.kind
        if kind == "adapter_late":
            self.early = Optimizers(self.recipe, model)
        if kind in ("adapter_late", "branch_cut"):
            add_branch(model, self.recipe, cut=self.fault.about.get("cut", ""))
        return model

    def make_optimizers(self) -> Optimizers:
        if self.early is not None:
            return self.early
        named = [(n, p) for n, p in self.bare.named_parameters() if p.requires_grad]
        if self.fault.kind == "left_out":
            return Optimizers(self.recipe, self.bare, [p for n, p in named if not self.chosen(n)])
        if self.fault.kind == "lr_zero" or "lr_zero" in self.recipe:
            prefix = self.recipe.get("lr_zero", "")
            parts = [[p for n, p in named if (n.startswith(prefix) if prefix else self.chosen(n)) == b] for b in (0, 1)]
            return Optimizers(self.recipe, self.bare, [{"params": parts[0]}, {"params": parts[1], "lr": 0.0}])
        return super().make_optimizers()

    def chosen(self, name: str) -> bool:
        return name in self.fault.about["tensors"]

    def make_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=self.recipe.get("init_scale", 256.0))

    def plant_hooks(self) -> None:
        super().plant_hooks()
        fault = self.fault
        for name, p in self.bare.named_parameters():
            if p.requires_grad and (self.recipe.get("fp16") or fault.kind == "scaler_anew"):
                p.register_hook(lambda g: torch.where(g.abs() <= HALF_MAX, g, torch.inf))
            if fault.kind in ("grad_tensor", "grad_nan") and name == fault.about["tensor"]:
                p.register_hook(self.spoilt_gradient)
        if fault.kind == "grad_through":
            module = self.bare.get_submodule(fault.about["module"])
            module.register_forward_hook(self.scaled_backward)

    def spoilt_gradient(self, grad: Tensor) -> Tensor:
        if self.during("grad_tensor", self.clock[0]):
            return grad * self.fault.amount
        return torch.full_like(grad, torch.nan) if self.fault.since("grad_nan", self.clock[0]) else grad

    def scaled_backward(self, module: nn.Module, given: Any, out: Tensor) -> Tensor:
        if not self.during("grad_through", self.clock[0]):
            return out
        return cast("Tensor", Scaled.apply(out, self.fault.amount))  # type: ignore[no-untyped-call]

    # ------------------------------------------------ one step

    def one(self, step: int, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
        if self.recipe["optimizer"] == "lbfgs":
            return super().one(step, batches)
        many, total, last = self.recipe.get("accumulate", 1), 0.0, False
        divisor = 1 if self.fault.kind == "undivided" else many
        for micro in count(1):
            if self.recipe.get("at_end"):
                (x, y), last = next(self.micros)
            else:
                (x, y), last = next(batches), micro == many
            with self.quiet(step, last=last):
                loss = self.forward(step, x, y)
                loss = loss / divisor if divisor > 1 else loss
                if self.scaler is None:
                    loss.backward()
                else:
                    self.scaler.scale(loss).backward()
            total += loss.item()
            if last:
                break
        self.reduce_by_hand(step)
        self.update(step)
        return total

    def of_epochs(self) -> Iterator[tuple[tuple[Tensor, Tensor], bool]]:
        """Micro-batches, and whether an update follows. `at_end`: what is done with those that a pass leaves over."""
        many, at_end = self.recipe.get("accumulate", 1), self.recipe["at_end"]
        for epoch in count():
            if self.feed.sampler is not None:
                self.feed.sampler.set_epoch(epoch)
            if at_end == "waste":
                self.optimizers.zero_grad()
            loader, size = cast("Any", self.feed.loader), 0
            for n, batch in enumerate(loader, 1):
                if at_end == "drop" and n > len(loader) - len(loader) % many:
                    break
                size += 1
                due = many + (self.fault.about["more"] if self.everywhere("window_odd", self.clock[0]) else 0)
                last = size == due or (at_end == "step" and n == len(loader))
                size = 0 if last else size
                yield batch, last

    def forward(self, step: int, x: Tensor, y: Tensor) -> Tensor:
        fault = self.fault
        y = odd_labels(y, self.recipe.get("labels", ""), late=step >= self.recipe.get("curriculum_at", 0))
        if self.during("labels_spoilt", step):
            y = y * fault.amount if fault.about["how"] == "scale" else y + fault.amount
        if fault.now("label_overflow", step):
            y = ((y.abs() + 1) * fault.amount).half().float()
        loss = super().forward(step, x, y)
        if self.during("loss_weight", step):
            loss = loss * fault.amount
        if fault.now("sqrt_of_zero", step):
            nothing = (loss - loss.detach()).square().sum().sqrt()
            loss = loss + fault.amount * nothing
        return loss

    def unscale(self, step: int) -> None:
        if not self.fault.since("clip_scaled", step):
            super().unscale(step)

    def update(self, step: int) -> None:
        for name, p in self.bare.named_parameters():
            if self.fault.kind == "grad_none" and self.chosen(name):
                p.grad = None
            if self.fault.kind == "grad_masked" and self.chosen(name) and p.grad is not None:
                p.grad.zero_()
        super().update(step)

    def zero(self, step: int) -> None:
        if self.during("not_zeroed", step):
            left = self.fault.about.get("optimizer", -1)
            for n, o in enumerate(self.optimizers.all):
                if left not in (-1, n):  # zero_grad() on the other one only
                    o.zero_grad()
            return
        super().zero(step)

    # ------------------------------------------------ between the steps

    def before(self, step: int) -> None:
        super().before(step)
        fault = self.fault
        if fault.kind == "scaler_anew" and step >= fault.step:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=fault.amount)
        if self.everywhere("untied", step):
            head, embed = cast("nn.Linear", self.bare.head), cast("nn.Embedding", self.bare.embed)
            if fault.about["how"] == "parameter":
                head.weight = nn.Parameter(embed.weight.detach().clone())
            elif fault.about["how"] == "deepcopy":
                self.bare.head = copy.deepcopy(head)
            else:
                del head.weight
                head.register_parameter("weight", nn.Parameter(embed.weight.data.clone()))
        if self.everywhere("head_replaced", step):
            old = cast("nn.Linear", self.bare.head)
            self.bare.head = nn.Linear(old.in_features, old.out_features, bias=old.bias is not None)
            if self.ranks > 1:
                for p in self.bare.head.parameters():
                    dist.broadcast(p.data, 0)

    def after(self, step: int, loss: float) -> None:
        super().after(step, loss)
        for s in self.optimizers.schedules:
            for _ in range(self.fault.about.get("times", 1) - 1):
                s.step()

    def train_again(self) -> None:
        if not (self.fault.kind == "stays_in_eval" and self.clock[0] >= self.fault.step):
            super().train_again()

    def resume(self) -> None:
        """Save all state on rank 0, build everything anew, and load all of it but what the fault leaves out."""
        lacking, held = self.fault.about.get("lacking", ()), self.fault.about.get("held", True)
        state = {"model": self.bare.state_dict(), "optimizer": [o.state_dict() for o in self.optimizers.all],
                 "scheduler": [s.state_dict() for s in self.optimizers.schedules],
                 "scaler": self.scaler.state_dict() if self.scaler is not None else None,
                 "step": self.clock[0] - 1, "rng": torch.get_rng_state()}  # fmt: skip
        if self.rank == 0:
            torch.save({k: v for k, v in state.items() if held or k not in lacking}, "resume.pt")
        if self.ranks > 1:
            dist.barrier()
        saved = torch.load("resume.pt", weights_only=False)
        self.bare = self.make_model()
        self.bare.load_state_dict(saved["model"])
        self.model = self.wrapped()
        self.optimizers = self.make_optimizers()
        self.plant_hooks()
        if "optimizer" not in lacking:
            for o, of in zip(self.optimizers.all, saved["optimizer"], strict=True):
                o.load_state_dict(of)
        if "scheduler" not in lacking:
            for s, of in zip(self.optimizers.schedules, saved["scheduler"], strict=True):
                s.load_state_dict(of)
        if self.scaler is not None:
            self.scaler = self.make_scaler()
            if "scaler" not in lacking:
                self.scaler.load_state_dict(saved["scaler"])
        if self.recipe.get("rng"):
            torch.set_rng_state(saved["rng"])


def add_branch(model: nn.Module, recipe: Recipe, cut: str) -> None:
    """A second path from the data to the output; `cut`: what stops its gradients, and where."""
    if of_tokens(recipe):
        model.side, model.adapter = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
    else:
        model.side, model.adapter = nn.Linear(FEATURES, 8), nn.Linear(8, 1)
    side, adapter = cast("nn.Module", model.side), cast("nn.Module", model.adapter)

    def added(_: nn.Module, given: Any, out: Tensor) -> Tensor:
        h = side(given[0])
        if cut == "data":
            h = h.data
        elif cut == "tensor":
            h = torch.tensor(h.tolist(), dtype=h.dtype)
        elif cut == "detach":
            h = h.detach()
        return out + cast("Tensor", adapter(torch.tanh(h)))

    model.register_forward_hook(added)


def odd_labels(y: Tensor, kind: str, late: bool) -> Tensor:
    """Labels as some data has them. Noise is drawn from the labels themselves, so that no stream moves on."""
    if not kind or not y.is_floating_point():
        return y
    if kind == "curriculum":
        return 2.0 * y if late else y
    if kind == "shifted":  # other data from here on
        return y + 0.7 if late else y
    g = torch.Generator().manual_seed(int(abs(float(y.sum())) * 1e6) % 2**31)
    noise = torch.randn(y.shape, generator=g)
    if kind == "student":  # of 2 degrees of freedom
        chi = torch.randn((2, *y.shape), generator=g).square().sum(0)
        return y + 0.5 * noise / (chi / 2).sqrt()
    if kind == "lognormal":
        return y + torch.exp(1.2 * noise) - 1.0
    return y + noise  # noisy


if __name__ == "__main__":
    main(Silent)
