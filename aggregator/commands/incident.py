"""one incident in full

Examples:

    tdbg incident latest PARAM_DESYNC-4897e994
    tdbg incident latest NONFINITE   # a unique prefix will do
"""

from __future__ import annotations

import argparse

from ..commandline import gate, gate_argument, judged, run_argument, show
from ..wrong_use import WrongUse


def arguments(p: argparse.ArgumentParser) -> None:
    """RUN, ID, --exit-code."""
    run_argument(p)
    p.add_argument("id", metavar="ID", help="an incident's id, or a unique prefix of it")
    gate_argument(p)


def run(args: argparse.Namespace) -> int:
    """Print it; raises WrongUse where the prefix fits none or several."""
    from ..outputs import text

    v = judged(args)
    fitting = [i for i in v.incidents if i.id == args.id] or [i for i in v.incidents if i.id.startswith(args.id)]
    if len(fitting) != 1:
        known = ", ".join(i.id for i in v.incidents) or "none"
        raise WrongUse(f"{len(fitting) or 'no'} incident of {v.run} begins with {args.id!r}", f"there are: {known}")
    show(
        args,
        lambda json: json.one_incident(v, fitting[0]),
        lambda: f"{text.incident(fitting[0])}\n  more: tdbg explain {fitting[0].reason_code}",
    )
    return gate(args, fitting)
