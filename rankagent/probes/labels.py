"""How many labels of each batch are supervised: those that are not the index which loss functions ignore.

Writes    labels
Costs     per batch one comparison until a supervised label is met, 8 to 40 us; more than 256 Ki labels are looked at in
          watched steps only; in these a count of all, 20 us, and 2.4 us per 1,024 labels
Blind to  batches that come on an accelerator; labels under a name of the program's own; masks kept beside the labels
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..agent import Emit, Place
from ..leaves import is_tensor, leaves
from ..lossgraph import ignored_indices
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("labels", (
    Column("loader", "int32", "", "see loader"),
    Column("iterator", "int32", "", "see loader"),
    Column("index", "int64", "", "position in this pass, from 0; see batch"),
    Column("elements", "int64", "", "labels in the batch"),
    Column("supervised", "int64", "", "of them, those that are not the ignored index"),
    Column("rows", "int64", "", "samples: first dimension of the labels"),
    Column("empty", "int64", "", "of them, those without a supervised label"),
    Column("ignored", "int64", "", "the index taken for ignored: what the loss of the last watched backward ignored; -100, as torch does by itself, until one was seen"),
    Column("told", "bool", "", "a loss function of this process was seen to ignore it"),
    Column("path", "text", "", "where in the batch the labels are, e.g. ['labels'] or [1]"),
    Column("tokens", "text", "", "at watched steps, of the first samples: what supervised labels are beside input_ids of the same shape: same: the token at their place; next: the token after it, so that a model which shifts labels itself learns the one after next; other; empty: not looked at"),
), "one row per batch with integer labels at watched steps, and per batch of which none is supervised")  # fmt: skip

TORCHS_OWN = -100  # ignore_index of torch's loss functions, and what the Hugging Face collators put in
EVERY_BATCH_ELEMENTS = 1 << 18  # 0.1 ms on one core; larger ones wait for a watched step
PIECE = 1 << 14  # elements at a time: torch would hand more to threads that training needs
NAMES = ("['labels']", "['label']", ".labels")


@dataclass(frozen=True)
class Count:
    """What was seen of one batch's labels, in the order of the table's columns."""

    elements: int
    supervised: int
    rows: int
    empty: int
    ignored: int
    told: bool
    path: str
    tokens: str


def install(emit: Emit) -> Undo:
    agent = emit.agent
    ignored, told = TORCHS_OWN, False

    def scan(data: Any) -> Count | None:
        found = labels_in(data)
        if found is None or (found[1].numel() > EVERY_BATCH_ELEMENTS and not agent.watching):
            return None
        path, labels = found
        flat = labels.reshape(labels.shape[0], -1)
        parts = (flat,) if flat.numel() <= PIECE else flat.split(max(1, PIECE // flat.shape[1]))
        if not agent.watching and any(part.ne(ignored).any() for part in parts):
            return None
        each = [part.ne(ignored).sum(1) for part in parts]
        supervised, empty = sum(int(e.sum()) for e in each), sum(int(e.eq(0).sum()) for e in each)
        tokens = beside_tokens(labels, ignored, data) if agent.watching else ""
        return Count(labels.numel(), supervised, labels.shape[0], empty, ignored, told, path, tokens)

    def handed(seen: Count | None, at: Place) -> None:
        if seen is not None:
            emit(TABLE, (at.loader, at.iterator, at.position, seen.elements, seen.supervised, seen.rows, seen.empty,
                         seen.ignored, seen.told), (seen.path, seen.tokens))  # fmt: skip

    def begin(root: Any) -> None:
        nonlocal ignored, told
        if agent.watching:
            indices = ignored_indices(root)
            if len(indices) == 1:  # several losses with indices of their own: whose labels these are is not known
                ignored, told = indices.pop(), True

    agent.look_at_batches(emit, scan, handed)
    emit.on("backward_begin", begin)
    return lambda: None


def labels_in(data: Any) -> tuple[str, Any] | None:
    """(path, tensor) of a batch's integer labels on the host: those of that name, or what ends a tuple."""
    named = data.get("labels") if isinstance(data, Mapping) else None
    if is_tensor(named):
        return ("['labels']", named) if _is_labels(named) else None
    found = None
    for path, tensor in leaves(data):
        if path.endswith(NAMES):
            return (path, tensor) if _is_labels(tensor) else None
        found = path, tensor
    last = isinstance(data, (tuple, list)) and found is not None and found[0] == f"[{len(data) - 1}]"
    return found if last and found is not None and found[0] != "[0]" and _is_labels(found[1]) else None


def _is_labels(tensor: Any) -> bool:
    kinds = ("torch.int64", "torch.int32", "torch.int16")  # signed: others can't hold a negative index
    return bool(
        tensor.device.type == "cpu"
        and tensor.numel()
        and tensor.dim()
        and str(tensor.layout) == "torch.strided"
        and str(tensor.dtype) in kinds
    )


def beside_tokens(labels: Any, ignored: int, data: Any) -> str:
    """How the supervised labels of the first samples lie beside the tokens of the same batch; empty without any."""
    tokens = data.get("input_ids") if isinstance(data, Mapping) else None
    shape = getattr(tokens, "shape", None)
    if tokens is None or shape != labels.shape or labels.dim() != 2 or shape[1] < 2 or tokens.device.type != "cpu":
        return ""
    rows = max(1, PIECE // shape[1])
    labels, tokens = labels[:rows], tokens[:rows]
    mask = labels.ne(ignored)
    if not mask.any():
        return ""
    if not (labels.ne(tokens) & mask).any():
        return "same"
    inner = mask[:, :-1]
    return "next" if inner.any() and not (labels[:, :-1].ne(tokens[:, 1:]) & inner).any() else "other"
