"""How many items data sets keep in this process: a cache of samples that fills looks like a leak from outside.

Lengths of containers only; nothing of the user's is called, so a class that counts its own accesses notices nothing.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

CONTAINERS = (
    dict,
    list,
    set,
    OrderedDict,
    defaultdict,
    deque,
)  # exactly these: a subclass may have a __len__ of its own
ATTRIBUTES = 64
LRU = type(functools.lru_cache(maxsize=1)(len))


def kept_items(datasets: Iterable[Any]) -> int:
    """Items in the containers that data sets hold, two levels of objects deep, and in the caches of their methods and
    modules. Of a module's own containers only those that are called caches: any other may be the leak itself."""
    known = list(datasets)
    modules = {type(d).__module__: sys.modules.get(type(d).__module__) for d in known}
    return sum(_items(d, 2) for d in known) + sum(_module_items(m) for m in modules.values())


def _items(owner: Any, depth: int) -> int:
    held = getattr(owner, "__dict__", None)
    if type(held) is not dict:
        return 0
    count: int = sum(f.cache_info().currsize for f in _cached_methods(type(owner)))
    for value in list(held.values())[:ATTRIBUTES]:
        kind = type(value)
        if kind in CONTAINERS:
            count += len(value)
        elif kind is LRU:
            count += value.cache_info().currsize
        elif depth > 1 and kind.__module__ not in ("builtins", "numpy", "torch"):
            count += _items(value, depth - 1)
    return count


def _module_items(module: Any) -> int:
    """torch's own data sets cache nothing, and its modules are large."""
    if module is None or module.__name__.partition(".")[0] == "torch":
        return 0
    count = 0
    for name, value in list(vars(module).items()):
        kind = type(value)
        if kind is LRU:
            count += value.cache_info().currsize
        elif kind in CONTAINERS and "cache" in name.lower():
            count += len(value)
    return count


def _cached_methods(kind: type) -> Iterator[Any]:
    return (f for f in vars(kind).values() if type(f) is LRU)
