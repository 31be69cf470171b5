"""Every private name of torch that the agent touches, in one place, each checked before use.

A name that is absent makes the feature "not recorded, because"; it never breaks training. Present in torch 2.4 to
2.13: DDP._sync_buffers, DDP._pre_forward, DDP._post_forward, DDP._comm_hooks, DDP._register_builtin_comm_hook,
GradScaler._maybe_opt_step, Variable._execution_engine, DTensor._local_tensor, Node._saved_* and saved_tensors,
torch._C._nn.flatten_dense_tensors, distributed_c10d._world, torch._C._len_torch_dispatch_stack,
torch._C._cuda_attach_out_of_memory_observer (in CUDA builds),
torch._C._functorch.peek_interpreter_stack, torch._C.DisableTorchFunction, torch._dynamo.convert_frame.FRAME_COUNTER,
Module._compiled_call_impl,
_BaseDataLoaderIter (_next_index, _index_sampler, _dataset, _sampler_iter, _base_seed),
_MultiProcessingDataLoaderIter (_reset, _task_info, _send_idx, _workers), _SingleProcessDataLoaderIter
(_dataset_fetcher), torch.utils.data._utils.fetch (_MapDatasetFetcher, _IterableDatasetFetcher: fetch, dataset,
collate_fn, auto_collation).
Of FSDP1 FullyShardedDataParallel._handle, its flat parameter's bookkeeping (_saved_grad_shard among it) and
_runtime_utils (_reduce_grad, _reduce_grad_no_shard); of FSDP2 FSDPModule._get_fsdp_state, its parameter groups
(fsdp_params, mesh_info) and _fsdp_param_group.foreach_reduce (2.13). Of dynamo eval_frame.cached_backends.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FSDP1_RUNTIME = "torch.distributed.fsdp._runtime_utils"
FSDP1_MODULE = "torch.distributed.fsdp.fully_sharded_data_parallel"
FSDP2_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state"
FSDP2_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
FSDP2_BEFORE_2_6 = "torch.distributed._composable.fsdp._fsdp_state"


def queue_callback(torch: Any, fn: Any) -> None:
    """Run `fn` in this backward after the last gradient is accumulated. Only valid while backward runs."""
    torch.autograd.Variable._execution_engine.queue_callback(fn)


def local_shard(tensor: Any) -> Any:
    """The part of a DTensor that this rank holds; the tensor itself when it is an ordinary one."""
    return getattr(tensor, "_local_tensor", tensor)


def is_shard(tensor: Any) -> bool:
    """Whether this parameter is a part of something larger: a DTensor or a flat parameter of FSDP."""
    return hasattr(tensor, "_local_tensor") or bool(getattr(tensor, "_is_flat_param", False))


def same_placements(one: Any, other: Any) -> bool:
    """Whether two tensors lie on the ranks in one way: a DTensor's gradient may still be a partial sum."""
    return bool(getattr(one, "placements", None) == getattr(other, "placements", None))


def readable(tensor: Any) -> bool:
    """Whether the tensor's memory is there. FSDP and offloading free it under living tensors: to read those crashes."""
    storage_bytes: int = tensor.untyped_storage().nbytes()
    return bool(storage_bytes >= tensor.nbytes + tensor.storage_offset() * tensor.element_size())


def compiles() -> bool:
    """Whether the program has asked dynamo to compile anything; true where that can't be told."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    backends = getattr(frames, "cached_backends", None)
    # `disable` notes None or False as its backend
    return not isinstance(backends, dict) or any(backends.values())


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


def groups_with_hooks(torch: Any) -> list[Any]:
    """The process groups there are that call a hook before each collective (torch 2.14); empty where torch has none."""
    known = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    if not torch.distributed.is_available() or known is None:
        return []
    return [g for g in getattr(known, "pg_map", ()) if hasattr(g, "register_pre_hook")]


def ordinary_forward(torch: Any) -> bool:
    """Whether operations are computed as they are called: nothing traces, transforms, captures or records them. Under
    such a mode (selective checkpointing is one) an operation of ours would become part of what it keeps."""
    modes = getattr(torch._C, "_len_torch_dispatch_stack", None)
    transforms = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    if modes is None or modes() or transforms is None or transforms() is not None or torch.jit.is_tracing():
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def has_compiled(models: list[Any]) -> bool:
    """Whether the program has asked dynamo to compile anything, or is to compile one of these models. A hook on all
    modules is among what it guards: to set or remove one would make it compile anew."""
    return compiles() or any(
        getattr(m, "_compiled_call_impl", None) is not None or "_orig_mod" in m._modules
        for top in models
        for m in top.modules()
    )


def default_store(torch: Any) -> Any:
    """The key-value store behind the default process group, None when it can't be had."""
    get = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_get_default_store", None)
    return get() if get is not None and distributed(torch) else None


def saved_for_backward(node: Any) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of what an operation saved for its backward. An operation that has freed it, or whose tensor was
    changed in place since, shows nothing. Unpacks: not to be called where saved tensors may lie behind hooks."""
    import torch

    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except RuntimeError:
                continue
            if isinstance(value, torch.Tensor):
                yield name.removeprefix("_saved_"), value
    try:
        several = getattr(node, "saved_tensors", ())  # of a function of the user's
    except RuntimeError:
        several = ()
    for n, value in enumerate(several):
        if isinstance(value, torch.Tensor):
            yield f"tensor {n}", value


def held_here(tensor: Any) -> Any:
    """The values of a saved tensor that lie in this process, or None where there is nothing to be read.

    FSDP frees the memory of gathered parameters after a forward, and the graph still refers to them: to read there ends
    the process. Of a DTensor the local part is given, since an operation on the whole would communicate; subclasses
    with a logic of their own and other layouts are left alone."""
    import torch

    tensor = getattr(tensor, "_local_tensor", tensor)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return None
    tensor = tensor.detach()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    reach = (tensor.storage_offset() + last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor if tensor.untyped_storage().nbytes() >= reach else None


def takes_mean(node: Any) -> bool:
    """Whether a loss function of torch's gave the mean over its elements: reduction 1 of its enumeration."""
    return getattr(node, "_saved_reduction", None) == 1


def ignores(node: Any) -> int | None:
    """The label that a classification loss of torch's leaves out; None for any other operation."""
    index = getattr(node, "_saved_ignore_index", None)
    if not isinstance(index, int):
        return None
    return index - (1 << 64) if index >= 1 << 63 else index  # torch shows a negative one without its sign


def out_of_memory_observer(torch: Any) -> Any:
    """What takes a function that the device allocator calls before it raises; None in builds without CUDA. It can't be
    taken back."""
    return getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)


def communication_hook_names(ddp: Any) -> list[str]:
    """Names of the communication hooks that a user registered on a DDP module."""
    return [getattr(hook, "__qualname__", type(hook).__name__) for hook, _ in getattr(ddp, "_comm_hooks", ())]


def fetcher_classes(torch: Any) -> list[Any]:
    """The classes in which loaders make their batches; empty where torch no longer has them."""
    module = getattr(getattr(torch.utils.data, "_utils", None), "fetch", None)
    known = [getattr(module, name, None) for name in ("_MapDatasetFetcher", "_IterableDatasetFetcher")]
    return [c for c in known if "fetch" in vars(c or object)]


def found_inf(optimizer: Any) -> Any:
    """The overflow flag that GradScaler hands to an optimizer that unscales by itself; None outside such a step."""
    return getattr(optimizer, "found_inf", None)


# -------------------------------------------------------- FSDP


def knows_gathered() -> bool:
    """Whether FSDP2's parameters can be told while they are gathered."""
    fsdp2 = getattr(sys.modules.get(FSDP2_GROUP.rpartition(".")[0] + "._fully_shard"), "FSDPModule", None)
    if fsdp2 is None:
        return FSDP2_BEFORE_2_6 not in sys.modules  # of that one nothing is known but its shards
    return hasattr(fsdp2, "_get_fsdp_state")


def fsdp2_no_root_runs(state: Any) -> bool:
    """Whether no root module of FSDP2's is in its forward at the moment."""
    return getattr(getattr(state, "_state_ctx", None), "iter_forward_root", state) is None


@dataclass(frozen=True)
class Fsdp2Part:
    """One parameter of FSDP2: what the optimizer holds, what the module shows while it is gathered, how it is split."""

    shard: Any
    gathered: Any  # None before its first use
    full_shape: tuple[int, ...]  # of what FSDP gathers: under tensor parallelism itself a part
    dim: int | None  # tensor dimension that is split; None: every rank holds all of it
    index: int
    count: int
    ranks: tuple[int, ...]  # over which its gradient is reduced


def fsdp2_parts(module: Any) -> list[Fsdp2Part] | None:
    """The parameters that `fully_shard` manages for this module; None when torch keeps them in a way not known here."""
    state_of = getattr(type(module), "_get_fsdp_state", None)
    if state_of is None:
        return []
    state = state_of(module)
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # one at most in older versions
        groups = [g] if (g := getattr(state, "_fsdp_param_group", None)) is not None else []
    try:
        return [_fsdp2_part(group.mesh_info, p) for group in groups for p in group.fsdp_params]
    except AttributeError:
        return None


def _fsdp2_part(group_info: Any, p: Any) -> Fsdp2Part:
    info = getattr(p, "mesh_info", group_info)
    split = info.shard_mesh_dim is not None
    return Fsdp2Part(
        p.sharded_param,
        getattr(p, "_unsharded_param", None),
        tuple(p._orig_size),
        p.fsdp_placement.dim if split else None,
        info.shard_mesh_rank if split else 0,
        info.shard_mesh_size if split else 1,
        tuple(info.mesh.mesh.flatten().tolist()),
    )


@dataclass(frozen=True)
class Fsdp1Part:
    """One parameter of FSDP1: the flat one, or one of those that it is made of (use_orig_params)."""

    shard: Any
    full_shape: tuple[int, ...]
    start: int  # this rank's first element of it
    numel: int  # elements that this rank holds
    offset: int  # where it begins in the flat gradient, before that is scattered
    same: Any  # process group of the ranks that hold the same part; None when no other does

    @property
    def full_numel(self) -> int:
        return math.prod(self.full_shape)


@dataclass(frozen=True)
class Fsdp1Unit:
    """What one FullyShardedDataParallel module flattened."""

    flat: Any
    parts: list[Fsdp1Part]
    groups: tuple[Any, ...]  # process groups over which its gradient is reduced, one after the other


def fsdp1_unit(module: Any) -> Fsdp1Unit | None:
    """The unit of this FSDP1 module, None when it flattened nothing. AttributeError when torch keeps it otherwise."""
    handle = module._handle
    return None if handle is None else fsdp1_unit_of(handle, getattr(module, "_inter_node_pg", None))


def fsdp1_unit_of(handle: Any, between: Any) -> Fsdp1Unit:
    """The unit of a flat parameter's handle; `between` is the process group of the replicas in a hybrid strategy."""
    flat, group = handle.flat_param, handle.process_group
    split = handle.uses_sharded_strategy
    hybrid = between if "HYBRID" in handle._sharding_strategy.name else None
    same = hybrid if split else group
    groups = (group,) if hybrid is None else (group, hybrid)
    if not handle._use_orig_params:
        size = flat._sharded_size.numel()
        full = tuple(flat._unpadded_unsharded_size)
        start = handle.rank * size if split else 0
        return Fsdp1Unit(flat, [Fsdp1Part(flat, full, start, size, 0, same)], groups)
    parts, offset, at = [], 0, 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            held = flat._shard_param_infos[at]
            start, size = (held.intra_param_start_idx, held.numel_in_shard) if held.in_shard else (0, 0)
            parts.append(Fsdp1Part(flat._params[at], tuple(flat._shapes[at]), start, size, offset, same))
            at += 1
        offset += numel
    return Fsdp1Unit(flat, parts, groups)


def fsdp1_saved_shard(flat: Any) -> Any:
    """The gradient of earlier backwards that a flat parameter's reduction is added to; None without one."""
    return getattr(flat, "_saved_grad_shard", None)


def has_gradient_hooks(shard: Any) -> bool:
    """Whether the program hooked the moment at which FSDP2 has reduced a gradient; true where that can't be told."""
    return bool(getattr(shard, "_post_accumulate_grad_hooks", True))


# -------------------------------------------------------- collectives


def process_group(torch: Any) -> Any:
    """The class whose methods all collectives of Python's go through, and torch's Work; None where torch lacks them."""
    module = getattr(torch._C, "_distributed_c10d", None)
    group, work = getattr(module, "ProcessGroup", None), getattr(module, "Work", None)
    return (group, work) if hasattr(group, "group_name") and work is not None else None


def group_ranks(torch: Any) -> dict[str, tuple[int, ...]]:
    """The global ranks of every group that this process knows, by the group's name, in the order of its own ranks."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    known = getattr(world, "pg_group_ranks", {})
    names = getattr(world, "pg_names", {})
    return {names[pg]: tuple(sorted(ranks, key=ranks.get)) for pg, ranks in list(known.items()) if pg in names}


def flight_recorder(torch: Any) -> bytes | None:
    """A pickle of the flight recorder's entries without stacks; None where torch has no recorder."""
    module = getattr(torch._C, "_distributed_c10d", None)
    dump = getattr(module, "_dump_fr_trace", None) or getattr(module, "_dump_nccl_trace", None)
    return None if dump is None else bytes(dump(True, False, False))
