"""A CSV file, one number a line: run, attempt, step, rank, metric, unit, value, time_ns.

Goes to the file of -o, else to standard output. NaN and Inf are written NaN, Infinity, -Infinity. Text that a
spreadsheet would take for a formula gets an apostrophe in front. Incidents are not in it: `tdbg incidents --json`.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Sequence
from typing import TextIO

from ...exporting import Point
from ...findings import Verdict
from ...metrics import METRICS
from . import Target

EXTRA = None
HEAD = ("run", "attempt", "step", "rank", "metric", "unit", "value", "time_ns")


class Csv:
    """Lines to a text file."""

    def __init__(self, run: str, out: TextIO) -> None:
        self.where = getattr(out, "name", "")
        self._run, self._out = unspreadable(run), out
        self._writer = csv.writer(out, lineterminator="\n")
        self._writer.writerow(HEAD)

    def points(self, points: Sequence[Point]) -> None:
        self._writer.writerows(
            (self._run, p.attempt, p.step, p.rank, p.metric, METRICS[p.metric].unit, _number(p.value), p.time_ns)
            for p in points
        )
        self._out.flush()

    def incidents(self, verdict: Verdict) -> None:
        """They have a shape of their own."""

    def close(self, status: str) -> None:
        if self._out is not sys.stdout:
            self._out.close()


def begin(target: Target) -> Csv:
    to_stdout = target.output in ("", "-")
    return Csv(target.run, sys.stdout if to_stdout else open(target.output, "w", newline="", encoding="utf-8"))


def unspreadable(text: str) -> str:
    """Text that no spreadsheet runs."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
