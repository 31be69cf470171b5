"""TRAIN_EVAL_OVERLAP from the ids and contents of training and evaluation passes, in the order in which they ran."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import train_eval_overlap

N = 100


class Loop:
    """One rank's program: passes over parts of data sets, each of which trains or evaluates."""

    def __init__(self, rows: Rows, rank: int = 0) -> None:
        self.rows, self.rank = rows, rank
        self.step = 0
        self.numbers: dict[str, int] = {}
        self.passes: dict[str, int] = {}

    def read(self, data: str, ids: Iterable[int], trains: bool, part: str = "", dataset: int = 0, whole: bool = True,
             content: Callable[[int], int] | None = None, picked: int = -1, named: bool = True,
             grad: bool | None = None, **loader: Any) -> None:  # fmt: skip
        """A pass. `part`: the name of a Subset; `picked`: samples that a sampler of its own takes of the data set."""
        ids = list(ids)
        name = f"{data}/{part}/{dataset}/{trains}"
        at = {"rank": self.rank, "pid": 7, "loader": self.numbers.setdefault(name, len(self.numbers))}
        at["iterator"] = self.passes[name] = self.passes.get(name, -1) + 1
        chain: list[list[object]] = [[data, N, ""]] + ([["Subset", len(ids), part]] if part else [])
        about = {"dataset": dataset, "dataset_class": data, "dataset_length": N, "dataset_digest": data,
                 "levels": json.dumps(chain), "samples": picked if picked >= 0 else chain[-1][1]}  # fmt: skip
        self.rows.add("loader", **at, step=self.step, **(about | loader))
        digest = content or (lambda i: i * 7 + 1)
        for index, start in enumerate(range(0, len(ids), 5)):
            some = ids[start : start + 5]
            self.rows.add("batch", **at, index=index, step=self.step, samples=len(some), ids=some if named else [],
                          digests=[digest(i) for i in some], backwards=self.step,
                          grad_enabled=trains if grad is None else grad)  # fmt: skip
            self.step += trains
        if whole:
            self.rows.add("batch", **at, index=10**6, step=self.step, backwards=self.step, end="StopIteration")

    def train(self, data: str, ids: Iterable[int], **more: Any) -> None:
        self.read(data, ids, True, **more)

    def evaluate(self, data: str, ids: Iterable[int], **more: Any) -> None:
        self.read(data, ids, False, **more)


def judge(rows: Rows, world_size: int = 1) -> tuple[str, list[Finding]]:
    outcomes, found = rows.judge(train_eval_overlap, world_size=world_size)
    return outcomes["TRAIN_EVAL_OVERLAP"], [f for _, f in found]


def loop(*passes: tuple[str, str, Iterable[int], dict[str, Any]]) -> Rows:
    rows = Rows()
    one = Loop(rows)
    for verb, data, ids, more in passes:
        getattr(one, verb)(data, ids, **more)
    return rows


# ---------------------------------------------------------------- one data set, ids


def test_a_split_that_was_drawn_twice() -> None:
    rows = loop(("train", "Rows", range(80), {"part": "a"}), ("evaluate", "Rows", range(70, 90), {"part": "b"}))
    outcome, (found,) = judge(rows)
    assert outcome == "INCIDENT"
    assert (found.severity, found.evidence_state, found.subject) == ("warning", "OBSERVED", "Rows")
    assert "10 of 20" in found.summary


def test_disjoint_parts_are_clear() -> None:
    part = ("evaluate", "Rows", range(80, 100), {"part": "b"})
    assert judge(loop(("train", "Rows", range(80), {"part": "a"}), part)) == ("CLEAR", [])


def test_folds_are_each_judged_against_their_own_training() -> None:
    rows = Rows()
    one = Loop(rows)
    for fold in range(4):
        held = set(range(fold * 25, fold * 25 + 25))
        kept = [i for i in range(N) if i not in held]
        one.evaluate("Rows", held, part=f"held {fold}")  # a check before training starts
        for _ in range(2):
            one.train("Rows", kept, part=f"kept {fold}")
            one.evaluate("Rows", held, part=f"held {fold}")
    assert judge(rows) == ("CLEAR", [])


def test_a_leak_within_each_fold_is_found() -> None:
    rows = Rows()
    one = Loop(rows)
    for fold in range(3):
        for _ in range(2):
            one.train("Rows", range(fold, 90), part=f"kept {fold}")
            one.evaluate("Rows", range(80, 100), part=f"held {fold}")
    assert judge(rows)[0] == "INCIDENT"


def test_a_measure_on_the_training_data_beside_a_real_evaluation_is_silent() -> None:
    for measured in ({"part": "a"}, {"part": "a", "grad": True}):
        rows = loop(
            ("train", "Rows", range(80), {"part": "a"}),
            ("evaluate", "Rows", range(80), measured),
            ("evaluate", "Rows", range(80, 100), {"part": "b"}),
        )
        assert judge(rows) == ("CLEAR", [])


def test_the_training_data_as_the_only_evaluation_is_a_note() -> None:
    rows = loop(("train", "Rows", range(N), {}), ("evaluate", "Rows", range(N), {}))
    _, (found,) = judge(rows)
    assert found.severity == "note"
    assert found.cannot_conclude


def test_a_part_of_the_training_data_as_the_only_evaluation_is_a_note() -> None:
    rows = loop(("train", "Rows", range(N), {}), ("evaluate", "Rows", range(20), {"part": "v"}))
    assert [f.severity for f in judge(rows)[1]] == ["note"]


def test_samplers_that_pick_from_one_data_set() -> None:
    apart = loop(("train", "Rows", range(80), {"picked": 80}), ("evaluate", "Rows", range(80, 100), {"picked": 20}))
    assert judge(apart) == ("CLEAR", [])
    mixed = loop(("train", "Rows", range(80), {"picked": 80}), ("evaluate", "Rows", range(70, 90), {"picked": 20}))
    assert [f.severity for f in judge(mixed)[1]] == ["warning"]


def test_one_sample_at_the_edge_of_a_split_is_a_note() -> None:
    rows = Rows()
    one = Loop(rows)
    one.train("Rows", range(301), part="a")
    one.evaluate("Rows", range(300, 500), part="b")
    assert [f.severity for f in judge(rows)[1]] == ["note"]


def test_a_look_at_one_batch_of_the_training_loader_is_no_evaluation() -> None:
    for look in ({"grad": True}, {"grad": False}):
        rows = loop(
            ("evaluate", "Rows", range(5), {"whole": False, **look}),
            ("train", "Rows", range(N), {}),
        )
        assert judge(rows) == ("INSUFFICIENT_EVIDENCE", []) or judge(rows)[1] == []


def test_the_last_test_on_all_data_beside_a_clean_evaluation_is_a_note() -> None:
    rows = loop(
        ("train", "Rows", range(80), {"part": "a"}),
        ("evaluate", "Rows", range(80, 100), {"part": "b"}),
        ("evaluate", "Rows", range(N), {}),
    )
    assert [f.severity for f in judge(rows)[1]] == ["note"]


# ---------------------------------------------------------------- data sets of their own, contents


def own(ids: Iterable[int], content: Callable[[int], int], **more: Any) -> Rows:
    """Two epochs over 100 samples of the content 7 i + 1, each followed by an evaluation."""
    rows = Rows()
    one = Loop(rows)
    ids = list(ids)
    for _ in range(2):
        one.train("Rows", range(N), **more)
        one.evaluate("Held", ids, dataset=1, content=content, named=more.get("named", True))
    return rows


def test_evaluation_samples_with_the_content_of_training_samples() -> None:
    rows = own(range(40), lambda i: i * 7 + 1 if i < 30 else -i)
    outcome, (found,) = judge(rows)
    assert outcome == "INCIDENT"
    assert (found.severity, found.evidence_state) == ("warning", "INFERRED")
    assert "30 of 40" in found.summary


def test_other_contents_are_clear_where_training_contents_stay() -> None:
    assert judge(own(range(40), lambda i: -i)) == ("CLEAR", [])


def test_few_kinds_of_samples_meet_again_by_nature() -> None:
    rows = own(range(40), lambda i: i % 10)
    rows.connection.execute("UPDATE batch SET digests = [i % 10 FOR i IN ids]")
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])


def test_augmented_training_data_can_not_be_compared() -> None:
    rows = own(range(40), lambda i: i * 7 + 1)
    rows.connection.execute("UPDATE batch SET digests = [i * 7 + iterator * 1000 + 3 FOR i IN ids] WHERE loader = 0")
    assert judge(rows) == ("INSUFFICIENT_EVIDENCE", [])


def test_streams_are_compared_by_content() -> None:
    found = judge(own(range(40), lambda i: i * 7 + 1, named=False))[1]
    assert [f.evidence_state for f in found] == ["INFERRED"]


def test_two_data_sets_of_one_class_and_length_are_not_taken_for_one() -> None:
    rows = Rows()
    one = Loop(rows)
    for _ in range(2):
        one.train("Rows", range(80), part="a")
        one.evaluate("Rows", range(60, 100), part="b", dataset=1, content=lambda i: -i)
    assert judge(rows) == ("CLEAR", [])


def test_an_evaluation_without_a_loader_is_no_evidence() -> None:
    assert judge(loop(("train", "Rows", range(N), {}))) == ("INSUFFICIENT_EVIDENCE", [])


def test_ranks_that_evaluate_their_shares_are_one_finding() -> None:
    rows = Rows()
    for rank in range(2):
        one = Loop(rows, rank)
        one.train("Rows", range(rank, 80, 2), part="a")
        one.evaluate("Rows", range(60 + rank, 100, 2), part="b")
    _, (found,) = judge(rows, 2)
    assert found.ranks == (0, 1)
