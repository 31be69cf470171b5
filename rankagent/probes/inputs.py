"""NaN and Inf in what is handed to the model: batches of the loaders (labels too) and arguments of the root forward.

Writes    input
Costs     one sum per floating-point tensor up to 256 Ki elements, larger ones at watched steps only
Blind to  tensors on an accelerator between watched steps; inputs made inside the model
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..agent import Emit, StepInfo
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("input", (
    Column("source", "text", "", "batch: taken from a loader; forward: argument of the root module"),
    Column("tensors", "int32", "", "floating-point tensors looked at"),
    Column("nonfinite", "int64", "", "elements that are NaN or Inf in them"),
    Column("path", "text", "", "first tensor that holds some, e.g. [1] or ['price']; empty for none"),
    Column("dtype", "text", "", "its dtype"),
    Column("positions", "int64[]", "", "rows (first dimension) of that tensor that hold some, the first 32"),
    Column("rows", "int64", "", "first dimension of the first tensor argument; -1 without"),
    Column("elements", "int64", "", "elements of that tensor; -1 without"),
    Column("skipped", "int32", "", "tensors not looked at for their size"),
), "one row per watched step and source, and per step with something not finite")  # fmt: skip


EVERY_STEP_ELEMENTS = 1 << 18  # 0.1 ms on one core; larger tensors wait for a watched step
DEPTH = 4
ROWS_LIMIT = 32


def install(emit: Emit) -> Undo:
    agent = emit.agent
    done: dict[str, Scan] = {}
    seen: dict[tuple[int, int, int], Bad | None] = {}  # tensors looked at in this step, and what was found in them

    def look(source: str, data: Any) -> None:
        torch = agent.torch
        scan = done.setdefault(source, Scan())
        for path, tensor in leaves(torch, data, "", DEPTH):
            if scan.rows < 0 and tensor.dim():
                scan.rows, scan.elements = tensor.shape[0], tensor.numel()
            if not tensor.is_floating_point() or not tensor.numel() or tensor.layout != torch.strided:
                continue
            if tensor.device.type != "cpu" or (tensor.numel() > EVERY_STEP_ELEMENTS and not agent.watching):
                scan.skipped += 1
                continue
            scan.tensors += 1
            key = (tensor.data_ptr(), tensor.numel(), -1 if tensor.is_inference() else tensor._version)
            if key not in seen:  # else: the very tensor that the loader handed out, unchanged
                # a finite sum means finite elements; the rest is exact
                odd = not math.isfinite(tensor.detach().sum().item())
                seen[key] = nonfinite_in(torch, tensor.detach()) if odd else None
            scan.note(path, seen[key])
        if scan.nonfinite:
            agent.alarm()

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        look("forward", args if not kwargs else (*args, kwargs) if args else kwargs)

    def write(step: int, watched: bool) -> None:
        for source, s in done.items():
            if watched or s.nonfinite:
                emit(
                    TABLE,
                    (s.tensors, s.nonfinite, s.rows, s.elements, s.skipped),
                    (source, s.path, s.dtype, s.positions),
                    step=step,
                )
        done.clear()
        seen.clear()

    def closed(info: StepInfo) -> None:
        write(info.step, info.watched)

    def close() -> None:
        write(agent.window.step, True)  # what a step that never ended was given

    agent.look_at_batch = lambda data: emit.guarded(look, "batch", data)
    emit.on("forward_begin", forward)
    emit.on("step_closed", closed)
    emit.on("close", close)
    return lambda: None


class Scan:
    """What was seen of one source in the step in progress."""

    def __init__(self) -> None:
        self.tensors = self.nonfinite = self.skipped = 0
        self.rows = self.elements = -1
        self.path, self.dtype, self.positions = "", "", list[int]()

    def note(self, path: str, bad: Bad | None) -> None:
        if bad is None:
            return
        if not self.nonfinite:
            self.path, self.dtype, self.positions = path, bad.dtype, bad.positions
        self.nonfinite += bad.count


@dataclass(frozen=True)
class Bad:
    """Elements of one tensor that are not finite: how many, and the rows that hold them."""

    count: int
    dtype: str
    positions: list[int]


def nonfinite_in(torch: Any, tensor: Any) -> Bad | None:
    """What is not finite in a tensor; None when its sum only overflowed from finite elements."""
    bad = ~torch.isfinite(tensor)
    count = int(bad.sum())
    if not count:
        return None
    rows = bad.reshape(bad.shape[0], -1).any(1).nonzero() if bad.dim() else bad.reshape(1).nonzero()
    return Bad(count, str(tensor.dtype).removeprefix("torch."), rows.flatten()[:ROWS_LIMIT].tolist())


def leaves(torch: Any, data: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """(path, tensor) of the tensors in nested tuples, lists and mappings, in order; paths read like Python indexing."""
    if isinstance(data, torch.Tensor):
        yield path, data
    elif depth and isinstance(data, Mapping):
        for key, value in data.items():
            yield from leaves(torch, value, f"{path}[{key!r}]", depth - 1)
    elif depth and isinstance(data, (list, tuple)) and len(data) <= 64:
        for at, value in enumerate(data):
            yield from leaves(torch, value, f"{path}[{at}]", depth - 1)
