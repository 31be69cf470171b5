"""What a data set is made of: its root, the choices made of it, digests of both. No file of the user's is opened."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy

from . import frameworks
from .leaves import is_tensor

SAMPLED_BYTES = 1 << 16  # of each large attribute of a data set
ATTRIBUTES = 64
DEEPEST = 16  # choices upon choices; more is a cycle


class Level(NamedTuple):
    """One choice of samples: `indices` are positions in the level below, None at the root."""

    dataset: Any
    indices: Any
    length: int

    @property
    def name(self) -> str:
        return type(self.dataset).__name__

    @property
    def composed(self) -> bool:
        """Several choices in one, as Hugging Face data sets keep them: held-out part and share look alike."""
        return hasattr(self.indices, "take") and hasattr(self.indices, "chunks")

    def below(self, positions: list[Any]) -> list[Any]:
        """Positions in the level below of positions in this one."""
        if self.composed:  # an Arrow column: one call, not n
            taken: list[Any] = self.indices.take(positions).to_pylist()
            return taken
        return [self.indices[i] for i in positions]

    def described(self) -> list[Any]:
        """Class, length, digest of the indices; a fourth part where choices are composed."""
        return [self.name, self.length, self.digest(), *(["composed"] if self.composed else [])]

    def digest(self) -> str:
        """Digest of the indices, all of them; empty for a root."""
        if self.indices is None:
            return ""
        array = self.indices.to_numpy() if self.composed else self.indices
        return f"{zlib.crc32(numpy.asarray(array, dtype=numpy.int64).tobytes()):08x}"


def levels(dataset: Any) -> list[Level]:
    """The choices from the root to `dataset`: Subset chains, and the index mapping of Hugging Face data sets."""
    chain: list[Level] = []
    while hasattr(dataset, "indices") and hasattr(dataset, "dataset") and len(chain) < DEEPEST:
        chain.insert(0, Level(dataset, dataset.indices, length(dataset)))
        dataset = dataset.dataset
    table = frameworks.table_of(dataset)
    if table is None:
        return [Level(dataset, None, length(dataset)), *chain]
    mapping = frameworks.mapping_of(dataset)
    if mapping is not None:
        chain.insert(0, Level(dataset, mapping, length(dataset)))
    return [Level(dataset, None, int(table.num_rows)), *chain]


def length(sized: Any) -> int:
    """len() of a user's object; -1 when it has none or computing it fails."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError, AttributeError, ValueError, OverflowError):
        return -1


def root_ids(chain: list[Level], positions: list[Any]) -> list[int]:
    """Positions in the root data set of positions in the last of the chain; empty when they are no integers."""
    for level in reversed(chain[1:]):
        positions = level.below(positions)
    try:
        return [int(i) for i in positions]
    except (TypeError, ValueError):
        return []


def dataset_digest(root: Any) -> str:
    """Digest of a data set's own attributes: arrays and tensors sampled, lists by length and ends, plain values whole.

    Equal on two ranks: they hold the same data set. Different: nothing is known, since a rank may keep its number in
    it. Empty when it has no attribute to look at. Under 1 ms for ordinary sets.
    """
    table = frameworks.table_of(root)
    if table is not None:
        return f"{_crc('table', frameworks.parts_of_table(table), 0):08x}"
    attributes = getattr(root, "__dict__", None)
    if isinstance(root, (list, tuple)):
        attributes = {"": root}
    if not isinstance(attributes, dict) or not attributes:
        return ""
    crc = 0
    for name in sorted(map(str, attributes))[:ATTRIBUTES]:
        crc = _crc(name, _parts(attributes.get(name), 3), crc)
    return f"{crc:08x}"


def _crc(name: str, parts: Iterator[bytes], crc: int) -> int:
    for part in parts:
        crc = zlib.crc32(part, zlib.crc32(name.encode(), crc))
    return crc


def _parts(value: Any, depth: int) -> Iterator[bytes]:
    kind = type(value).__name__
    if is_tensor(value):
        yield f"tensor {tuple(value.shape)} {value.dtype}".encode()
        if value.device.type == "cpu" and not value.is_sparse and value.numel():
            flat = value.detach().reshape(-1)
            stride = max(1, flat.numel() * flat.element_size() // SAMPLED_BYTES)
            yield str(flat[::stride].double().sum().item()).encode() if not flat.is_complex() else b""
    elif isinstance(value, numpy.ndarray):
        yield f"array {value.shape} {value.dtype}".encode()
        if value.size and not value.dtype.hasobject:
            flat = value.reshape(-1)
            yield numpy.ascontiguousarray(flat[:: max(1, value.nbytes // SAMPLED_BYTES)]).tobytes()
    elif isinstance(value, (bool, int, float, str, bytes, type(None))):
        yield repr(value)[:4096].encode()
    elif isinstance(value, (list, tuple)) and depth:
        yield f"{kind} {len(value)}".encode()
        for item in (*value[:4], *value[-4:]):
            yield from _parts(item, depth - 1)
    elif isinstance(value, range):
        yield repr(value).encode()
    else:
        yield kind.encode()  # anything else counts by its class only: caches and handles change or cost too much
