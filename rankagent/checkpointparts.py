"""What a saved object holds: weights, optimizer, scheduler, scaler, random streams, counters. Told by its structure.

Reads keys, types and sizes only, never a tensor's values, and stops after a bounded number of entries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

DEPTH = 4  # Lightning keeps a sampler's state that deep; what is deeper is part of something recognised before
ENTRIES = 2000  # looked at in one object: 1 ms
TENSORS = 4096  # remembered of one object, to tell where weights came from
COUNTER = re.compile(r"(^|_)(epochs?|steps?|iters?|iterations?|updates?)(_|$)", re.IGNORECASE)
RANDOM = re.compile(r"(^|_)(rng|random)", re.IGNORECASE)
DATA = re.compile(r"sampler|data_?loader", re.IGNORECASE)
PYTHON_WORDS = 625  # numbers in the state of python's and numpy's Mersenne Twister, position included
TORCH_BYTES = 5056  # size of the state of torch's CPU generator


@dataclass
class Parts:
    """`held` goes into the table as JSON; `tensors` are the weights themselves, not to be kept alive."""

    held: dict[str, Any] = field(default_factory=dict)
    tensors: list[Any] = field(default_factory=list)
    left: int = ENTRIES

    def most(self, part: str, value: float) -> None:
        self.held[part] = max(self.held.get(part, value), value)


def parts_of(value: Any) -> Parts:
    """The parts of an object that was saved or loaded; empty for what is no checkpoint."""
    parts = Parts()
    _look(value, "", 0, parts)
    return parts


def _look(value: Any, key: str, depth: int, parts: Parts) -> None:
    parts.left -= 1
    if parts.left < 0:
        return
    if isinstance(value, Mapping):
        _look_into(value, key, depth, parts)
    elif hasattr(value, "state_dict") and hasattr(value, "parameters"):
        parts.most("model", sum(1 for _ in value.parameters()))  # a module that was pickled as it is
    elif is_random_state(value) or (key and RANDOM.search(key) and not isinstance(value, (bool, int, float, str))):
        parts.held["rng"] = True
    elif isinstance(value, int) and not isinstance(value, bool):
        if COUNTER.search(key):
            parts.held.setdefault("counters", {})[key] = value
    elif isinstance(value, (list, tuple)) and depth < DEPTH:
        for item in value[:8]:
            _look(item, key, depth + 1, parts)


def _look_into(value: Mapping[Any, Any], key: str, depth: int, parts: Parts) -> None:
    if "state" in value and "param_groups" in value:
        _optimizer(value, parts)
    elif "last_epoch" in value and len({"_step_count", "base_lrs", "best", "_schedulers"} & set(value)) > 0:
        position = value["last_epoch"]
        parts.most("scheduler", position if isinstance(position, (int, float)) else -1)
    elif "scale" in value and "growth_factor" in value:
        parts.held["scaler"] = True
    elif (tensors := list(_weights(value))) and not RANDOM.search(key):
        parts.most("model", len(tensors))
        parts.tensors += tensors[: TENSORS - len(parts.tensors)]
    else:
        if DATA.search(key):
            parts.held["data"] = True
        if depth < DEPTH:
            for name, item in value.items():
                _look(item, str(name), depth + 1, parts)


def _optimizer(value: Mapping[Any, Any], parts: Parts) -> None:
    state, groups = value["state"], value["param_groups"]
    parts.most("optimizer", len(state) if isinstance(state, Mapping) else 0)
    first = groups[0] if isinstance(groups, (list, tuple)) and groups else None
    lr = first.get("lr") if isinstance(first, Mapping) else None
    if isinstance(lr, (int, float)):
        parts.held.setdefault("lr", lr)


def _weights(value: Mapping[Any, Any]) -> Iterator[Any]:
    """The tensors of a mapping that holds names and tensors; nothing for any other one."""
    found = []
    for name, item in value.items():
        if hasattr(item, "dim") and hasattr(item, "is_cuda"):
            found.append(item)
        elif not str(name).endswith(("_extra_state", "_metadata")):
            return
    if not all(is_random_state(t) for t in found):
        yield from found


def is_random_state(value: Any) -> bool:
    """The state of a generator of torch, python or numpy."""
    if hasattr(value, "dim"):  # not is_cuda, which a typed storage answers with a warning
        return str(value.dtype) == "torch.uint8" and value.dim() == 1 and value.numel() == TORCH_BYTES
    if isinstance(value, (tuple, list)) and len(value) >= 3:
        return value[0] == "MT19937" if isinstance(value[0], str) else _is_python_state(value)
    return False


def _is_python_state(value: Any) -> bool:
    return isinstance(value[1], (tuple, list)) and len(value[1]) == PYTHON_WORDS
