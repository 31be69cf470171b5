"""The loss of every backward, summed over the step's micro-batches and freed of the loss scale.

Writes    loss
Costs     one scalar read per backward on CPU; on CUDA a copy that is read a step later
Blind to  losses that reach torch.autograd.grad only; roots that are not scalar
"""

from __future__ import annotations

from ..tables import Column, Table

TABLE = Table("loss", (
    Column("backwards", "int32", "", "backward calls with a scalar root in this step"),
    Column("total", "float64", "", "sum of their losses, loss scale removed"),
    Column("last", "float64", "", "the last of them"),
    Column("nonfinite", "int32", "", "how many of them are NaN or Inf"),
    Column("first_nonfinite", "int32", "", "micro-step (from 0) of the first that is; -1 for none"),
    Column("scale", "float64", "", "loss scale in force; 1 without a scaler"),
), "one row per step with a backward")  # fmt: skip
