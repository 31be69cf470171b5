"""The tensors of a batch or of a call's arguments, wherever they sit in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

DEPTH = 4  # levels of nesting
WIDTH = 64  # a longer list holds samples, not parts of a batch


def leaves(data: Any, path: str = "", depth: int = DEPTH) -> Iterator[tuple[str, Any]]:
    """(path, tensor) of the tensors in nested tuples, lists, mappings and dataclasses, in order.

    Paths read like Python: "[0]['price']", ".labels".
    """
    if is_tensor(data):
        yield path, data
    elif depth and isinstance(data, Mapping):
        for key, value in data.items():
            yield from leaves(value, f"{path}[{key!r}]", depth - 1)
    elif depth and isinstance(data, (list, tuple)) and len(data) <= WIDTH:
        for at, value in enumerate(data):
            yield from leaves(value, f"{path}[{at}]", depth - 1)
    elif depth and is_dataclass(data) and not isinstance(data, type):
        for part in fields(data):
            yield from leaves(getattr(data, part.name, None), f"{path}.{part.name}", depth - 1)


def is_tensor(value: Any) -> bool:
    """Whether this is a torch tensor, without importing torch."""
    return hasattr(value, "element_size") and hasattr(value, "storage_offset")
