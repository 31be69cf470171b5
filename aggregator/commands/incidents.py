"""incidents with rank-level evidence

Examples:

    tdbg incidents latest
    tdbg incidents latest --exit-code   # ends with 1 on a warning or worse
"""

from __future__ import annotations

import argparse

from ..commandline import gate, gate_argument, judged, run_argument, show


def arguments(p: argparse.ArgumentParser) -> None:
    """RUN, --exit-code."""
    run_argument(p)
    gate_argument(p)


def run(args: argparse.Namespace) -> int:
    """Print them, the gravest first."""
    from ..outputs import text

    v = judged(args)
    show(args, lambda json: json.incidents(v), lambda: text.incidents(v))
    return gate(args, v.incidents)
