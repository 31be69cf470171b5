"""Which folder a RUN on the command line means: an id, a unique prefix of one, a path to a run folder, or `latest`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..rankagent import contract
from ..rankagent.contract import TdbgError
from ..rankagent.readback import read_json


def store_dir(option: str | None, environment: Mapping[str, str] = os.environ) -> Path:
    """The store: --store, else TDBG_DIR, else ./tdbg_runs."""
    return Path(option or environment.get(contract.STORE) or contract.DEFAULT_STORE)


def is_run(folder: Path) -> bool:
    """Whether tdbg wrote this folder: its run.json, a process's records, or sealed tables."""
    about = read_json(folder / "run.json")
    if isinstance(about, dict) and str(about.get("schema", "")).startswith("tdbg.run/"):
        return True
    if any(contract.parse_process_dir(name) for name in _names(folder / "records")):
        return True
    # a glob that stops at the first part: a folder of tables without any is nobody's run
    return any(contract.parse_part(p.name) for p in (folder / "tables").glob("*/*/part-*.parquet"))


def run_dirs(store: Path) -> list[Path]:
    """All runs of a store, oldest first. Raises TdbgError when there is no such store."""
    if not store.is_dir():
        raise TdbgError(f"no store at {store}", "record a run with tdbg-run, or name the store: tdbg --store DIR ...")
    try:
        folders = [p for p in store.iterdir() if p.is_dir() and not p.name.startswith(".")]
    except OSError as e:
        raise TdbgError(f"{store}: {e.strerror}", "the store must be readable") from None
    return sorted((p for p in folders if is_run(p)), key=lambda p: (started_ns(p), p.name))


def started_ns(run: Path) -> int:
    """When the run began, by its run.json; by the folder's time where that is missing."""
    about = read_json(run / "run.json")
    start = about.get("start_ns") if isinstance(about, dict) else None
    if isinstance(start, int):
        return start
    try:
        return run.stat().st_mtime_ns
    except OSError:
        return 0


def resolve(store: Path, name: str) -> Path:
    """The run folder that `name` means. Raises TdbgError when none or several fit."""
    if name == "latest":
        runs = run_dirs(store)
        if not runs:
            raise TdbgError(f"no run in {store}", "record one with tdbg-run, or name another store: tdbg --store DIR")
        return runs[-1]
    if name and os.sep not in name and name not in (".", "..") and is_run(store / name):
        return store / name
    if os.sep in name or Path(name).is_dir():
        return _by_path(Path(name))
    fitting = [r for r in run_dirs(store) if name and r.name.startswith(name)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        some = ", ".join(r.name for r in fitting[:5]) + (" ..." if len(fitting) > 5 else "")
        raise TdbgError(f"{len(fitting)} runs in {store} begin with {name!r}: {some}", "give more of the id")
    raise TdbgError(f"no run {name!r} in {store}", "`tdbg runs` lists them; a path to a run folder serves as well")


def _by_path(path: Path) -> Path:
    if not path.is_dir():
        raise TdbgError(f"no run folder at {path}", "give a run id or the path of a folder that tdbg-run made")
    if not is_run(path):
        raise TdbgError(f"{path} is not a run: no run.json of tdbg, no records, no tables",
                        "give the run's own folder, e.g. tdbg_runs/RUN")  # fmt: skip
    return path


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
