"""NaN and Inf in what is handed to the model: batches of the loaders (labels too) and arguments of the root forward.

Writes    input
Costs     one sum per floating-point tensor up to 256 Ki elements, larger ones at watched steps only
Blind to  tensors on an accelerator between watched steps; inputs made inside the model
"""

from __future__ import annotations

from ..tables import Column, Table

TABLE = Table("input", (
    Column("source", "text", "", "batch: taken from a loader; forward: argument of the root module"),
    Column("tensors", "int32", "", "floating-point tensors looked at"),
    Column("nonfinite", "int64", "", "elements that are NaN or Inf in them"),
    Column("path", "text", "", "first tensor that holds some, e.g. [1] or ['price']; empty for none"),
    Column("dtype", "text", "", "its dtype"),
    Column("positions", "int64[]", "", "rows (first dimension) of that tensor that hold some, the first 32"),
    Column("rows", "int64", "", "first dimension of the first tensor argument; -1 without"),
    Column("skipped", "int32", "", "tensors not looked at for their size"),
), "one row per step and source")  # fmt: skip
