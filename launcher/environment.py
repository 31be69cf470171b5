"""From the user's environment to the ranks': pure, so that what `tdbg-run` adds to a job can be read and tested here.

Two doors lead into a rank (the rank opens one of them once): a folder with `sitecustomize` first on PYTHONPATH, and a
`.pth` file gated by TDBG_RUN that loads TDBG_BOOT. Nothing else of the environment changes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import tdbg.rankagent
from tdbg.rankagent import contract


def agent_folder() -> Path:
    """Folder of the installed `rankagent` package."""
    return Path(tdbg.rankagent.__path__[0]).resolve()


def environment(
    old: Mapping[str, str], run: Path, node: int, settings: Mapping[str, str], agent: Path | None = None
) -> dict[str, str]:
    """The environment in which torchrun starts its ranks. `settings`: variable names of `contract` and their values."""
    agent = agent or agent_folder()
    new = {k: v for k, v in old.items() if k != contract.CLAIM}  # a claim of a surrounding run would silence this one's
    new.update(settings)
    new[contract.RUN_DIR] = str(run)
    new[contract.BOOT] = str(agent / "boot.py")
    new[contract.NODE] = str(node)
    new["PYTHONPATH"] = first_on_path(str(agent / "bootstrap"), old.get("PYTHONPATH", ""))
    return new


def first_on_path(folder: str, path: str) -> str:
    """`path` with `folder` first and nowhere else. An empty path stays without empty elements: they mean the cwd."""
    rest = [p for p in path.split(os.pathsep) if p != folder] if path else []
    return os.pathsep.join([folder, *rest])


def apply(new: Mapping[str, str]) -> None:
    """Make this process's environment equal to `new`, touching only the variables that differ."""
    for name in set(os.environ) - set(new):
        del os.environ[name]
    for name, value in new.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
