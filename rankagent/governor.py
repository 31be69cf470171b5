"""How often the heavy passes run: every step in the close watch, then every K-th, so that the cost stays in the budget.

K is a power of two, so that the steps of two ranks with different K nest and every comparison still has common steps.
Rank 0 proposes it from its own measured costs through the job's key-value store, some steps before it takes effect;
a rank that finds no proposal keeps the K it has, which only costs it more.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable

MAX_CADENCE = 1024
LEAD_STEPS = 8  # ranks coupled by collectives are at most one step apart; the others keep their K until the next review
REVIEW_STEPS = 2048  # how often K is reconsidered: one store look-up a review
ALARM_STEPS = 3
ALARM_PAUSE_STEPS = 64  # an alarm that never ends must not turn the close watch into the normal state
FIRST_REVIEW_STEP = 24  # medians of fewer steps follow the warm-up
UNMEASURED_CADENCE = 8  # until the first review when there is no close watch to measure in
_WINDOW = 32


class Governor:
    """`watched(step)` says whether the heavy passes run; `spent` feeds it one finished step's costs."""

    def __init__(self, watch_steps: int, budget_ratio: float | None) -> None:
        self.watch_steps = watch_steps
        self.budget_ratio = budget_ratio
        self.cadence = 1 if watch_steps >= FIRST_REVIEW_STEP else UNMEASURED_CADENCE
        self._watch_until = watch_steps
        self._alarm_until = self._alarm_from = 0
        self._heavy_ns: deque[int] = deque(maxlen=_WINDOW)
        self._light_ns: deque[int] = deque(maxlen=_WINDOW)
        self._step_ns: deque[int] = deque(maxlen=_WINDOW)

    def watched(self, step: int) -> bool:
        """Whether heavy passes are due at this step."""
        if step <= self._watch_until or step <= self._alarm_until or self.budget_ratio is None:
            return True
        return step % self.cadence == 0

    def in_force(self, step: int) -> int:
        """The cadence that a step's row reports."""
        return 1 if step <= self._watch_until else self.cadence

    def watch_again(self, step: int) -> None:
        """A new model, optimizer or checkpoint: watch closely from here."""
        self._watch_until = max(self._watch_until, step + self.watch_steps - 1)

    def alarm(self, step: int) -> None:
        """Something odd: full passes now and for the next steps, with a pause before the next alarm counts."""
        if step >= self._alarm_from:
            self._alarm_until = step + ALARM_STEPS
            self._alarm_from = step + ALARM_PAUSE_STEPS

    def spent(self, watched: bool, step_ns: int, agent_ns: int) -> None:
        """Costs of a finished step."""
        (self._heavy_ns if watched else self._light_ns).append(agent_ns)
        if step_ns > 0:
            self._step_ns.append(max(step_ns - agent_ns, 1))

    def proposal(self) -> int:
        """The K that keeps the mean cost within the budget, from the last steps' medians; 1 without a budget."""
        if self.budget_ratio is None or not self._step_ns or not self._heavy_ns:
            return 1
        heavy, step = statistics.median(self._heavy_ns), statistics.median(self._step_ns)
        light = statistics.median(self._light_ns) if self._light_ns else 0.0
        # The light part is there at every step; what is left of the budget pays for the passes, at least a quarter.
        room = max(self.budget_ratio * step - light, self.budget_ratio * step / 4)
        cadence = 1
        while cadence < MAX_CADENCE and (heavy - light) / cadence > room:
            cadence *= 2
        return cadence

    def review(self, step: int, rank: int, publish: Callable[[str, str], None] | None,
               look_up: Callable[[str], str | None] | None) -> None:  # fmt: skip
        """Called at the end of each step: propose, adopt, or nothing (the usual case: two remainders)."""
        base = max(self._watch_until, FIRST_REVIEW_STEP)
        ahead, since = step + LEAD_STEPS - base, step - base
        if ahead >= 0 and ahead % REVIEW_STEPS == 0 and rank == 0 and publish is not None:
            publish(f"tdbg/cadence/{base}/{ahead // REVIEW_STEPS}", str(self.proposal()))
        if since >= 0 and since % REVIEW_STEPS == 0:
            proposed = (
                look_up(f"tdbg/cadence/{base}/{since // REVIEW_STEPS}") if look_up is not None else self.proposal()
            )
            self.cadence = int(proposed) if proposed else self.cadence
