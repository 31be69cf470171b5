"""the live screen of a running or finished run

Examples:

    tdbg watch latest
    tdbg watch latest --json   # one look, as JSON
"""

from __future__ import annotations

import argparse

from ..commandline import open_run, run_argument, show


def arguments(p: argparse.ArgumentParser) -> None:
    """RUN."""
    run_argument(p)


def run(args: argparse.Namespace) -> int:
    """Draw until the run has ended; with --json look once."""
    from ..watching import Watcher

    with open_run(args, live=True) as store:
        look = Watcher(store).look
        if args.json:
            now = look()
            show(args, lambda json: json.watch(now.verdict, now.ranks), str)
            return 0
        from ..outputs.live import watch as watch_loop

        watch_loop(look)
    return 0
