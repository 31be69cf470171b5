"""The agent of one rank: knows the step in progress, hands torch's events to the probes, closes the record at the end.

Events (all on the training thread, arguments in brackets):

    backward_begin [root]      outermost backward starts; `root` is its first tensor
    loss_nonfinite [root]      the scalar that a backward is about to start from is NaN or Inf (on the host only)
    given_nonfinite [op, tensor]   what an operation of that loss's forward got from outside the graph is not finite
    gradients_local []         last gradient accumulated, reduction in flight (watched steps only)
    unit_gradients [found, wire_dtype]   FSDP is about to reduce a unit (watched steps only): an OwnGradient per tensor,
                               and the type in which it is sent. May come from a thread of autograd's
    backward_end [whole]       outermost backward is over, DDP has reduced; `whole` is False when it raised
    before_update [optimizer, number]   gradients are final; with a closure: after its first call
    step_end []                the step's last update is done; heavy passes belong here
    step_closed [StepInfo]     costs are known; the light rows are written here
    forward_begin [module, args, kwargs] / forward_end []     root forward
    batch_given [loader, pass, again, end]   a row of `batch` was written; `again`: no backward since the one before it
                               of this pass
    buffers_synced [ddp]       DDP has just broadcast its buffers
    ending []                  the process group is about to be destroyed
    failed [exception]         an uncaught exception; `close` follows
    close []                   the process ends
"""

from __future__ import annotations

import atexit
import functools
import os
import pkgutil
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from . import contract, guard, identity, probes, torchprivate
from .boundary import Window
from .catalogue import Catalogue
from .governor import Governor
from .landing import Landing
from .numbers import Numbers
from .patch import Undo
from .record import Recorder
from .tables import Table

now_ns = time.perf_counter_ns


@dataclass(frozen=True)
class StepInfo:
    """What is known of a step when it closes. Times in ns; `reduce_wait_ns` is -1 where it was not measured."""

    step: int
    optimizers: int
    backwards: int
    skipped: bool
    inferred: bool
    watched: bool
    cadence: int
    step_ns: int
    agent_ns: int
    discarded: int = 0
    phases: dict[str, int] = field(default_factory=dict)


class Place(NamedTuple):
    """Which batch it is: the loader, its pass and the position in it, as in table batch."""

    loader: int
    iterator: int
    position: int


class Emit:
    """A probe's hold on the agent: write rows, subscribe to events. One per probe, so that one can be switched off."""

    def __init__(self, agent: Agent, name: str) -> None:
        self.agent, self.name = agent, name

    def __call__(
        self, table: Table, fixed: Sequence[Any], variable: Sequence[Any] = (), step: int | None = None
    ) -> None:
        """Write one row; `step` defaults to the step in progress."""
        if self.agent.live:
            self.agent.recorder.write(table, self.agent.window.step if step is None else step, fixed, variable)

    def on(self, event: str, fn: Callable[..., Any]) -> None:
        """Call `fn` at an event. An error in it switches this probe off."""
        self.agent.subscribe(self.name, event, fn)

    def guarded(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call `fn(*args)` from a patch of this probe's own, under the same guard; None when it failed or is off."""
        agent = self.agent
        if not agent.live or self.name in agent.disabled:
            return None
        started = now_ns()
        result = guard.attempt(agent.switch_off(self.name), fn, *args)
        agent.spent_ns += now_ns() - started
        return result


class Agent:
    """See the module. Built once per rank; `live` is False in forked children and after the end."""

    def __init__(self, torch: Any, role: identity.Role, recorder: Recorder, governor: Governor) -> None:
        self.torch, self.role, self.recorder, self.governor = torch, role, recorder, governor
        self.live = True
        self.window = Window()
        self.catalogue = Catalogue(torch)
        self.landing = Landing(torch)
        self.watching = governor.watched(1)
        self.backwards = self.backwards_total = 0
        self.updates = 0  # by torch optimizers so far: a backward left over when these are gone is no step
        self.phases: dict[str, int] = {}
        self.phase = "other"  # where the training thread is
        self.phase_left: Callable[[str], None] = lambda name: None  # set by the phases probe
        self.skipped = False
        self.discarded = 0  # backwards of the step in progress whose gradients were thrown away
        self.odd = False  # an alarm was raised in the step in progress
        self.scale: Any = None  # loss scale tensor used in the step in progress
        self.spent_ns = 0
        self._alone = False  # the job's store was lost: each rank keeps to its own costs
        self.disabled: set[str] = set()
        self._last_boundary_ns = 0
        self._events: dict[str, list[tuple[str, Callable[..., Any], Callable[[Exception], None]]]] = {}
        self._undos: list[Undo] = []
        _leave_in_forked_children(self)
        self.thread = threading.get_ident()  # steps are counted in the thread that imported torch
        self._looks: list[tuple[Callable[[Any], Any], Callable[[Any, Place], None]]] = []  # see look_at_batches
        # set by the workers probe: (iterator, loader, pass, end) of each batch that came out of a loader
        self.batch_taken: Callable[[Any, int, int, str], None] = lambda *taken: None
        self.samplers = Numbers()  # DistributedSamplers, in the order of construction
        self.datasets = Numbers()  # roots of what loaders read in this process, in the order of first use
        self.batch_fetched: Callable[[], None] = lambda: None  # set by the hooks
        self.updating: list[int] = []  # set by the hooks: ids of the optimizers whose step() runs, outermost first

    # -------------------------------------------------------- probes and events

    def subscribe(self, name: str, event: str, fn: Callable[..., Any]) -> None:
        self._events.setdefault(event, []).append((name, fn, self.switch_off(name)))

    def switch_off(self, name: str) -> Callable[[Exception], None]:
        """What happens when this probe fails: it is silent from now on, and the run says so."""

        def off(error: Exception) -> None:
            if name in self.disabled:
                return
            self.disabled.add(name)
            for event, subscribed in self._events.items():
                self._events[event] = [s for s in subscribed if s[0] != name]
            self.recorder.disable()
            from .probes.failure import PROBE

            self.recorder.write(PROBE, self.window.step, (), (name, "disabled", guard.describe(error)))

        return off

    def give_up(self, error: Exception) -> None:
        """An error in the step counting itself: what follows could be wrong, so recording ends here and says so."""
        self.switch_off("hooks")(error)
        self.recorder.update_state(self.window.step - 1, time.time_ns())
        self.live = False

    def fire(self, event: str, *args: Any) -> None:
        """Hand an event to every probe that wants it, each under the guard, and count the time as ours."""
        subscribed = self._events.get(event)
        if not subscribed or not self.live:
            return
        started = now_ns()
        for _, fn, off in tuple(subscribed):
            guard.attempt(off, fn, *args)
        self.spent_ns += now_ns() - started

    def enter(self, phase: str) -> None:
        """Training is in another phase: for a failure's row, and for the launcher, which sees it while it lasts."""
        self.phase_left(self.phase)
        self.phase = phase
        if self.live:
            self.recorder.enter(phase)

    def look_at_batches(self, emit: Emit, scan: Callable[[Any], Any], handed: Callable[[Any, Place], None]) -> None:
        """Each batch that a loader fetched goes through `scan`; when training gets it, `handed` has what that gave."""
        self._looks.append((functools.partial(emit.guarded, scan), functools.partial(emit.guarded, handed)))

    def scan_batch(self, data: Any) -> list[Any]:
        return [scan(data) for scan, _ in self._looks]

    def batch_handed(self, scans: Sequence[Any], at: Place) -> None:
        for (_, handed), seen in zip(self._looks, scans, strict=False):  # of the end of a pass there is none
            handed(seen, at)

    def install(self) -> None:
        """Load the torch hooks and every probe of the folder; one that fails is left out and said so."""
        from . import hooks, stacks
        from .probes.failure import PROBE

        self._undos.append(hooks.install(self))
        undo = guard.attempt(self.switch_off("stacks"), stacks.install, self)
        self._undos += [undo] if undo is not None else []
        for info in sorted(pkgutil.iter_modules(probes.__path__), key=lambda i: i.name):
            undo = guard.attempt(self.switch_off(info.name), self._load_probe, info.name)
            if undo is not None:
                self._undos.append(undo)
                self.recorder.write(PROBE, 0, (), (info.name, "installed", ""))

    def _load_probe(self, name: str) -> Undo:
        undo: Undo = import_module(f"{probes.__name__}.{name}").install(Emit(self, name))
        return undo

    def uninstall(self) -> None:
        """Leave torch as it was found."""
        while self._undos:
            self._undos.pop()()
        self._events.clear()

    # -------------------------------------------------------- steps

    def add_phase(self, name: str, elapsed_ns: int) -> None:
        self.phases[name] = self.phases.get(name, 0) + elapsed_ns

    def close_step(self, inferred: bool = False) -> None:
        """The step in progress is over: heavy passes, then its light rows, then the next one begins."""
        if not self.live:
            return
        self.fire("step_end")
        step, watched = self.window.step, self.watching
        ended = now_ns()
        step_ns = ended - self._last_boundary_ns if self._last_boundary_ns else 0
        self._last_boundary_ns = ended
        optimizers = self.window.close()
        self.updates += optimizers
        info = StepInfo(step, optimizers, self.backwards, self.skipped, inferred, watched, self.governor.in_force(step),
                        step_ns, self.spent_ns, self.discarded, self.phases)  # fmt: skip
        self.spent_ns = 0
        self.governor.spent(watched, step_ns, info.agent_ns)
        self.phases, self.backwards, self.skipped, self.odd, self.scale = {}, 0, False, False, None
        self.discarded = 0
        self.fire("step_closed", info)
        self.landing.poll()
        if self.landing.dropped:
            self.recorder.lost(self.landing.dropped)
            self.landing.dropped = 0
        guard.attempt(self._disagree, self.governor.review, step, self.role.rank, *self._agreement())
        self.watching = self.governor.watched(step + 1)
        self.recorder.update_state(step, time.time_ns())
        self.enter("other")

    def _agreement(self) -> tuple[Any, Any]:
        """How ranks agree on the cadence: (publish, look up) in the job's store; (None, None) for a single rank."""
        if self.role.world_size <= 1 or self._alone:
            return None, None

        def publish(key: str, value: str) -> None:
            store = torchprivate.default_store(self.torch)
            if store is not None:
                store.set(f"{key}/{self.role.attempt}", value)

        def look_up(key: str) -> str | None:
            store, name = torchprivate.default_store(self.torch), f"{key}/{self.role.attempt}"
            return store.get(name).decode() if store is not None and store.check([name]) else None

        return publish, look_up

    def _disagree(self, error: Exception) -> None:
        self._alone = True

    def watch_again(self) -> None:
        """What is trained was built or loaded anew: watch closely from the step in progress on."""
        if self.window.step > 1:
            self.governor.watch_again(self.window.step)
            self.watching = True

    def alarm(self) -> None:
        """Something odd was seen: full passes from now on, for some steps."""
        self.odd = True
        self.governor.alarm(self.window.step)
        self.watching = self.governor.watched(self.window.step)

    # -------------------------------------------------------- the end

    def close_open_step(self) -> None:
        """Close a step whose update was seen while the agent still waited for another optimizer, or for a backward."""
        if self.window.stepped:
            self.close_step()
        elif self.backwards and not self.updates and not self.catalogue.optimizers():
            self.close_step(inferred=True)

    def close(self) -> None:
        """At exit of the rank's own process: last values, then the mark that it ended in order."""
        if not self.live or os.getpid() != self.recorder.pid:
            return
        guard.attempt(self.give_up, self.close_open_step)
        self.fire("close")
        guard.attempt(self.switch_off("landing"), self.landing.poll, True)
        self.recorder.close(self.window.step - 1)
        self.live = False


def _leave_in_forked_children(agent: Agent) -> None:
    """In a child made by fork the agent is silent: the mapped record belongs to the parent."""
    known = weakref.ref(agent)

    def silence() -> None:
        agent = known()
        if agent is not None:
            agent.live = False

    os.register_at_fork(after_in_child=silence)


_agent: Agent | None = None


def start(torch: Any) -> Agent | None:
    """Start the agent if this process is a rank's main one. Called once torch has been imported; idempotent."""
    global _agent
    role = None if _agent else identity.current()
    if role is None:
        return _agent
    folder = contract.process_dir(role.run, "rank", role.rank, role.attempt, os.getpid())
    recorder = Recorder(folder, role.rank, role.attempt)
    _agent = agent = Agent(torch, role, recorder, Governor(*settings(os.environ)))

    guard.attempt(agent.give_up, agent.install)
    atexit.register(guard.attempt, lambda e: None, agent.close)
    return agent


def settings(environment: Any) -> tuple[int, float | None]:
    """(steps of the close watch, budget as a share of the step or None for no limit) from the variables."""
    watch = environment.get(contract.WATCH_STEPS, "")
    budget = environment.get(contract.BUDGET, "")
    steps = int(watch) if watch.isdigit() else contract.DEFAULT_WATCH_STEPS
    if budget == "off":
        return steps, None
    try:
        percent = float(budget) if budget else contract.DEFAULT_BUDGET_PERCENT
    except ValueError:
        percent = contract.DEFAULT_BUDGET_PERCENT
    return steps, max(percent, 0.01) / 100
