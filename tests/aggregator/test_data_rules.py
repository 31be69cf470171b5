"""The rules about data on what real loaders of one process leave: right programs are silent, faults are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset, random_split

from kit.agent import record
from kit.rows import Finding, Rows
from tdbg.aggregator.detectors import samples_dropped, train_eval_overlap
from tdbg.rankagent.tables import known_tables


class Loop:
    """A model and the two loops around it that everybody writes."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.0)

    def train(self, loader: Any) -> None:
        for x, *_ in loader:
            self.net(x).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self, loader: Any, grad: bool = False) -> None:
        with torch.set_grad_enabled(grad):
            for x, *_ in loader:
                self.net(x)


class Rendered(Dataset[Any]):
    """Samples computed from their number; `noise` changes them at each reading, as augmentation does."""

    def __init__(self, first: int, n: int, noise: float = 0.0) -> None:
        self.first, self.n, self.noise = first, n, noise

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(self.first + i))
        return x + self.noise * torch.randn(4), x.sum()


def table(n: int = 200, seed: int = 0) -> TensorDataset:
    return TensorDataset(torch.randn(n, 4, generator=torch.Generator().manual_seed(seed)), torch.arange(n))


def halves(data: Any, seed: int) -> Any:
    return random_split(data, [len(data) * 4 // 5, len(data) - len(data) * 4 // 5], torch.Generator().manual_seed(seed))


def judged(tmp_path: Any, program: Callable[[], None], module: Any) -> tuple[str, list[Finding]]:
    rows = Rows()
    for name, found in record(tmp_path, program).items():
        columns = {c.name for c in known_tables()[name].columns} | {"rank", "attempt", "pid", "step", "seq"}
        for row in found if name in ("batch", "loader", "sampler", "step") else ():
            rows.add(name, **{k: v for k, v in row.items() if k in columns})
    outcomes, findings = rows.judge(module, world_size=1)
    return outcomes[module.CODE], [f for _, f in findings]


def overlap(tmp_path: Any, program: Callable[[], None]) -> tuple[str, list[Finding]]:
    return judged(tmp_path, program, train_eval_overlap)


# ---------------------------------------------------------------- healthy: evaluation


def split_once() -> None:
    train, held = halves(table(), 1)
    loop, loader = Loop(), DataLoader(train, batch_size=16, shuffle=True)
    for _ in range(2):
        loop.train(loader)
        loop.evaluate(DataLoader(held, batch_size=16))


def folds() -> None:
    data = table(100)
    for fold in range(4):
        held = range(fold * 25, fold * 25 + 25)
        kept = [i for i in range(100) if i not in held]
        loop, loader = Loop(), DataLoader(Subset(data, kept), batch_size=5, shuffle=True)
        loop.evaluate(DataLoader(Subset(data, held), batch_size=5))  # before training, as trainers check themselves
        loop.train(loader)
        loop.evaluate(DataLoader(Subset(data, held), batch_size=5))


def measures_on_training_data() -> None:
    train, held = halves(table(), 1)
    loop, loader = Loop(), DataLoader(train, batch_size=16, shuffle=True)
    for _ in range(2):
        loop.train(loader)
        loop.evaluate(loader)
        loop.evaluate(DataLoader(Subset(train, range(32)), batch_size=16))
        loop.evaluate(DataLoader(held, batch_size=16))


def statistics_first() -> None:
    train, held = halves(table(), 1)
    loader = DataLoader(train, batch_size=16, shuffle=True)
    next(iter(loader))
    loop = Loop()
    loop.evaluate(loader, grad=True)  # mean and deviation of the data, say
    loop.train(loader)
    loop.evaluate(DataLoader(held, batch_size=16))


def samplers_on_one_set() -> None:
    data, order = table(), torch.randperm(200, generator=torch.Generator().manual_seed(1)).tolist()
    loop = Loop()
    for _ in range(2):
        loop.train(DataLoader(data, batch_size=16, sampler=SubsetRandomSampler(order[:160])))
        loop.evaluate(DataLoader(data, batch_size=16, sampler=SubsetRandomSampler(order[160:])))


def sets_of_their_own() -> None:
    loop, loader = Loop(), DataLoader(Rendered(0, 160), batch_size=16, shuffle=True)
    for _ in range(2):
        loop.train(loader)
        loop.evaluate(DataLoader(Rendered(1000, 40), batch_size=16))


def few_kinds() -> None:
    loop = Loop()
    for seed in (0, 0):
        data = [TensorDataset(torch.randint(0, 3, (n, 4), generator=torch.Generator().manual_seed(seed + n)).float())
                for n in (200, 60)]  # fmt: skip
        loop.train(DataLoader(data[0], batch_size=20, shuffle=True))
        loop.evaluate(DataLoader(data[1], batch_size=20))


HEALTHY = {
    split_once: "CLEAR", folds: "CLEAR", measures_on_training_data: "CLEAR", statistics_first: "CLEAR",
    samplers_on_one_set: "CLEAR", sets_of_their_own: "CLEAR", few_kinds: "INSUFFICIENT_EVIDENCE",
}  # fmt: skip


@pytest.mark.parametrize("program", HEALTHY, ids=lambda p: p.__name__)
def test_evaluation_on_held_out_data_is_silent(tmp_path: Any, program: Callable[[], None]) -> None:
    assert overlap(tmp_path, program) == (HEALTHY[program], [])


def test_augmented_training_data_of_its_own_is_not_called_clear(tmp_path: Any) -> None:
    def program() -> None:
        loop, loader = Loop(), DataLoader(Rendered(0, 160, noise=0.1), batch_size=16, shuffle=True)
        for _ in range(2):
            loop.train(loader)
            loop.evaluate(DataLoader(Rendered(0, 40), batch_size=16))

    assert overlap(tmp_path, program) == ("INSUFFICIENT_EVIDENCE", [])


# ---------------------------------------------------------------- faults: evaluation


def drawn_twice() -> None:
    data = table()
    loop = Loop()
    for _ in range(2):
        loop.train(DataLoader(halves(data, 1)[0], batch_size=16, shuffle=True))
        loop.evaluate(DataLoader(halves(data, 2)[1], batch_size=16))


def drawn_twice_from_copies() -> None:
    loop = Loop()
    for _ in range(2):
        loop.train(DataLoader(halves(table(), 1)[0], batch_size=16, shuffle=True))
        loop.evaluate(DataLoader(halves(table(), 2)[1], batch_size=16))


def files_that_share_rows() -> None:
    loop = Loop()
    for _ in range(2):
        loop.train(DataLoader(Rendered(0, 160), batch_size=16, shuffle=True))
        loop.evaluate(DataLoader(Rendered(120, 80), batch_size=16), grad=True)


def samplers_that_overlap() -> None:
    data = table()
    loop = Loop()
    for _ in range(2):
        loop.train(DataLoader(data, batch_size=16, sampler=SubsetRandomSampler(range(160))))
        loop.evaluate(DataLoader(data, batch_size=16, sampler=SubsetRandomSampler(range(140, 200))))


@pytest.mark.parametrize(
    "program", [drawn_twice, drawn_twice_from_copies, files_that_share_rows, samplers_that_overlap],
    ids=lambda p: p.__name__,
)  # fmt: skip
def test_evaluation_data_that_was_trained_on_is_found(tmp_path: Any, program: Callable[[], None]) -> None:
    outcome, found = overlap(tmp_path, program)
    assert outcome == "INCIDENT"
    assert {f.severity for f in found} == {"warning"}


def test_training_on_everything_is_at_least_a_note(tmp_path: Any) -> None:
    def program() -> None:
        data = table()
        loop = Loop()
        for _ in range(2):
            loop.train(DataLoader(data, batch_size=16, shuffle=True))
            loop.evaluate(DataLoader(halves(data, 1)[1], batch_size=16))

    assert [f.severity for f in overlap(tmp_path, program)[1]] == ["note"]


# ---------------------------------------------------------------- samples dropped


@pytest.mark.parametrize(
    ("n", "batch", "severity"), [(200, 16, None), (205, 20, None), (190, 128, "warning"), (100, 128, "warning")]
)
def test_only_a_material_remainder_is_told(tmp_path: Any, n: int, batch: int, severity: str | None) -> None:
    def program() -> None:
        loop, loader = Loop(), DataLoader(table(n), batch_size=batch, shuffle=True, drop_last=True)
        for _ in range(4):
            loop.train(loader)

    _, found = judged(tmp_path, program, samples_dropped)
    assert [f.severity for f in found] == ([severity] if severity else [])


def test_epochs_limited_on_purpose_over_reshuffled_data_are_silent(tmp_path: Any) -> None:
    def program() -> None:
        loop, loader = Loop(), DataLoader(table(), batch_size=10, shuffle=True)
        for _ in range(12):
            loop.train(batch for batch, _ in zip(loader, range(8), strict=False))

    assert judged(tmp_path, program, samples_dropped)[1] == []
