"""what a reason code means: its rule, what it reads, its limits and numbers, and what to do

Examples:

    tdbg explain                  # all codes, a line each
    tdbg explain GRAD_DESYNC
"""

from __future__ import annotations

import argparse
from difflib import get_close_matches

from ..codes import CODES
from ..commandline import show
from ..wrong_use import WrongUse


def arguments(p: argparse.ArgumentParser) -> None:
    """CODE."""
    p.add_argument("code", metavar="CODE", nargs="?", help="a reason code, in any case (default: list them all)")


def run(args: argparse.Namespace) -> int:
    """Print one rule, or the list; raises WrongUse for what is no code, with those that are spelt nearly so."""
    from .. import detector, rulebook
    from ..outputs import rules

    if args.code is None:
        have = {c for name in detector.names() for c in detector.codes_of(detector.load_one(name))}
        show(args, lambda json: json.codes(have), lambda: rules.listed(have))
        return 0
    code = args.code.upper().replace("-", "_")
    if code not in CODES:
        near = get_close_matches(code, CODES, n=3, cutoff=0.5)
        raise WrongUse(
            f"no reason code {args.code!r}",
            f"{'nearest: ' + ', '.join(near) if near else 'tdbg explain lists them all'}",
        )
    rule = rulebook.explain(code)
    show(args, lambda json: json.rule(rule), lambda: rules.explained(rule))
    return 0
