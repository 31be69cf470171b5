"""Settings of every optimizer and every gradient clipping, written when they change.

Writes    optim, clip
Costs     one dictionary read per parameter group and step; a row only on a change
Blind to  settings kept outside param_groups
"""

from __future__ import annotations

from ..tables import Column, Table

OPTIM = Table("optim", (
    Column("optimizer", "int32", "", "optimizer of this process, in the order of first steps"),
    Column("group", "int32", "", "parameter group"),
    Column("class_name", "text", "", "class of the optimizer"),
    Column("lr", "float64", "", "learning rate"),
    Column("settings", "text", "", "JSON of all other scalar settings of the group, keys sorted"),
    Column("tensors", "int32", "", "parameters in the group"),
), "in force from this step on until the next row of the same optimizer and group")  # fmt: skip

CLIP = Table("clip", (
    Column("max_norm", "float64", "", "threshold; for clipping by value, the value"),
    Column("norm_type", "float64", "", "p of the norm; 0 for clipping by value"),
    Column("norm", "float64", "", "total norm before clipping as the call returned it; NaN when it is not known on the host"),
    Column("calls", "int32", "", "calls in this step"),
), "one row per step with a clipping call (the last call's values)")  # fmt: skip

TABLES = (OPTIM, CLIP)
