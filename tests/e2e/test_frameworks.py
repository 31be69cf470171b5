"""Frameworks under `tdbg-run`: nothing changes, steps count once, losses and samples are those the framework had.

Each job is one process group's life with several small trainings, run under torchrun and under tdbg-run. A program
prints for each training its steps, the loss of every backward as the framework scaled it, the samples that each
micro-batch held, and the sum of its final weights: the same bits in both runs, and what the run's tables must say.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from kit.framework_programs import HUGGING_FACE, LIGHTNING, OWN
from kit.job import Ended, both, job

PROGRAMS = {
    "hugging face": (HUGGING_FACE, ("transformers", "accelerate")),
    "lightning": (LIGHTNING, ("lightning",)),
    "own loops": (OWN, ("torchdata",)),
}


@pytest.fixture(scope="module", params=PROGRAMS)
def ended(request: Any, tmp_path_factory: Any) -> tuple[Ended, Ended]:
    """The job under torchrun and under tdbg-run; both ended well."""
    text, needs = PROGRAMS[request.param]
    lacking = [name for name in needs if importlib.util.find_spec(name) is None]
    if lacking:
        pytest.skip(f"{lacking[0]} is not installed")
    plain, recorded = both(tmp_path_factory.mktemp("framework"), job(text))
    assert plain.code == 0, plain
    assert recorded.code == 0, recorded
    return plain, recorded


def said(run: Ended, rank: int) -> dict[str, Any]:
    """What a rank's program printed, by training, in order."""
    lines = [json.loads(line) for line in run.out.splitlines() if line.startswith('{"')]
    return {name: about for line in lines for name, about in line.items() if about["rank"] == rank}


def test_losses_samples_and_weights_are_those_without_us(ended: tuple[Ended, Ended]) -> None:
    plain, recorded = ended
    for rank in range(2):
        assert said(plain, rank)
        assert said(plain, rank) == said(recorded, rank)


def test_a_run_that_does_everything_right_raises_no_alarm(ended: tuple[Ended, Ended]) -> None:
    assert ended[1].alarms == []
    assert ended[1].verdict["data_quality"]["complete"]


def test_steps_are_counted_once_and_hold_the_losses_of_the_framework(ended: tuple[Ended, Ended]) -> None:
    recorded = ended[1]
    totals = []
    for rank in range(2):
        trainings = said(recorded, rank).values()
        rows = recorded.rows(f"""SELECT s.backwards, s.inferred, l.total FROM step s JOIN loss l USING (rank, step)
                                 WHERE rank = {rank} ORDER BY step""")
        assert len(rows) == sum(about["steps"] for about in trainings)
        assert not any(inferred for _, inferred, _ in rows)
        losses = [loss for about in trainings for loss in about["losses"]]
        assert sum(backwards for backwards, *_ in rows) == len(losses)
        for backwards, _, total in rows:
            mine, losses = losses[:backwards], losses[backwards:]
            assert total == pytest.approx(sum(mine), rel=1e-5)
        totals.append([total for *_, total in rows])
    log = next(iter(said(recorded, 0).values())).get("log", [])  # what a trainer itself reports: the ranks' mean
    assert [(a + b) / 2 for a, b in zip(*totals, strict=True)][: len(log)] == pytest.approx(log, rel=1e-4)


def test_each_batch_holds_the_samples_that_the_model_was_given(ended: tuple[Ended, Ended]) -> None:
    recorded = ended[1]
    given = [said(recorded, rank) for rank in range(2)]
    for rank in range(2):
        rows = recorded.rows(f"""SELECT b.ids FROM training_batch b JOIN loader l USING (rank, pid, loader, iterator)
                                 WHERE rank = {rank} AND len(b.ids) > 0 AND l.dispatched = 0 ORDER BY b.seq""")
        own = [about["seen"] for about in given[rank].values() if not about.get("dispatched")]
        assert [r[0] for r in rows] == [ids for seen in own for ids in seen]


def test_rank_0_knows_what_it_dealt_to_every_rank(ended: tuple[Ended, Ended]) -> None:
    recorded = ended[1]
    given = [said(recorded, rank).get("dispatched") for rank in range(2)]
    if given[0] is None:
        pytest.skip("nothing is dispatched here")
    rows = recorded.rows("""SELECT b.rank, b.ids, b.samples FROM training_batch b
                            JOIN loader l USING (rank, pid, loader, iterator)
                            WHERE l.dispatched = 2 ORDER BY b.rank, b.seq""")
    dealt = [ids for rank, ids, _ in rows if rank == 0]
    assert dealt == [a + b for a, b in zip(given[0]["seen"], given[1]["seen"], strict=True)]
    for rank in range(2):
        assert [size for r, _, size in rows if r == rank] == [len(ids) for ids in given[rank]["seen"]]


def test_wrapped_optimizers_and_schedules_are_seen_through(ended: tuple[Ended, Ended]) -> None:
    recorded = ended[1]
    for rank in range(2):
        rows = recorded.rows(f"SELECT DISTINCT class_name, lr FROM optim WHERE rank = {rank}")
        assert {name for name, _ in rows} <= {"Adam", "AdamW", "SGD"}
        assert len({lr for _, lr in rows}) > 1
