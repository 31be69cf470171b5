"""What a loop of styles.py or networks.py is given: ranks, seeds, batches, wrapping, optimizers, a schedule."""

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .data import Feed
from .fault import Fault, Recipe
from .optimizers import Optimizers


class Setting:
    """A recipe on this rank. `option(name)` reads what the recipe adds for its style."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        random.seed(recipe["seed"])
        numpy.random.seed(recipe["seed"])
        torch.manual_seed(recipe["seed"])
        if recipe["wrap"] != "single":
            dist.init_process_group("gloo")
        self.feed = Feed(recipe, self.rank, self.ranks, Fault({}, self.rank))
        self.chance = torch.Generator().manual_seed(recipe["seed"] * 7 + self.rank)  # what differs between ranks

    @property
    def steps(self) -> range:
        return range(1, self.recipe["steps"] + 1)

    def option(self, name: str, otherwise: Any = None) -> Any:
        return self.recipe.get("options", {}).get(name, otherwise)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.feed)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.chance)

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        return DistributedDataParallel(model, **options) if self.recipe["wrap"] == "ddp" else model

    def optimizers(self, model: nn.Module, own: list[Any] | None = None) -> Optimizers:
        """As the recipe says, with its schedule."""
        return Optimizers(self.recipe, model, own)

    def average_gradients(self, model: nn.Module) -> None:
        """For loops that no wrapper fits."""
        if self.ranks > 1:
            for p in model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= self.ranks

    def end(self) -> None:
        if self.recipe["wrap"] != "single":
            dist.barrier()
            dist.destroy_process_group()


def update(optimizers: Optimizers, loss: Tensor) -> None:
    """The usual end of a step."""
    optimizers.zero_grad()
    loss.backward()
    optimizers.step(None)
    for s in optimizers.schedules:
        s.step()
