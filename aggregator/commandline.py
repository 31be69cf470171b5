"""What the commands share: opening the run that a command line names, printing as JSON or as text, the exit status.

A command is a module in `commands/`: a docstring whose first line is its help and whose examples stand below it,
`arguments(parser)` and `run(args) -> exit status`. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # duckdb takes longer to import than a wrong command line to report
    from .findings import Incident, Verdict
    from .store import Store

RUN_HELP = "run id, unique prefix, path of a run folder, or latest"


def run_argument(p: argparse.ArgumentParser) -> None:
    """RUN."""
    p.add_argument("run", metavar="RUN", help=RUN_HELP)


def gate_argument(p: argparse.ArgumentParser) -> None:
    """--exit-code, for CI."""
    p.add_argument("--exit-code", action="store_true", help="exit with 1 on an incident above a note")


def open_run(args: argparse.Namespace, live: bool = False) -> Store:
    """The run that RUN names. Raises TdbgError where there is none, or where it can't be read."""
    from .locate import resolve, store_dir
    from .store import Store

    return Store(resolve(store_dir(args.store), args.run), live)


def judged(args: argparse.Namespace) -> Verdict:
    """Its verdict."""
    from .verdict import judge

    with open_run(args) as store:
        return judge(store)


def gate(args: argparse.Namespace, incidents: Iterable[Incident]) -> int:
    """The exit status: 1 with --exit-code and an incident of severity warning or critical."""
    return int(args.exit_code and any(i.finding.severity != "note" for i in incidents))


def read_more(args: argparse.Namespace, v: Verdict) -> str:
    """The command line that shows all of it, ready to be pasted."""
    from .locate import store_dir

    path, store = Path(v.path), store_dir(args.store)
    if path.parent.resolve() != store.resolve():
        return shlex.join(["tdbg", "verdicts", v.path])
    words = ["tdbg", "--store", str(store)] if args.store else ["tdbg"]
    return shlex.join([*words, "verdicts", path.name])


def show(args: argparse.Namespace, as_json: Callable[[Any], Any], as_text: Callable[[], str]) -> None:
    """Print as one JSON object with --json (`as_json` gets the module that makes them), else as text."""
    if args.json:
        from .outputs import json

        print(json.dumps(as_json(json)))
    else:
        print(as_text())
