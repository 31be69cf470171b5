"""The very samples that training consumed, for every form of loader; digests where there are no ids."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)

from kit.agent import read, record, running
from kit.numbers import Numbers
from tdbg.rankagent.samples import sample_digests


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        start, stride = (info.id, info.num_workers) if info else (0, 1)
        yield from (torch.tensor(float(i)) for i in range(start, 40, stride))


FORMS = {
    "plain": {"batch_size": 5},
    "shuffled": {"batch_size": 5, "shuffle": True},
    "two workers": {"batch_size": 5, "num_workers": 2, "shuffle": True},
    "persistent workers": {"batch_size": 4, "num_workers": 2, "persistent_workers": True, "shuffle": True},
    "prefetch": {"batch_size": 3, "num_workers": 1, "prefetch_factor": 4},
    "spawned workers": {"batch_size": 10, "num_workers": 1, "multiprocessing_context": "spawn"},
    "batch sampler": {"batch_sampler": BatchSampler(SequentialSampler(range(37)), 6, True)},
    "no batching": {"batch_size": None},
    "drop last": {"batch_size": 5, "drop_last": True},
}


def values(batch):
    return [int(v) for v in batch.reshape(-1)]


@pytest.mark.parametrize("form", FORMS)
def test_recorded_ids_are_the_samples_in_the_batch(tmp_path, form):
    got = []

    def consume():
        loader = DataLoader(Numbers(), **FORMS[form])
        for _ in range(2):
            got.extend(values(batch) for batch in loader)

    rows = record(tmp_path, consume)
    batches = [r for r in rows["batch"] if r["end"] == ""]
    assert [r["ids"] for r in batches] == got
    assert [r["samples"] for r in batches] == [len(g) for g in got]
    assert [r["iterator"] for r in rows["batch"] if r["end"] == "StopIteration"] == [0, 1]
    assert len(rows["loader"]) == 2
    assert not any(r["state"] == "disabled" for r in rows["probe"])


def test_out_of_order_delivery_keeps_ids_and_batches_together(tmp_path):
    got = []

    def consume():
        try:
            loader = DataLoader(Numbers(), batch_size=4, num_workers=2, in_order=False)
        except TypeError:
            pytest.skip("this torch has no in_order")
        got.extend(values(b) for b in loader)

    assert [r["ids"] for r in record(tmp_path, consume)["batch"][:-1]] == got


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_that_the_program_swallows_shifts_nothing(tmp_path, workers):
    got = []

    def consume():
        loader = iter(DataLoader(Numbers(30, fail=(7,)), batch_size=5, num_workers=workers))
        while True:
            try:
                got.append(values(next(loader)))
            except StopIteration:
                return
            except ValueError:
                continue

    rows = record(tmp_path, consume)["batch"]
    assert [r["ids"] for r in rows if r["end"] == ""] == got
    assert [r["end"] for r in rows if r["end"] not in ("", "StopIteration")] == ["ValueError"]


def test_ids_are_positions_in_the_root_data_set_and_levels_say_how(tmp_path):
    root = ConcatDataset([Numbers(10), Numbers(10)])
    inner = Subset(Subset(root, range(4, 20)), [0, 2, 4, 6])

    rows = record(tmp_path, lambda: list(DataLoader(inner, batch_size=2)))
    assert [r["ids"] for r in rows["batch"][:-1]] == [[4, 6], [8, 10]]
    loader = rows["loader"][0]
    assert (loader["dataset_class"], loader["dataset_length"]) == ("ConcatDataset", 20)
    assert [lv[:2] for lv in __import__("json").loads(loader["levels"])] == [
        ["ConcatDataset", 20],
        ["Subset", 16],
        ["Subset", 4],
    ]


def test_a_random_split_has_one_digest_for_one_seed(tmp_path):
    def digest(seed, folder):
        part, _ = random_split(Numbers(20), [15, 5], generator=torch.Generator().manual_seed(seed))
        return record(tmp_path / folder, lambda: list(DataLoader(part)))["loader"][0]["levels"]

    assert digest(1, "a") == digest(1, "b") != digest(2, "c")


def test_the_distributed_samplers_settings_and_epochs_are_recorded(tmp_path):
    def consume():
        sampler = DistributedSampler(Numbers(37), num_replicas=2, rank=1, seed=5)
        loader = DataLoader(Numbers(37), batch_size=5, sampler=sampler)
        for epoch in (0, 1):
            sampler.set_epoch(epoch)
            list(loader)

    rows = record(tmp_path, consume)
    events = [(r["event"], r["epoch"]) for r in rows["sampler"]]
    assert events == [("init", 0), ("set_epoch", 0), ("iter", 0), ("set_epoch", 1), ("iter", 1)]
    first = rows["sampler"][0]
    assert (first["num_replicas"], first["replica"], first["seed"], first["length"], first["dataset_length"]) == (
        2,
        1,
        5,
        19,
        37,
    )
    assert [r["sampler"] for r in rows["loader"]] == [0, 0]


def test_drawing_with_replacement_is_said(tmp_path):
    sampler = WeightedRandomSampler([1.0] * 37, 20)
    rows = record(tmp_path, lambda: list(DataLoader(Numbers(37), sampler=sampler)))
    assert rows["loader"][0]["replacement"]


@pytest.mark.parametrize("workers", [0, 2])
def test_iterable_data_has_digests_instead_of_ids(tmp_path, workers):
    rows = record(tmp_path, lambda: list(DataLoader(Stream(), batch_size=8, num_workers=workers)))
    batches = [r for r in rows["batch"] if r["end"] == ""]
    digests = [d for r in batches for d in r["digests"]]
    assert all(r["ids"] == [] for r in batches)
    assert len(digests) == len(set(digests)) == 40
    assert rows["loader"][0]["iterable"]


def test_one_sample_has_one_digest_wherever_it_stands(tmp_path):
    x = torch.randn(12, 3, 5)
    data = TensorDataset(x, torch.arange(12))
    orders = ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4])
    by_id = []
    for k, order in enumerate(orders):
        rows = record(tmp_path / str(k), lambda order=order: list(DataLoader(Subset(data, order), batch_size=6)))
        by_id.append(dict(zip(rows["batch"][0]["ids"], rows["batch"][0]["digests"], strict=True)))
    assert by_id[0] == by_id[1]


def test_the_same_data_set_has_the_same_digest_and_another_has_not(tmp_path):
    def digest(seed, folder):
        data = TensorDataset(torch.randn(50, 4, generator=torch.Generator().manual_seed(seed)))
        return record(tmp_path / folder, lambda: list(DataLoader(data)))["loader"][0]["dataset_digest"]

    assert digest(1, "a") == digest(1, "b") != digest(2, "c")


def test_the_order_of_samples_and_random_numbers_is_the_same_with_and_without_the_agent(tmp_path):
    def order():
        torch.manual_seed(3)
        loader = DataLoader(Numbers(), batch_size=5, shuffle=True, num_workers=2, persistent_workers=True)
        return [values(b) for _ in range(2) for b in loader], torch.rand(1).item()

    plain = order()
    with running(tmp_path):
        watched = order()
    assert plain == watched


def test_nan_in_a_batch_names_the_tensor_the_rows_and_the_step(tmp_path):
    class Data(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, i):
            return {"x": torch.ones(3), "price": torch.tensor(float("nan") if i == 7 else 1.0).half()}

    def train():
        net = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        for batch in DataLoader(Data(), batch_size=4):
            net(batch["x"]).sum().backward()
            optimizer.step()

    rows = [r for r in record(tmp_path, train)["input"] if r["source"] == "batch"]
    assert [(r["step"], r["nonfinite"]) for r in rows] == [(1, 0), (2, 1), (3, 0)]
    assert (rows[1]["path"], rows[1]["dtype"], rows[1]["positions"]) == ("['price']", "float16", [3])


def test_large_finite_half_precision_values_are_no_false_alarm(tmp_path):
    rows = record(tmp_path, lambda: [step_with(torch.full((64,), 60000.0, dtype=torch.float16))])
    assert [r["nonfinite"] for r in rows["input"]] == [0]


def step_with(x):
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for (batch,) in DataLoader(TensorDataset(x), batch_size=64):
        net(batch.float()[:, None]).sum().backward()
        optimizer.step()


def test_what_the_model_gets_is_counted_even_when_it_is_the_loaders_own_tensor(tmp_path):
    x = torch.ones(8, 1)
    x[5] = float("nan")

    def train(agent):
        for (batch,) in DataLoader(TensorDataset(x), batch_size=4):
            net = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
            agent.fire("forward_begin", net, (batch,), {})  # as DDP's forward does
            net(batch).sum().backward()
            optimizer.step()

    with running(tmp_path) as agent:
        train(agent)
    rows = [(r["step"], r["source"], r["nonfinite"]) for r in read(tmp_path)["input"]]
    assert [r for r in rows if r[0] == 2] == [(2, "batch", 1), (2, "forward", 1)]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_how_workers_are_started_is_said(tmp_path, method):
    loader = DataLoader(Numbers(4), num_workers=1, multiprocessing_context=method)
    assert record(tmp_path, lambda: list(loader))["loader"][0]["worker_start"] == method


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_that_was_never_made_has_the_ids_it_was_to_hold(tmp_path, workers):
    def consume():
        with pytest.raises(ValueError, match="broken"):
            list(DataLoader(Numbers(30, fail=(7,)), batch_size=5, num_workers=workers))

    (row,) = [r for r in record(tmp_path, consume)["batch"] if r["end"] == "ValueError"]
    assert (row["ids"], row["samples"]) == ([5, 6, 7, 8, 9], -1)


def test_samples_of_small_integers_have_digests_of_their_own():
    tokens = torch.randint(0, 4, (20_000, 12), generator=torch.Generator().manual_seed(1))
    contents = {tuple(row) for row in tokens.tolist()}
    assert len(set(sample_digests(tokens, len(tokens)))) >= len(contents) - 2  # 2e8 pairs, 2^-32 each
