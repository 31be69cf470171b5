"""Seeds and digests of the random streams of torch, numpy and python.

Writes    rng, seed
Costs     50 us at watched steps; one row per seeding call
Blind to  generators that user code makes for itself; seeding through C
"""

from __future__ import annotations

from ..tables import Column, Table

RNG = Table("rng", (
    Column("torch_digest", "int64", "", "digest of torch's CPU generator state"),
    Column("numpy_digest", "int64", "", "digest of numpy's global generator state; 0 when numpy.random is not loaded"),
    Column("python_digest", "int64", "", "digest of random's state; 0 when not loaded"),
    Column("torch_seed", "int64", "", "initial_seed of torch's CPU generator (wrapped to 64 bits, signed)"),
    Column("torch_seeded", "bool", "", "somebody seeded it: the seed is not the library's default"),
    Column("numpy_seeded", "bool", "", "a seeding call was seen"),
    Column("python_seeded", "bool", "", "a seeding call was seen"),
    Column("numpy_seed", "text", "", "last seed given to numpy.random.seed; empty for none"),
    Column("python_seed", "text", "", "last seed given to random.seed; empty for none"),
    Column("cuda_seed", "int64", "", "initial_seed of the current CUDA device's generator; 0 without CUDA"),
), "one row at the end of each watched step, step 1 included; one with step 0 before the first update")  # fmt: skip

SEED = Table("seed", (
    Column("library", "text", "", "torch, torch.cuda, numpy or random"),
    Column("call", "text", "", "function called"),
    Column("seed", "text", "", "seed given; empty when drawn from the system"),
    Column("where", "text", "", "file:line of the caller outside torch, numpy and this agent"),
), "one row per seeding call in the rank's main process, at most 1,000 an attempt")  # fmt: skip

TABLES = (RNG, SEED)
