"""Numbers for objects in the order they are first seen, without keeping them alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any


class Numbers:
    """`of` numbers an object, `find` only looks. A freed object's number is not given again.

    Objects that can't be referred to weakly, such as lists, have none: -1.
    """

    def __init__(self) -> None:
        self._known: list[weakref.ReferenceType[Any]] = []

    def of(self, item: Any) -> int:
        known = self.find(item)
        if known < 0 and type(item).__weakrefoffset__:
            self._known.append(weakref.ref(item))
            known = len(self._known) - 1
        return known

    def find(self, item: Any) -> int:
        """The item's number, -1 when it has none."""
        return next((i for i, ref in enumerate(self._known) if ref() is item), -1)

    def alive(self) -> Iterator[Any]:
        """The items that still exist."""
        return (item for ref in self._known if (item := ref()) is not None)
