"""Collectives as a rank issues them: rows before the call, what goes into a signature, what is kept for a failure."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kit.agent import read, record, running
from tdbg.launcher import flights
from tdbg.rankagent import flightrecorder, signatures
from tdbg.rankagent.probes import collectives
from tdbg.rankagent.record import Recorder

ProcessGroup = torch._C._distributed_c10d.ProcessGroup
pytestmark = pytest.mark.xdist_group("process-group")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def calls(rows: dict[str, list[dict[str, Any]]], source: str = "call") -> list[dict[str, Any]]:
    return [r for r in rows.get("collective", []) if r["source"] == source]


def train(steps: int, each: Any) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        each()
        optimizer.step()


# ---------------------------------------------------------------- what a row says


def test_each_collective_has_a_row_with_its_place_in_the_group_and_in_the_program(tmp_path: Path) -> None:
    def helper(x: torch.Tensor) -> None:
        dist.all_reduce(x)

    def program() -> None:
        helper(torch.ones(2, 3))
        dist.broadcast(torch.ones(4, dtype=torch.int64), src=0)
        dist.barrier()
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX, async_op=True).wait()

    rows = calls(record(tmp_path, program))
    assert [(r["position"], r["op"], r["signature"], r["root"]) for r in rows] == [
        (1, "all_reduce", "float32[6] SUM", -1), (2, "broadcast", "int64[4]", 0), (3, "barrier", "", -1),
        (4, "all_reduce", "float32[1] MAX", -1),
    ]  # fmt: skip
    assert rows[0]["site"].startswith("test_collectives.py:")
    assert rows[0]["site"].endswith(" helper")
    assert " program < " in rows[0]["callers"]
    assert {tuple(r["ranks"]) for r in rows} == {(0,)}


def test_aliases_object_collectives_and_groups_are_seen(tmp_path: Path) -> None:
    from torch.distributed import all_reduce  # taken before the agent is there

    def program() -> None:
        all_reduce(torch.ones(1))
        dist.all_gather_object([None], {"a": 1})
        other = dist.new_group([0])
        all_reduce(torch.ones(1), group=other)

    rows = calls(record(tmp_path, program))
    assert [r["op"] for r in rows] == ["all_reduce", "all_gather", "all_gather", "all_reduce"]
    assert rows[3]["position"] == 1
    assert rows[3]["group"] != rows[0]["group"]


def test_a_call_that_fails_has_its_row_and_its_own_error(tmp_path: Path) -> None:
    def program() -> None:
        with pytest.raises((ValueError, RuntimeError)):
            dist.all_gather([torch.ones(3)], torch.ones(2))

    assert [r["signature"] for r in calls(record(tmp_path, program))] == ["float32[3] own float32[2]"]


def test_time_inside_calls_and_waits_is_communication(tmp_path: Path) -> None:
    with running(tmp_path) as agent:
        dist.all_reduce(torch.ones(1))
        assert agent.phases["communication"] > 0
        assert not [name for name in agent.phases if name.startswith("communication_in")]


@pytest.mark.parametrize("phase", ["forward", "optimizer", "data"])
def test_time_inside_calls_is_told_apart_within_the_phase_that_it_falls_into(tmp_path: Path, phase: str) -> None:
    with running(tmp_path) as agent:
        agent.enter(phase)
        dist.all_reduce(torch.ones(1))
        assert agent.phases[f"communication_in_{phase}"] == agent.phases["communication"] > 0


@pytest.mark.parametrize("phase", ["backward", "checkpoint"])
def test_backwards_and_saves_hold_their_collectives(tmp_path: Path, phase: str) -> None:
    with running(tmp_path) as agent:
        agent.enter(phase)
        dist.all_reduce(torch.ones(1))
        assert agent.phases == {}


def test_torch_is_left_as_it_was_and_results_are_the_same(tmp_path: Path) -> None:
    before = {name: vars(ProcessGroup)[name] for name in signatures.METHODS if name in vars(ProcessGroup)}
    assert {"allreduce", "broadcast", "barrier", "allgather"} <= set(before)
    x = torch.arange(4.0)
    record(tmp_path, lambda: dist.all_reduce(x))
    assert {name: vars(ProcessGroup)[name] for name in before} == before
    dist.all_reduce(x)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_positions_go_on_when_a_group_is_made_anew(tmp_path: Path) -> None:
    def program() -> None:
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1))

    rows = calls(record(tmp_path, program))
    assert len({(r["group"], r["position"]) for r in rows}) == 2


# ---------------------------------------------------------------- beyond the first few of a step


def test_a_step_of_many_calls_outside_the_watch_is_counted_and_digested(tmp_path: Path) -> None:
    def many(order: int) -> Any:
        def each() -> None:
            for size in (1, 2)[::order]:
                for _ in range(10):
                    dist.all_reduce(torch.ones(size))

        return each

    digests = []
    for run, order in (("a", 1), ("b", 1), ("c", -1)):
        rows = record(tmp_path / run, lambda order=order: train(3, many(order)), watch_steps=0)
        counted = rows["collective_step"]
        assert [(r["step"], r["first"], r["count"]) for r in counted] == [(s, 20 * s - 11, 12) for s in (1, 2, 3)]
        assert len(calls(rows)) == 3 * collectives.FEW
        digests.append([r["digest"] for r in counted])
    assert digests[0] == digests[1]
    assert all(a != c for a, c in zip(digests[0], digests[2], strict=True))


def test_threads_of_the_user_are_counted_without_rows(tmp_path: Path) -> None:
    def program() -> None:
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1)))
        thread.start()
        thread.join()
        dist.all_reduce(torch.ones(1))

    assert [r["position"] for r in calls(record(tmp_path, program))] == [2]


# ---------------------------------------------------------------- at a failure


def recorded_by_torch() -> bool:
    return hasattr(torch._C._distributed_c10d, "_dump_fr_trace")


@pytest.mark.skipif(not recorded_by_torch(), reason="this torch records no gloo collectives")
def test_a_failure_writes_what_the_flight_recorder_holds(tmp_path: Path) -> None:
    with running(tmp_path) as agent:
        dist.all_reduce(torch.ones(5))
        agent.fire("failed", ValueError("x"))
    last = calls(read(tmp_path), "recorder")[-1]
    assert (last["op"], last["signature"]) == ("all_reduce", "float[5]")
    assert "test_a_failure_writes" in last["site"]


def test_the_launcher_asks_and_takes_the_answer_over(tmp_path: Path) -> None:
    with running(tmp_path / "rank", watch_steps=0) as agent:
        for _ in range(collectives.FEW + 3):
            dist.all_reduce(torch.ones(5))
        folder = Path(agent.recorder.folder)
        assert flights.ask([folder, tmp_path]) == [folder]
        flights.wait([folder], 5.0)
        node = Recorder(tmp_path / "records" / "node-00000.0.1", -1, 0)
        assert flights.take(folder, node, rank=0, attempt=0)
        assert not flights.take(folder, node, rank=0, attempt=0)
    rows = calls(read(tmp_path))
    assert [(r["rank"], r["position"]) for r in rows] == [(0, collectives.FEW + n) for n in (1, 2, 3)]
    assert not (folder / "ask").exists()


def test_who_cannot_answer_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ask")
    began = time.monotonic()
    flights.wait(flights.ask([tmp_path, tmp_path / "none"]))
    assert time.monotonic() - began < 0.2


def test_the_thread_is_not_seen_and_a_forked_child_ends_well(tmp_path: Path) -> None:
    seen = threading.enumerate()
    with running(tmp_path) as agent:
        dist.all_reduce(torch.ones(1))
        assert threading.enumerate() == seen
        pid = os.fork()
        if pid == 0:
            os._exit(1 if agent.live else 7)  # gloo itself can do nothing in a child
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert len(calls(read(tmp_path))) == 1


# ---------------------------------------------------------------- signatures


def tensor(numel: int, dtype: str = "float32", device: str = "cpu") -> Any:
    return SimpleNamespace(numel=lambda: numel, dtype=f"torch.{dtype}", device=SimpleNamespace(type=device))


@pytest.mark.parametrize(
    ("method", "one", "other"),
    [
        ("alltoall_base", (tensor(3), tensor(7)), (tensor(5), tensor(7))),
        ("alltoall", ([tensor(1), tensor(2)], [tensor(3)]), ([tensor(4), tensor(9)], [tensor(1)])),
        ("gather", ([[tensor(4), tensor(4)]], [tensor(4)]), ([], [tensor(4)])),
        ("gather", ([], [tensor(4, device="cuda")]), ([], [tensor(9, device="cuda")])),
        ("scatter", ([tensor(4)], [[tensor(4), tensor(4)]]), ([tensor(4)], [])),
        ("allgather", ([[tensor(4), tensor(9)]], [tensor(4, device="cuda")]),
         ([[tensor(4), tensor(9)]], [tensor(9, device="cuda")])),
        ("reduce_scatter", ([tensor(4, device="cuda")], [[tensor(4), tensor(9)]]),
         ([tensor(9, device="cuda")], [[tensor(4), tensor(9)]])),
    ],
)  # fmt: skip
def test_what_ranks_may_have_different_is_no_part_of_a_signature(method: str, one: Any, other: Any) -> None:
    shape = signatures.METHODS[method]
    assert signatures.read(shape, one, {}, str) == signatures.read(shape, other, {}, str)


@pytest.mark.parametrize(
    ("method", "one", "other"),
    [
        ("allreduce", ([tensor(3)],), ([tensor(4)],)),
        ("allreduce", ([tensor(3)],), ([tensor(3, "bfloat16")],)),
        ("allgather", ([[tensor(4), tensor(4)]], [tensor(4)]), ([[tensor(5), tensor(5)]], [tensor(5)])),
        ("allgather", ([[tensor(4), tensor(4)]], [tensor(4)]), ([[tensor(4), tensor(4)]], [tensor(5)])),
        ("broadcast", ([tensor(4)], SimpleNamespace(rootRank=0)), ([tensor(4)], SimpleNamespace(rootRank=1))),
        ("allreduce", ([tensor(4)], SimpleNamespace(reduceOp="SUM")), ([tensor(4)], SimpleNamespace(reduceOp="MAX"))),
    ],
)
def test_what_ranks_must_have_alike_is(method: str, one: Any, other: Any) -> None:
    shape = signatures.METHODS[method]
    assert signatures.read(shape, one, {}, str) != signatures.read(shape, other, {}, str)


def test_a_long_list_of_tensors_stays_short() -> None:
    many = signatures.sizes([tensor(n) for n in range(1000)], "all")
    assert len(many) < 200
    assert many != signatures.sizes([tensor(n) for n in range(999)] + [tensor(7)], "all")
    assert signatures.sizes([tensor(4)] * 50, "all") == "float32[4] x50"


# ---------------------------------------------------------------- the recorder's entries


def entry(name: str, seq: int = 1, **more: Any) -> dict[str, Any]:
    return {"profiling_name": name, "process_group": ("0", "default_pg"), "collective_seq_id": seq, "is_p2p": False,
            "time_created_ns": seq * 10, "retired": True, "input_sizes": [[2, 3]], "input_dtypes": ["Float"],
            "output_sizes": [[4, 6]], "output_dtypes": ["Float"]} | more  # fmt: skip


def test_entries_keep_what_ranks_must_have_alike() -> None:
    raw = [entry("gloo:all_reduce"), entry("gloo:all_gather", 2), entry("gloo:all_to_all", 3), entry("nccl:gather", 4),
           entry("gloo:send", 5, is_p2p=True), entry("nccl:recv 0<-1", 6), entry("", 7), entry("gloo:barrier", 8,
           input_sizes=[], input_dtypes=[])]  # fmt: skip
    found = flightrecorder.entries(pickle.dumps({"entries": raw}))
    assert [(e.position, e.op, e.signature) for e in found] == [
        (1, "all_reduce", "float[6]"), (2, "all_gather", "float[24]"), (3, "all_to_all", "float"),
        (4, "gather", "float"), (8, "barrier", ""),
    ]  # fmt: skip
