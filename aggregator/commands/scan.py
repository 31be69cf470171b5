"""which run of a like-for-like batch is the odd one, or that there is no single one and why

Examples:

    tdbg scan run-a run-b run-c run-d
    tdbg scan runs/* --json
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from itertools import combinations

from ..commandline import RUN_HELP, show
from ..wrong_use import WrongUse


def arguments(p: argparse.ArgumentParser) -> None:
    """RUN RUN ..."""
    p.add_argument("runs", metavar="RUN", nargs="+", help=RUN_HELP)


def run(args: argparse.Namespace) -> int:
    """Compare each pair and print what is said of the batch. Raises WrongUse for fewer than two runs."""
    from ..compare import compare, opened
    from ..locate import resolve, store_dir
    from ..outputs import batch
    from ..scan import scan
    from ..store import Store

    folder = store_dir(args.store)
    paths = list(dict.fromkeys(resolve(folder, r).resolve() for r in args.runs))
    if len(paths) < 2:
        raise WrongUse("scan takes two different runs or more", "tdbg runs lists those of the store")
    with ExitStack() as open_:
        stores = {path: open_.enter_context(Store(path)) for path in paths}
        ids = [s.about.id for s in stores.values()]
        name = {path: s.about.id if ids.count(s.about.id) == 1 else str(path) for path, s in stores.items()}
        sides = {path: opened(s) for path, s in stores.items()}
        for path, side in sides.items():
            side.run = name[path]
        pairs = {(name[x], name[y]): compare(stores[x].rows, sides[x], stores[y].rows, sides[y])
                 for x, y in combinations(paths, 2)}  # fmt: skip
    said = scan([name[p] for p in paths], pairs)
    show(args, lambda json: json.scan(said), lambda: batch.scanned(said))
    return 0
