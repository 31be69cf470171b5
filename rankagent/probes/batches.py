"""The very samples that each batch is made of: ids in the root data set, or digests of their content.

Writes    loader, batch
Costs     about 10 us a batch, and 20 to 40 us for the digests of 64 samples
Blind to  data that reaches the model without a torch DataLoader
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from ..agent import Emit, now_ns
from ..numbers import Numbers
from ..patch import Undo, replace, undo_all
from ..samples import batch_size, dataset_digest, indices_digest, levels, root_ids, sample_digests
from ..tables import Column, Table
from .rng import signed
from .sampler import length

LOADER = Table("loader", (
    Column("loader", "int32", "", "loader of this process, in the order of first iteration"),
    Column("iterator", "int32", "", "pass over it, from 0"),
    Column("workers", "int32", "", "worker processes"),
    Column("worker_start", "text", "", "fork, spawn, forkserver; empty without workers"),
    Column("batch_size", "int32", "", "declared batch size; -1 for none"),
    Column("drop_last", "bool", "", "an incomplete last batch is dropped"),
    Column("sampler_class", "text", "", "class of the innermost sampler"),
    Column("sampler", "int32", "", "its number in the sampler table; -1 if it is no DistributedSampler"),
    Column("shuffle", "int32", "", "1 shuffled, 0 in order, -1 unknown"),
    Column("replacement", "bool", "", "samples are drawn with replacement or by weight"),
    Column("batches", "int64", "", "len(loader); -1 unknown"),
    Column("samples", "int64", "", "len(sampler); -1 unknown"),
    Column("iterable", "bool", "", "iterable data set: no ids"),
    Column("dataset_class", "text", "", "class of the root data set"),
    Column("dataset_length", "int64", "", "length of the root data set; -1 unknown"),
    Column("dataset_digest", "text", "", "digest of the root data set's own attributes (tensors, arrays, lists sampled); empty unknown"),
    Column("levels", "text", "", "JSON list from root to the loader's data set: [class, length, digest of its indices into the level below]"),
    Column("base_seed", "int64", "", "seed that workers derive theirs from; 0 without workers"),
    Column("worker_init", "bool", "", "a worker_init_fn is set"),
), "one row per pass over a loader")  # fmt: skip

BATCH = Table("batch", (
    Column("loader", "int32", "", "see loader"),
    Column("iterator", "int32", "", "see loader"),
    Column("index", "int64", "", "position in this pass, from 0"),
    Column("samples", "int32", "", "samples in it; -1 unknown"),
    Column("ids", "int64[]", "", "positions in the root data set, in order; empty for iterable data"),
    Column("digests", "int64[]", "", "32-bit content digest per sample, in order; empty when the batch holds no tensor to digest, "
           "and between watched steps where there are ids"),
    Column("wait_ns", "int64", "ns", "wall time that training waited for it"),
    Column("backwards", "int64", "", "outermost backward calls of this process before it was fetched"),
    Column("grad_enabled", "bool", "", "autograd was on when it was fetched"),
    Column("end", "text", "", "empty; StopIteration for the end of the pass (no samples); else the exception's class"),
), "one row per batch that training took from a loader, one more at the end of each whole pass")  # fmt: skip

TABLES = (LOADER, BATCH)


IDS_LIMIT = 65_536  # per batch; a larger one is recorded by its size only
REPLACEMENT = ("WeightedRandomSampler",)


class Pass:
    """What is known of one pass over a loader, kept on torch's own iterator."""

    def __init__(self, loader: int, number: int, chain: list[Any], iterable: bool, sampler_iter: Any) -> None:
        self.loader, self.number, self.chain, self.iterable = loader, number, chain, iterable
        self.sampler_iter = sampler_iter
        self.index = 0


class Indices:
    """Index lists on their way from the sampler to training: by task number with workers, in order without."""

    def __init__(self) -> None:
        self.queue: deque[Any] = deque()
        self.by_task: dict[int, Any] = {}

    def take(self, iterator: Any) -> Any:
        tasks = getattr(iterator, "_task_info", None)
        if isinstance(tasks, Tasks):
            return self.by_task.pop(tasks.last, None)
        return self.queue.popleft() if self.queue else None


class Tasks(dict):  # type: ignore[type-arg]
    """The loader's table of tasks, remembering the key removed last: the task whose batch is handed out."""

    last = -1

    def pop(self, key: Any, *default: Any) -> Any:
        self.last = key
        return super().pop(key, *default)

    def __delitem__(self, key: Any) -> None:
        self.last = key
        super().__delitem__(key)


def install(emit: Emit) -> Undo:
    agent = emit.agent
    loaders = agent.torch.utils.data.dataloader
    base, multi = loaders._BaseDataLoaderIter, loaders._MultiProcessingDataLoaderIter
    numbers = Numbers()
    passes: dict[int, int] = {}

    def indices(iterator: Any) -> Indices:
        found: Indices | None = iterator.__dict__.get("_tdbg_indices")
        if found is None:
            found = iterator.__dict__["_tdbg_indices"] = Indices()
        return found

    def next_index(original: Any) -> Any:
        def _next_index(iterator: Any) -> Any:
            index = original(iterator)
            if agent.live:
                emit.guarded(keep, iterator, index)
            return index

        return _next_index

    def keep(iterator: Any, index: Any) -> None:
        send = getattr(iterator, "_send_idx", None)
        if send is None:
            indices(iterator).queue.append(index)
        else:
            indices(iterator).by_task[send] = index

    def reset(original: Any) -> Any:
        def _reset(iterator: Any, *args: Any, **kwargs: Any) -> Any:
            if agent.live:
                iterator.__dict__.pop("_tdbg_indices", None)
            result = original(iterator, *args, **kwargs)
            if agent.live:
                emit.guarded(follow_tasks, iterator)
            return result

        return _reset

    def follow_tasks(iterator: Any) -> None:
        if not isinstance(iterator._task_info, Tasks):
            iterator._task_info = Tasks(iterator._task_info)

    def fetch(original: Any) -> Any:
        def __next__(iterator: Any) -> Any:
            if not agent.live:
                return original(iterator)
            agent.phase, started = "data", now_ns()
            try:
                data = original(iterator)
            except BaseException as e:
                emit.guarded(took, iterator, None, started, now_ns(), type(e).__name__)
                raise
            ended = now_ns()
            emit.guarded(took, iterator, data, started, ended, "")
            agent.look_at_batch(data)
            agent.phase = "other"
            return data

        return __next__

    def took(iterator: Any, data: Any, started: int, ended: int, end: str) -> None:
        agent.add_phase("data", ended - started)
        agent.batch_fetched()
        this = iterator.__dict__.get("_tdbg_pass")
        if this is None or this.sampler_iter is not iterator._sampler_iter:
            this = iterator.__dict__["_tdbg_pass"] = begin(iterator)
        index = indices(iterator).take(iterator) if end != "StopIteration" else None
        ids, size, digests = [], -1, []
        if end == "":
            listed = index if isinstance(index, (list, tuple)) else [index]
            ids = (
                [] if this.iterable or index is None or len(listed) > IDS_LIMIT else root_ids(this.chain, list(listed))
            )
            size = len(listed) if ids else batch_size(data)
            # where there are ids, the content is looked at in watched steps only: it proves that two ranks' sets are one
            looked = 0 < size <= IDS_LIMIT and (agent.watching or not ids)
            digests = sample_digests(data, size) if looked else []
        emit(BATCH, (this.loader, this.number, this.index, size, ended - started, agent.backwards_total,
                     agent.torch.is_grad_enabled()), (ids, digests, end))  # fmt: skip
        this.index += 1

    def begin(iterator: Any) -> Pass:
        sampler = iterator._index_sampler
        number = numbers.of(sampler)
        passes[number] = passes.get(number, -1) + 1
        chain = levels(iterator._dataset)
        iterable = iterator._dataset_kind == loaders._DatasetKind.Iterable
        describe(iterator, number, passes[number], chain, iterable)
        return Pass(number, passes[number], chain, iterable, iterator._sampler_iter)

    def describe(iterator: Any, number: int, this: int, chain: list[Any], iterable: bool) -> None:
        index_sampler = iterator._index_sampler
        inner = getattr(index_sampler, "sampler", index_sampler)
        kind = type(inner).__name__
        shuffle = getattr(inner, "shuffle", {"RandomSampler": True, "SequentialSampler": False}.get(kind))
        workers = getattr(iterator, "_num_workers", 0)
        processes = getattr(iterator, "_workers", None) or [None]
        start = getattr(processes[0], "_start_method", None) or agent.torch.multiprocessing.get_start_method()
        shape = [[type(d).__name__, length(d), indices_digest(d)] for d in chain]
        emit(LOADER, (
            number, this, workers, getattr(index_sampler, "batch_size", None) or -1,
            bool(getattr(index_sampler, "drop_last", False)), agent.samplers.find(inner),
            -1 if not isinstance(shuffle, bool) else int(shuffle),
            bool(getattr(inner, "replacement", False)) or kind in REPLACEMENT,
            -1 if iterable else length(index_sampler), -1 if iterable else length(inner), iterable,
            -1 if iterable else length(chain[0]), signed(iterator._base_seed) if workers else 0,
            getattr(iterator, "_worker_init_fn", None) is not None,
        ), (start if workers else "", kind, type(chain[0]).__name__, dataset_digest(chain[0]), json.dumps(shape)))  # fmt: skip

    return undo_all([replace(base, "_next_index", next_index), replace(base, "__next__", fetch),
                     replace(multi, "_reset", reset)])  # fmt: skip
