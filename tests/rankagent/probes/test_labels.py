"""Supervised labels are counted in each batch, whatever it is made of, and nothing is said of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from kit.agent import record

Rows = list[dict[str, Any]]


class Samples(Dataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        return self.samples[i]


def _train(samples: list[Any], ignored: int = -100, batch_size: int = 2) -> None:
    """A step on each batch, with a loss that has nothing to do with what the labels say but for the ignored index."""
    net = torch.nn.Linear(3, 5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in DataLoader(Samples(samples), batch_size=batch_size):
        (F.cross_entropy(net(torch.ones(2, 3)), torch.tensor([1, 2]), ignore_index=ignored) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def _labels(folder: Path, samples: list[Any], ignored: int = -100, **settings: Any) -> Rows:
    return record(folder, lambda: _train(samples, ignored), **settings).get("labels", [])


def _tokens(labels: list[int], ids: tuple[int, ...] = (7, 8, 9, 6)) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


def test_a_batch_of_a_mapping_is_counted_by_element_and_sample(tmp_path: Path) -> None:
    samples = [_tokens([-100, 8, 9, 6]), _tokens([-100] * 4), _tokens([-100] * 4), _tokens([-100] * 4)]
    rows = _labels(tmp_path, samples)
    assert [(r["step"], r["index"], r["elements"], r["supervised"], r["rows"], r["empty"]) for r in rows] == [
        (1, 0, 8, 3, 2, 1), (2, 1, 8, 0, 2, 2)
    ]  # fmt: skip
    assert {(r["loader"], r["iterator"], r["ignored"], r["path"]) for r in rows} == {(0, 0, -100, "['labels']")}
    assert [r["told"] for r in rows] == [False, True]  # the first batch came before any loss


@pytest.mark.parametrize(
    ("labels", "said"),
    [([-100, 8, 9, 6], "same"), ([8, 9, 6, -100], "next"), ([8, 9, 6, 1], "next"), ([8, 9, 9, -100], "other"),
     ([-100] * 4, "")],
)  # fmt: skip
def test_labels_beside_the_tokens_of_the_same_batch(tmp_path: Path, labels: list[int], said: str) -> None:
    assert [r["tokens"] for r in _labels(tmp_path, [_tokens(labels)] * 2)] == [said]


def test_the_index_that_the_loss_ignores_is_the_one_compared_with(tmp_path: Path) -> None:
    rows = _labels(tmp_path, [_tokens([0, 0, 3, 4])] * 6, ignored=0)
    assert [(r["ignored"], r["told"], r["supervised"]) for r in rows] == [(-100, False, 8), (0, True, 4), (0, True, 4)]


def test_the_last_tensor_of_a_tuple_holds_the_labels(tmp_path: Path) -> None:
    rows = _labels(tmp_path, [(torch.ones(3), 1), (torch.ones(3), -100)])
    assert [(r["path"], r["elements"], r["supervised"], r["empty"]) for r in rows] == [("[1]", 2, 1, 1)]


@pytest.mark.parametrize(
    "sample",
    [torch.tensor([1, 2]), (torch.ones(2), torch.ones(2)), {"labels": torch.ones(2)}, {"ids": torch.tensor([1])},
     (torch.tensor([1, 2]),), {"labels": torch.tensor([1, 2], dtype=torch.uint8)}, "text"],
)  # fmt: skip
def test_batches_without_integer_labels_leave_no_row(tmp_path: Path, sample: Any) -> None:
    assert _labels(tmp_path, [sample] * 4) == []


def test_between_watched_steps_only_a_batch_without_a_supervised_label_is_recorded(tmp_path: Path) -> None:
    samples = [_tokens([1, 2, 3, 4])] * 40
    samples[20:22] = [_tokens([-100] * 4)] * 2
    rows = _labels(tmp_path, samples, watch_steps=2)
    assert [r["step"] for r in rows if not r["supervised"]] == [11]
    assert len(rows) < 20


def test_losses_that_ignore_different_labels_leave_the_index_as_it_was(tmp_path: Path) -> None:
    def program() -> None:
        net = torch.nn.Linear(3, 5)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in DataLoader(Samples([_tokens([0, 1, 2, 3])] * 2), batch_size=1):
            out, y = net(torch.ones(2, 3)), torch.tensor([1, 2])
            (F.cross_entropy(out, y) + F.cross_entropy(out, y, ignore_index=0)).backward()
            optimizer.step()

    assert [(r["ignored"], r["told"]) for r in record(tmp_path, program)["labels"]] == [(-100, False)] * 2
