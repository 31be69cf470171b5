"""The commit a run was started from, from repositories made here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tdbg.launcher import revision
from tdbg.launcher.revision import revision as revision_of

HASH = "0123456789abcdef0123456789abcdef01234567"


def repository(root: Path, head: str) -> Path:
    (root / ".git").mkdir()
    (root / ".git" / "HEAD").write_text(head)
    return root


def test_outside_a_repository_there_is_none(tmp_path: Path) -> None:
    assert revision_of(tmp_path) is None


def test_a_branch_is_followed_from_a_folder_below(tmp_path: Path) -> None:
    repository(tmp_path, "ref: refs/heads/main\n")
    (tmp_path / ".git/refs/heads").mkdir(parents=True)
    (tmp_path / ".git/refs/heads/main").write_text(HASH + "\n")
    (tmp_path / "a/b").mkdir(parents=True)
    found = revision_of(tmp_path / "a/b")
    assert found is not None
    assert found["commit"] == HASH


def test_packed_branches_and_detached_heads_are_read(tmp_path: Path) -> None:
    repository(tmp_path, "ref: refs/heads/main\n")
    (tmp_path / ".git/packed-refs").write_text(f"# pack-refs\n{HASH} refs/heads/main\n")
    assert (revision_of(tmp_path) or {})["commit"] == HASH
    (tmp_path / ".git/HEAD").write_text(HASH[::-1])
    assert (revision_of(tmp_path) or {})["commit"] == HASH[::-1]


def test_a_git_that_takes_too_long_leaves_dirty_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object, timeout: float, **__: object) -> None:
        raise subprocess.TimeoutExpired("git", timeout)

    monkeypatch.setattr(revision.subprocess, "run", slow)
    assert revision_of(repository(tmp_path, HASH)) == {"commit": HASH, "dirty": None}
