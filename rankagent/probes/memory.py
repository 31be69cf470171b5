"""Memory of the rank's own process at the end of each step.

Writes    memory
Costs     one read of /proc/self/statm (1 to 10 us) a step, getrlimit
Blind to  loader workers (the node's launcher samples those)
"""

from __future__ import annotations

from ..tables import Column, Table

TABLE = Table("memory", (
    Column("rss_bytes", "int64", "B", "resident memory"),
    Column("vms_bytes", "int64", "B", "address space"),
    Column("limit_as_bytes", "int64", "B", "RLIMIT_AS; -1 for none"),
    Column("cuda_allocated_bytes", "int64", "B", "by tensors; -1 without CUDA"),
    Column("cuda_reserved_bytes", "int64", "B", "by the caching allocator; -1 without CUDA"),
), "one row per step")  # fmt: skip
