"""Where the agent meets torch: backward, optimizer steps, loss scaling. Turns each into agent events.

What wrappers do is in `ddp` and `fsdp`.

Every wrapper calls the original with the very same arguments, whatever happens to us, and is transparent to tracing:
under `torch.compile` it hands over at once, so that dynamo sees the original.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from . import ddp, fsdp, guard, torchprivate
from .afterimport import when
from .agent import Agent, now_ns
from .patch import Undo, replace, undo_all


def install(agent: Agent) -> Undo:
    """Patch torch for one agent; the returned undo leaves it as it was."""
    torch = agent.torch
    hooks = Hooks(agent)
    agent.batch_fetched = hooks.batch_fetched
    optim = __import__("torch.optim.optimizer", fromlist=["optimizer"])
    undos = [
        replace(torch.autograd, "backward", hooks.backward),
        replace(optim.Optimizer, "__init__", hooks.optimizer_made),
        optim.register_optimizer_step_pre_hook(hooks.outside_dynamo(hooks.before_step)).remove,
        optim.register_optimizer_step_post_hook(hooks.outside_dynamo(hooks.after_step)).remove,
        replace(torch.distributed, "destroy_process_group", hooks.group_ends),
        replace(torch.amp.GradScaler, "scale", hooks.scale),
    ]
    if hasattr(torch.amp.GradScaler, "_maybe_opt_step"):
        undos.append(replace(torch.amp.GradScaler, "_maybe_opt_step", hooks.maybe_step))
    forward = Forward(hooks)
    undos += [ddp.install(hooks, forward), fsdp.install(hooks, forward)]
    return undo_all(undos)


class Hooks:
    """The state between a wrapper's call and the next: nesting depths and start times."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.compiling = getattr(agent.torch.compiler, "is_compiling", lambda: False)
        self.in_backward = False
        self._backward_began = self._reduced_from = self._update_began = 0
        self._handle: Any = None
        self._inner: set[int] = set()  # optimizers that stepped inside backward
        self._updating = agent.updating = list[int]()  # ids of optimizers whose step() runs, outermost first
        self._calls = 0
        self.off = agent.give_up

    def active(self) -> bool:
        """Whether what torch is doing in this thread is a step of training's that is to be seen."""
        return threading.get_ident() == self.agent.thread and self.recordable()

    def recordable(self) -> bool:
        """Whether anything may be recorded at all; also asked in autograd's threads, while backward runs."""
        agent = self.agent
        if not agent.live or self.compiling():
            return False
        cuda = agent.torch.cuda
        return not (cuda.is_initialized() and cuda.is_current_stream_capturing())  # nothing goes into a user's graph

    def outside_dynamo(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that dynamo leaves alone: once dynamo is imported, calls go through `torch._dynamo.disable`.

        Importing dynamo ourselves would cost seconds. Without this, a compiled whole step breaks at each line of ours.
        """
        target = [fn]

        def hook(*args: Any, **kwargs: Any) -> Any:
            return target[0](*args, **kwargs)

        def wrap(dynamo: Any) -> None:
            target[0] = dynamo.disable(fn)

        when("torch._dynamo", lambda dynamo: guard.attempt(self.off, wrap, dynamo))
        return hook

    # -------------------------------------------------------- backward

    def backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.in_backward or not self.active():
                return original(tensors, *args, **kwargs)
            self.in_backward = True
            guard.attempt(self.off, self._begin_backward, tensors)
            whole = False
            try:
                result = original(tensors, *args, **kwargs)
                whole = True
                return result
            finally:
                self.in_backward = False
                guard.attempt(self.off, self._end_backward, whole)

        return self.outside_dynamo(backward)

    def _begin_backward(self, tensors: Any) -> None:
        agent = self.agent
        root = tensors if isinstance(tensors, agent.torch.Tensor) else next(iter(tensors), None)
        if agent.backwards and not agent.catalogue.optimizers():
            agent.close_step(inferred=True)  # nobody steps a torch optimizer: the next backward ends the step
        agent.enter("backward")
        agent.fire("backward_begin", root)
        if agent.watching and root is not None and getattr(root, "requires_grad", False):
            self._handle = root.register_hook(self._queue_local)
        self._backward_began, self._reduced_from = now_ns(), 0

    def _queue_local(self, grad: Any) -> None:
        # Queued as the first thing in this backward, so it runs after the last gradient is accumulated and before
        # DDP's own callback copies the reduced values back (torch 2.13; checked value by value in the tests).
        guard.attempt(self.off, torchprivate.queue_callback, self.agent.torch, self._gradients_local)

    def _gradients_local(self) -> None:
        self.agent.fire("gradients_local")
        self._reduced_from = now_ns()

    def _end_backward(self, whole: bool) -> None:
        agent, ended = self.agent, now_ns()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        agent.add_phase("backward", ended - self._backward_began)
        if self._reduced_from:
            agent.add_phase("reduce_wait", ended - self._reduced_from)
        agent.fire("backward_end", whole)
        agent.backwards += 1
        agent.backwards_total += 1
        agent.enter("other")
        if self._inner:
            inner, self._inner = self._inner, set()
            agent.window.stepped += sorted(inner)
            agent.close_step()

    # -------------------------------------------------------- optimizer steps

    def optimizer_made(self, original: Any) -> Any:
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if self.agent.live:
                guard.attempt(self.off, self.made, self.agent.catalogue.add_optimizer, optimizer)

        return __init__

    def made(self, add: Callable[[Any], Any], what: Any) -> None:
        """A model was wrapped or an optimizer built: after the first step that is a reason to watch closely again."""
        add(what)
        self.agent.watch_again()

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if not self.active():
            return None
        return guard.attempt(self.off, self._before_step, optimizer, args, kwargs)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        agent = self.agent
        self._calls += 1
        number = agent.catalogue.add_optimizer(optimizer)
        if self.in_backward and not self._updating:
            self._inner.add(number)
            return None
        self._updating.append(id(optimizer))
        if len(self._updating) > 1:
            return None
        if agent.window.about_to_step(number):
            agent.close_step()
        agent.enter("optimizer")
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            agent.fire("before_update", optimizer, number)
            self._update_began = now_ns()
            return None
        self._update_began = now_ns()
        wrapped = self._with_gradients(closure, optimizer, number)
        if len(args) > 1:
            return (args[0], wrapped, *args[2:]), kwargs
        return args, {**kwargs, "closure": wrapped}

    def _with_gradients(self, closure: Any, optimizer: Any, number: int) -> Any:
        """A closure computes the gradients inside step(): look at them when its first call returns."""
        seen: list[bool] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            result = closure(*args, **kwargs)
            if not seen:
                seen.append(True)
                self.agent.fire("before_update", optimizer, number)
            return result

        return call

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.active():
            guard.attempt(self.off, self._after_step, optimizer)

    def _after_step(self, optimizer: Any) -> None:
        agent = self.agent
        if not self._updating:
            return
        self._updating.pop()
        if self._updating:
            return
        agent.add_phase("optimizer", now_ns() - self._update_began)
        flag = torchprivate.found_inf(optimizer)
        if flag is not None and not flag.is_cuda and float(flag) > 0:
            agent.skipped = True
        self._stepped(agent.catalogue.add_optimizer(optimizer))

    def _stepped(self, number: int) -> None:
        agent = self.agent
        if agent.window.has_stepped(number, set(agent.catalogue.optimizers())):
            agent.close_step()

    def batch_fetched(self) -> None:
        """A new batch: whatever optimizers stepped since the last one belong to a step that is over."""
        self._updating.clear()
        self.agent.close_open_step()

    # -------------------------------------------------------- loss scaling

    def scale(self, original: Any) -> Any:
        def scale(scaler: Any, outputs: Any) -> Any:
            result = original(scaler, outputs)
            if self.agent.live:
                self.agent.scale = getattr(scaler, "_scale", None)
            return result

        return scale

    def maybe_step(self, original: Any) -> Any:
        def _maybe_opt_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            calls = self._calls
            result = original(scaler, optimizer, *args, **kwargs)
            if self._calls == calls and self.active():
                guard.attempt(self.off, self._skipped_step, optimizer)
            return result

        return _maybe_opt_step

    def _skipped_step(self, optimizer: Any) -> None:
        agent = self.agent
        number = agent.catalogue.add_optimizer(optimizer)
        if agent.window.about_to_step(number):
            agent.close_step()
        agent.fire("before_update", optimizer, number)
        agent.skipped = True
        self._stepped(number)

    def group_ends(self, original: Any) -> Any:
        def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
            if self.active():
                guard.attempt(self.off, self.agent.close_open_step)
                self.agent.fire("ending")
            return original(*args, **kwargs)

        return destroy_process_group


class Forward:
    """The root module's forward, whichever wrapper shows it: when it began, and the events at both ends."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks, self._began = hooks, 0

    def begin(self, module: Any, args: Any, kwargs: Any) -> None:
        agent = self._hooks.agent
        if self._hooks.active() and agent.torch.is_grad_enabled():
            agent.enter("forward")
            agent.fire("forward_begin", module, args, kwargs)
            self._began = now_ns()

    def end(self) -> None:
        agent = self._hooks.agent
        if self._began and self._hooks.active():
            agent.add_phase("forward", now_ns() - self._began)
            self._began = 0
            agent.enter("other")
            agent.fire("forward_end")
