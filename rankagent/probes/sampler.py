"""Configuration and use of every DistributedSampler.

Writes    sampler
Costs     one row per construction, set_epoch and iteration
Blind to  samplers of other classes (their order is seen through the batches)
"""

from __future__ import annotations

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
