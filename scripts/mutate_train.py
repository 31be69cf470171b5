"""The training program of scripts/mutate: small, plain torch, put together from a recipe (`recipe.json`, argument 1).

It knows nothing of tdbg. A recipe names model, wrapper, optimizer, data and habits (accumulation, clipping, evaluation,
resume ...) and at most one fault, which the program commits at the step, rank and tensor that the recipe says. What a
recipe may hold is written where it is drawn: mutate_recipes.py.
"""

import contextlib
import json
import math
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # DDP looks whether a hook is annotated with it
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

FEATURES, WORDS, LENGTH = 12, 40, 8
Recipe = dict[str, Any]
Averaged = torch.futures.Future[Tensor]


# ---------------------------------------------------------------- the fault


class Fault:
    """What goes wrong, and when. Without one, `kind` is empty and nothing below ever acts."""

    def __init__(self, recipe: Recipe, rank: int) -> None:
        self.about: Recipe = recipe.get("fault") or {"kind": ""}
        self.kind: str = self.about["kind"]
        self.step: int = self.about.get("step", 0)
        self.mine = self.about.get("rank", rank) == rank
        self.amount: float = self.about.get("amount", 0.0)

    def here(self, kind: str) -> bool:
        """Of this kind and on this rank; no step in it."""
        return self.mine and self.kind == kind

    def now(self, kind: str, step: int) -> bool:
        return self.here(kind) and step == self.step

    def since(self, kind: str, step: int) -> bool:
        return self.here(kind) and step >= self.step

    def tensor(self, model: nn.Module) -> Tensor:
        """The parameter or buffer that the recipe names."""
        name = self.about["tensor"]
        found = {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]
        return local(found)

    def spoil(self, values: Tensor) -> None:
        """Change the tensor as the recipe says: one bit, one element or all of it."""
        how = self.about.get("how", "noise")
        with torch.no_grad():
            if how == "noise":
                values.add_(torch.randn(values.shape, generator=torch.Generator().manual_seed(5)) * self.amount)
            elif how == "scale":
                values.mul_(1.0 + self.amount)
            else:
                flat = values.view(-1)
                at = self.about.get("element", 0) % flat.numel()
                bits = flat[at : at + 1].view(torch.int32)
                bits ^= 1 << self.about.get("bit", 12)


class Scaled(torch.autograd.Function):
    """Identity whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, any other as it is."""
    return cast("Tensor", tensor.to_local()) if hasattr(tensor, "to_local") else tensor


# ---------------------------------------------------------------- models


class Regression(nn.Module):
    """Vector in, one number out."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.center: Tensor
        self.register_buffer("center", torch.full((FEATURES,), 0.1))
        self.body = nn.Sequential(
            nn.Linear(FEATURES, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width), nn.Tanh()
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.head(self.body(x - self.center)))


class Branches(nn.Module):
    """Two branches of which a step uses one; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 16)
        self.left, self.right, self.idle = nn.Linear(16, 1), nn.Linear(16, 1), nn.Linear(16, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.stem(x))
        return cast("Tensor", self.left(h) if self.calls % 2 else self.right(h))


class Images(nn.Module):
    """A small convolution with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
            nn.Linear(6 * FEATURES, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.layers(x.view(-1, 1, 3, FEATURES // 3)))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        a = nn.functional.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal=True)
        x = x + self.drop(self.out(a.squeeze(1)))
        return cast("Tensor", x + self.drop(self.mlp(self.norm2(x))))


class Language(nn.Module):
    """A causal transformer; the head may share the embedding's weight."""

    def __init__(self, width: int, depth: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.register_buffer("position", torch.randn(LENGTH, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return cast("Tensor", self.head(self.norm(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 12), nn.Linear(16, WORDS)
        self.lstm = nn.LSTM(12, 16, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return cast("Tensor", self.head(self.lstm(self.embed(tokens))[0]))


class Bag(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(WORDS, 12, mode="mean", sparse=sparse), nn.Linear(12, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return cast("Tensor", self.head(self.bag(tokens)).unsqueeze(1).expand(-1, tokens.shape[1], -1))


def build(recipe: Recipe) -> nn.Module:
    name, dropout = recipe["model"], recipe.get("dropout", 0.0)
    if name in ("mlp", "wide", "frozen"):
        made: nn.Module = Regression(80 if name == "wide" else 20, dropout)
        if name == "frozen":
            made.get_submodule("body.0").requires_grad_(False)
        return made
    if name in ("transformer", "untied"):
        return Language(16, 2, dropout, tied=name == "transformer")
    makers: dict[str, Callable[[], nn.Module]] = {
        "conv": Images, "branches": Branches, "lstm": Recurrent, "bag": lambda: Bag(False),
        "sparse_bag": lambda: Bag(True),
    }  # fmt: skip
    return makers[name]()


def of_tokens(recipe: Recipe) -> bool:
    return recipe["model"] in ("transformer", "untied", "lstm", "bag", "sparse_bag")


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    if out.dim() == 3:
        return nn.functional.cross_entropy(out.float().reshape(-1, WORDS), y.reshape(-1))
    return nn.functional.mse_loss(out.float(), y)


# ---------------------------------------------------------------- data


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
    return torch.utils.data.default_collate([s for s in samples if s is not None])


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
            from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

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
                yield batch
            self.epoch += 1

    def drawn(self) -> Iterator[tuple[Tensor, Tensor]]:
        """No loader: each rank draws rows of its own."""
        g = torch.Generator().manual_seed(self.recipe["seed"] * 1000 + self.rank)
        while True:
            at = torch.randint(0, len(self.rows), (self.about["batch"],), generator=g)
            yield self.rows.x[at], self.rows.y[at]


# ---------------------------------------------------------------- wrapping


def compressed(dtype: torch.dtype, ranks: int) -> Callable[[Any, Any], Any]:
    """A hand-written communication hook that averages in a smaller type."""

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        small = bucket.buffer().to(dtype).div_(ranks)
        future = dist.all_reduce(small, async_op=True).get_future()
        return cast("Averaged", future.then(lambda f: bucket.buffer().copy_(f.value()[0])))

    return hook


def faulty_hook(fault: Fault, ranks: int, clock: list[int]) -> Callable[[Any, Any], Any]:
    """Averages, until the fault leaves a contribution out, divides by too much, or spoils the result everywhere."""
    everywhere = fault.about.get("rank", 0)

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer, late = bucket.buffer(), clock[0] >= fault.step
        if late and fault.here("lost_contribution"):
            buffer.zero_()
        divisor = ranks * (1.0 + fault.amount) if late and fault.kind == "wrong_divisor" else ranks
        future = dist.all_reduce(buffer.div_(divisor), async_op=True).get_future()

        def ended(f: Any) -> Tensor:
            result = cast("Tensor", f.value()[0])
            if late and fault.kind == "spoilt_result" and bucket.index() == 0:
                result.view(-1)[everywhere % result.numel() :: 3] *= 1.0 + fault.amount
            return result

        return cast("Averaged", future.then(ended))

    return hook


def wrap(model: nn.Module, recipe: Recipe, fault: Fault, ranks: int, clock: list[int]) -> nn.Module:
    kind = recipe["wrap"]
    if kind in ("fsdp2", "hsdp"):
        return sharded(model, recipe, fault, ranks)
    if kind not in ("ddp", "join"):
        if kind not in ("single", "split") and fault.kind != "own_start":
            for t in (*model.parameters(), *model.buffers()):
                dist.broadcast(t.data, 0)
        return model
    options = {k: v for k, v in recipe.get("ddp", {}).items() if k != "comm_hook"}
    late = nn.Linear(1, 1) if fault.kind == "late_head" else None
    made = DistributedDataParallel(model, **options)
    if late is not None:
        made.module.tail = late
    hook = recipe.get("ddp", {}).get("comm_hook", "")
    if fault.kind in ("lost_contribution", "wrong_divisor", "spoilt_result"):
        made.register_comm_hook(None, faulty_hook(fault, ranks, clock))
    elif hook in ("fp16", "bf16"):
        made.register_comm_hook(None, compressed(torch.float16 if hook == "fp16" else torch.bfloat16, ranks))
    elif hook == "default":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        made.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    return made


def sharded(model: nn.Module, recipe: Recipe, fault: Fault, ranks: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if recipe["wrap"] == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    options: dict[str, Any] = {"mesh": mesh}
    if recipe.get("half"):
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parts = list(model.blocks) if isinstance(model, Language) else [model.get_submodule("body")]
    for part in parts:
        fully_shard(part, **options)
    if fault.kind != "no_root":
        fully_shard(model, **options)
    return model


# ---------------------------------------------------------------- optimizers


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


# ---------------------------------------------------------------- training


class Training:
    """The loop and everything it needs; one method for each moment at which a fault may strike."""

    def __init__(self, recipe: Recipe, rank: int, ranks: int) -> None:
        self.recipe, self.rank, self.ranks = recipe, rank, ranks
        self.fault = Fault(recipe, rank)
        self.clock = [0]
        self.seed()
        self.bare = build(recipe)
        if recipe["wrap"] == "split":  # as a model cut into stages by hand: every rank has another part
            self.bare = Regression(16 + 4 * rank, 0.0)
        if self.fault.kind == "own_start":
            with torch.no_grad():
                for p in self.bare.parameters():
                    p.add_(0.01 * rank)
        self.model = wrap(self.bare, recipe, self.fault, ranks, self.clock)
        self.optimizers = Optimizers(recipe, self.bare)
        self.feed = Feed(recipe, rank, ranks, self.fault)
        held_out = recipe["loader"]["samples"]
        self.held_out = Rows(recipe, 32, recipe["seed"], Fault({}, rank), first=held_out)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if recipe.get("scaler") else None
        self.average = [p.detach().clone() for p in self.bare.parameters()] if self.has("ema") and rank == 0 else None
        self.plant_hooks()
        if recipe.get("own_seeds"):
            torch.manual_seed(recipe["seed"] + 1000 + rank)

    def has(self, extra: str) -> bool:
        return extra in self.recipe.get("extras", ())

    def seed(self) -> None:
        seed = self.recipe["seed"]
        if self.fault.here("seed"):
            seed = seed * 31 + 7
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)

    def plant_hooks(self) -> None:
        fault, clock = self.fault, self.clock

        def altered(grad: Tensor) -> Tensor:
            if fault.since("grad_scaled", clock[0]):
                return grad * fault.amount
            if fault.now("grad_nonfinite", clock[0]):
                grad = grad.clone()
                grad.view(-1)[fault.about.get("element", 0) % grad.numel()] = float(fault.about["value"])
            return grad

        if fault.here("grad_scaled") or fault.here("grad_nonfinite"):
            names = [fault.about["tensor"]] if "tensor" in fault.about else None
            for name, p in self.bare.named_parameters():
                if p.requires_grad and (names is None or name in names):
                    p.register_hook(altered)

    # ------------------------------------------------ one step

    def run(self) -> None:
        batches = iter(self.feed)
        steps = self.recipe["steps"] - (2 * self.rank if self.recipe["wrap"] == "join" else 0)
        joined: Any = contextlib.nullcontext()
        if self.recipe["wrap"] == "join":
            joined = cast("DistributedDataParallel", self.model).join()
        with joined:
            for step in range(1, steps + 1):
                self.clock[0] = step
                if step == self.recipe.get("resume_at"):
                    self.resume()
                self.before(step)
                loss = self.one(step, batches)
                self.after(step, loss)
        if self.has("final_eval"):
            self.evaluate()

    def one(self, step: int, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
        if self.recipe["optimizer"] == "lbfgs":
            x, y = next(batches)

            def closure() -> Tensor:
                self.optimizers.zero_grad()
                loss = loss_of(self.model(x), y)
                loss.backward()
                return loss

            return float(self.optimizers.all[0].step(closure))  # type: ignore[arg-type]
        many = self.recipe.get("accumulate", 1)
        if self.fault.since("more_backwards", step):
            many += 1
        total = 0.0
        for micro in range(many):
            x, y = self.spoilt(step, *next(batches))
            with self.quiet(step, last=micro == many - 1):
                loss = self.forward(step, x, y) / many
                if self.scaler is None:
                    loss.backward()
                else:
                    self.scaler.scale(loss).backward()
            total += loss.item()
        self.reduce_by_hand(step)
        self.update(step)
        return total

    def spoilt(self, step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.fault.now("input_nonfinite", step):
            x = x.clone()
            x[self.fault.about["element"] % len(x), 0] = float(self.fault.about["value"])
        return x, y

    def forward(self, step: int, x: Tensor, y: Tensor) -> Tensor:
        model = self.model
        if self.fault.kind == "bypassed" and step >= self.fault.step:
            model = self.bare
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(self.recipe.get("autocast"))):
            out = model(x)
        if self.fault.kind == "late_head":
            out = self.bare.tail(out)  # type: ignore[operator]
        if self.fault.since("all_scaled", step):
            out = cast("Tensor", Scaled.apply(out, self.fault.amount))  # type: ignore[no-untyped-call]
        loss = loss_of(out, y)
        if self.fault.now("loss_nonfinite", step):
            loss = loss + torch.log(loss.detach() * 0) if self.fault.about["value"] == "-inf" else loss * float("nan")
        return loss

    def quiet(self, step: int, last: bool) -> Any:
        """no_sync where the window goes on; the fault forgets to leave it."""
        ddp = isinstance(self.model, DistributedDataParallel)
        forgot = self.fault.kind == "never_synced" and step == self.fault.step
        if ddp and (not last or forgot) and (self.recipe.get("no_sync", True) or forgot):
            return cast("DistributedDataParallel", self.model).no_sync()
        return contextlib.nullcontext()

    def reduce_by_hand(self, step: int) -> None:
        if self.recipe["wrap"] != "hand":
            return
        for name, p in self.bare.named_parameters():
            if p.grad is None or (self.fault.now("hand_forgot", step) and name == self.fault.about["tensor"]):
                if p.grad is not None:
                    dist.all_reduce(p.grad.clone())  # the others wait for it
                continue
            if self.fault.since("hand_lost", step):
                p.grad.zero_()
            dist.all_reduce(p.grad)
            p.grad /= self.ranks

    def update(self, step: int) -> None:
        fault = self.fault
        if fault.now("grad_edited", step):
            grad = fault.tensor(self.bare).grad
            assert grad is not None
            fault.spoil(grad)
        if self.scaler is not None:
            for o in self.optimizers.all:
                self.scaler.unscale_(o)
        clip, limit = self.recipe.get("clip", ""), self.recipe.get("limit", 1.0)
        if fault.since("clip", step):
            limit *= fault.amount
        if clip == "norm":
            nn.utils.clip_grad_norm_(self.bare.parameters(), limit)
        elif clip == "value":
            nn.utils.clip_grad_value_(self.bare.parameters(), limit)
        if fault.since("hparam", step):
            self.wrong_setting()
        if fault.now("state", step):
            self.spoil_state()
        if fault.since("skipped_updates", step) and (step - fault.step) % 2 == 0:
            self.optimizers.zero_grad()
            return
        self.optimizers.step(self.scaler)
        if self.scaler is not None:
            self.scaler.update()
        self.optimizers.zero_grad()

    def wrong_setting(self) -> None:
        for group in self.optimizers.groups:
            key = self.fault.about["key"]
            if key == "betas":
                group["betas"] = (0.5, group["betas"][1])
            elif key == "lr" and "initial_lr" in group:
                group["lr"] = group["lr"] * 1.5
            else:
                group[key] = self.fault.amount

    def spoil_state(self) -> None:
        for o in self.optimizers.all:
            for p, state in o.state.items():
                if (
                    "tensor" in self.fault.about
                    and p is not dict(self.bare.named_parameters())[self.fault.about["tensor"]]
                ):
                    continue
                values = local(state[self.fault.about["key"]])
                with torch.no_grad():
                    values.mul_(self.fault.amount)

    # ------------------------------------------------ between the steps

    def before(self, step: int) -> None:
        fault = self.fault
        if (
            fault.now("param", step)
            or fault.now("buffer", step)
            or (fault.kind == "param_everywhere" and step == fault.step)
        ):
            fault.spoil(fault.tensor(self.bare))
        if fault.now("param_nonfinite", step) or (fault.kind == "param_nonfinite_all" and step == fault.step):
            with torch.no_grad():
                fault.tensor(self.bare).view(-1)[0] = float(fault.about["value"])
        if fault.now("exception", step):
            raise RuntimeError(f"no luck at step {step}")
        if fault.now("exit", step):
            sys.exit(3)
        if fault.now("kill", step):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "reload" and step == fault.step - 2:
            self.kept = {k: v.clone() for k, v in self.bare.state_dict().items()}
        if fault.now("reload", step):
            self.bare.load_state_dict(self.kept)

    def after(self, step: int, loss: float) -> None:
        recipe, fault = self.recipe, self.fault
        if not fault.since("schedule", step):
            for s in self.optimizers.schedules:
                if recipe.get("schedule") != "plateau":
                    s.step()
        if recipe.get("schedule") == "plateau" and step % 5 == 0:
            value = torch.tensor(loss)
            if self.ranks > 1:
                dist.all_reduce(value)
            for s in self.optimizers.schedules:
                s.step(float(value) / self.ranks if not fault.here("plateau_local") else 1e9 + step)
        if recipe["wrap"] == "localsgd" and step % 4 == 0:
            for p in self.bare.parameters():
                dist.all_reduce(p.data)
                p.data /= self.ranks
        if self.average is not None:
            with torch.no_grad():
                for a, p in zip(self.average, self.bare.parameters(), strict=True):
                    a.lerp_(p.detach(), 0.1)
        every = recipe.get("eval_every", 0)
        if every and step % every == 0:
            self.evaluate()
        if self.has("checkpoint") and step % 20 == 0:
            self.save()
        if self.has("print") and self.rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss:.4f}", flush=True)

    def evaluate(self) -> None:
        """On samples of its own, or (the fault) on some that training uses."""
        data: Any = self.held_out
        if self.fault.kind == "eval_overlap":
            data = ConcatDataset([Subset(self.feed.rows, range(self.fault.about["count"])), self.held_out])
            if self.fault.about["how"] == "copied":
                data = TensorDataset(*(torch.stack(column) for column in zip(*data, strict=True)))
        if self.recipe["wrap"] in ("ddp", "join", "single", "hand") and self.has("eval_on_rank0") and self.rank:
            return
        self.bare.eval()
        with torch.no_grad():
            for x, y in DataLoader(data, batch_size=16):
                loss_of(self.bare(x), y).item()
        self.bare.train()

    def save(self) -> None:
        if self.rank == 0 and self.recipe["wrap"] not in ("fsdp2", "hsdp"):
            torch.save(self.bare.state_dict(), "model.pt")

    def resume(self) -> None:
        """As a restarted job would: save on rank 0, build everything again, load everywhere."""
        if self.rank == 0:
            torch.save({"model": self.bare.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers.all],
                        "schedules": [s.state_dict() for s in self.optimizers.schedules]}, "resume.pt")  # fmt: skip
        if self.ranks > 1:
            dist.barrier()
        self.bare = build(self.recipe)
        saved = torch.load("resume.pt", weights_only=False)
        self.bare.load_state_dict(saved["model"])
        self.model = wrap(self.bare, self.recipe, self.fault, self.ranks, self.clock)
        self.optimizers = Optimizers(self.recipe, self.bare)
        if not (self.fault.kind == "optimizer_not_loaded" and not self.fault.mine):
            for o, state in zip(self.optimizers.all, saved["optimizers"], strict=True):
                o.load_state_dict(state)
        for s, state in zip(self.optimizers.schedules, saved["schedules"], strict=True):
            s.load_state_dict(state)


def main() -> None:
    recipe = json.loads(Path(sys.argv[1]).read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fault = Fault(recipe, rank)
    if fault.here("deterministic"):
        torch.use_deterministic_algorithms(True, warn_only=True)
    if fault.here("precision"):
        torch.set_float32_matmul_precision("medium")
    if recipe["wrap"] != "single":
        dist.init_process_group("gloo")
    training = Training(recipe, rank, ranks)
    training.run()
    if recipe["wrap"] != "single":
        dist.barrier()  # gloo's threads still let go of DDP's last futures, and the end of the group waits for them
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
