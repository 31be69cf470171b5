"""One look at the gradients of a backward, and the gradients that must be taken before it is over."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import fingerprint
from .agent import Emit
from .catalogue import REPLICATED, Entry, due
from .sketch import PIECES, Place

NO_GRADIENT, UNMEASURED = -1.0, -2.0


@dataclass
class Pass:
    """One look at the gradients, and what is filled in later. `chosen` are the positions of `parts` in `entries`."""

    entries: list[Entry]
    indices: list[int]
    step: int
    chosen: list[int] = field(default_factory=list)
    grads: list[Any] = field(default_factory=list)  # whole; those of `early` are not among them
    parts: list[Any] = field(default_factory=list)  # their windows
    places: list[Place] = field(default_factory=list)
    l2: list[float] = field(default_factory=list)

    @property
    def on_host(self) -> bool:
        return not any(p.is_cuda for p in self.parts)

    def forget(self) -> None:
        """Let the gradients go: values of a device land a step later, by when the program has freed them."""
        self.grads, self.parts = [], []

    def spread(self, found: list[Any], nothing: Any, width: int = 1) -> list[Any]:
        """Values of the chosen entries at their places among all; `nothing` without a gradient, NaN or 0 elsewhere."""
        if len(self.chosen) == len(self.l2):
            return found
        untaken = math.nan if isinstance(nothing, float) else nothing
        out = [v for norm in self.l2 for v in (nothing if norm == NO_GRADIENT else untaken,) * width]
        for k, at in enumerate(self.chosen):
            out[at * width : (at + 1) * width] = found[k * width : (k + 1) * width]
        return out


class EarlyGradients:
    """Gradients that are views of DDP's buckets, taken one by one as each is accumulated: afterwards they are reduced.

    Hooks on the parameters see them before DDP does, in every mode. They are there only while a watched backward runs.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit, self._agent = emit, emit.agent
        self._handles: list[Any] = []
        self.taken: dict[int, tuple[Any, Any, bool]] = {}  # catalogue index -> window, norm, whether it is not finite
        self.unseen: set[int] = set()  # DDP modules whose own gradients can't be told from reduced ones

    def watch(self, armed: dict[int, bool]) -> None:
        """Before a backward: hooks on the parameters of DDP modules whose gradients are views and will be reduced."""
        self.forget()
        views = {number for number, d, _ in self._agent.catalogue.ddps() if d.gradient_as_bucket_view}
        if not views:
            return
        self.unseen = {number for number in views if number not in armed}  # its forward was not seen: compiled?
        views = {number for number in views if armed.get(number)}
        if not views:
            return
        self._agent.catalogue.refresh()
        for entry in due(self._agent.catalogue.params, self._agent.window.step):
            p = entry.ref() if entry.ddp in views and entry.sharing in REPLICATED else None
            if p is not None and p.requires_grad:
                self._handles.append(p.register_post_accumulate_grad_hook(self._taker(entry.index)))

    def _taker(self, index: int) -> Callable[[Any], None]:
        def accumulated(p: Any) -> None:
            self._emit.guarded(self._take, index, p.grad)

        return accumulated

    def _take(self, index: int, grad: Any) -> None:
        if grad is None or grad.is_sparse or not grad.is_floating_point() or not grad.numel():
            return
        grad = grad.detach()
        norm = grad.norm()
        odd = not grad.is_cuda and not math.isfinite(norm.item()) and fingerprint.has_nonfinite(grad)
        self.taken[index] = (fingerprint.windowed(grad, self._agent.window.step).clone(), norm, odd)

    def forget(self) -> None:
        """The backward is over: no hook and no copy stays."""
        while self._handles:
            self._handles.pop().remove()
        self.taken.clear()
        self.unseen = set()


def norms_of(torch: Any, here: Pass, taken: dict[int, tuple[Any, Any, bool]]) -> Any:
    """The norms of a pass's gradients, those that were taken early among them, as one float64 vector."""
    if not taken:
        return fingerprint.norms(here.grads)
    out = [taken[i][1].double() if (i := here.entries[at].index) in taken else None for at in here.chosen]
    late = [k for k, norm in enumerate(out) if norm is None]
    if late:
        for k, norm in zip(late, fingerprint.norms([here.grads[k] for k in late]), strict=True):
            out[k] = norm
    return torch.stack(out)


def roots(squares: list[float]) -> list[float]:
    """L2 norm of each window from the sums of squares of its pieces."""
    pieces = [squares[k : k + PIECES] for k in range(0, len(squares), PIECES)]
    return [math.sqrt(sum(p)) for p in pieces]


def doubtful(here: Pass, k: int, taken: dict[int, tuple[Any, Any, bool]]) -> bool:
    """Whether a gradient on the host whose norm is not finite holds NaN or Inf: a norm may overflow as well."""
    known = taken.get(here.entries[here.chosen[k]].index)
    return known[2] if known is not None else fingerprint.has_nonfinite(here.grads[k])
