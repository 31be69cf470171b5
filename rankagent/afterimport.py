"""Call a function once a module has been imported: the agent's one import hook. Imports nothing but sys at first.

A finder at the head of `sys.meta_path` answers for the awaited names only: it lets the ordinary finders do their work
and wraps `exec_module` on the loader they return, which keeps its type.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # typing and collections.abc would cost every Python process below the launcher 10 ms
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Then = Callable[[Any], None]

_waiting: dict[str, list[Then]] = {}
_busy: set[str] = set()


def when(name: str, then: Then) -> None:
    """Call `then(module)` right after `name` is executed; at once when it has been imported already."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        then(module)
        return
    _waiting.setdefault(name, []).append(then)
    if not any(isinstance(f, Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, Finder())


class Finder:
    """The meta-path finder; every name that nobody awaits costs it one dictionary look-up."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _waiting or name in _busy:
            return None
        import importlib.util

        _busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            _busy.discard(name)
        loader = getattr(spec, "loader", None)
        if spec is None or loader is None or not hasattr(loader, "exec_module"):
            return spec
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for then in _waiting.pop(name, ()):
                then(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:  # a loader that cannot be changed: the module is imported unobserved
            return spec
        return spec


def arm() -> None:
    """Wait for torch, then start the agent if this process is a rank's main one."""
    from . import guard

    def start(torch: Any) -> None:
        from . import agent, worker

        if agent.start(torch) is None:
            worker.start_spawned(torch)

    when("torch", lambda torch: guard.attempt(lambda e: None, start, torch))
