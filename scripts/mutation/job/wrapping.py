"""How the ranks train one model: DDP with hooks of its own or the user's, FSDP2, by hand."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # DDP looks whether a hook is annotated with it
from torch.nn.parallel import DistributedDataParallel

from .fault import Fault, Recipe
from .models import Language

Averaged = torch.futures.Future[Tensor]


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
