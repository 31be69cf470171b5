"""What happened, in order: ranks that do the same are one event, schedules and overflow are spans."""

from __future__ import annotations

from typing import Any

from kit.healthy import healthy
from kit.rows import Rows
from tdbg.aggregator.findings import Finding, Incident
from tdbg.aggregator.timeline import Event, timeline


def _events(rows: Rows, *incidents: Incident) -> list[Event]:
    return timeline(lambda sql: rows.connection.execute(sql).fetchall(), incidents)


def _of(events: list[Event], kind: str) -> list[tuple[int, int, tuple[int, ...], str]]:
    return [(e.step, e.last_step, e.ranks, e.words) for e in events if e.kind == kind]


def _lr(rows: Rows, ranks: int, **at: Any) -> None:
    for rank in range(ranks):
        rows.add("optim", rank=rank, pid=100 + rank, class_name="AdamW", settings="{}", **at)


def test_what_all_ranks_do_at_one_step_is_one_event() -> None:
    events = _events(healthy(3))
    assert _of(events, "pass") == [(1, 1, (0, 1, 2), "pass 1 over the training data begins"),
                                   (13, 13, (0, 1, 2), "pass 2 over the training data begins")]  # fmt: skip
    assert _of(events, "lr") == [(1, 1, (0, 1, 2), "optimizer 0: 0.001")]
    assert _of(events, "exit") == [(24, 24, (0, 1, 2), "code 0")]
    assert [(e.attempt, e.step) for e in events] == sorted((e.attempt, e.step) for e in events)


def test_a_schedule_is_one_line_and_a_leap_its_own() -> None:
    rows = healthy(2)
    for step in range(2, 8):
        _lr(rows, 2, step=step, lr=0.001 * step)  # a warm-up
    for step in range(8, 20):
        _lr(rows, 2, step=step, lr=0.007 * 0.9 ** (step - 7))
    _lr(rows, 2, step=20, lr=0.1)
    spans = [(first, last) for first, last, _, _ in _of(_events(rows), "lr")]
    assert spans == [(1, 7), (8, 19), (20, 20)]


def test_a_rank_that_differs_has_an_event_of_its_own() -> None:
    rows = healthy(3)
    _lr(rows, 2, step=5, lr=0.5)
    rows.add("optim", rank=2, pid=102, class_name="AdamW", settings="{}", step=5, lr=0.25)
    assert _of(_events(rows), "lr")[1:] == [(5, 5, (0, 1), "optimizer 0: 0.5"), (5, 5, (2,), "optimizer 0: 0.25")]


def test_overflow_checkpoints_evaluations_and_ends() -> None:
    rows = healthy(2)
    rows.connection.execute("UPDATE step SET skipped = TRUE WHERE step IN (3, 4, 9)")
    rows.connection.execute("DELETE FROM evaluation")
    rows.connection.execute("UPDATE loss SET scale = 512 WHERE step >= 5")
    for rank in (0, 1):
        me = {"rank": rank, "pid": 100 + rank}
        rows.add("evaluation", **me, step=13, model_type="Net", in_eval=True)
        rows.add("checkpoint", **me, step=13, event="save", path="/x/last.pt", parts='{"model": 4, "rng": true}')
        for part in ("model", "optimizer"):
            rows.add("checkpoint", **me, step=1, event="apply", part=part, source=0)
    rows.add("failure", rank=1, pid=101, step=20, kind="exception", type="ValueError", during="data")
    rows.connection.execute("UPDATE exit SET exit_code = -9 WHERE rank = 0")
    events = _events(rows)
    both = (0, 1)
    assert _of(events, "skipped") == [(3, 4, both, "2 updates left out by the scaler"),
                                      (9, 9, both, "1 update left out by the scaler")]  # fmt: skip
    assert _of(events, "loss scale") == [(5, 5, both, "1 to 512")]
    assert _of(events, "evaluation") == [(13, 13, both, "Net in eval mode")]
    assert _of(events, "save") == [(13, 13, both, "last.pt (model, rng)")]
    assert _of(events, "put back") == [(1, 1, both, "model, optimizer")]
    assert _of(events, "failure") == [(20, 20, (1,), "ValueError in phase data")]
    assert _of(events, "exit") == [(24, 24, (0,), "signal 9"), (24, 24, (1,), "code 0")]
    assert [e.kind for e in events if e.step == 13] == ["pass", "evaluation", "save"]


def test_incidents_stand_at_their_steps() -> None:
    found = Finding(ranks=(1,), first_step=9, last_step=24, subject="in.weight", severity="critical", summary="apart")
    (event,) = [e for e in _events(healthy(2), Incident("x", "PARAM_DESYNC", found)) if e.kind == "incident"]
    assert (event.step, event.last_step, event.ranks) == (9, 24, (1,))
    assert event.words == "PARAM_DESYNC (critical): in.weight"


def test_what_devices_report_is_told_with_the_ranks_on_them() -> None:
    rows = Rows()
    for step in range(1, 5):
        rows.add("step", rank=1, step=step, time_ns=step * 1000)
    rows.add("gpu_proc", rank=1, device=3, of_pid=7)
    for at, reasons, errors in ((500, 0x4, 0), (1500, 0x4, 0), (2500, 0x44, 2), (3500, 0, 2)):
        rows.add("gpu", rank=-1, device=3, time_ns=at, throttle_reasons=reasons, ecc_uncorrected=errors)
    rows.add("gpu_event", rank=-1, device=3, time_ns=3200, xid=79)
    assert _of(_events(rows), "device") == [
        (2, 2, (1,), "device 3: 2 uncorrected memory error(s)"),
        (2, 2, (1,), "device 3: clocks slowed by hardware thermal slowdown"),
        (3, 3, (1,), "device 3: Xid 79, the device fell off the bus"),
        (3, 3, (1,), "device 3: clocks free again"),
    ]
