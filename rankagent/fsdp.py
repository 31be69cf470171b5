"""Where the agent meets FSDP: each unit's own gradients before they are reduced, the root's forward.

FSDP reduces a unit's gradient as soon as backward has computed it and frees it at once, so this is the one moment at
which a rank's own gradient is there. The functions wrapped here are private to torch: where one is absent, only the
reduced shards are recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from . import guard, torchprivate
from .afterimport import when
from .patch import Undo, replace, undo_all
from .unitgradients import OwnGradient

if TYPE_CHECKING:
    from .hooks import Forward, Hooks


NAME = "fsdp"  # what the run says has failed when torch keeps these things in a way not known here


def install(hooks: Hooks, forward: Forward) -> Undo:
    """Patch FSDP1 and FSDP2 as soon as the program imports them."""
    undos: list[Undo] = []
    units, forwards = Units(hooks), Forwards(hooks, forward)

    def patch(module_name: str, path: str, make: Callable[[Any], Any]) -> None:
        def there(module: Any) -> None:
            owner_name, _, name = path.rpartition(".")
            owner = getattr(module, owner_name, None) if owner_name else module
            if hooks.agent.live and owner is not None and hasattr(owner, name):
                undos.append(replace(owner, name, make))

        when(module_name, lambda module: guard.attempt(hooks.agent.switch_off(NAME), there, module))

    patch(torchprivate.FSDP1_RUNTIME, "_reduce_grad", units.before_fsdp1)
    patch(torchprivate.FSDP1_RUNTIME, "_reduce_grad_no_shard", units.before_fsdp1)
    patch(torchprivate.FSDP2_GROUP, "foreach_reduce", units.before_fsdp2)
    patch(torchprivate.FSDP1_MODULE, "FullyShardedDataParallel.forward", forwards.fsdp1)
    patch(torchprivate.FSDP2_STATE, "FSDPState._root_pre_forward", forwards.fsdp2_begins)
    patch(torchprivate.FSDP2_STATE, "FSDPState._post_forward", forwards.fsdp2_ends)
    return undo_all(undos)


class Units:
    """Fires `unit_gradients` just before a unit is reduced, in watched steps."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks, self._off = hooks, hooks.agent.switch_off(NAME)

    def _watched(self) -> bool:
        if NAME in self._hooks.agent.disabled:
            return False
        # on CUDA this runs in a thread of autograd's, while the training thread waits in backward
        return self._hooks.agent.watching and self._hooks.in_backward and self._hooks.recordable()

    def before_fsdp1(self, original: Any) -> Any:
        def reduce_grad(*args: Any, **kwargs: Any) -> Any:
            if self._watched():
                guard.attempt(self._off, self._fsdp1, *args)
            return original(*args, **kwargs)

        return reduce_grad

    def _fsdp1(self, state: Any, handle: Any) -> None:
        grad = handle.flat_param.grad
        if grad is None or getattr(state, "_comm_hook", None) is not None:
            return  # what a hook of the user's makes of it is not known
        flat = grad.detach().reshape(-1)
        unit = torchprivate.fsdp1_unit_of(handle, getattr(state, "_inter_node_pg", None))
        alone = not _holds(torchprivate.fsdp1_saved_shard(handle.flat_param))
        found = [(p.shard, flat[p.offset : p.offset + p.full_numel].view(p.full_shape), alone) for p in unit.parts]
        self._fire(found, None, grad.dtype)

    def before_fsdp2(self, original: Any) -> Any:
        signature = inspect.signature(original)

        def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
            if self._watched():
                guard.attempt(self._off, self._fsdp2, signature, args, kwargs)
            return original(*args, **kwargs)

        return foreach_reduce

    def _fsdp2(self, signature: inspect.Signature, args: Any, kwargs: Any) -> None:
        told = signature.bind(*args, **kwargs).arguments
        if told.get("all_reduce_hook") is not None:
            return
        params, grads = told["fsdp_params"], told["unsharded_grads"]
        # hybrid forms may put the last part of the reduction off to a later backward
        last = told.get("all_reduce_grads", True) and told.get("partial_reduce_output") is None
        by_torch = type(told.get("reduce_scatter_comm")).__module__.startswith(("torch.", "builtins"))
        found = [(p.sharded_param, g.detach(), last and by_torch and _untouched(p.sharded_param))
                 for p, g in zip(params, grads, strict=True)]  # fmt: skip
        self._fire(found, told.get("gradient_divide_factor"), told.get("reduce_dtype") or grads[0].dtype)

    def _fire(self, found: list[tuple[Any, Any, bool]], divisor: float | None, dtype: Any) -> None:
        """`divisor`: what the program told FSDP to divide the sum by instead of the number of ranks."""
        agent = self._hooks.agent
        agent.catalogue.refresh(in_backward=True)
        own: list[OwnGradient] = []
        for shard, grad, alone in found:
            entry = agent.catalogue.entry(shard)
            if entry is not None:
                ranks = entry.shards.count(",") + 1
                own.append(OwnGradient(entry, grad, divisor / ranks if divisor else 1.0, alone))
        if own:
            agent.fire("unit_gradients", own, str(dtype).removeprefix("torch."))


def _untouched(shard: Any) -> bool:
    """Nothing is in the shard's gradient yet, and no hook of the program's changes it as soon as it is there."""
    return not torchprivate.has_gradient_hooks(shard) and not _holds(shard.grad)


def _holds(grad: Any) -> bool:
    """Whether a shard's gradient holds something already. On a device its values are not waited for."""
    if grad is None:
        return False
    grad = torchprivate.local_shard(grad)
    return bool(grad.is_cuda or grad.any())


class Forwards:
    """The forward of a whole model. A part that FSDP wraps on its own, without its root, is given activations."""

    def __init__(self, hooks: Hooks, forward: Forward) -> None:
        self._hooks, self._forward, self._off = hooks, forward, hooks.agent.switch_off(NAME)
        self._inside = False

    def _begin(self, module: Any, args: Any, kwargs: Any) -> None:
        catalogue = self._hooks.agent.catalogue
        catalogue.refresh()
        if catalogue.is_top(module):
            self._forward.begin(module, args, kwargs)

    def fsdp1(self, original: Any) -> Any:
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._inside or not self._hooks.active():
                return original(module, *args, **kwargs)
            self._inside = True
            try:
                guard.attempt(self._off, self._begin, module, args, kwargs)
                result = original(module, *args, **kwargs)
                self._forward.end()
                return result
            finally:
                self._inside = False

        return forward

    def fsdp2_begins(self, original: Any) -> Any:
        """FSDP2 has no forward of its own: its hooks run around the module's."""

        def _root_pre_forward(state: Any, *args: Any) -> Any:  # module, its arguments, its keyword arguments
            if torchprivate.fsdp2_no_root_runs(state) and self._hooks.active():
                guard.attempt(self._off, self._begin, *args)
            return original(state, *args)

        return _root_pre_forward

    def fsdp2_ends(self, original: Any) -> Any:
        def _post_forward(state: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(state, *args, **kwargs)
            if torchprivate.fsdp2_no_root_runs(state) and self._hooks.active():
                self._forward.end()
            return result

        return _post_forward
