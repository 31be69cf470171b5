"""Where the agent meets DistributedDataParallel: its construction, its forward, its broadcast of buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import guard
from .agent import now_ns
from .patch import Undo, replace, undo_all

if TYPE_CHECKING:
    from .hooks import Forward, Hooks


def install(hooks: Hooks, forward: Forward) -> Undo:
    """Patch DDP; where a private method is absent, what it would show is not recorded."""
    agent, compiling = hooks.agent, hooks.compiling
    parallel = agent.torch.nn.parallel.DistributedDataParallel

    def made(original: Any) -> Any:
        def __init__(ddp: Any, *args: Any, **kwargs: Any) -> None:
            original(ddp, *args, **kwargs)
            if agent.live:
                guard.attempt(hooks.off, hooks.made, agent.catalogue.add_ddp, ddp)

        return __init__

    def before_forward(original: Any) -> Any:
        def _pre_forward(ddp: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling():  # first and with nothing else read, so that a trace is that of the original
                return original(ddp, *args, **kwargs)
            result = original(ddp, *args, **kwargs)
            forward.begin(ddp, args, kwargs)
            return result

        return _pre_forward

    def after_forward(original: Any) -> Any:
        def _post_forward(ddp: Any, *args: Any) -> Any:
            if not compiling():
                forward.end()
            return original(ddp, *args)

        return _post_forward

    def buffers_synced(original: Any) -> Any:
        def _sync_buffers(ddp: Any) -> Any:
            if compiling():
                return original(ddp)
            started = now_ns()
            result = original(ddp)
            if hooks.active():
                agent.add_phase("communication", now_ns() - started)
                agent.fire("buffers_synced", ddp)
            return result

        return _sync_buffers

    undos = [replace(parallel, "__init__", made)]
    for name, make in (("_sync_buffers", buffers_synced), ("_pre_forward", before_forward),
                       ("_post_forward", after_forward)):  # fmt: skip
        if hasattr(parallel, name):
            undos.append(replace(parallel, name, make))
    return undo_all(undos)
