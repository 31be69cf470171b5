"""The git commit that a run was started from, read from `.git`, and whether files were changed (`git status`)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

STATUS_SECONDS = 1.0  # a status of a large tree on a network disk takes longer: then nobody knows, and the run goes on


def revision(cwd: Path) -> dict[str, Any] | None:
    """{"commit", "dirty"}; dirty is None when git is absent, slow or refuses. None outside a repository."""
    git = _git_folder(cwd)
    commit = _commit(git) if git else ""
    return {"commit": commit, "dirty": _dirty(cwd)} if commit else None


def _git_folder(cwd: Path) -> Path | None:
    for folder in (cwd, *cwd.parents):
        git = folder / ".git"
        if git.is_dir():
            return git
        if git.is_file():  # a worktree or submodule: "gitdir: PATH"
            return (folder / git.read_text().partition("gitdir:")[2].strip()).resolve()
    return None


def _commit(git: Path) -> str:
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        ref = head.partition(":")[2].strip()
        common = git / "commondir"  # a worktree's branches are in the main repository
        roots = [git, (git / common.read_text().strip()).resolve()] if common.is_file() else [git]
        return next((c for c in (_ref(r, ref) for r in roots) if c), "")
    except OSError:
        return ""


def _ref(git: Path, ref: str) -> str:
    if (git / ref).is_file():
        return (git / ref).read_text().strip()
    packed = git / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {ref}")), "")


def _dirty(cwd: Path) -> bool | None:
    env = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # don't refresh the user's index while they may be using it
    try:
        done = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=cwd, env=env, capture_output=True, stdin=subprocess.DEVNULL, timeout=STATUS_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return bool(done.stdout.strip()) if done.returncode == 0 else None
