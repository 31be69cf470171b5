"""Evaluation between steps, as the passes over loaders show it: batches of a pass that no backward belongs to.

A pass whose batches are fetched while autograd is off is one. Of those fetched with autograd on, a backward belongs to
the one that is still going on, or was asked last; a pass that ended before that was an evaluation as well.
"""

from __future__ import annotations

from dataclasses import dataclass

Key = tuple[int, int]  # loader, pass


@dataclass
class Span:
    """Batches of one pass that were given since the last backward."""

    began: int
    until: int
    data_ns: int = 0
    communication_ns: int = 0
    batches: int = 0
    grad: bool = False  # autograd was on at one of them
    ended: bool = False


class Pauses:
    """Told of each batch and backward; `evaluation_ns` is of the step, and of it `data_ns` waiting for batches and
    `communication_ns` in collectives."""

    def __init__(self) -> None:
        self.evaluation_ns = self.data_ns = self.communication_ns = 0
        self._spans: dict[Key, Span] = {}
        self._last: Key | None = None

    def given(self, key: Key, now: int, wait_ns: int, communication_ns: int, end: bool, grad: bool) -> None:
        """A batch of a pass was given, or its `end`; training waited for it until `now`, and spent so much in
        collectives since the batch before."""
        last = self._spans.get(self._last) if self._last is not None else None
        if last is not None and not last.ended:
            last.communication_ns += communication_ns
            if self._last != key:
                last.until = now - wait_ns  # what became of its last batch ends where another pass is asked
        span = self._spans.setdefault(key, Span(now - wait_ns, now))
        self._last = key
        span.until, span.ended = now, end
        span.data_ns += wait_ns
        span.batches += not end
        span.grad |= grad and not end

    def backward(self) -> None:
        """A backward begins: what was given and does not belong to it was an evaluation."""
        if not self._spans:
            return
        trained = [k for k, s in self._spans.items() if s.grad and not s.ended]
        trained = trained or [k for k, s in self._spans.items() if s.grad][-1:]
        for key, span in self._spans.items():
            if span.batches and key not in trained:
                self.evaluation_ns += span.until - span.began
                self.data_ns += span.data_ns
                self.communication_ns += span.communication_ns
        self._spans.clear()
        self._last = None

    def take(self) -> tuple[int, int, int]:
        """(evaluation, data waits in it, collectives in it) since the last call."""
        found = self.evaluation_ns, self.data_ns, self.communication_ns
        self.evaluation_ns = self.data_ns = self.communication_ns = 0
        return found
