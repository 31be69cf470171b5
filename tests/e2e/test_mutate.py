"""The mutation run of scripts/mutate: what it draws, how it judges, and two jobs of it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "mutate"


@pytest.fixture(scope="module")
def mutate() -> ModuleType:
    """The script as a module: it has no suffix."""
    loader = importlib.machinery.SourceFileLoader("mutate_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look their module up
    path = list(sys.path)
    loader.exec_module(module)
    sys.path[:] = path
    return module


def judged(mutate: ModuleType, mode: str, *incidents: dict[str, Any], step: int = 10, once: bool = False) -> Any:
    """The result for a fault on rank 1 of 3 at `step`; passes ran every 8 steps where the mode is governed."""
    judging = mutate.judging
    usual = {"severity": "critical", "evidence_state": "OBSERVED", "ranks": [1], "subject": "head", "summary": "",
             "last_good_step": step - 1, "first_step": step, "reason_code": "PARAM_DESYNC"}  # fmt: skip
    verdict = {"incidents": [usual | i for i in incidents], "verdicts": [],
               "data_quality": {"complete": True, "warnings": []}}  # fmt: skip
    watched = list(range(1, 41)) if mode == "full" else [8, 16, 24, 32, 40]
    truth = judging.Truth(("PARAM_DESYNC",), (1,), step, False, "head", ("OPTIM_STATE_DESYNC",), once=once)
    case = judging.Case(0, "PARAM_DESYNC", {}, truth)
    result = judging.Result("", case.kind, mode, "", 0.0)
    judging.score(case, mode, judging.Said(verdict, watched, 40), result)
    return result


@pytest.mark.parametrize(
    ("mode", "incidents", "word"),
    [
        ("full", [{}], "RIGHT"),
        ("full", [], "MISSED"),
        ("full", [{"severity": "note"}], "MISSED"),
        ("full", [{"ranks": [0]}], "RANKS"),
        ("full", [{"subject": "body"}], "SUBJECT"),
        ("full", [{"first_step": 11, "last_good_step": 9}], "STEP"),
        ("full", [{"first_step": 9, "last_good_step": 8}], "STEP+INTERVAL"),
        ("full", [{}, {"reason_code": "STEP_DESYNC"}], "ALARM"),
        ("full", [{}, {"reason_code": "STEP_DESYNC", "severity": "note"}], "RIGHT"),
        ("governed", [{"first_step": 16, "last_good_step": 8}], "RIGHT"),
        ("governed", [{"first_step": 24, "last_good_step": 8}], "LATE"),
        ("governed", [{"first_step": 16, "last_good_step": 10}], "INTERVAL"),
    ],
)
def test_says_what_is_wrong_with_an_answer(mutate: ModuleType, mode: str, incidents: Any, word: str) -> None:
    assert judged(mutate, mode, *incidents).word == word


def test_of_a_fault_of_one_step_that_was_not_watched_what_it_left_is_found(mutate: ModuleType) -> None:
    left = {"reason_code": "OPTIM_STATE_DESYNC", "first_step": 16, "last_good_step": 8, "subject": "exp_avg"}
    assert judged(mutate, "governed", left, once=True).word == "RIGHT"
    assert judged(mutate, "governed", left).word == "MISSED"
    assert judged(mutate, "full", left | {"first_step": 10, "last_good_step": 9}, once=True).word == "MISSED"
    assert judged(mutate, "governed", left, once=True, step=16).word == "MISSED"


def test_a_seed_draws_the_same_jobs_and_another_one_others(mutate: ModuleType) -> None:
    draws = [[mutate.draws.faulty(seed, n) for n in range(20)] for seed in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]


def test_a_whole_run_commits_every_fault_and_has_holes_enough(mutate: ModuleType) -> None:
    count = len(mutate.draws.FAULTS)
    assert count <= 64  # faulty jobs of a whole run
    kinds = {mutate.draws.faulty(5, n).kind for n in range(count)}
    assert kinds == set(mutate.draws.codes())
    assert len(list(mutate.holes.cases(5))) == 29


def test_the_silent_family_has_every_fault_and_every_shape(mutate: ModuleType) -> None:
    draws = mutate.draws
    count = len(draws.SILENT)
    assert count <= 64  # faulty jobs of a whole run
    assert {draws.faulty(5, n, "", "silent").kind for n in range(count)} == set(draws.codes("silent"))
    assert draws.faulty(5, 3, "", "silent") == draws.faulty(5, 3, "", "silent") != draws.faulty(6, 3, "", "silent")
    shapes = mutate.draws.silent_healthy
    names = {*shapes.SHAPES, *shapes.LOOPS}
    assert {draws.healthy(5, n, "silent").recipe["shape"] for n in range(len(names))} == names
    assert not {f.name for f in draws.SILENT} & {f.name for f in draws.FAULTS}  # `--only` names one of them


def test_bounds_are_clopper_and_pearsons(mutate: ModuleType) -> None:
    assert mutate.reporting.bound(59, 59) == pytest.approx(0.05 ** (1 / 59))
    assert mutate.reporting.bound(45, 46) == pytest.approx(0.9011, abs=1e-3)


def test_jobs_are_judged_right() -> None:
    for arguments in (["--only", "buffer_changed", "--faulty", "1", "--mode", "full"],
                      ["--healthy", "1", "--mode", "governed"],
                      ["--family", "silent", "--only", "never_set_to_train", "--faulty", "1",
                       "--mode", "full"]):  # fmt: skip
        command = [sys.executable, str(SCRIPT), "--seed", "2", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(re.findall(r"^RIGHT ", done.stdout, re.MULTILINE)) == 1
