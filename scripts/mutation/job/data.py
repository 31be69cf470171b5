"""The samples and the loaders of every form."""

import random
from collections.abc import Iterator
from typing import Any, cast

import numpy
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    get_worker_info,
)

from .fault import Fault, Recipe
from .models import FEATURES, LENGTH, WORDS, of_tokens


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Samples that a learner can fit, drawn once; with the fault, some are broken."""

    def __init__(self, recipe: Recipe, count: int, seed: int, fault: Fault, first: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        if of_tokens(recipe):
            self.x = torch.randint(0, WORDS, (count + first, LENGTH), generator=g)
            self.y = (self.x * 3 + 1) % WORDS
        else:
            self.x = torch.randn(count + first, FEATURES, generator=g)
            self.y = self.x[:, :3].sum(1, keepdim=True).sin()
        self.x, self.y = self.x[first:], self.y[first:]
        self.fault = fault
        self.augment = recipe["loader"].get("augment", False)
        self.draws = numpy.random.default_rng(3)
        self.broken = set(fault.about.get("broken", ()))
        self.cache: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self.x)

    def check(self, i: int) -> None:
        if i in self.broken:
            raise ValueError(f"sample {i} is damaged")

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if self.fault.kind == "swallow_neighbour":
            try:
                self.check(i)
            except ValueError:
                return self[(i + 1) % len(self)]
        elif self.fault.kind == "swallow_none":
            try:
                self.check(i)
            except ValueError:
                return None  # type: ignore[return-value]
        elif self.fault.kind == "swallow_loop":
            self.check(i)
        try:
            weight = self.cache[i]  # an exception as control flow, which every program has
        except KeyError:
            weight = self.cache[i] = 1.0
        x = self.x[i]
        if self.augment and x.is_floating_point():
            if self.fault.kind == "generator_copied":
                x = x + 0.01 * torch.from_numpy(self.draws.standard_normal(FEATURES)).float()
            else:
                x = x + 0.01 * torch.randn(FEATURES)
        return x * weight if x.is_floating_point() else x, self.y[i]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same samples read in order, split by rank and worker; the fault forgets one of the two."""

    def __init__(self, rows: Rows, rank: int, ranks: int, fault: Fault) -> None:
        self.rows, self.rank, self.ranks, self.fault = rows, rank, ranks, fault

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        part, parts = (0, 1) if info is None else (info.id, info.num_workers)
        if self.fault.kind == "not_split_by_worker":
            part, parts = 0, 1
        if self.fault.kind == "not_split_by_rank":
            rank, ranks = 0, 1
        else:
            rank, ranks = self.rank, self.ranks
        for i in range(rank * parts + part, len(self.rows) // (ranks * parts) * ranks * parts, ranks * parts):
            yield self.rows[i]


def without_none(samples: list[Any]) -> Any:
    """The batch of what is left; None where nothing is."""
    left = [s for s in samples if s is not None]
    return torch.utils.data.default_collate(left) if left else None


def same_seed(worker: int) -> None:
    torch.manual_seed(1234)
    numpy.random.seed(1234)
    random.seed(1234)


class Feed:
    """Endless batches, epoch after epoch, as the recipe's loader gives them."""

    def __init__(self, recipe: Recipe, rank: int, ranks: int, fault: Fault) -> None:
        self.recipe, self.rank, self.ranks, self.fault = recipe, rank, ranks, fault
        self.about: Recipe = recipe["loader"]
        self.rows = Rows(recipe, self.about["samples"], recipe["seed"], fault)
        self.sampler: DistributedSampler[Any] | None = None
        self.epoch = 0
        self.loader = None if self.about["kind"] == "tensors" else self.make()

    def make(self) -> Any:
        kind, batch = self.about["kind"], self.about["batch"]
        workers = self.about.get("workers", 0)
        options: dict[str, Any] = {"num_workers": workers, "drop_last": self.about.get("drop_last", False)}
        if workers:
            options |= {"persistent_workers": self.about.get("persistent", False)}
        if self.fault.kind == "worker_seed":
            options["worker_init_fn"] = same_seed
        if self.fault.kind in ("swallow_none",):
            options["collate_fn"] = without_none
        if self.fault.here("batch_size"):
            batch = max(1, batch // 2)
        if kind == "stream":
            options.pop("drop_last")
            return DataLoader(Stream(self.rows, self.rank, self.ranks, self.fault), batch, **options)
        if kind == "weighted":
            g = torch.Generator().manual_seed(self.recipe["seed"] + 17 * self.rank)
            many = len(self.rows) // self.ranks
            weighted = WeightedRandomSampler([1.0 + i % 3 for i in range(len(self.rows))], many, generator=g)
            return DataLoader(self.rows, batch, sampler=weighted, **options)
        if kind == "subset" or self.fault.kind in ("slice_hole", "same_slice"):
            share = len(self.rows) // self.ranks
            begin, end = self.rank * share, (self.rank + 1) * share
            if self.fault.here("slice_hole"):
                end -= self.about["batch"] * self.fault.about["batches"]
            if self.fault.here("same_slice"):
                other = (self.rank + 1) % self.ranks
                begin, end = other * share, (other + 1) * share
            part = Subset(self.rows, range(begin, end))
            g = torch.Generator().manual_seed(self.recipe["seed"] + self.rank)
            order: Sampler[int] = RandomSampler(part, generator=g)
            return DataLoader(part, batch, sampler=order, **options)
        if self.fault.kind == "no_sampler":
            g = torch.Generator().manual_seed(self.recipe["seed"])
            return DataLoader(self.rows, batch, shuffle=True, generator=g, **options)
        seed = self.recipe["seed"] + (101 * (self.rank + 1) if self.fault.here("sampler_seed") else 0)
        self.sampler = DistributedSampler(self.rows, self.ranks, self.rank, seed=seed, drop_last=options["drop_last"])
        if kind == "batch_sampler":
            options.pop("drop_last")
            batches = torch.utils.data.BatchSampler(self.sampler, batch, drop_last=False)
            return DataLoader(self.rows, batch_sampler=batches, **options)
        if kind == "stateful":
            from torchdata.stateful_dataloader import StatefulDataLoader

            return StatefulDataLoader(self.rows, batch, sampler=self.sampler, **options)
        return DataLoader(self.rows, batch, sampler=self.sampler, **options)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.loader is None:
            yield from self.drawn()
        while True:
            told = self.fault.kind != "no_set_epoch" and not (self.epoch > 0 and self.fault.here("set_epoch_not_here"))
            if self.sampler is not None and told:
                self.sampler.set_epoch(self.epoch)
            batches = iter(cast("DataLoader[Any]", self.loader))
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                except ValueError:
                    if self.fault.kind != "swallow_loop":
                        raise
                    continue
                if batch is not None:  # every sample of it was damaged
                    yield batch
            self.epoch += 1

    def drawn(self) -> Iterator[tuple[Tensor, Tensor]]:
        """No loader: each rank draws rows of its own."""
        g = torch.Generator().manual_seed(self.recipe["seed"] * 1000 + self.rank)
        while True:
            at = torch.randint(0, len(self.rows), (self.about["batch"],), generator=g)
            yield self.rows.x[at], self.rows.y[at]
