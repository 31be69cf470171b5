"""The loop: `python -m job.train recipe.json`. One method for each moment at which a fault may strike."""

import contextlib
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from .data import Feed, Rows
from .fault import Fault, Recipe, Scaled, local
from .models import Regression, build, loss_of
from .optimizers import Optimizers
from .wrapping import wrap


class Training:
    """The loop and everything it needs; one method for each moment at which a fault may strike."""

    def __init__(self, recipe: Recipe, rank: int, ranks: int) -> None:
        self.recipe, self.rank, self.ranks = recipe, rank, ranks
        self.fault = Fault(recipe, rank)
        self.clock = [0]
        self.seed()
        self.bare = self.make_model()
        if self.fault.kind == "own_start":
            with torch.no_grad():
                for p in self.bare.parameters():
                    p.add_(0.01 * rank)
        self.model = self.wrapped()
        self.optimizers = self.make_optimizers()
        self.feed = Feed(recipe, rank, ranks, self.fault)
        held_out = recipe["loader"]["samples"]
        self.held_out = Rows(recipe, 32, recipe["seed"], Fault({}, rank), first=held_out)
        self.scaler = self.make_scaler() if recipe.get("scaler") else None
        self.average = [p.detach().clone() for p in self.bare.parameters()] if self.has("ema") and rank == 0 else None
        self.plant_hooks()
        if recipe.get("own_seeds"):
            torch.manual_seed(recipe["seed"] + 1000 + rank)

    def make_model(self) -> nn.Module:
        if self.recipe["wrap"] == "split":  # as a model cut into stages by hand: every rank has another part
            return Regression(16 + 4 * self.rank, 0.0)
        return build(self.recipe)

    def wrapped(self) -> nn.Module:
        return wrap(self.bare, self.recipe, self.fault, self.ranks, self.clock)

    def make_optimizers(self) -> Optimizers:
        return Optimizers(self.recipe, self.bare)

    def make_scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=256.0)

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
        self.unscale(step)
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
        self.zero(step)

    def unscale(self, step: int) -> None:
        if self.scaler is not None:
            for o in self.optimizers.all:
                self.scaler.unscale_(o)

    def zero(self, step: int) -> None:
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
        self.train_again()

    def train_again(self) -> None:
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
        self.bare = self.make_model()
        saved = torch.load("resume.pt", weights_only=False)
        self.bare.load_state_dict(saved["model"])
        self.model = self.wrapped()
        self.optimizers = self.make_optimizers()
        if not (self.fault.kind == "optimizer_not_loaded" and not self.fault.mine):
            for o, state in zip(self.optimizers.all, saved["optimizers"], strict=True):
                o.load_state_dict(state)
        for s, state in zip(self.optimizers.schedules, saved["schedules"], strict=True):
            s.load_state_dict(state)


def main(program: type[Training] = Training) -> None:
    recipe = json.loads(Path(sys.argv[1]).read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    fault = Fault(recipe, rank)
    if fault.here("deterministic"):
        torch.use_deterministic_algorithms(True, warn_only=True)
    if fault.here("precision"):
        torch.set_float32_matmul_precision("medium")
    if recipe["wrap"] != "single":
        dist.init_process_group("gloo")
    program(recipe, rank, ranks).run()
    if recipe["wrap"] != "single":
        dist.barrier()  # gloo's threads still let go of DDP's last futures, and the end of the group waits for them
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
