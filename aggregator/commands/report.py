"""one self-contained HTML page: verdict, evidence with plots, timeline, memory, phases, identity, data coverage

Examples:

    tdbg report latest                    # writes RUN.html into this folder
    tdbg report latest -o run.html
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..commandline import open_run, run_argument, show
from ..wrong_use import WrongUse


def arguments(p: argparse.ArgumentParser) -> None:
    """RUN, -o."""
    run_argument(p)
    p.add_argument("-o", "--output", metavar="FILE", help="where to (default: RUN.html here; - for standard output)")


def run(args: argparse.Namespace) -> int:
    """Write the page and say where. Raises WrongUse where it can't be written; a page that was there stays then."""
    from importlib.metadata import version

    from ..outputs.html import page
    from ..outputs.pagefile import write
    from ..report import report

    with open_run(args) as store:
        gathered = report(store)
    text = page(gathered, version("tdbg"))
    name = gathered.verdict.run
    if args.output == "-":
        sys.stdout.write(text)
        return 0
    path = Path(args.output or f"{name}.html")
    try:
        size = write(path, text)
    except OSError as e:
        raise WrongUse(f"{path} can't be written: {e.strerror or e}", "-o FILE names another place") from None
    show(args, lambda json: json.report(name, str(path), size), lambda: f"{path} ({size // 1024} KiB)")
    return 0
