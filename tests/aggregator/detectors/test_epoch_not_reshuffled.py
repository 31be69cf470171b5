"""EPOCH_NOT_RESHUFFLED from the ids of training batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import epoch_not_reshuffled

IN_ORDER = list(range(24))
SHUFFLED = [7 * i % 24 + i // 24 for i in range(24)]
BATCH = 6


def train(
    orders: Sequence[Sequence[int]], ranks: int = 2, whole: bool = True, fresh: bool = False, **loader: Any
) -> Rows:
    """Ranks that consume the same orders pass after pass; `fresh` builds a new loader for each pass."""
    rows = Rows()
    about = {"sampler_class": "RandomSampler", "shuffle": 1, "sampler": -1} | loader
    for rank in range(ranks):
        step = 0
        for k, order in enumerate(orders):
            key = {"rank": rank, "loader": k if fresh else 0, "iterator": 0 if fresh else k}
            rows.add("loader", **key, **about)
            for index in range(0, len(order), BATCH):
                step += 1
                rows.add("batch", **key, index=index // BATCH, step=step, ids=order[index : index + BATCH],
                         samples=BATCH, backwards=step - 1)  # fmt: skip
            if whole:
                rows.add("batch", **key, index=len(order) // BATCH, step=step, backwards=step, end="StopIteration")
    return rows


def judge(rows: Rows, world_size: int = 2) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(epoch_not_reshuffled, world_size=world_size)
    return outcomes["EPOCH_NOT_RESHUFFLED"], [f for _, f in found]


def test_a_new_order_each_pass_is_clear() -> None:
    assert judge(train([IN_ORDER, SHUFFLED, IN_ORDER])) == ("CLEAR", [])


def test_one_order_twice_is_found_at_the_first_step_of_the_second_pass() -> None:
    _, (f,) = judge(train([SHUFFLED, SHUFFLED]))
    assert (f.ranks, f.first_step, f.subject, f.severity) == ((0, 1), 5, "RandomSampler", "warning")


def test_a_pass_that_is_taken_again_after_a_resume_is_no_repetition() -> None:
    rows = train([IN_ORDER, SHUFFLED, SHUFFLED], ranks=1)
    rows.add("checkpoint", step=9, event="apply", part="model")
    rows.connection.execute("UPDATE checkpoint SET seq = (SELECT max(seq) + 1 FROM batch WHERE step = 9)")
    assert judge(rows, world_size=1) == ("CLEAR", [])


def test_the_repetition_may_begin_later() -> None:
    _, (f,) = judge(train([IN_ORDER, SHUFFLED, SHUFFLED]))
    assert f.first_step == 9


def test_a_loader_built_anew_for_each_epoch_is_followed() -> None:
    _, (f,) = judge(train([SHUFFLED, SHUFFLED], fresh=True))
    assert f.first_step == 5


def test_no_shuffling_asked_for_is_not_applicable() -> None:
    assert judge(train([IN_ORDER, IN_ORDER], shuffle=0, sampler_class="SequentialSampler")) == ("NOT_APPLICABLE", [])


def test_a_distributed_sampler_says_itself_whether_it_shuffles() -> None:
    for shuffle, expected in ((True, "INCIDENT"), (False, "NOT_APPLICABLE")):
        rows = train([SHUFFLED, SHUFFLED], shuffle=-1, sampler=0)
        for rank in range(2):
            rows.add("sampler", rank=rank, event="init", class_name="DistributedSampler", shuffle=shuffle)
        assert judge(rows)[0] == expected


def test_fewer_than_20_samples_may_agree_by_chance() -> None:
    assert judge(train([SHUFFLED[:18], SHUFFLED[:18]])) == ("INSUFFICIENT_EVIDENCE", [])


def test_passes_that_did_not_end_are_no_evidence() -> None:
    assert judge(train([SHUFFLED, SHUFFLED], whole=False)) == ("INSUFFICIENT_EVIDENCE", [])


def test_two_loaders_read_side_by_side_in_one_order_are_no_repetition() -> None:
    rows = Rows()
    for loader in (0, 1):
        rows.add("loader", loader=loader, shuffle=1, sampler_class="RandomSampler")
    for index in range(4):
        for loader in (0, 1):
            rows.add("batch", loader=loader, index=index, step=index + 1, ids=SHUFFLED[index * 6 : index * 6 + 6],
                     backwards=index)  # fmt: skip
    for loader in (0, 1):
        rows.add("batch", loader=loader, index=4, step=4, backwards=4, end="StopIteration")
    assert judge(rows, 1) == ("INSUFFICIENT_EVIDENCE", [])
