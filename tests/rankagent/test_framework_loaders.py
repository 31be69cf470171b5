"""The loaders of the frameworks around torch: each batch's ids against its content, at the step that consumes it."""

import itertools
import json

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset

from kit.agent import record
from kit.numbers import Numbers
from tdbg.rankagent.readahead import Following


def values(batch):
    return [int(v) for v in batch.reshape(-1)]


def train(loader, got, limit=None, epochs=1):
    """Consume a loader with an update for each batch; `got` collects what each step was given."""
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for _ in range(epochs):
        for batch in itertools.islice(loader, limit):
            got.append(values(batch))
            net(batch.float().reshape(-1, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def consumed(rows):
    return [(r["step"], r["ids"]) for r in rows["batch"] if r["end"] == ""]


def steps(got):
    return list(enumerate(got, start=1))


def unharmed(rows):
    return [r for r in rows["probe"] if r["state"] == "disabled"] == []


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.tensor([float(i)]) for i in range(20))


# ---------------------------------------------------------------- accelerate


@pytest.fixture
def accelerate():
    pytest.importorskip("accelerate")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield __import__("accelerate.data_loader", fromlist=["x"])
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def shard_of(accelerate):
    """prepare_data_loader as rank `index` of `count`, on the CPU and without a process group."""

    def make(loader, index=0, count=2, **more):
        return accelerate.prepare_data_loader(
            loader, device=torch.device("cpu"), num_processes=count, process_index=index, put_on_device=True, **more
        )

    from accelerate.state import PartialState

    PartialState(cpu=True)
    return make


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("index", [0, 1])
def test_a_loader_that_reads_one_batch_ahead_gives_each_step_its_own_batch(tmp_path, shard_of, index, workers):
    got = []
    loader = DataLoader(Numbers(37), batch_size=4, shuffle=True, num_workers=workers)
    rows = record(tmp_path, lambda: train(shard_of(loader, index), got, epochs=2))
    assert consumed(rows) == steps(got)
    assert unharmed(rows)
    ends = [(r["iterator"], r["backwards"]) for r in rows["batch"] if r["end"] == "StopIteration"]
    assert ends == [(0, len(got) // 2), (1, len(got))]
    first = rows["loader"][0]
    assert (first["batch_size"], first["samples"], first["sharers"], first["shuffle"]) == (4, 37, 2, 1)
    assert first["sampler_class"] in ("RandomSampler", "SeedableRandomSampler")


def test_a_loop_that_leaves_early_is_not_given_the_batch_read_ahead(tmp_path, shard_of):
    got = []
    rows = record(tmp_path, lambda: train(shard_of(DataLoader(Numbers(40), batch_size=4)), got, limit=3))
    assert consumed(rows) == steps(got)
    assert len(got) == 3


def test_split_batches_and_batches_left_out_on_resuming(tmp_path, accelerate, shard_of):
    got = []

    def resume():
        loader = shard_of(DataLoader(Numbers(40), batch_size=8), 1, split_batches=True)
        train(accelerate.skip_first_batches(loader, 2), got)

    rows = record(tmp_path, resume)
    assert consumed(rows) == steps(got)
    assert got[0] == [20, 21, 22, 23]
    first = rows["loader"][0]
    assert (first["batch_size"], first["sharers"], first["skipped"]) == (4, 2, 2)


def test_an_iterable_loader_that_skips_its_first_batches_does_not_record_them(tmp_path, accelerate, shard_of):
    got = []
    loader = shard_of(DataLoader(Stream(), batch_size=5), count=1)
    rows = record(tmp_path, lambda: train(accelerate.skip_first_batches(loader, 2), got))
    assert [r["samples"] for r in rows["batch"] if r["end"] == ""] == [5, 5]
    assert [r["step"] for r in rows["batch"] if r["end"] == ""] == [1, 2]
    assert rows["loader"][0]["skipped"] == 2


def test_a_dispatcher_records_the_share_of_this_rank_and_the_ids_of_all(tmp_path, shard_of):
    got = []
    loader = DataLoader(Numbers(38), batch_size=4)
    rows = record(tmp_path, lambda: train(shard_of(loader, count=1, dispatch_batches=True), got))
    assert consumed(rows) == steps(got)
    assert rows["loader"][0]["dispatched"] == 1
    assert [r["end"] for r in rows["batch"]][-1] == "StopIteration"
    assert [r["samples"] for r in rows["batch"]][:-1] == [4] * 9 + [2]


def test_nan_read_ahead_belongs_to_the_step_that_gets_it(tmp_path, shard_of):
    data = torch.ones(40, 1)
    data[21] = float("nan")

    def run():
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        for batch in shard_of(DataLoader(list(data), batch_size=4), count=1):
            net(batch).sum().backward()
            optimizer.step()

    rows = record(tmp_path, run)
    assert [r["step"] for r in rows["input"] if r["source"] == "batch" and r["nonfinite"]] == [6]


# ---------------------------------------------------------------- torchdata


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_stateful_loader_and_its_resumed_pass(tmp_path, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    got, after = [], []

    def run():
        loader = stateful(Numbers(40), batch_size=4, num_workers=workers, snapshot_every_n_steps=3)
        train(loader, got, limit=4)
        resumed = stateful(Numbers(40), batch_size=4, num_workers=workers, snapshot_every_n_steps=3)
        resumed.load_state_dict(loader.state_dict())
        train(resumed, after)

    rows = record(tmp_path, run)
    assert after[0] == [16, 17, 18, 19]
    assert consumed(rows) == steps(got + after)
    assert [r["skipped"] for r in rows["loader"]] == [0, 4]
    assert unharmed(rows)


# ---------------------------------------------------------------- Hugging Face datasets


def test_ids_of_a_hugging_face_data_set_are_positions_in_its_table(tmp_path):
    hub = pytest.importorskip("datasets")
    table = hub.Dataset.from_dict({"x": [float(i) for i in range(40)]}).with_format("torch")
    got = []

    def run():
        split = table.train_test_split(test_size=10, seed=3)
        for part in (split["train"], split["test"], Subset(split["train"], range(5, 25))):
            got.extend(values(b["x"]) for b in DataLoader(part, batch_size=5, shuffle=True))

    rows = record(tmp_path, run)
    assert [ids for _, ids in consumed(rows)] == got
    trained, tested, subset = rows["loader"]
    assert trained["dataset_digest"] == tested["dataset_digest"] == subset["dataset_digest"] != ""
    assert [lv[:2] for lv in json.loads(subset["levels"])] == [["Dataset", 40], ["Dataset", 30], ["Subset", 20]]
    assert unharmed(rows)


def test_hugging_face_tables_with_other_rows_have_other_digests(tmp_path):
    hub = pytest.importorskip("datasets")

    def digest(first, folder):
        part = hub.Dataset.from_dict({"x": [float(first + i) for i in range(20)]}).with_format("torch")
        return record(tmp_path / folder, lambda: list(DataLoader(part)))["loader"][0]["dataset_digest"]

    assert digest(0, "a") == digest(0, "b") != digest(1, "c")


def test_split_dataset_by_node_of_a_shuffled_data_set_keeps_the_ids(tmp_path):
    hub = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    table = hub.Dataset.from_dict({"x": [float(i) for i in range(40)]}).with_format("torch").shuffle(seed=1)
    got = []

    def run():
        for rank in (0, 1):
            got.extend(values(b["x"]) for b in DataLoader(split_dataset_by_node(table, rank, 2), batch_size=5))

    assert [ids for _, ids in consumed(record(tmp_path, run))] == got


# ---------------------------------------------------------------- Lightning


def test_lightning_reads_one_ahead_of_data_without_a_length(tmp_path):
    fetchers = pytest.importorskip("lightning.pytorch.loops.fetchers")
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    got = []

    def run():
        fetcher = fetchers._PrefetchDataFetcher(prefetch_batches=1)
        fetcher.setup(CombinedLoader(DataLoader(Stream(), batch_size=5)))

        def batches():
            iter(fetcher)
            while not fetcher.done:
                yield next(fetcher)[0]
            fetcher.teardown()

        train(batches(), got)

    rows = record(tmp_path, run)
    found = [(r["step"], r["end"]) for r in rows["batch"]]
    assert found == [(1, ""), (2, ""), (3, ""), (4, ""), (5, "StopIteration")]
    assert rows["batch"][-1]["backwards"] == 4
    assert unharmed(rows)


def test_lightning_does_not_read_ahead_of_data_with_a_length(tmp_path):
    fetchers = pytest.importorskip("lightning.pytorch.loops.fetchers")
    from lightning.pytorch.utilities.combined_loader import CombinedLoader

    got = []

    def run():
        fetcher = fetchers._PrefetchDataFetcher(prefetch_batches=1)
        fetcher.setup(CombinedLoader(DataLoader(Numbers(20), batch_size=5)))
        train((batch for batch, *_ in fetcher), got)

    assert consumed(record(tmp_path, run)) == steps(got)


# ---------------------------------------------------------------- samplers


class Buckets:
    """A batch sampler of the user's own: samples of like length together, incomplete buckets left out."""

    drop_last = True

    def __init__(self, length, size):
        self.length, self.size = length, size

    def __iter__(self):
        for start in (0, 1):
            bucket = list(range(start, self.length, 2))
            yield from (bucket[i : i + self.size] for i in range(0, len(bucket) - self.size + 1, self.size))

    def __len__(self):
        return sum((self.length - start + 1) // 2 // self.size for start in (0, 1))


SAMPLERS = {
    "buckets": (lambda: {"batch_sampler": Buckets(37, 4)}, ("Buckets", -1, True, -1)),
    "batch sampler": (lambda: {"batch_sampler": BatchSampler(SequentialSampler(range(37)), 6, True)},
                      ("SequentialSampler", 6, True, 0)),
    "some only": (lambda: {"sampler": RandomSampler(range(37), num_samples=9), "batch_size": 3},
                  ("RandomSampler", 3, False, 1)),
}  # fmt: skip


@pytest.mark.parametrize("form", SAMPLERS)
def test_the_innermost_sampler_and_the_batching_are_told_apart(tmp_path, form):
    make, expected = SAMPLERS[form]
    got = []
    rows = record(tmp_path, lambda: got.extend(values(b) for b in DataLoader(Numbers(37), **make())))
    assert [ids for _, ids in consumed(rows)] == got
    first = rows["loader"][0]
    assert (first["sampler_class"], first["batch_size"], first["drop_last"], first["shuffle"]) == expected


def test_a_dispatcher_that_keeps_its_number_of_processes_elsewhere_is_followed_all_the_same():
    class Later:
        def _fetch_batches(self, iterator):
            return iterator

    following = Following(
        lambda: True, pytest.fail, lambda *handed: None, lambda waiting: None, lambda original: original
    )
    assert list(following._whole_pass(lambda loader: iter([1, 2]))(Later())) == [1, 2]
