"""what happened in order: lr changes, overflow, checkpoints, evaluations, incidents

Examples:

    tdbg timeline latest
"""

from __future__ import annotations

import argparse

from ..commandline import open_run, run_argument, show


def arguments(p: argparse.ArgumentParser) -> None:
    """RUN."""
    run_argument(p)


def run(args: argparse.Namespace) -> int:
    """Print the events by attempt and step."""
    from ..outputs import text
    from ..timeline import timeline
    from ..verdict import judge

    with open_run(args) as store:
        v = judge(store)
        events = timeline(store.rows, v.incidents)
    show(args, lambda json: json.timeline(v, events), lambda: text.timeline(v, events))
    return 0
