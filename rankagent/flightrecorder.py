"""torch's flight recorder, read by our own code: the last collectives of each group, those that C++ issued included.

The ring is on by default in torch 2.13 for gloo and NCCL (2000 entries); where a version has none, or the environment
switched it off, there is nothing to read. A dump without stacks takes 0.3 ms for 100 entries and up to 75 ms for a full
ring, so it is read when a job fails or hangs, never per step.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from .signatures import listed

MOST = 256  # entries kept, the newest ones

# What of an entry its ranks must have alike, as in `signatures`: the input unless said otherwise.
_OUTPUT = ("all_gather", "_all_gather_base", "all_gather_single", "scatter", "ALLGATHER")
_TYPE_ONLY = ("all_to_all", "alltoall", "ALLTOALL")
_ONE_SIDED = ("gather", "scatter")
_POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True)
class Entry:
    """One collective that torch recorded. `retired`: the recorder knows that it is over."""

    group: str
    position: int
    op: str
    signature: str
    created_ns: int
    retired: bool


def entries(dump: bytes) -> list[Entry]:
    """The newest collectives in a dump of `_dump_fr_trace`, oldest first; entries of a form not known are left out."""
    found = []
    for raw in pickle.loads(dump).get("entries", [])[-MOST:]:
        entry = _entry(raw)
        if entry is not None:
            found.append(entry)
    return found


def _entry(raw: Mapping[str, Any]) -> Entry | None:
    backend, _, op = str(raw.get("profiling_name", "")).partition(":")
    group, position = raw.get("process_group"), raw.get("collective_seq_id")
    if not op or raw.get("is_p2p") or op.startswith(_POINT_TO_POINT) or not group or not isinstance(position, int):
        return None
    signature = _signature(backend, op, raw)
    return Entry(str(group[0]), position, op, signature, int(raw["time_created_ns"]), bool(raw.get("retired")))


def _signature(backend: str, op: str, raw: Mapping[str, Any]) -> str:
    side = "output" if op.startswith(_OUTPUT) else "input"
    shapes: Sequence[Sequence[int]] = raw.get(f"{side}_sizes") or ()
    dtypes = [str(d).lower() for d in raw.get(f"{side}_dtypes") or ()]
    if op.startswith(_TYPE_ONLY) or (backend != "gloo" and op.startswith(_ONE_SIDED)):
        return " ".join(sorted(set(dtypes)))
    if len(dtypes) != len(shapes):
        return listed([f"[{prod(s)}]" for s in shapes])
    return listed([f"{d}[{prod(s)}]" for d, s in zip(dtypes, shapes, strict=True)])
