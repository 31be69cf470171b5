"""The agent's small parts: import hook, patching, identity, guard, step window, governor, landing."""

import importlib
import sys

import pytest

from tdbg.rankagent import afterimport, guard, identity, patch
from tdbg.rankagent.boundary import Window
from tdbg.rankagent.governor import ALARM_PAUSE_STEPS, ALARM_STEPS, LEAD_STEPS, Governor
from tdbg.rankagent.landing import RING, Landing


@pytest.fixture
def module_folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, afterimport.Finder)]
    afterimport._waiting.clear()


def test_a_function_runs_right_after_the_awaited_module(module_folder):
    (module_folder / "awaited_one.py").write_text("VALUE = 1\n")
    seen = []
    afterimport.when("awaited_one", lambda m: seen.append(m.VALUE))
    assert seen == []
    module = importlib.import_module("awaited_one")
    assert seen == [1]
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_an_imported_module_is_served_at_once():
    seen = []
    afterimport.when("json", seen.append)
    assert seen == [sys.modules["json"]]


def test_an_awaited_module_that_fails_or_is_missing_fails_as_ever(module_folder):
    (module_folder / "awaited_bad.py").write_text("raise ValueError('mine')\n")
    afterimport.when("awaited_bad", lambda m: None)
    afterimport.when("awaited_absent", lambda m: None)
    with pytest.raises(ValueError, match="mine"):
        importlib.import_module("awaited_bad")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("awaited_absent")


class Thing:
    def own(self):
        return "own"


class Heir(Thing):
    pass


def test_a_patch_is_undone_exactly():
    before = vars(Thing)["own"]
    undo = patch.replace(Thing, "own", lambda original: lambda self: original(self) + "!")
    assert Thing().own() == "own!"
    undo()
    assert vars(Thing)["own"] is before


def test_a_patch_of_an_inherited_method_leaves_no_trace():
    undo = patch.replace(Heir, "own", lambda original: lambda self: "patched")
    undo()
    assert "own" not in vars(Heir)
    assert Heir().own() == "own"


def test_a_patch_replaced_by_somebody_else_is_not_undone():
    before = vars(Thing)["own"]
    undo = patch.replace(Thing, "own", lambda original: lambda self: "ours")
    theirs = lambda self: "theirs"  # noqa: E731
    Thing.own = theirs
    undo()
    assert Thing.own is theirs
    Thing.own = before


def test_the_first_process_with_a_rank_claims_it_and_its_children_do_not():
    environment = {
        "TDBG_RUN": "/run",
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    role = identity.claim(environment, 100)
    assert (role.rank, role.world_size, role.local_rank, role.attempt) == (3, 8, 1, 2)
    assert identity.claim(environment, 101) is None
    assert identity.claim(environment, 100) == role


@pytest.mark.parametrize(
    "environment", [{}, {"RANK": "0"}, {"TDBG_RUN": "/run"}, {"TDBG_RUN": "/r", "RANK": "0", "TDBG_OFF": "1"}]
)
def test_a_process_without_run_or_rank_claims_nothing(environment):
    assert identity.claim(environment, 1) is None


def test_other_launchers_variables_name_the_rank_too():
    role = identity.claim({"TDBG_RUN": "/r", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}, 1)
    assert (role.rank, role.world_size, role.local_rank) == (5, 6, -1)


def test_an_error_of_ours_stops_at_the_guard_but_an_interrupt_passes():
    errors = []
    assert guard.attempt(errors.append, lambda: 1 // 0) is None
    assert "ZeroDivisionError" in guard.describe(errors[0])
    with pytest.raises(KeyboardInterrupt):
        guard.attempt(errors.append, lambda: (_ for _ in ()).throw(KeyboardInterrupt()))


def test_one_optimizer_is_one_step():
    w = Window()
    for step in range(1, 4):
        assert w.step == step
        assert not w.about_to_step(0)
        assert w.has_stepped(0, {0})
        assert w.close() == 1


def test_two_optimizers_of_one_iteration_are_one_step():
    w = Window()
    for _ in range(3):
        assert not w.has_stepped(0, {0, 1})
        assert not w.about_to_step(1)
        assert w.has_stepped(1, {0, 1})
        assert w.close() == 2
    assert w.step == 4


def test_a_rebuilt_optimizer_goes_on_counting():
    w = Window()
    assert w.has_stepped(0, {0})
    w.close()
    assert w.has_stepped(1, {1})
    w.close()
    assert w.step == 3


def test_an_optimizer_that_never_steps_delays_only_the_first_window():
    w = Window()
    assert not w.has_stepped(0, {0, 1})
    assert w.about_to_step(0)
    w.close()
    assert w.has_stepped(0, {0, 1})


def test_the_close_watch_covers_every_step_and_then_every_kth():
    g = Governor(100, 0.005)
    for _ in range(40):
        g.spent(True, 20_000_000, 1_000_000)
    assert all(g.watched(s) for s in range(1, 101))
    for step in range(1, 101):
        g.review(step, 0, None, None)
    assert g.cadence == 16  # 1 ms every 16th step is 0.33 % of 19 ms, every 8th 0.66 %
    assert [s for s in range(101, 150) if g.watched(s)] == [112, 128, 144]


def test_ranks_agree_on_rank_0s_cadence_however_their_own_costs_differ():
    store = {}
    ranks = [Governor(100, 0.005) for _ in range(3)]
    for r, g in enumerate(ranks):
        for _ in range(40):
            g.spent(True, 20_000_000, 1_000_000 * (r + 1))
    for step in range(1, 101):
        for r, g in enumerate(ranks):
            g.review(step, r, store.__setitem__, store.get)
    assert [g.cadence for g in ranks] == [16, 16, 16]
    assert len(store) == 1


def test_a_rank_that_finds_no_proposal_keeps_watching_every_step():
    g = Governor(100, 0.005)
    g.spent(True, 20_000_000, 1_000_000)
    for step in range(100 - LEAD_STEPS, 101):
        g.review(step, 1, None, {}.get)
    assert g.cadence == 1


def test_without_a_budget_every_step_is_watched():
    g = Governor(10, None)
    assert all(g.watched(s) for s in range(1, 5000))


def test_an_alarm_watches_the_next_steps_and_then_pauses():
    g = Governor(0, 0.005)
    g.cadence = 1024
    g.alarm(1000)
    assert [s for s in range(1000, 1020) if g.watched(s)] == list(range(1000, 1000 + ALARM_STEPS + 1))
    g.alarm(1010)
    assert not g.watched(1011)
    g.alarm(1000 + ALARM_PAUSE_STEPS)
    assert g.watched(1000 + ALARM_PAUSE_STEPS + 1)


class FakeDevice:
    """Stands for torch with a device whose copies arrive when the test says so."""

    class Event:
        done = False

        def record(self):
            pass

        def query(self):
            return FakeDevice.Event.done

        def synchronize(self):
            FakeDevice.Event.done = True

    class Tensor:
        def __init__(self, values, is_cuda=True):
            self.values, self.is_cuda, self.shape, self.dtype = values, is_cuda, (len(values),), None

        def copy_(self, other, non_blocking):
            assert non_blocking
            return FakeDevice.Tensor(other.values, False)

        def tolist(self):
            return self.values

    class cuda:
        pass

    def __init__(self):
        FakeDevice.Event.done = False
        self.cuda.Event = FakeDevice.Event

    def empty(self, shape, dtype, pin_memory):
        assert pin_memory
        return FakeDevice.Tensor([0] * shape[0], False)


def test_device_values_arrive_later_and_in_order_without_waiting():
    landing, got = Landing(FakeDevice()), []
    landing.land([FakeDevice.Tensor([1])], lambda r: got.append(r))
    landing.land([FakeDevice.Tensor([2]), FakeDevice.Tensor([3])], lambda r: got.append(r))
    landing.poll()
    assert got == []
    FakeDevice.Event.done = True
    landing.poll()
    assert got == [[[1]], [[2], [3]]]


def test_host_values_are_read_on_the_spot():
    landing, got = Landing(FakeDevice()), []
    landing.land([FakeDevice.Tensor([4], is_cuda=False)], got.append)
    assert got == [[[4]]]


def test_more_copies_in_flight_than_the_ring_holds_are_dropped_and_counted():
    landing, got = Landing(FakeDevice()), []
    for n in range(RING + 3):
        landing.land([FakeDevice.Tensor([n])], got.append)
    assert landing.dropped == 3
    landing.poll(wait=True)
    assert len(got) == RING
