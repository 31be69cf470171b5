"""Exact fingerprints and norms of parameters and buffers.

Writes    param, buffer, tensor
Costs     one pass over the elements per watched step (0.4 ms per million); full sweeps at the first step and the end
Blind to  shards (DTensor, flat parameters): they are catalogued, not compared
"""

from __future__ import annotations

from ..tables import Column, Table

PARAM = Table("param", (
    Column("stage", "text", "", "start: before the first update of an attempt; end: after the step's update; final: when the process ended"),
    Column("generation", "int32", "", "tensor catalogue that the tensors refer to"),
    Column("tensors", "int64[]", "", "catalogue index per entry; empty: all parameters in catalogue order"),
    Column("l2", "float64[]", "", "L2 norm per tensor; -2 not measured"),
    Column("digest", "int64[]", "", "exact fingerprint of the bits"),
    Column("nonfinite", "int64[]", "", "catalogue indices of tensors that hold NaN or Inf"),
), "one row per watched step")  # fmt: skip

BUFFER = Table("buffer", (
    Column("stage", "text", "", "sync: right after DDP's broadcast, before the forward changes them; end, final: as for param"),
    Column("generation", "int32", "", "tensor catalogue that the tensors refer to"),
    Column("tensors", "int64[]", "", "catalogue index per entry; empty: all buffers in catalogue order"),
    Column("digest", "int64[]", "", "exact fingerprint of the bits"),
), "one row per watched step; none when the model has no buffers")  # fmt: skip

TENSOR = Table("tensor", (
    Column("generation", "int32", "", "number of this catalogue, from 1; a new one when models or optimizers change"),
    Column("index", "int32", "", "position in it, parameters first"),
    Column("kind", "text", "", "param or buffer"),
    Column("name", "text", "", "name within its model, without wrappers' prefixes"),
    Column("model", "int32", "", "model of this process, in the order in which optimizers first held them"),
    Column("model_type", "text", "", "class of the model"),
    Column("shape", "text", "", "e.g. 4x16; scalar for none"),
    Column("dtype", "text", "", "e.g. float32"),
    Column("numel", "int64", "", "elements"),
    Column("trainable", "bool", "", "requires_grad"),
    Column("optimizer", "int32", "", "optimizer that holds it, -1 for none"),
    Column("sharing", "text", "", "ddp: DDP reduces it; late: in a DDP module, but added after wrapping; ignored: DDP was told to leave it; "
           "sharded: a part of it; plain: no wrapper; hook: reduced by a user's communication hook that may not average over all"),
    Column("peers", "text", "", "global ranks that hold a replica, comma separated; empty: not known"),
    Column("broadcast", "int32", "", "buffers: 1 DDP broadcasts them, 0 told not to, -1 no DDP"),
), "one row per tensor and catalogue")  # fmt: skip

TABLES = (PARAM, BUFFER, TENSOR)
