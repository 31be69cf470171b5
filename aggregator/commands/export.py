"""hands the metrics and incidents to an experiment tracker, once or while the run goes on

Examples:

    tdbg export latest --to csv -o run.csv
    tdbg export latest --to tensorboard --follow
    tdbg export latest --to wandb --offline
    tdbg export latest --to prometheus -o /var/lib/node_exporter/tdbg.prom --follow
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...rankagent.contract import TdbgError
from ..commandline import open_run, run_argument, show
from ..wrong_use import WrongUse

if TYPE_CHECKING:
    from ..side import Rows

TRACKERS = ("csv", "mlflow", "otel", "prometheus", "tensorboard", "wandb")  # a test holds it against the folder
PAUSE_PER_SECOND = 4.0  # after a look of t seconds the next waits 4 t: a fifth of a core at most


def arguments(p: argparse.ArgumentParser) -> None:
    """RUN, --to, -o, --follow, --offline."""
    run_argument(p)
    p.add_argument("--to", required=True, choices=TRACKERS, help="where to; each but csv needs its extra: tdbg[NAME]")
    p.add_argument("-o", "--output", default="", metavar="WHERE",
                   help="file, folder, project or address, as the tracker takes it (each has a usual one)")  # fmt: skip
    p.add_argument("--follow", action="store_true", help="go on until the run has ended")
    p.add_argument("--offline", action="store_true", help="wandb: write files only, send nothing")


def run(args: argparse.Namespace) -> int:
    """Export, then say how much went where; to standard output nothing is added."""
    from ..exporting import export
    from ..outputs import exporters
    from ..outputs.clean import clean

    tracker = exporters.load(args.to)
    with open_run(args, live=args.follow) as store:
        target = exporters.Target(store.about.id, args.output, _params(store.rows), _hosts(store.rows), args.offline)
        try:
            exporter = tracker.begin(target)
            said = export(store, exporter, args.follow, _pauses())
        except ImportError as e:
            module, extra = tracker.EXTRA
            raise WrongUse(f"--to {args.to} needs the library {module}: {e}", f"pip install 'tdbg[{extra}]'") from None
        except (TdbgError, BrokenPipeError):
            raise
        except Exception as e:  # a tracker's library raises classes of its own
            first = (str(e).strip().splitlines() or [""])[0]
            where = f" to {args.output}" if args.output else ""
            raise TdbgError(f"--to {args.to}{where} failed: {type(e).__name__}: {first}",
                            "-o names another place; tdbg export --help says what each takes") from None  # fmt: skip
    if args.json or not (args.to in ("csv", "prometheus") and args.output in ("", "-")):
        show(args, lambda json: json.exported(store.about.id, args.to, exporter.where, said),
             lambda: clean(f"{said.points} numbers of {store.about.id} ({said.status}): {exporter.where}"))  # fmt: skip
    return 0


def _pauses() -> Callable[[], None]:
    """A function that waits between two looks, the longer the longer a look takes."""
    began = [time.monotonic()]

    def wait() -> None:
        time.sleep(max(1.0, PAUSE_PER_SECOND * (time.monotonic() - began[0])))
        began[0] = time.monotonic()

    return wait


def _params(rows: Rows) -> dict[str, str]:
    """What every rank was started with: the keys in which all agree."""
    return dict(rows("SELECT key, any_value(value) FROM identity WHERE rule = 'must' GROUP BY key "
                     "HAVING count(DISTINCT value) = 1 ORDER BY key"))  # fmt: skip


def _hosts(rows: Rows) -> dict[int, str]:
    return dict(rows("SELECT rank, any_value(value) FROM identity WHERE key = 'host' GROUP BY rank"))
