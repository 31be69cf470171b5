"""Every private name of torch that the agent touches, in one place, each checked before use.

A name that is absent makes the feature "not recorded, because"; it never breaks training. Present in torch 2.4 to
2.13: DDP._sync_buffers, DDP._pre_forward, DDP._post_forward, DDP._comm_hooks, GradScaler._maybe_opt_step,
Variable._execution_engine, DTensor._local_tensor, torch._C._nn.flatten_dense_tensors, distributed_c10d._world,
_BaseDataLoaderIter (_next_index, _index_sampler, _dataset, _sampler_iter, _base_seed),
_MultiProcessingDataLoaderIter (_reset, _task_info, _send_idx).
"""

from __future__ import annotations

import sys
from typing import Any


def queue_callback(torch: Any, fn: Any) -> None:
    """Run `fn` in this backward after the last gradient is accumulated. Only valid while backward runs."""
    torch.autograd.Variable._execution_engine.queue_callback(fn)


def local_shard(tensor: Any) -> Any:
    """The part of a DTensor that this rank holds; the tensor itself when it is an ordinary one."""
    return getattr(tensor, "_local_tensor", tensor)


def is_shard(tensor: Any) -> bool:
    """Whether this parameter is a part of something larger: a DTensor or a flat parameter of FSDP."""
    return hasattr(tensor, "_local_tensor") or type(tensor).__name__ == "FlatParameter"


def readable(tensor: Any) -> bool:
    """Whether the tensor's memory is there. FSDP and offloading free it under living tensors: to read those crashes."""
    storage_bytes: int = tensor.untyped_storage().nbytes()
    return bool(storage_bytes >= tensor.nbytes + tensor.storage_offset() * tensor.element_size())


def spreads_state(optimizer: Any) -> bool:
    """Whether the optimizer keeps each parameter's state on one rank only: ZeroRedundancyOptimizer."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def flatten(tensors: list[Any]) -> Any:
    """Dense tensors of one dtype and device copied end to end into a new 1-d tensor."""
    import torch

    with torch.no_grad():
        fast = getattr(torch._C._nn, "flatten_dense_tensors", None)
        return fast(tensors) if fast is not None else torch.cat([t.reshape(-1) for t in tensors])


def distributed(torch: Any) -> Any:
    """torch.distributed when a default process group exists, else None."""
    dist = torch.distributed
    return dist if dist.is_available() and dist.is_initialized() else None


def only_default_group(torch: Any) -> bool:
    """True when no process group beside the default one exists, so that nobody built a parallel layout by hand."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    groups = getattr(world, "pg_map", None)
    return groups is not None and len(groups) == 1


def default_store(torch: Any) -> Any:
    """The key-value store behind the default process group, None when it can't be had."""
    get = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_get_default_store", None)
    return get() if get is not None and distributed(torch) else None


def communication_hook_names(ddp: Any) -> list[str]:
    """Names of the communication hooks that a user registered on a DDP module."""
    return [getattr(hook, "__qualname__", type(hook).__name__) for hook, _ in getattr(ddp, "_comm_hooks", ())]


def found_inf(optimizer: Any) -> Any:
    """The overflow flag that GradScaler hands to an optimizer that unscales by itself; None outside such a step."""
    return getattr(optimizer, "found_inf", None)
