"""the first step, metric and rank at which two runs part, or that they don't

Examples:

    tdbg compare before after
    tdbg compare uninterrupted resumed   # did my resume work?
"""

from __future__ import annotations

import argparse

from ..commandline import show


def arguments(p: argparse.ArgumentParser) -> None:
    """A, B."""
    p.add_argument("a", metavar="A", help="run id, unique prefix, path of a run folder, or latest")
    p.add_argument("b", metavar="B", help="the run to lay beside it; may have resumed from one of its checkpoints")


def run(args: argparse.Namespace) -> int:
    """Print what is said of the two."""
    from ..compare import compare, opened
    from ..locate import resolve, store_dir
    from ..outputs import text
    from ..store import Store

    folder = store_dir(args.store)
    with Store(resolve(folder, args.a)) as one, Store(resolve(folder, args.b)) as other:
        said = compare(one.rows, opened(one), other.rows, opened(other))
    show(args, lambda json: json.comparison(said), lambda: text.comparison(said))
    return 0
