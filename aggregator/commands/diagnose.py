"""the failure modes of a run in order, each with its evidence, what is excluded, what is open and the next check

Examples:

    tdbg diagnose latest
    tdbg diagnose latest --json --exit-code
"""

from __future__ import annotations

import argparse

from ..commandline import gate, gate_argument, judged, run_argument, show


def arguments(p: argparse.ArgumentParser) -> None:
    """RUN, --exit-code."""
    run_argument(p)
    gate_argument(p)


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis."""
    from ..diagnose import diagnose
    from ..outputs.diagnosis import diagnosis

    d = diagnose(judged(args))
    show(args, lambda json: json.diagnosis(d), lambda: diagnosis(d))
    return gate(args, d.verdict.incidents)
