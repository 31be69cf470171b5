"""`tdbg`: reads runs. One short function per command; what it prints is made in `outputs`.

Exit status: 0 done; 1 only with --exit-code and an incident of severity warning or critical; 2 a wrong command line;
3 a run that is missing or unreadable.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..rankagent.contract import TdbgError
from .wrong_use import WrongUse

if TYPE_CHECKING:  # duckdb takes longer to import than a wrong command line to report
    from .findings import Verdict
    from .store import Store

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; an error is one or two lines on stderr."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure:
            reconfigure(errors="backslashreplace")  # a name that the terminal's encoding lacks is no reason to fail
    args = parser().parse_args(argv)
    command: Command = args.command
    try:
        status = command(args)
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
    p = argparse.ArgumentParser("tdbg", description="Says which rank, step and tensor of a recorded run went wrong.",
                                allow_abbrev=False)  # fmt: skip
    p.add_argument("--store", metavar="DIR", help="folder of runs (default: TDBG_DIR, else ./tdbg_runs)")
    several = p.add_subparsers(metavar="command", required=True)

    def add(name: str, command: Command, words: str, run: bool = True) -> argparse.ArgumentParser:
        one = several.add_parser(name, help=words, description=words, allow_abbrev=False)
        one.add_argument("--json", action="store_true", help="print one JSON object")
        if run:
            one.add_argument("run", metavar="RUN", help="run id, unique prefix, path of a run folder, or latest")
        one.set_defaults(command=command)
        return one

    add("runs", runs, "the runs of the store", run=False)
    v = add("verdicts", verdicts, "every rule's verdict, abstentions included")
    v.add_argument("--summary", action="store_true", help="only the few lines that tdbg-run prints at its end")
    for one in (v, add("incidents", incidents, "incidents with rank-level evidence")):
        one.add_argument("--exit-code", action="store_true", help="exit with 1 on an incident above a note")
    i = add("incident", incident, "one incident in full")
    i.add_argument("id", metavar="ID", help="an incident's id, or a unique prefix of it")
    i.add_argument("--exit-code", action="store_true", help="exit with 1 when it is above a note")
    add("ranks", ranks, "one row a rank: steps, loss, gradient norm, step time, memory, what sets it apart")
    add("metrics", metrics, "metric rows by rank and step").add_argument("metric", metavar="METRIC", nargs="?")
    add(
        "timeline",
        timeline,
        "what happened in order: lr changes, overflow, checkpoints, evaluations, incidents",
    )
    c = add("compare", compare, "the first step, metric and rank at which two runs part, or that they don't", run=False)
    c.add_argument("a", metavar="A", help="run id, unique prefix, path of a run folder, or latest")
    c.add_argument("b", metavar="B", help="the run to lay beside it; may have resumed from one of its checkpoints")
    add("sql", sql, "DuckDB SQL over the run's tables, read-only").add_argument("query", metavar="QUERY")
    add("watch", watch, "the live screen of a running or finished run")
    return p


def runs(args: argparse.Namespace) -> int:
    """`tdbg runs`."""
    from .locate import run_dirs, store_dir
    from .outputs import text
    from .overview import run_row

    rows = [run_row(folder) for folder in run_dirs(store_dir(args.store))]
    _print(args, lambda json: json.runs(rows), lambda: text.runs(rows))
    return 0


def verdicts(args: argparse.Namespace) -> int:
    """`tdbg verdicts RUN`."""
    from .outputs import text

    v = _judged(args)
    if args.summary and not args.json:
        print(text.summary(v, _read_more(args, v)))
    else:
        _print(args, lambda json: json.verdicts(v), lambda: text.verdicts(v))
    return _gate(args, not _above_note(v))


def incidents(args: argparse.Namespace) -> int:
    """`tdbg incidents RUN`."""
    from .outputs import text

    v = _judged(args)
    _print(args, lambda json: json.incidents(v), lambda: text.incidents(v))
    return _gate(args, not _above_note(v))


def incident(args: argparse.Namespace) -> int:
    """`tdbg incident RUN ID`."""
    from .outputs import text

    v = _judged(args)
    fitting = [i for i in v.incidents if i.id == args.id] or [i for i in v.incidents if i.id.startswith(args.id)]
    if len(fitting) != 1:
        known = ", ".join(i.id for i in v.incidents) or "none"
        raise WrongUse(f"{len(fitting) or 'no'} incident of {v.run} begins with {args.id!r}", f"there are: {known}")
    _print(args, lambda json: json.one_incident(v, fitting[0]), lambda: text.incident(fitting[0]))
    return _gate(args, fitting[0].finding.severity == "note")


def ranks(args: argparse.Namespace) -> int:
    """`tdbg ranks RUN`."""
    from .outputs import text
    from .ranks import rank_rows
    from .verdict import judge

    with _open(args) as store:
        v = judge(store)
        rows = rank_rows(store, v.incidents, v.world_size)
    _print(args, lambda json: json.ranks(v.run, rows), lambda: text.ranks(rows))
    return 0


def metrics(args: argparse.Namespace) -> int:
    """`tdbg metrics RUN [METRIC]`."""
    from .metrics import METRICS, metric_rows
    from .outputs import text

    if args.metric is not None and args.metric not in METRICS:
        raise WrongUse(f"no metric {args.metric!r}", f"there are: {', '.join(METRICS)}")
    with _open(args) as store:
        rows, run = metric_rows(store, args.metric), store.about.id
    units = {name: METRICS[name].unit for name in dict.fromkeys(r.metric for r in rows)}
    _print(args, lambda json: json.metrics(run, rows, units), lambda: text.metrics(rows, units))
    return 0


def timeline(args: argparse.Namespace) -> int:
    """`tdbg timeline RUN`."""
    from .outputs import text
    from .timeline import timeline as events_of
    from .verdict import judge

    with _open(args) as store:
        v = judge(store)
        events = events_of(store.rows, v.incidents)
    _print(args, lambda json: json.timeline(v, events), lambda: text.timeline(v, events))
    return 0


def compare(args: argparse.Namespace) -> int:
    """`tdbg compare A B`."""
    from .compare import compare as laid_beside
    from .compare import opened
    from .locate import resolve, store_dir
    from .outputs import text
    from .store import Store

    folder = store_dir(args.store)
    with Store(resolve(folder, args.a)) as one, Store(resolve(folder, args.b)) as other:
        said = laid_beside(one.rows, opened(one), other.rows, opened(other))
    _print(args, lambda json: json.comparison(said), lambda: text.comparison(said))
    return 0


def sql(args: argparse.Namespace) -> int:
    """`tdbg sql RUN QUERY`."""
    from .outputs import text
    from .query import ask

    with _open(args) as store:
        columns, rows = ask(store, args.query)
        run = store.about.id
    _print(args, lambda json: json.sql(run, columns, rows), lambda: text.sql(columns, rows))
    return 0


def watch(args: argparse.Namespace) -> int:
    """`tdbg watch RUN`."""
    from .watching import Watcher

    with _open(args, live=True) as store:
        look = Watcher(store).look
        if args.json:
            now = look()
            _print(args, lambda json: json.watch(now.verdict, now.ranks), str)
            return 0
        from .outputs.live import watch as watch_loop

        watch_loop(look)
    return 0


def _open(args: argparse.Namespace, live: bool = False) -> Store:
    from .locate import resolve, store_dir
    from .store import Store

    return Store(resolve(store_dir(args.store), args.run), live)


def _judged(args: argparse.Namespace) -> Verdict:
    from .verdict import judge

    with _open(args) as store:
        return judge(store)


def _above_note(v: Verdict) -> bool:
    return any(i.finding.severity != "note" for i in v.incidents)


def _gate(args: argparse.Namespace, passed: bool) -> int:
    return 1 if args.exit_code and not passed else 0


def _read_more(args: argparse.Namespace, v: Verdict) -> str:
    """The command line that shows all of it, ready to be pasted."""
    from .locate import store_dir

    path, store = Path(v.path), store_dir(args.store)
    if path.parent.resolve() != store.resolve():
        return shlex.join(["tdbg", "verdicts", v.path])
    words = ["tdbg", "--store", str(store)] if args.store else ["tdbg"]
    return shlex.join([*words, "verdicts", path.name])


def _print(args: argparse.Namespace, as_json: Callable[[Any], Any], as_text: Callable[[], str]) -> None:
    if args.json:
        from .outputs import json

        print(json.dumps(as_json(json)))
    else:
        print(as_text())


if __name__ == "__main__":
    sys.exit(main())
