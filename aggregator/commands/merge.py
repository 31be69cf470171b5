"""brings the node-local folders of one multi-node run together into one that every command reads

Examples:

    tdbg merge node-0/tdbg_runs/job-17 node-1/tdbg_runs/job-17
    tdbg merge node-*/tdbg_runs/job-17 -o merged/job-17
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..commandline import show


def arguments(p: argparse.ArgumentParser) -> None:
    """DIR DIR ..., -o."""
    p.add_argument("folders", metavar="DIR", nargs="+", help="a run folder that one node's tdbg-run made")
    p.add_argument("-o", "--output", metavar="OUT", help="the folder to make (default: the run's id in the store)")


def run(args: argparse.Namespace) -> int:
    """Make the folder and say what it holds."""
    from ..about import read_about
    from ..locate import resolve, store_dir
    from ..merge import merge
    from ..outputs.batch import merged

    store = store_dir(args.store)
    sources = [resolve(store, f) for f in args.folders]
    target = Path(args.output) if args.output else store / read_about(sources[0]).id
    said = merge(sources, target)
    show(args, lambda json: json.merged(said), lambda: merged(said))
    return 0
