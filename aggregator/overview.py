"""One line about a run, for the list of runs. A run that can't be read is a line as well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..rankagent.contract import TdbgError
from .store import Store
from .verdict import judge


def run_row(folder: Path) -> dict[str, Any]:
    """id, when, script, world size, status, steps, incidents above a note, notes; `error` for an unreadable run."""
    try:
        with Store(folder) as store:
            v, about = judge(store), store.about
    except TdbgError as e:
        return {"run": folder.name, "start_ns": None, "script": "", "world_size": None, "status": "unreadable",
                "steps": None, "incidents": None, "notes": None, "error": e.message}  # fmt: skip
    notes = sum(i.finding.severity == "note" for i in v.incidents)
    return {"run": folder.name, "start_ns": about.start_ns, "script": about.script, "world_size": v.world_size,
            "status": v.status, "steps": v.steps, "incidents": len(v.incidents) - notes, "notes": notes,
            "complete": v.data_quality.complete, "error": None}  # fmt: skip
