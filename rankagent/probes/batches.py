"""The very samples that each batch is made of: ids in the root data set, or digests of their content.

Writes    loader, batch
Costs     about 10 us a batch, and 20 to 40 us for sample digests of 64 samples
Blind to  data that reaches the model without a torch DataLoader
"""

from __future__ import annotations

from ..tables import Column, Table

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
    Column("digests", "int64[]", "", "32-bit content digest per sample, in order; empty when the batch holds no tensor to digest"),
    Column("wait_ns", "int64", "ns", "wall time that training waited for it"),
    Column("backwards", "int64", "", "outermost backward calls of this process before it was fetched"),
    Column("grad_enabled", "bool", "", "autograd was on when it was fetched"),
    Column("end", "text", "", "empty; StopIteration for the end of the pass (no samples); else the exception's class"),
), "one row per batch that training took from a loader, one more at the end of each whole pass")  # fmt: skip

TABLES = (LOADER, BATCH)
