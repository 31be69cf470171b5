"""What this process runs on and with: versions, argv, code, flags, environment variables from an allow-list.

Writes    identity
Costs     once after the first step (a few ms: it hashes the user's source files) and once at the end
Blind to  code that is not a file (exec, notebooks), compiled extensions' build options
"""

from __future__ import annotations

from ..tables import Column, Table

TABLE = Table("identity", (
    Column("key", "text", "", "dotted name, e.g. version.torch, env.OMP_NUM_THREADS, code.MODULE, flag.deterministic"),
    Column("value", "text", "", "value, or a digest where the value is code"),
    Column("rule", "text", "", "must (ranks may not differ), should (a difference is worth a note), may (free)"),
), "one row per key; a later row replaces an earlier one of the same key")  # fmt: skip
