"""Run folders that many tests read and some harm: written once a session, copied for each test."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kit.healthy import healthy
from kit.plants import PLANTS
from kit.runs import write_run

Copy = Callable[[str], Path]


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with `healthy`, `unsealed` (the same, nothing sealed yet), `faulty` (PARAM_DESYNC on rank 2)."""
    store = tmp_path_factory.mktemp("templates")
    rows = healthy(ranks=3)
    write_run(store, rows, "healthy")
    write_run(store, rows, "unsealed", seal=False)
    PLANTS["PARAM_DESYNC"].apply(rows)
    write_run(store, rows, "faulty")
    write_run(store, rows, "faulty-unsealed", seal=False)
    return store


@pytest.fixture
def run_of(templates: Path, tmp_path: Path) -> Copy:
    """A copy of a template that the test may harm."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(templates / name, tmp_path / "store" / name, symlinks=True))

    return copy
