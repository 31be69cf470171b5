"""Digests of random streams: the global ones of torch, numpy and python, and generators that user objects own.

A digest changes with every number drawn. An origin changes when the stream is seeded anew or replaced, so that one
that stayed says: the same sequence goes on. It is UNKNOWN_ORIGIN where seeding can't be seen.
"""

from __future__ import annotations

import ctypes
import random
import sys
import zlib
from collections import Counter
from typing import Any, NamedTuple

UNKNOWN_ORIGIN = -1
OBJECTS_LIMIT = 256  # looked at in search of generators
ITEMS_LIMIT = 32  # of each list: a Compose has a handful, a list of samples has millions
DEPTH = 3  # data set -> transform -> its parts -> their generator
MT19937_BYTES = 625 * 4  # 624 words of state and the position, as numpy lays them out

seedings: Counter[str] = (
    Counter()
)  # calls of numpy.random.seed and random.seed in this process, counted by the rng probe
_address: list[Any] = [None, 0]


class Stream(NamedTuple):
    """One stream at one moment."""

    name: str
    digest: int
    origin: int


def torch_digest(torch: Any) -> int:
    """Digest of torch's CPU generator: 2 us."""
    return zlib.crc32(torch.get_rng_state().numpy())


def numpy_digest() -> int:
    """Digest of numpy's global stream, 0 when it was never used; from its memory, as get_state() takes 24 us."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if not hasattr(numpy_random, "get_state"):
        return 0
    generator = numpy_random.get_bit_generator() if hasattr(numpy_random, "get_bit_generator") else None
    if type(generator).__name__ == "MT19937":
        if generator is not None and generator is not _address[0]:
            _address[:] = [generator, generator.ctypes.state_address]
        return zlib.crc32(ctypes.string_at(_address[1], MT19937_BYTES))
    return zlib.crc32(repr(numpy_random.get_state(legacy=False)).encode())


def python_digest() -> int:
    """Digest of random's global stream. Integers hash alike in every process."""
    return hash(random.getstate())


def global_streams(torch: Any, seedings_seen: bool) -> list[Stream]:
    """The three streams that belong to nobody. `seedings_seen`: calls of the seeding functions are counted here."""
    origins = {name: seedings[name] if seedings_seen else UNKNOWN_ORIGIN for name in ("numpy", "random")}
    return [
        Stream("torch", torch_digest(torch), torch.default_generator.initial_seed() & 0x7FFFFFFFFFFFFFFF),
        Stream("numpy", numpy_digest(), origins["numpy"]),
        Stream("random", python_digest(), origins["random"]),
    ]


def owned_generators(owner: Any, name: str, found: dict[str, Any], depth: int = DEPTH) -> dict[str, Any]:
    """Generators in an object's attributes, in theirs and in lists, by dotted name. Runs no code of the user's."""
    seen: set[int] = set()
    waiting = [(name, owner, depth)]
    while waiting and len(seen) < OBJECTS_LIMIT:
        path, value, left = waiting.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_generator(value):
            found.setdefault(path, value)
        elif left:
            waiting += [(path + key, item, left - step) for key, item, step in _inside(value) if _may_hold(item)]
    return found


def module_generators(module: str, found: dict[str, Any]) -> dict[str, Any]:
    """Generators that a module keeps in its own names."""
    names = getattr(sys.modules.get(module), "__dict__", {})
    for name, value in list(names.items()):
        if is_generator(value):
            found.setdefault(name, value)
    return found


def _inside(value: Any) -> list[tuple[str, Any, int]]:
    """(how it is written, part, levels it is deeper) of an object's attributes or a small container's items."""
    if type(value) in (list, tuple, dict):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return (
            [(f"[{key}]".replace(",", ";"), item, 0) for key, item in list(items)] if len(value) <= ITEMS_LIMIT else []
        )
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return []
    return [(f".{k}", v, 1) for k, v in list(attributes.items())[:OBJECTS_LIMIT]]


def _may_hold(value: Any) -> bool:
    """Whether a generator can be in there: no plain values, arrays, modules, classes and functions."""
    kind = type(value)
    return kind in (list, tuple, dict) or (
        kind.__module__ not in ("builtins", "types") and not hasattr(kind, "__array__")
    )


def is_generator(value: Any) -> bool:
    """A random generator that user code can own: torch.Generator, numpy's Generator and RandomState, random.Random."""
    kind = type(value)
    if kind.__name__ in ("Generator", "RandomState"):
        return kind.__module__.partition(".")[0] in ("torch", "numpy")
    return isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)


def owned_stream(name: str, generator: Any) -> Stream:
    """Digest and origin of one generator that user code owns."""
    if isinstance(generator, random.Random):
        return Stream(name, hash(generator.getstate()), UNKNOWN_ORIGIN)
    if hasattr(generator, "initial_seed"):
        state = generator.get_state()
        return Stream(name, zlib.crc32(state.cpu().numpy()), generator.initial_seed() & 0x7FFFFFFFFFFFFFFF)
    bits = getattr(generator, "bit_generator", None)
    state = bits.state if bits is not None else generator.get_state(legacy=False)
    # PCG64 keeps its increment, Philox its key for life: both come from the seed. Others can be seeded unseen.
    inner = state.get("state")
    lasting = inner.get("inc", inner.get("key")) if state.get("bit_generator") != "MT19937" and inner else None
    origin = UNKNOWN_ORIGIN if lasting is None else zlib.crc32(_flat(lasting))
    return Stream(name, zlib.crc32(_flat(state)), origin)


def _flat(value: Any) -> bytes:
    """Bytes of a nested state: arrays whole, since their repr is cut."""
    if isinstance(value, dict):
        return b"".join(str(k).encode() + _flat(v) for k, v in sorted(value.items(), key=lambda kv: str(kv[0])))
    raw = getattr(value, "tobytes", None)
    return raw() if raw is not None else repr(value).encode()
