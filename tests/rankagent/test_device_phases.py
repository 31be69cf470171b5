"""Times of a step on a device, with a stand-in for CUDA's events: a stream that runs behind the host."""

from __future__ import annotations

import pytest

from tdbg.rankagent.devicephases import RING, DevicePhases

STEP = ("forward_begin", "forward_end", "backward_begin", "gradients_local", "backward_end", "before_update")


class Stream:
    """Events take place 1 ms apart on the device; those up to `done` ms have."""

    def __init__(self):
        self.made = self.recorded = 0
        self.done = 0.0
        stream = self

        class Event:
            def __init__(self, enable_timing=False):
                assert enable_timing
                stream.made += 1

            def record(self):
                stream.recorded += 1
                self.at = float(stream.recorded)

            def query(self):
                return self.at <= stream.done

            def elapsed_time(self, other):
                assert self.query(), "CUDA raises for an event that has not passed"
                assert other.query(), "CUDA raises for an event that has not passed"
                return other.at - self.at

            def synchronize(self):
                raise AssertionError("the host must never wait")

        self.Event = Event


@pytest.fixture
def stream():
    return Stream()


def step(phases, number):
    for border in STEP:
        phases.mark(border)
    phases.end(number)


def test_a_step_is_read_when_the_device_has_come_to_its_end(stream):
    phases = DevicePhases(stream)
    step(phases, 1)
    stream.done = 6
    assert list(phases.landed()) == []
    stream.done = 7
    ms = {"forward": 1, "backward": 2, "reduce_wait": 1, "optimizer": 1, "gap": -1e-6}
    assert list(phases.landed()) == [(1, {phase: int(t * 1e6) for phase, t in ms.items()})]


def test_from_the_end_of_the_step_before_it_is_a_gap(stream):
    phases = DevicePhases(stream)
    stream.done = 1e9
    step(phases, 1)
    step(phases, 2)
    (_, first), (number, second) = phases.landed()
    assert (first["gap"], number, second["gap"]) == (-1, 2, 3_000_000)
    phases.forget()
    step(phases, 9)
    assert [t["gap"] for _, t in phases.landed()] == [-1]


def test_micro_batches_add_up(stream):
    phases = DevicePhases(stream)
    stream.done = 1e9
    for border in (*STEP[:5], *STEP):
        phases.mark(border)
    phases.end(1)
    ((_, times),) = phases.landed()
    assert (times["forward"], times["backward"], times["reduce_wait"]) == (2_000_000, 4_000_000, 2_000_000)


def test_a_device_far_behind_costs_rows_and_no_waiting(stream):
    phases = DevicePhases(stream)
    for number in range(1, RING + 4):
        step(phases, number)
    assert phases.dropped == 3
    stream.done = 1e9
    assert [number for number, _ in phases.landed()] == list(range(1, RING + 1))


def test_events_are_used_again(stream):
    phases = DevicePhases(stream)
    stream.done = 1e9
    for number in range(1, 100):
        step(phases, number)
        assert [n for n, _ in phases.landed()] == [number]
    assert stream.made <= 3 * (len(STEP) + 1)
