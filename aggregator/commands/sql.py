"""DuckDB SQL over the run's tables, read-only

Examples:

    tdbg sql latest "SELECT rank, step, total FROM loss ORDER BY step, rank"
    tdbg sql latest "SHOW TABLES"
"""

from __future__ import annotations

import argparse

from ..commandline import open_run, run_argument, show


def arguments(p: argparse.ArgumentParser) -> None:
    """RUN, QUERY."""
    run_argument(p)
    p.add_argument("query", metavar="QUERY", help="one statement that reads")


def run(args: argparse.Namespace) -> int:
    """Print its rows."""
    from ..outputs import text
    from ..query import ask

    with open_run(args) as store:
        columns, rows = ask(store, args.query)
        run = store.about.id
    show(args, lambda json: json.sql(run, columns, rows), lambda: text.sql(columns, rows))
    return 0
