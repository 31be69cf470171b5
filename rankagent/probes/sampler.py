"""Configuration and use of every DistributedSampler.

Writes    sampler
Costs     one row per construction, set_epoch and iteration
Blind to  samplers of other classes (their order is seen through the batches)
"""

from __future__ import annotations

from typing import Any

from ..agent import Emit
from ..dataset import length
from ..patch import Undo, replace, undo_all
from ..tables import Column, Table

TABLE = Table("sampler", (
    Column("sampler", "int32", "", "sampler of this process, in the order of construction"),
    Column("class_name", "text", "", "class"),
    Column("event", "text", "", "init, set_epoch or iter"),
    Column("num_replicas", "int32", "", "replicas it splits for"),
    Column("replica", "int32", "", "replica it serves"),
    Column("seed", "int64", "", "seed"),
    Column("epoch", "int64", "", "epoch in force"),
    Column("shuffle", "bool", "", "shuffling asked for"),
    Column("drop_last", "bool", "", "tail dropped instead of padded"),
    Column("length", "int64", "", "samples an epoch for this replica; -1 unknown"),
    Column("dataset_length", "int64", "", "length of its data set; -1 unknown"),
), "one row per event")  # fmt: skip


def install(emit: Emit) -> Undo:
    distributed = emit.agent.torch.utils.data.distributed.DistributedSampler
    numbers = emit.agent.samplers

    def note(sampler: Any, event: str) -> None:
        emit(TABLE, (numbers.of(sampler), sampler.num_replicas, sampler.rank, int(sampler.seed), int(sampler.epoch),
                     bool(sampler.shuffle), bool(sampler.drop_last), sampler.num_samples, length(sampler.dataset)),
             (type(sampler).__name__, event))  # fmt: skip

    def after(event: str) -> Any:
        def make(original: Any) -> Any:
            def method(sampler: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(sampler, *args, **kwargs)
                emit.guarded(note, sampler, event)
                return result

            return method

        return make

    return undo_all([replace(distributed, "__init__", after("init")), replace(distributed, "set_epoch", after("set_epoch")),
                     replace(distributed, "__iter__", after("iter"))])  # fmt: skip
