"""NaN and Inf in what is handed to the model: batches of the loaders (labels too) and arguments of the root forward.

Writes    input
Costs     one sum per floating-point tensor up to 256 Ki elements, larger ones at watched steps only
Blind to  tensors on an accelerator between watched steps; inputs made inside the model
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..agent import Emit, StepInfo
from ..leaves import leaves
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("input", (
    Column("source", "text", "", "batch: taken from a loader; forward: argument of the root module; graph: what an operation of the forward got from outside, where only the loss showed it"),
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
ROWS_LIMIT = 32


def install(emit: Emit) -> Undo:
    agent = emit.agent
    done: dict[str, Scan] = {}
    seen: dict[tuple[int, int, int], Bad | None] = {}  # tensors looked at in this step, and what was found in them

    def scan_of(data: Any) -> Scan:
        torch, scan = agent.torch, Scan()
        for path, tensor in leaves(data):
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
        return scan

    def note(source: str, scan: Scan | None) -> None:
        if scan is None:
            return
        done.setdefault(source, Scan()).add(scan)
        if scan.nonfinite:
            agent.alarm()

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        note("forward", scan_of(args if not kwargs else (*args, kwargs) if args else kwargs))

    def in_graph(op: str, tensor: Any) -> None:
        """Of a model without a wrapper the arguments are not seen: what one operation got shows them, if it has a row
        for each of the batch's."""
        handed = [s.rows for s in done.values()]
        if any(s.nonfinite for s in done.values()) or not tensor.dim() or tensor.shape[0] not in handed:
            return
        scan = Scan()
        scan.rows, scan.elements, scan.tensors = tensor.shape[0], tensor.numel(), 1
        scan.note(f"what {op} got", nonfinite_in(agent.torch, tensor))
        note("graph", scan)

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

    agent.look_at_batches(emit, scan_of, lambda scan, at: note("batch", scan))
    emit.on("forward_begin", forward)
    emit.on("given_nonfinite", in_graph)
    emit.on("step_closed", closed)
    emit.on("close", close)
    return lambda: None


class Scan:
    """What was seen of one batch or call, or of all of one source in the step in progress."""

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

    def add(self, other: Scan) -> None:
        """Count in what was seen of a further batch or call."""
        if self.rows < 0:
            self.rows, self.elements = other.rows, other.elements
        if other.nonfinite and not self.nonfinite:
            self.path, self.dtype, self.positions = other.path, other.dtype, other.positions
        self.tensors += other.tensors
        self.skipped += other.skipped
        self.nonfinite += other.nonfinite


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
