"""`tdbg`: reads runs. Finds the command in `commands/`, runs it, turns errors into one or two lines.

Exit status: 0 done; 1 only with --exit-code and an incident of severity warning or critical; 2 a wrong command line;
3 a run that is missing or unreadable.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from ..rankagent.contract import TdbgError
from .wrong_use import WrongUse

# In the order of the help: what there is, what is wrong with it, the numbers, several runs, handing it on.
COMMANDS = (
    "runs", "verdicts", "incidents", "incident", "diagnose", "explain", "ranks", "metrics", "timeline", "sql",
    "compare", "scan", "watch", "report", "export", "merge",
)  # fmt: skip
EXIT_STATUS = """exit status: 0 done; 1 only with --exit-code and an incident of severity warning or critical;
2 a wrong command line; 3 a run that is missing or unreadable"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; an error is one or two lines on stderr."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="backslashreplace")  # a name that the terminal's encoding lacks is no reason to fail
    args = parser().parse_args(argv)
    try:
        status: int = args.command.run(args)
        sys.stdout.flush()
        return status
    except TdbgError as e:
        from .outputs.clean import clean

        lines = [clean(line) for line in str(e).splitlines()]
        print("tdbg: " + "\n".join(lines), file=sys.stderr)
        return 2 if isinstance(e, WrongUse) else 3
    except BrokenPipeError:
        # the reader has enough; keep the interpreter from failing again when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """The command line, as the contract fixes it."""
    p = argparse.ArgumentParser(
        "tdbg", description="Says which rank, step and tensor of a recorded run went wrong.", epilog=EXIT_STATUS,
        allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("--store", metavar="DIR", help="folder of runs (default: TDBG_DIR, else ./tdbg_runs)")
    several = p.add_subparsers(metavar="command", required=True)
    for name in COMMANDS:
        command = load(name)
        words, _, examples = (inspect.getdoc(command) or "").partition("\n\n")
        one = several.add_parser(name, help=words, description=words, epilog=examples, allow_abbrev=False,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        one.add_argument("--json", action="store_true", help="print one JSON object")
        command.arguments(one)
        one.set_defaults(command=command)
    return p


def load(name: str) -> ModuleType:
    """The module of one command."""
    return import_module(f".commands.{name}", __package__)


if __name__ == "__main__":
    sys.exit(main())
