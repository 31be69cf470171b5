"""OOM from rows of oom, exit and host."""

from __future__ import annotations

from typing import Any

from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import oom

GIB = 1 << 30
MEASURED = {"parameters_bytes": GIB, "gradients_bytes": GIB, "optimizer_bytes": 2 * GIB, "others_bytes": 5 * GIB}


def steps(ranks: int = 3, until: int = 9) -> Rows:
    rows = Rows()
    for rank in range(ranks):
        for step in range(1, until + 1):
            rows.add("step", rank=rank, step=step)
    return rows


def failed(rows: Rows, **more: Any) -> Rows:
    row = {"rank": 1, "step": 10, "kind": "device", "device": 0, "during": "backward", "type": "OutOfMemoryError",
           "requested_bytes": GIB, "in_use_bytes": 9 * GIB, "total_bytes": 10 * GIB, "free_bytes": -1,
           "reserved_bytes": 10 * GIB, "batch": "float32[64, 512]", "largest": "float32[32, 512]", "largest_step": 4,
           "holders": f"5 x float32[16384, 16384] on cuda = {5 * GIB}"}  # fmt: skip
    return rows.add("oom", **(row | MEASURED | more))


def judge(rows: Rows, **facts: Any) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(oom, **facts)
    return outcomes["OOM"], [f for _, f in found]


def test_an_error_names_rank_phase_step_holders_and_batches() -> None:
    _, (f,) = judge(failed(steps()))
    assert (f.ranks, f.first_step, f.last_good_step, f.severity, f.evidence_state) == (
        (1,),
        10,
        9,
        "critical",
        "OBSERVED",
    )
    assert f.subject == "backward"
    assert "1024 MiB asked for" in f.summary
    assert "5 x float32[16384, 16384]" in f.summary
    said = {e.metric: (e.value, e.expected) for e in f.evidence}
    assert said["optimizer state"][0] == "2048 MiB"
    assert said["last batch"] == ("float32[64, 512]", "largest before: float32[32, 512] at step 4")
    assert f.cannot_conclude == ()


def test_what_no_tensor_accounts_for_is_said() -> None:
    _, (f,) = judge(failed(steps(), others_bytes=0, gradients_bytes=0, holders=""))
    assert "graphs" in f.cannot_conclude[0]
    _, (f,) = judge(failed(steps(), **dict.fromkeys(MEASURED, -1)))
    assert "could not be looked at" in f.cannot_conclude[0]


def test_the_allocators_word_and_the_exception_are_one_failure() -> None:
    rows = failed(failed(steps(), caught=True, type="", message=""))
    _, (f,) = judge(rows)
    assert f.severity == "critical"


def test_a_refusal_that_was_caught_is_a_warning() -> None:
    rows = failed(failed(steps(until=20), caught=True, step=5), caught=True, step=9)
    _, (f,) = judge(rows)
    assert (f.severity, f.evidence_state, f.first_step, f.last_step) == ("warning", "OBSERVED", 5, 9)


def killed(kills: int, fullness: float, **more: Any) -> Rows:
    rows = steps()
    rows.add("host", rank=-1, time_ns=10**12 - 10**9, cgroup_limit_bytes=1000, cgroup_used_bytes=int(1000 * fullness),
             memory_total_bytes=10**6, memory_available_bytes=9 * 10**5)  # fmt: skip
    rows.add("proc", rank=1, rss_bytes=3 * GIB, workers_rss_bytes=GIB)
    return rows.add("exit", **({"rank": 1, "step": 9, "exit_code": -9, "ended_ns": 10**12, "oom_kills": kills} | more))


def test_a_kill_that_the_kernel_counted_near_the_limit_is_observed() -> None:
    _, (f,) = judge(killed(1, 0.97))
    assert (f.ranks, f.first_step, f.severity, f.evidence_state) == ((1,), 10, "critical", "OBSERVED")
    assert "4096 MiB with its workers" in f.summary


def test_a_kill_far_from_any_limit_is_inferred() -> None:
    _, (f,) = judge(killed(1, 0.4))
    assert (f.severity, f.evidence_state) == ("warning", "INFERRED")


def test_more_victims_than_kills_are_inferred() -> None:
    rows = killed(1, 0.97).add("exit", rank=2, step=9, exit_code=-9, ended_ns=10**12, oom_kills=1)
    assert [f.evidence_state for f in judge(rows)[1]] == ["INFERRED", "INFERRED"]


def test_sigkill_without_a_count_is_no_oom() -> None:
    assert judge(killed(0, 0.97)) == ("CLEAR", [])
    assert judge(killed(-1, 0.97)) == ("INSUFFICIENT_EVIDENCE", [])
    assert judge(killed(1, 0.97, stopped_by_launcher=True)) == ("CLEAR", [])
    assert judge(killed(1, 0.97, exit_code=1)) == ("CLEAR", [])


def test_a_missing_rank_is_no_clear() -> None:
    assert judge(steps(), world_size=4, missing_ranks=(3,)) == ("INSUFFICIENT_EVIDENCE", [])
    assert judge(steps()) == ("CLEAR", [])
