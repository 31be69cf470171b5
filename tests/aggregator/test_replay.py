"""What is needed to run a step again, and what changed near it."""

from __future__ import annotations

from tdbg.aggregator.replay import IDS, kit
from tdbg.aggregator.surroundings import coincides, raised

ITEM = {"attempt": 0, "step": 9, "rank": 1, "ids": [4, 5], "digests": [], "samples": 2, "lr": 0.1, "scale": 1.0,
        "at": 8, "torch": -1, "numpy": 0, "python": 7}  # fmt: skip


def _said(**other: object) -> list[tuple[str, str]]:
    return [(e.metric, e.value) for e in kit([ITEM | other], 0, 9, [1])]


def test_lists_samples_streams_and_rate() -> None:
    assert _said() == [
        ("ids of the batch's samples", "4, 5"),
        ("random streams after this step, the last seen before", "torch ffffffffffffffff, python 0000000000000007"),
        ("learning rate", "0.1"),
    ]


def test_says_how_many_samples_are_left_out_and_falls_back_on_contents() -> None:
    assert _said(ids=list(range(IDS)), samples=IDS + 8)[0][1].endswith("31 and 8 more")
    assert _said(ids=[], digests=[11])[0][0] == "content digests of the batch's samples"
    assert ("loss scale", "1024") in _said(scale=1024.0)


def test_other_steps_ranks_and_attempts_say_nothing() -> None:
    assert list(kit([ITEM], 0, 8, [1])) == list(kit([ITEM], 0, 9, [0])) == list(kit([ITEM], 1, 9, [1])) == []
    assert _said(ids=None, digests=None, at=None, lr=None) == []


def _rates(*changes: tuple[int, float]) -> list[dict[str, float]]:
    return [{"step": s, "value": v} for s, v in changes]


def test_only_a_rate_above_all_before_is_raised() -> None:
    assert raised(_rates((1, 0.1), (48, 1.0)), 50) is not None
    assert raised(_rates((1, 0.1), (40, 1.0)), 50) is None  # too long ago
    assert raised(_rates((1, 1.0), (30, 0.01), (49, 1.0)), 50) is None  # a warm restart
    assert raised(_rates(*((s, 0.1 * s) for s in range(1, 51))), 50) is None  # a warm-up
    assert raised(None, 50) is None


def test_names_what_else_changed() -> None:
    said = coincides((_rates((1, 1.0), (49, 0.1)), _rates((50, 512.0)), [1, 50]), 1, 50)
    assert [e.metric for e in said] == [
        "learning rate", "loss scale changed to", "a new pass over the data began", "the run had been restarted",
    ]  # fmt: skip
