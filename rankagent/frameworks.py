"""Every private name of the frameworks around torch that the agent touches, each checked before use.

A name that is absent makes the feature "not recorded"; it never breaks training. Present in accelerate 1.15
(DataLoaderDispatcher._fetch_batches), lightning 2.6 (_PrefetchDataFetcher, _DataFetcher), torchdata 0.11
(StatefulDataLoader._get_iterator, _StatefulMultiProcessingDataLoaderIter._reset; all four used in `readahead`) and
datasets 5.2 (Dataset._data, Dataset._indices, Dataset._fingerprint). Of transformers 5.24 the Trainer's
`callback_handler` is used, which has no promise to stay, of lightning 2.6 Trainer._logger_connector._callback_metrics,
LightningModule._trainer and ._current_fx_name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ROWS_READ = 8  # of a table, spread evenly, first and last among them: about 1 ms


def table_of(dataset: Any) -> Any:
    """The table behind a map-style Hugging Face data set, None for any other."""
    if not (hasattr(dataset, "_data") and hasattr(dataset, "_indices") and hasattr(dataset, "_fingerprint")):
        return None
    table = dataset._data
    return table if hasattr(table, "num_rows") and hasattr(table, "column_names") else None


def mapping_of(dataset: Any) -> Any:
    """The column of positions in the table that a Hugging Face data set shows, in order; None when it shows all."""
    indices = getattr(dataset, "_indices", None)
    return None if indices is None else indices.column(0)


def parts_of_table(table: Any) -> Iterator[bytes]:
    """What tells one table from another: its size, its columns and some of its rows."""
    rows = int(table.num_rows)
    yield f"{rows} {sorted(table.column_names)}".encode()
    for k in range(min(rows, ROWS_READ)):
        at = k * (rows - 1) // max(1, min(rows, ROWS_READ) - 1)
        yield repr(table.slice(at, 1).to_pydict())[:65536].encode()


def last_logged(trainer: Any) -> dict[str, Any]:
    """The last entry of a Hugging Face Trainer's history of its log; empty where there is none."""
    history = getattr(getattr(trainer, "state", None), "log_history", None)
    return history[-1] if isinstance(history, list) and history and isinstance(history[-1], dict) else {}


def trainer_callbacks(trainer: Any) -> list[str]:
    """Classes of the callbacks that a Hugging Face Trainer calls, in order, its own among them."""
    callbacks = getattr(getattr(trainer, "callback_handler", None), "callbacks", None)
    return [type(c).__name__ for c in callbacks] if isinstance(callbacks, list) else []


def lightning_metrics(trainer: Any) -> set[str] | None:
    """Names of the metrics that a Lightning Trainer's callbacks could see so far; None where it is not known.

    Its public `callback_metrics` may compute them first, over all ranks.
    """
    metrics = getattr(getattr(trainer, "_logger_connector", None), "_callback_metrics", None)
    return set(metrics) if isinstance(metrics, dict) else None


def lightning_window(module: Any) -> int | None:
    """By how much Lightning divides what the `training_step` in progress returns; None outside of one, and where the
    program or the strategy divides."""
    trainer = getattr(module, "_trainer", None)
    window = getattr(trainer, "accumulate_grad_batches", None)
    if getattr(module, "_current_fx_name", None) != "training_step" or not isinstance(window, int):
        return None
    elsewhere = getattr(getattr(trainer, "strategy", None), "handles_gradient_accumulation", True)
    return window if getattr(module, "automatic_optimization", False) is True and elsewhere is False else None
