"""The live screen: pure functions from values to rich renderables. No query, no clock, no terminal in here.

Every string of a run goes through `clean` into a `Text`, so neither markup nor escape sequences in it do anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..findings import Incident, Verdict
from ..ranks import RankRow
from ..wording import counted, ranks_text, spans
from .clean import clean
from .text import heading, quality
from .units import duration, memory, number

STYLES = {"critical": "bold red", "warning": "yellow", "note": "dim"}
# Lines that are not rows: heading, data quality, two table heads with their blank lines, the keys.
FRAME_LINES = 8
FOLD_FROM = 9  # up to eight ranks, one machine's worth of devices, are shown one by one when there is room


@dataclass(frozen=True)
class Screen:
    """All that the screen shows, as of one moment."""

    verdict: Verdict
    status: str
    ranks: tuple[RankRow, ...]
    paused: bool = False


def screen(s: Screen, width: int = 80, height: int = 24, keys: bool = True) -> RenderableType:
    """The whole screen, never higher than `height`."""
    room = max(4, height - FRAME_LINES)
    shown_incidents = min(len(s.verdict.incidents), max(1, room // 2))
    parts: list[RenderableType] = [
        _line(_head(s), "bold"),
        ranks_table(s.ranks, max(2, room - max(1, shown_incidents))),
        Text(),
        incidents_table(s.verdict, max(1, shown_incidents)),
        _quality(s.verdict),
    ]
    if keys:
        parts.append(_line("q quits" + ("   p goes on (paused)" if s.paused else "   p pauses"), "dim"))
    return Group(*parts)


def ranks_table(rows: Sequence[RankRow], most: int) -> Table:
    """A line a rank; alike ranks become one line with their count and spread when they are many."""
    table = Table(box=None, pad_edge=False, expand=True)
    for name in ("rank", "step", "loss", "grad norm", "step time", "memory"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", justify="left" if name == "rank" else "right")
    table.add_column("what sets it apart", no_wrap=True, overflow="ellipsis", ratio=1)
    for cells, style in rank_lines(rows, most):
        table.add_row(*(Text(clean(c)) for c in cells), style=style)
    return table


def rank_lines(rows: Sequence[RankRow], most: int) -> list[tuple[tuple[str, ...], str]]:
    """(cells, style) per line, `most` at the most."""
    if len(rows) <= min(most, FOLD_FROM - 1):
        return [(_cells(r), "yellow" if r.apart else "") for r in rows]
    apart, alike = [r for r in rows if r.apart], [r for r in rows if not r.apart]
    single = apart[: most - 2] if len(apart) > most - 2 else apart
    lines = [(_cells(r), "yellow") for r in single]
    if len(apart) > len(single):
        lines.append((_folded(apart[len(single) :], "more of these"), "yellow"))
    if alike:
        lines.append((_folded(alike, "alike"), ""))
    return lines


def _cells(r: RankRow) -> tuple[str, ...]:
    name = f"{r.rank} {r.host}" if r.host else str(r.rank)
    return (
        name[:18],
        str(r.steps),
        number(r.loss),
        number(r.grad_norm),
        duration(r.step_ns),
        memory(r.rss_bytes),
        r.apart,
    )


def _folded(rows: Sequence[RankRow], words: str) -> tuple[str, ...]:
    names = spans(r.rank for r in rows)
    name = f"{names if len(names) <= 12 else names[:9] + '...'} ({len(rows)})"
    return (
        name, _spread(rows, lambda r: r.steps, lambda v: str(int(v))), _spread(rows, lambda r: r.loss, _short),
        _spread(rows, lambda r: r.grad_norm, _short), _spread(rows, lambda r: r.step_ns, duration),
        _spread(rows, lambda r: r.rss_bytes, memory), f"{counted(len(rows), 'rank')} {words}",
    )  # fmt: skip


def _spread(rows: Sequence[RankRow], value: Callable[[RankRow], float | None], shown: Callable[[float], str]) -> str:
    known = [v for r in rows if (v := value(r)) is not None]
    if not known:
        return "-"
    low, high = shown(min(known)), shown(max(known))
    return low if low == high else f"{low}..{high}"


def _short(value: float) -> str:
    return f"{value:.3g}"


def incidents_table(v: Verdict, most: int) -> RenderableType:
    """The gravest incidents, a line each; how many more there are."""
    if not v.incidents:
        return _line("no incident so far" if v.status == "running" else "no incident", "")
    table = Table(box=None, pad_edge=False, expand=True)
    for name in ("incident", "ranks", "step"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=24)
    left = len(v.incidents) - most
    table.add_column("summary" + (f" ({left} more: tdbg incidents)" if left > 0 else ""), no_wrap=True,
                     overflow="ellipsis", ratio=1)  # fmt: skip
    for i in v.incidents[:most]:
        table.add_row(*(Text(clean(c)) for c in _incident_cells(i)), style=STYLES[i.finding.severity])
    return table


def _incident_cells(i: Incident) -> tuple[str, str, str, str]:
    f = i.finding
    return (i.reason_code, spans(f.ranks), "-" if f.first_step is None else str(f.first_step), f.summary)


def _head(s: Screen) -> str:
    first = heading(s.verdict)
    return first.replace(f": {s.verdict.status},", f": {s.status},", 1) + f", {ranks_text(r.rank for r in s.ranks)}"


def _quality(v: Verdict) -> Text:
    lines = quality(v.data_quality)
    words = lines[0] + (": " + lines[1].strip() if len(lines) > 1 else "")
    return _line(words, "" if v.data_quality.complete else "yellow")


def _line(words: str, style: str) -> Text:
    return Text(clean(words), style=style, no_wrap=True, overflow="ellipsis", end="\n")
