"""metric rows by rank and step

Examples:

    tdbg metrics latest          # all of them
    tdbg metrics latest loss
"""

from __future__ import annotations

import argparse

from ..commandline import open_run, run_argument, show
from ..wrong_use import WrongUse


def arguments(p: argparse.ArgumentParser) -> None:
    """RUN, METRIC."""
    run_argument(p)
    p.add_argument("metric", metavar="METRIC", nargs="?", help="one metric alone (default: all)")


def run(args: argparse.Namespace) -> int:
    """Print them; raises WrongUse for a metric that does not exist."""
    from ..metrics import METRICS, metric_rows
    from ..outputs import text

    if args.metric is not None and args.metric not in METRICS:
        raise WrongUse(f"no metric {args.metric!r}", f"there are: {', '.join(METRICS)}")
    with open_run(args) as store:
        rows, run = metric_rows(store, args.metric), store.about.id
    units = {name: METRICS[name].unit for name in dict.fromkeys(r.metric for r in rows)}
    show(args, lambda json: json.metrics(run, rows, units), lambda: text.metrics(rows, units))
    return 0
