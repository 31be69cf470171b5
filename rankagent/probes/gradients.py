"""Norms of every gradient before the reduction spreads it, norms and fingerprints of what the optimizer gets.

Writes    grad
Costs     one fused norm over all gradients per pass and stage, one exact fingerprint per tensor at the reduced stage
Blind to  local gradients under gradient_as_bucket_view=True and sharded models (then `valid` is false)
"""

from __future__ import annotations

from ..tables import Column, Table

TABLE = Table("grad", (
    Column("stage", "text", "", "local: this rank's own, before any reduction; reduced: as the optimizer gets it"),
    Column("generation", "int32", "", "tensor catalogue that the tensors refer to"),
    Column("tensors", "int64[]", "", "catalogue index per entry; empty: all from 0 on"),
    Column("l2", "float64[]", "", "L2 norm per tensor, loss scale removed; -1 no gradient, -2 not measured"),
    Column("digest", "int64[]", "", "exact fingerprint per tensor of the reduced stage; empty at the local stage"),
    Column("nonfinite", "int64[]", "", "catalogue indices of tensors that hold NaN or Inf"),
    Column("valid", "bool", "", "local stage: the values are this rank's alone, before the reduction"),
    Column("scale", "float64", "", "loss scale that was divided out; 1 without a scaler"),
), "one row per watched step and stage (and micro-step when something is not finite)")  # fmt: skip
