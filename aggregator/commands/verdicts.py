"""every rule's verdict, abstentions included

Examples:

    tdbg verdicts latest
    tdbg verdicts latest --json --exit-code   # for CI: ends with 1 on a warning or worse
"""

from __future__ import annotations

import argparse

from ..commandline import gate, gate_argument, judged, read_more, run_argument, show


def arguments(p: argparse.ArgumentParser) -> None:
    """RUN, --summary, --exit-code."""
    run_argument(p)
    gate_argument(p)
    p.add_argument("--summary", action="store_true", help="only the few lines that tdbg-run prints at its end")


def run(args: argparse.Namespace) -> int:
    """Print them, or the summary of the run."""
    from ..outputs import text

    v = judged(args)
    if args.summary and not args.json:
        print(text.summary(v, read_more(args, v)))
    else:
        show(args, lambda json: json.verdicts(v), lambda: text.verdicts(v))
    return gate(args, v.incidents)
