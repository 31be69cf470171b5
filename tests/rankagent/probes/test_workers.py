"""What data sets and workers do inside: streams that workers share, samples that were lost or exchanged."""

import random
import sys
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from kit.agent import record
from kit.broken import FirstTry, Inline, Neighbour, Noisy, Nothing, OwnFallback, Retry, without_none
from tdbg import rankagent


def rows_of(tmp_path, dataset, **how):
    how = {"batch_size": 5} | how

    def two_passes():
        loader = DataLoader(dataset, **how)
        for _ in range(2):
            list(loader)

    rows = record(tmp_path, two_passes)
    assert not any(r["state"] == "disabled" for r in rows["probe"])
    return rows


HOW = {
    "in the rank": {},
    "in workers": {"num_workers": 2},
    "in spawned workers": {"num_workers": 1, "multiprocessing_context": "spawn"},
    "in persistent workers": {"num_workers": 2, "persistent_workers": True},
}


@pytest.fixture(autouse=True)
def nobody_traces():
    before = sys.gettrace()
    sys.settrace(None)  # coverage tools
    yield
    sys.settrace(before)


@pytest.fixture(autouse=True)
def children_find_the_rank(monkeypatch, tmp_path):
    """What the launcher and the claim leave in the environment, so that spawned workers report to this agent."""
    door = str(Path(rankagent.__path__[0]) / "bootstrap")
    for name, value in {"TDBG_RUN": str(tmp_path), "TDBG_CLAIM": "1", "RANK": "0", "PYTHONPATH": door}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("how", HOW)
def test_a_neighbour_handed_out_after_an_exception_is_named(tmp_path, how):
    rows = rows_of(tmp_path, Neighbour(20, broken=(3, 7)), **HOW[how])["making"]
    pairs = [(r["instead_of"], r["instead"]) for r in rows]
    assert sorted(pairs) == sorted([([3], [4]), ([7], [8])] * 2)
    assert {r["exceptions"] for r in rows} == {"ValueError"}


@pytest.mark.parametrize("how", ["in the rank", "in workers"])
def test_an_index_that_was_changed_after_an_exception_is_named(tmp_path, how):
    rows = rows_of(tmp_path, Inline(20, broken=(3,)), **HOW[how])["making"]
    assert [(r["instead_of"], r["instead"]) for r in rows] == [([3], [4])] * 2


def test_ids_are_those_of_the_root_data_set(tmp_path):
    rows = rows_of(tmp_path, Subset(Neighbour(20, broken=(13,)), range(10, 20)))["making"]
    assert [(r["caught_ids"], r["instead_of"], r["instead"]) for r in rows] == [([13], [13], [14])] * 2


@pytest.mark.parametrize("how", ["in the rank", "in workers"])
def test_samples_that_are_none_are_counted_with_their_ids(tmp_path, how):
    rows = rows_of(tmp_path, Nothing(20, broken=(3, 7)), collate_fn=without_none, **HOW[how])["making"]
    assert sorted((r["asked"], r["made"], r["nones"], r["none_caught"], r["none_ids"]) for r in rows) == sorted(
        [(5, 4, 1, 1, [3]), (5, 4, 1, 1, [7])] * 2
    )


@pytest.mark.parametrize("kind", [Retry, FirstTry])
def test_a_sample_that_was_made_after_all_is_no_substitute(tmp_path, kind):
    rows = rows_of(tmp_path, kind(20, broken=(3, 7))).get("making", [])
    assert all(not r["instead_of"] and not r["nones"] for r in rows)


def test_code_that_handles_no_exception_is_never_traced(tmp_path):
    assert "making" not in rows_of(tmp_path, Noisy(20))


def test_exceptions_that_are_how_the_code_works_end_the_tracing(tmp_path):
    rows = rows_of(tmp_path, OwnFallback(400))["making"]
    assert max(r["samples_traced"] for r in rows) <= 70


class Sloppy(IterableDataset):
    def __iter__(self):
        for i in range(20):
            try:
                if i == 3:
                    raise ValueError(i)
                yield torch.tensor(float(i))
            except ValueError:
                continue


def test_exceptions_in_an_iterable_data_set_are_seen(tmp_path):
    rows = rows_of(tmp_path, Sloppy())["making"]
    assert [(r["outside"], r["exceptions"]) for r in rows] == [(1, "ValueError")] * 2


def test_the_tracer_of_somebody_else_stays(tmp_path):
    def theirs(frame, event, arg):
        return None

    def program():
        sys.settrace(theirs)
        list(DataLoader(Neighbour(20, broken=(3,)), batch_size=5))
        assert sys.gettrace() is theirs
        sys.settrace(None)

    rows = record(tmp_path, program)
    assert "making" not in rows
    assert [(r["fetches"], r["untraced"]) for r in rows["stream"]] == [(0, 0), (1, 1), (2, 2), (4, 4)]


def streams(rows, worker, fetches, iterator=0):
    (row,) = [r for r in rows["stream"] if (r["worker"], r["fetches"], r["iterator"]) == (worker, fetches, iterator)]
    return {n: (d, o) for n, d, o in zip(row["names"].split(","), row["digests"], row["origins"], strict=True)}


@pytest.mark.parametrize("how", ["in workers", "in persistent workers"])
@pytest.mark.parametrize("make", [numpy.random.default_rng, numpy.random.RandomState, random.Random])
def test_a_generator_of_the_data_set_is_the_same_in_two_workers(tmp_path, how, make):
    rows = rows_of(tmp_path, Noisy(40, make(1)), **HOW[how])
    for fetches in (0, 1, 2):
        assert streams(rows, 0, fetches)["dataset.rng"] == streams(rows, 1, fetches)["dataset.rng"]
        assert streams(rows, 0, fetches)["torch"] != streams(rows, 1, fetches)["torch"]
    assert len({streams(rows, 0, f)["dataset.rng"] for f in (0, 1, 2)}) == 3
    assert len({streams(rows, 0, f)["torch"] for f in (0, 1, 2)}) == 1


def test_torch_generators_too(tmp_path):
    rows = rows_of(tmp_path, Noisy(40, torch.Generator()), num_workers=2)
    assert streams(rows, 0, 1)["dataset.rng"] == streams(rows, 1, 1)["dataset.rng"]


def same_seed(worker):
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)


def test_workers_that_were_seeded_alike_stand_alike(tmp_path):
    rows = rows_of(tmp_path, Noisy(40), num_workers=2, worker_init_fn=same_seed)
    for name in ("torch", "numpy", "random"):
        assert streams(rows, 0, 0)[name] == streams(rows, 1, 0)[name]


def test_nothing_of_the_workers_files_is_left_behind(tmp_path):
    rows_of(tmp_path, Noisy(40), num_workers=2)
    assert not list(tmp_path.rglob("worker-*"))


def test_a_pass_that_is_left_early_still_tells(tmp_path):
    def program():
        for batch in DataLoader(Neighbour(200, broken=(31,)), batch_size=5, num_workers=1):
            if batch[0] >= 35:
                break

    assert [r["instead_of"] for r in record(tmp_path, program)["making"]] == [[31]]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_batch_says_which_worker_made_it(tmp_path, workers):
    rows = rows_of(tmp_path, Noisy(20), num_workers=workers)["batch"]
    given = [r["worker"] for r in rows if r["end"] == ""]
    assert given == ([0, 1] * 4 if workers else [-1] * 8)


def test_later_batches_are_looked_at_for_none_alone(tmp_path):
    rows = rows_of(tmp_path, Nothing(800, broken=(640, 641, 777)), collate_fn=without_none)["making"]
    assert [(r["fetches"], r["nones"], r["none_ids"]) for r in rows[:2]] == [(129, 2, [640, 641]), (155, 1, [777])]
