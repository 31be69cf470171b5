"""What counts as one optimizer step: all optimizers of one iteration together, from 1 in each attempt. Pure.

A window collects the optimizers that step. It closes when every optimizer expected in it has stepped (those of the
window before; in the first one, all that exist), when one of them steps again, or when a new batch is fetched.
"""

from __future__ import annotations


class Window:
    """`step` is the number of the step in progress. Keys are any hashable names of optimizers."""

    def __init__(self) -> None:
        self.step = 1
        self.stepped: list[int] = []
        self._expected: set[int] = set()

    def about_to_step(self, key: int) -> bool:
        """True when the open window must be closed first, because this optimizer has stepped in it already."""
        return key in self.stepped

    def has_stepped(self, key: int, alive: set[int]) -> bool:
        """Note that an optimizer stepped; True when the window is now complete. `alive`: optimizers that exist."""
        self.stepped.append(key)
        expected = (self._expected & alive) or (alive if self.step == 1 and not self._expected else set())
        return expected <= set(self.stepped)

    def close(self) -> int:
        """End the window and return how many optimizers stepped in it."""
        count = len(self.stepped)
        self._expected, self.stepped = set(self.stepped), []
        self.step += 1
        return count
