"""Where the time of a step went on a CUDA device: events at the borders of its phases, read when they have passed.

The host only launches work, so its clock shows when something was asked for, not when it was done. An event with a
time stamp is put on the current stream at each border; nothing waits for it. What has not passed after `RING` steps is
dropped and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

RING = 8  # steps in flight: a host is rarely more than one or two ahead of its device
# border -> the phase that begins there
PHASES = {
    "forward_begin": "forward", "forward_end": "gap", "backward_begin": "backward", "gradients_local": "reduce_wait",
    "backward_end": "gap", "before_update": "optimizer", "step_end": "gap",
}  # fmt: skip

Marks = list[tuple[str, Any]]


class DevicePhases:
    """`mark` at each border, `end` at the last one of a step, `landed` gives the steps whose events have passed."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._marks: Marks = []
        self._flying: deque[tuple[int, Marks]] = deque()
        self._spare: list[Any] = []
        self.dropped = 0

    def mark(self, border: str) -> None:
        event = self._spare.pop() if self._spare else self._cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((PHASES[border], event))

    def end(self, step: int) -> None:
        """The step is over; the border is the first one of the next step."""
        self.mark("step_end")
        marks, self._marks = self._marks, [("gap", self._marks[-1][1])]
        if len(self._flying) >= RING:
            self.dropped += 1
            self._recycle(marks)
        else:
            self._flying.append((step, marks))

    def forget(self) -> None:
        """The next step is not looked at: what lies before the one after it is unknown."""
        self._marks = []

    def landed(self) -> Iterator[tuple[int, dict[str, int]]]:
        """(step, ns by phase) of each step whose events have all passed, in order; never waits."""
        while self._flying and all(event.query() for _, event in self._flying[0][1]):
            step, marks = self._flying.popleft()
            times = dict.fromkeys(("forward", "backward", "reduce_wait", "optimizer"), 0)
            times["gap"] = 0 if marks[0][0] == "gap" else -1  # -1: the end of the step before is not known
            for (phase, event), (_, following) in pairwise(marks):
                ns = int(event.elapsed_time(following) * 1e6)
                if times[phase] >= 0:
                    times[phase] += ns
                if phase == "reduce_wait":
                    times["backward"] += ns
            self._recycle(marks)
            yield step, times

    def _recycle(self, marks: Marks) -> None:
        """The last event is also the first of the next step, and goes with that one."""
        self._spare += [event for _, event in marks[:-1]][: 2 * len(PHASES)]
