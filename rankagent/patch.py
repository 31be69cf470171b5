"""Replace a function or method of torch and put the original back exactly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Undo = Callable[[], None]


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> Undo:
    """Set `owner.name` to `make(original)`; the returned undo restores it, unless somebody else has replaced it since.

    The original is taken from the owner's own dictionary, so that what is restored is what was there (a builtin method
    fetched by getattr comes back unbound). Raises AttributeError when the owner lacks the name.
    """
    inherited = name not in vars(owner)
    original = getattr(owner, name) if inherited else vars(owner)[name]
    substitute = make(original)
    if substitute is not original:
        functools.update_wrapper(substitute, original, updated=())
    setattr(owner, name, substitute)

    def undo() -> None:
        if vars(owner).get(name) is not substitute:
            return
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    return undo


def undo_all(undos: list[Undo]) -> Undo:
    """One undo for many, last made first."""

    def undo() -> None:
        while undos:
            undos.pop()()

    return undo
