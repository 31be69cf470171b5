"""one row a rank: steps, loss, gradient norm, step time, memory, what sets it apart

Examples:

    tdbg ranks latest
    tdbg ranks latest --json
"""

from __future__ import annotations

import argparse

from ..commandline import open_run, run_argument, show


def arguments(p: argparse.ArgumentParser) -> None:
    """RUN."""
    run_argument(p)


def run(args: argparse.Namespace) -> int:
    """Print them by rank."""
    from ..outputs import text
    from ..ranks import rank_rows
    from ..verdict import judge

    with open_run(args) as store:
        v = judge(store)
        rows = rank_rows(store, v.incidents, v.world_size)
    show(args, lambda json: json.ranks(v.run, rows), lambda: text.ranks(rows))
    return 0
