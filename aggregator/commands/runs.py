"""the runs of the store

Examples:

    tdbg runs
    tdbg --store /shared/runs runs --json
"""

from __future__ import annotations

import argparse

from ..commandline import show


def arguments(p: argparse.ArgumentParser) -> None:
    """Nothing of its own."""


def run(args: argparse.Namespace) -> int:
    """Print them, the newest first."""
    from ..locate import run_dirs, store_dir
    from ..outputs import text
    from ..overview import run_row

    rows = [run_row(folder) for folder in run_dirs(store_dir(args.store))]
    show(args, lambda json: json.runs(rows), lambda: text.runs(rows))
    return 0
