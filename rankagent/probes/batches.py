"""The very samples that each batch is made of: ids in the root data set, or digests of their content.

Writes    loader, batch
Costs     about 10 us a batch, and 20 to 40 us for the digests of 64 samples
Blind to  data that reaches the model without a torch DataLoader
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from typing import Any

from ..agent import Emit, Place, now_ns
from ..dataset import Level, dataset_digest, length, levels, root_ids
from ..numbers import Numbers
from ..patch import Undo, replace, undo_all
from ..readahead import Discarded, Following, Waiting
from ..samples import batch_size, sample_digests
from ..tables import Column, Table
from .rng import signed

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
    Column("samples", "int64", "", "len(innermost sampler); -1 unknown"),
    Column("sharers", "int32", "", "ranks that the batches of this one sampler are dealt to; 1: it is this rank's own"),
    Column("dispatched", "int32", "", "ranks that rank 0 reads for, which then knows the ids of them all; 0: each reads for itself"),
    Column("skipped", "int64", "", "batches left out at the start, consumed before the pass was resumed"),
    Column("iterable", "bool", "", "iterable data set: no ids"),
    Column("dataset", "int32", "", "root data set of this process, in the order of first use; -1 unknown"),
    Column("dataset_class", "text", "", "class of the root data set"),
    Column("dataset_length", "int64", "", "length of the root data set; -1 unknown"),
    Column("dataset_digest", "text", "", "digest of the root data set's own attributes (tensors, arrays, lists sampled); empty unknown"),
    Column("levels", "text", "", "JSON list from root to the loader's data set: [class, length, digest of its indices into the level below, "
           "'composed' where they hold several choices]"),
    Column("base_seed", "int64", "", "seed that workers derive theirs from; 0 without workers"),
    Column("worker_init", "bool", "", "a worker_init_fn is set"),
), "one row per pass over a loader")  # fmt: skip

BATCH = Table("batch", (
    Column("loader", "int32", "", "see loader"),
    Column("iterator", "int32", "", "see loader"),
    Column("index", "int64", "", "position in this pass, from 0"),
    Column("samples", "int32", "", "samples in it; -1 unknown"),
    Column("worker", "int32", "", "worker that made it; -1: the rank's own process did"),
    Column("ids", "int64[]", "", "positions in the root data set, in order, also of a batch whose making raised; empty for iterable data"),
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

    def __init__(self, loader: int, number: int, chain: list[Level], iterable: bool, sampler_iter: Any) -> None:
        self.loader, self.number, self.chain, self.iterable = loader, number, chain, iterable
        self.sampler_iter = sampler_iter
        self.index = 0
        self.backwards = -1  # of this process, when its last batch was given


@dataclass
class Fetched:
    """A batch that a loader gave, until training gets it. Holds no data of the user's."""

    of: Pass
    size: int
    ids: list[int]
    digests: list[int]
    wait_ns: int
    scans: list[Any]  # what other probes saw in it
    end: str
    worker: int = -1


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
    """The loader's table of tasks, remembering what was removed last: the task whose batch is handed out, its worker."""

    last = worker = -1

    def pop(self, key: Any, *default: Any) -> Any:
        self._note(key)
        return super().pop(key, *default)

    def __delitem__(self, key: Any) -> None:
        self._note(key)
        super().__delitem__(key)

    def _note(self, key: Any) -> None:
        task = self.get(key)  # (worker,) or (worker, batch)
        self.last, self.worker = key, task[0] if isinstance(task, tuple) else -1


def install(emit: Emit) -> Undo:
    agent = emit.agent
    loaders = agent.torch.utils.data.dataloader
    base, multi = loaders._BaseDataLoaderIter, loaders._MultiProcessingDataLoaderIter
    numbers, roots = Numbers(), agent.datasets
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
            agent.enter("data")
            started = now_ns()
            try:
                data = original(iterator)
            except BaseException as e:
                emit.guarded(took, iterator, None, started, now_ns(), type(e).__name__)
                if isinstance(e, StopIteration):
                    agent.enter("other")
                raise
            emit.guarded(took, iterator, data, started, now_ns(), "")
            agent.enter("other")
            return data

        return __next__

    def took(iterator: Any, data: Any, started: int, ended: int, end: str) -> None:
        waiting = following.fetching
        agent.add_phase("data", ended - started)
        index = indices(iterator).take(iterator) if end != "StopIteration" else None
        if isinstance(waiting, Discarded):
            return
        agent.batch_fetched()
        this = pass_of(iterator, waiting, end)
        ids: list[int] = []
        digests: list[int] = []
        size = -1
        if end != "StopIteration":  # of a batch whose making raised an exception: the ids that it was to hold
            listed = index if isinstance(index, (list, tuple)) else [index]
            known = not (this.iterable or index is None or len(listed) > IDS_LIMIT)
            ids = root_ids(this.chain, list(listed)) if known else []
        if end == "":
            size = len(ids) or batch_size(data)
            digests = digests_of(data, size, bool(ids)) if waiting is None or not waiting.ranks else []
        fetched = Fetched(this, size, ids, digests, ended - started, agent.scan_batch(data) if end == "" else [], end,
                          getattr(getattr(iterator, "_task_info", None), "worker", -1))  # fmt: skip
        if waiting is None:
            hand(fetched)
        elif end == "":
            waiting.add(fetched)
        else:
            waiting.ends.append(fetched)
        agent.batch_taken(iterator, this.loader, this.number, end)

    def digests_of(data: Any, size: int, has_ids: bool) -> list[int]:
        # where there are ids, the content is looked at in watched steps only: it proves that two ranks' sets are one
        return sample_digests(data, size) if 0 < size <= IDS_LIMIT and (agent.watching or not has_ids) else []

    def hand(fetched: Fetched) -> None:
        """Training gets the batch now: it belongs to the step in progress."""
        emit(BATCH, (fetched.of.loader, fetched.of.number, fetched.of.index, fetched.size, fetched.worker, fetched.wait_ns,
                     agent.backwards_total, agent.torch.is_grad_enabled()),
             (fetched.ids, fetched.digests, fetched.end))  # fmt: skip
        agent.batch_handed(fetched.scans, Place(fetched.of.loader, fetched.of.number, fetched.of.index))
        fetched.of.index += 1
        again, fetched.of.backwards = fetched.of.backwards == agent.backwards_total, agent.backwards_total
        agent.fire("batch_given", fetched.of.loader, fetched.of.number, again, fetched.end)

    def hand_group(group: list[Fetched], data: Any, waiting: Waiting) -> None:
        if waiting.ranks:
            emit.guarded(hand_share, group, data, waiting)
            return
        for fetched in group:
            emit.guarded(hand, fetched)

    def hand_share(group: list[Fetched], data: Any, waiting: Waiting) -> None:
        """This rank's part of what rank 0 read for all: rank 0 alone knows the ids, which are those of all parts."""
        ids = [i for fetched in group for i in fetched.ids]
        size = batch_size(data)
        agent.batch_fetched()
        hand(Fetched(pass_of(waiting.iterator, waiting, ""), size, ids, digests_of(data, size, bool(ids)),
                     sum(fetched.wait_ns for fetched in group), agent.scan_batch(data), ""))  # fmt: skip

    def end_passes(waiting: Waiting) -> None:
        if waiting.ranks and waiting.iterator is not None:
            this = pass_of(waiting.iterator, waiting, "StopIteration")
            waiting.ends[:] = [Fetched(this, -1, [], [], 0, [], "StopIteration")]
        for fetched in waiting.ends:
            emit.guarded(hand, fetched)

    def pass_of(iterator: Any, waiting: Waiting | None, end: str) -> Pass:
        this: Pass | None = iterator.__dict__.get("_tdbg_pass")
        if this is None or this.sampler_iter is not iterator._sampler_iter:
            this = iterator.__dict__["_tdbg_pass"] = begin(iterator, waiting, end)
        return this

    def begin(iterator: Any, waiting: Waiting | None, end: str) -> Pass:
        sampler = iterator._index_sampler
        number = numbers.of(sampler)
        passes[number] = passes.get(number, -1) + 1
        chain = levels(iterator._dataset)
        iterable = iterator._dataset_kind == loaders._DatasetKind.Iterable
        samplers = sampler_chain(sampler)
        skipped = next((s.skip_batches for s in samplers if isinstance(getattr(s, "skip_batches", None), int)), 0)
        skipped += max(0, getattr(iterator, "_num_yielded", 0) - (end == ""))
        if waiting is not None:
            skipped += waiting.skip
        describe(iterator, number, chain, samplers, skipped, waiting.ranks if waiting is not None else 0)
        return Pass(number, passes[number], chain, iterable, iterator._sampler_iter)

    def describe(iterator: Any, number: int, chain: list[Level], samplers: list[Any], skipped: int, ranks: int) -> None:
        iterable = iterator._dataset_kind == loaders._DatasetKind.Iterable
        inner = samplers[-1]
        kind = type(inner).__name__
        size, drop_last = batching(samplers)
        lone = (
            len(samplers) == 1 and iterator._auto_collation
        )  # a batch sampler of the user's: its length is in batches
        workers = getattr(iterator, "_num_workers", 0)
        processes = getattr(iterator, "_workers", None) or [None]
        start = getattr(processes[0], "_start_method", None) or agent.torch.multiprocessing.get_start_method()
        shape = [level.described() for level in chain]
        batches = -1 if iterable else length(samplers[0])
        if ranks and batches >= 0:
            batches = batches // ranks if drop_last else -(-batches // ranks)
        emit(LOADER, (
            number, passes[number], workers, size, drop_last, agent.samplers.find(inner), shuffles(inner),
            bool(getattr(inner, "replacement", False)) or kind in REPLACEMENT, batches,
            -1 if iterable or lone else length(inner), sharers(samplers), ranks, skipped, iterable,
            roots.of(chain[0].dataset), -1 if iterable else chain[0].length,
            signed(iterator._base_seed) if workers else 0, getattr(iterator, "_worker_init_fn", None) is not None,
        ), (start if workers else "", kind, chain[0].name, dataset_digest(chain[0].dataset), json.dumps(shape)))  # fmt: skip

    def shuffles(sampler: Any) -> int:
        samplers = agent.torch.utils.data
        known = True if isinstance(sampler, samplers.RandomSampler) else None
        known = False if isinstance(sampler, samplers.SequentialSampler) else known
        shuffle = getattr(sampler, "shuffle", known)
        return int(shuffle) if isinstance(shuffle, bool) else -1

    following = Following(lambda: agent.live, agent.switch_off(emit.name), hand_group, end_passes, reset)
    return undo_all([replace(base, "_next_index", next_index), replace(base, "__next__", fetch),
                     replace(multi, "_reset", reset), following.undo])  # fmt: skip


def sampler_chain(index_sampler: Any) -> list[Any]:
    """Samplers from what the loader asks to the innermost: batch samplers that wrap others, then their sampler."""
    chain = [index_sampler]
    while len(chain) < 8:
        below = getattr(chain[-1], "batch_sampler", None)
        below = getattr(chain[-1], "sampler", None) if below is None else below
        if not hasattr(below, "__iter__"):
            break
        chain.append(below)
    return chain


def batching(samplers: list[Any]) -> tuple[int, bool]:
    """(declared batch size of one rank, -1 for none; whether a batch sampler drops what fills no batch)."""
    size, drop_last = -1, False
    for sampler in samplers[:-1] or samplers:
        declared = getattr(sampler, "batch_size", None)
        if size < 0 and isinstance(declared, int):
            split = getattr(sampler, "split_batches", False) is True
            size = declared // max(1, sharers(samplers)) if split else declared
        drop_last = drop_last or getattr(sampler, "drop_last", False) is True
    return size, drop_last


def sharers(samplers: list[Any]) -> int:
    """Ranks that the batches of one sampler are dealt to, as by accelerate's BatchSamplerShard; 1 for an ordinary one."""
    parts = 1
    for sampler in samplers:
        dealt = getattr(sampler, "num_processes", 1)
        if hasattr(sampler, "batch_sampler") and isinstance(dealt, int):
            parts *= max(1, dealt)
    return parts
