"""The pictures of the report: pure functions from values to (SVG, words that say the same)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

from ..illustrate import Agreement, Picture
from ..report import Limit, Phases
from ..series import Line, Series
from ..timeline import Event
from ..wording import counted, ranks_text
from . import svg
from .units import duration, in_unit, memory

NAMES = {
    "loss": "loss", "lr": "learning rate", "loss_scale": "loss scale", "grad_norm": "gradient norm",
    "grad_norm_local": "own gradient norm", "clip_norm": "norm before clipping", "step_ns": "step time",
    "data_ns": "waiting for data", "forward_ns": "forward", "backward_ns": "backward", "optimizer_ns": "optimizer",
    "communication_ns": "communication", "checkpoint_ns": "checkpoint", "evaluation_ns": "evaluation",
    "rss_bytes": "memory of the process", "cuda_allocated_bytes": "device memory in tensors",
}  # fmt: skip
LOGARITHMIC = 1e3  # a series whose positive values span more than this is drawn on a logarithmic axis
NEAR = 4  # a limit more than this many times the highest value is told in words: its line would flatten the curve
# Patterns beside colours: bars are told apart on paper and by those who see no colours.
HATCHES = ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "--")
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c8c8c", "#b3b3b3")
# Kinds of event that get a mark on the time axis, the most telling first.
MARKS = {"incident": "v", "failure": "X", "load": ">", "put back": "4", "save": "s", "evaluation": "d", "pass": "|",
         "lr": ".", "loss scale": "1", "skipped": "x", "attempt": "p", "device": "*", "exit": "<"}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A picture for the page, and what it shows in a sentence."""

    svg: str
    title: str
    words: str


def picture(p: Picture, name: str, culprits: Collection[int], first: int | None, last: int | None = None) -> Drawn:
    """Whatever illustrates an incident."""
    return agreement(p, name, culprits, first) if isinstance(p, Agreement) else overlay(p, name, culprits, first, last)


def overlay(s: Series, name: str, culprits: Collection[int] = (), first: int | None = None,
            last: int | None = None, limits: Sequence[Limit] = ()) -> Drawn:  # fmt: skip
    """All ranks over each other, the marked ones in front; the step of the incident as a line."""
    near = [limit for limit in limits if s.highest * NEAR >= limit.size_bytes]
    with matplotlib.rc_context(svg.SETTINGS):
        fig = svg.figure()
        ax = fig.add_subplot()
        _values(ax, s, culprits)
        for limit in near:
            ax.axhline(limit.size_bytes, color=svg.INK, linewidth=0.8, linestyle=(0, (6, 2)))
            ax.annotate(f"{limit.name} limit {memory(limit.size_bytes)}", (0, limit.size_bytes), fontsize=8,
                        xycoords=("axes fraction", "data"), xytext=(2, -9), textcoords="offset points")  # fmt: skip
        if first is not None:
            _mark(ax, first)
        ax.set_xlabel("step")
        ax.set_ylabel(NAMES.get(s.metric, s.metric))
        _axes(ax, s)
        if ax.get_legend_handles_labels()[1]:
            fig.legend(*ax.get_legend_handles_labels(), loc="outside upper left", ncols=6, fontsize=8)
        title = f"{NAMES.get(s.metric, s.metric).capitalize()} by step"
        far = [f"{x.name} limit {memory(x.size_bytes)}" for x in limits if x not in near]
        words = _said(s, culprits, first) + (f"; far below the {' and the '.join(far)}" if far else "")
        return Drawn(svg.drawn(fig, name, title, words), title, words)


def agreement(a: Agreement, name: str, culprits: Collection[int], first: int | None) -> Drawn:
    """Ranks downwards, watched steps to the right: who held the same bits as the largest group."""
    with matplotlib.rc_context(svg.SETTINGS):
        fig = svg.figure(height=min(4.0, 1.1 + 0.28 * max(2, len(a.ranks))))
        ax = fig.add_subplot()
        ax.grid(False)
        at = {rank: y for y, rank in enumerate(a.ranks)}
        x = range(len(a.steps))
        for group, (colour, marker, label) in enumerate(
            ((svg.FAINT, "s", "the same bits"), ("#d55e00", "D", "others"), ("#0072b2", "^", "others again"))
        ):
            held = [(i, at[r]) for r, row in zip(a.ranks, a.groups, strict=True) for i in x
                    if row[i] is not None and min(row[i] or 0, 2) == group]  # fmt: skip
            if held:
                size = max(6, min(40, 1500 / len(x)))
                ax.scatter([i for i, _ in held], [y for _, y in held], marker=marker, color=colour, s=size, label=label,
                           linewidths=0)  # fmt: skip
        places = sorted({0, len(a.steps) - 1, *range(0, len(a.steps), max(1, len(a.steps) // 8))})
        if first in a.steps:
            place = a.steps.index(first)
            places = sorted({p for p in places if abs(p - place) > len(a.steps) // 20} | {place})
            ax.axvline(place - 0.5, color=svg.INK, linewidth=1.2)
        ax.set_xticks(places, [str(a.steps[p]) for p in places])
        shown = list(a.ranks) if len(a.ranks) <= 16 else [r for r in a.ranks if r in set(culprits)][:16] or [a.ranks[0]]
        ax.set_yticks([at[r] for r in shown], [f"rank {r}" for r in shown])
        ax.set_ylim(len(a.ranks) - 0.4, -0.6)
        ax.set_xlabel("watched step")
        fig.legend(loc="outside upper left", ncols=3, fontsize=8)
        title = f"Who holds the same bits of {a.what} {_short(a.tensor)}"
        apart = [s for i, s in enumerate(a.steps) if len({row[i] for row in a.groups if row[i] is not None}) > 1]
        words = (f"{counted(len(a.ranks), 'rank')} at {counted(len(a.steps), 'watched step')}; they differ at "
                 f"{len(apart)} of these" + (f", first at step {apart[0]}" if apart else ""))  # fmt: skip
        return Drawn(svg.drawn(fig, name, title, words), title, words)


def phases(p: Phases, name: str) -> Drawn:
    """A bar a rank: where the time of its mean step goes."""
    with matplotlib.rc_context(svg.SETTINGS | {"hatch.linewidth": 0.5}):
        fig = svg.figure(height=1.2 + 0.3 * len(p.ranks))
        ax = fig.add_subplot()
        left = [0.0] * len(p.ranks)
        for i, phase in enumerate(p.names):
            values = [row[i] for row in p.mean_ns]
            if any(v > 0 for v in values):
                ax.barh([f"rank {r}" for r in p.ranks], values, left=left, color=COLOURS[i], hatch=HATCHES[i],
                        edgecolor=svg.INK, linewidth=0.3, label=phase)  # fmt: skip
            left = [x + y for x, y in zip(left, values, strict=True)]
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: duration(v)))
        ax.xaxis.set_major_locator(MaxNLocator(6))
        fig.legend(*ax.get_legend_handles_labels(), loc="outside upper left", ncols=6, fontsize=8)
        slowest = max(range(len(p.ranks)), key=lambda i: sum(p.mean_ns[i]))
        row = p.mean_ns[slowest]
        most = max(range(len(row)), key=row.__getitem__)
        all_ = counted(p.of_ranks, "rank")
        many = f"the slowest {len(p.ranks)} of {all_}" if p.of_ranks > len(p.ranks) else all_
        words = (f"{many}; the longest mean step is that of rank {p.ranks[slowest]}, {duration(sum(row))}, of which "
                 f"{p.names[most]} takes {duration(row[most])}")  # fmt: skip
        return Drawn(
            svg.drawn(fig, name, "Where the time of a step goes", words), "Where the time of a step goes", words
        )


def timeline(series: Sequence[Series], events: Sequence[Event], attempt: int, name: str) -> Drawn:
    """Loss, rates and what happened, on one axis of steps."""
    mine = [e for e in events if e.attempt == attempt]
    kinds = [k for k in MARKS if any(e.kind == k for e in mine)]
    with matplotlib.rc_context(svg.SETTINGS):
        fig = svg.figure(height=1.5 * max(1, len(series)) + 0.9 + 0.22 * len(kinds))
        axes = fig.subplots(len(series) + 1, 1, sharex=True, squeeze=False,
                            height_ratios=[*([1.5] * len(series)), 0.5 + 0.22 * len(kinds)])[:, 0]  # fmt: skip
        for ax, s in zip(axes, series, strict=False):
            _values(ax, s, ())
            ax.set_ylabel(NAMES.get(s.metric, s.metric))
            _axes(ax, s)
        lanes = axes[-1]
        for y, kind in enumerate(kinds):
            grave = kind in ("incident", "failure")
            steps = [e.step for e in mine if e.kind == kind]
            lanes.scatter(steps, [y] * len(steps), marker=MARKS[kind], s=28, color="#d55e00" if grave else svg.INK)
            for e in mine:
                if e.kind == kind and e.last_step > e.step:
                    lanes.plot([e.step, e.last_step], [y, y], color="#d55e00" if grave else svg.INK, linewidth=1)
        lanes.set_yticks(range(len(kinds)), kinds)
        lanes.set_ylim(len(kinds) - 0.4, -0.6)
        lanes.set_xlabel("step")
        lanes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        words = f"{counted(len(mine), 'event')} of {counted(len(kinds), 'kind')}, told in the table below"
        return Drawn(svg.drawn(fig, name, "What happened, by step", words), "What happened, by step", words)


def _values(ax: Axes, s: Series, culprits: Collection[int]) -> None:
    if s.band is not None and s.band.steps:
        ax.fill_between(s.band.steps, s.band.low, s.band.high, color=svg.FAINT, alpha=0.35, linewidth=0,
                        label=f"{s.band.ranks} other ranks" if s.lines else counted(s.band.ranks, "rank"))  # fmt: skip
        ax.plot(s.band.steps, s.band.middle, color=svg.INK, linewidth=1, label="their median")
    odd = [line for line in s.lines if line.rank in culprits]
    others = [line for line in s.lines if line.rank not in culprits]
    for i, line in enumerate(others):
        label = ranks_text(x.rank for x in others) if i == 0 else None  # one entry for all of them
        _line(ax, line, svg.INK if odd else None, "-", "", label if odd else f"rank {line.rank}", i, 0.55 if odd else 1,
              s.lasts)  # fmt: skip
    for i, line in enumerate(odd):
        colour, dash, marker = svg.MARKED[i % len(svg.MARKED)]
        _line(ax, line, colour, dash, marker, f"rank {line.rank}" if i < 6 else None, len(others) + i, 1, s.lasts)


def _line(ax: Axes, line: Line, colour: str | None, dash: str, marker: str, label: str | None, nth: int,
          alpha: float, lasts: bool) -> None:  # fmt: skip
    if colour is None:
        colour, dash, _ = svg.MARKED[nth % len(svg.MARKED)]
        marker = ""
    values = [v if math.isfinite(v) else math.nan for v in line.values]
    ax.plot(line.steps, values, color=colour, linestyle=dash, marker=marker, markevery=max(1, len(values) // 12),
            markersize=3.5, linewidth=1.3, label=label, alpha=alpha,
            drawstyle="steps-post" if lasts else "default")  # fmt: skip
    lost = [s for s, v in zip(line.steps, line.values, strict=True) if not math.isfinite(v)]
    if lost:  # NaN has no height: marked along the upper edge, each rank on a level of its own
        level = 0.97 - 0.06 * (nth % 4)
        ax.plot(lost, [level] * len(lost), transform=ax.get_xaxis_transform(), linestyle="", marker="x", markersize=4,
                color=colour, label=None)  # fmt: skip
        ax.annotate(f"rank {line.rank}: NaN or Inf", (lost[0], level), xycoords=ax.get_xaxis_transform(), fontsize=8,
                    xytext=(-4, 0), textcoords="offset points", ha="right", va="center")  # fmt: skip


def _mark(ax: Axes, step: int) -> None:
    ax.axvline(step, color=svg.INK, linewidth=1.2, linestyle=(0, (2, 2)))
    ax.annotate(f"step {step}", (step, 0), xycoords=("data", "axes fraction"), xytext=(3, 3),
                textcoords="offset points", fontsize=8)  # fmt: skip


def _axes(ax: Axes, s: Series) -> None:
    values = s.finite
    positive = [v for v in values if v > 0]
    if values and min(values) == max(values):  # an axis around one value would show digits, not the value
        ax.set_yticks([values[0]], [in_unit(values[0], s.unit) if s.unit else f"{values[0]:.4g}"])
    elif positive and min(values) >= 0 and max(positive) > LOGARITHMIC * min(positive) and not s.unit:
        ax.set_yscale("symlog", linthresh=min(positive))
    elif s.unit:
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: in_unit(v, s.unit)))
        ax.yaxis.set_major_locator(MaxNLocator(5))
        top = max([*values, 1.0]) * 1.08
        ax.set_ylim(0, max(top, ax.get_ylim()[1]))
        if s.unit == "B":
            ax.yaxis.set_major_locator(MultipleLocator(_round_bytes(top / 5)))
    else:
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.4g}"))
        ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))


def _round_bytes(size: float) -> float:
    """The next of 1, 2, 5, 10 ... KiB, MiB, GiB above: ticks that people would choose."""
    unit = 1024.0 ** max(0, int(math.log(max(size, 1), 1024)))
    return next(n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if n * unit >= size) * unit


def _said(s: Series, culprits: Collection[int], first: int | None) -> str:
    low, high = s.steps
    n = len(s.lines) + (s.band.ranks if s.band else 0)
    odd = [line.rank for line in s.lines if line.rank in culprits]
    words = f"{s.meaning}; {counted(n, 'rank')}, steps {low} to {high}"
    words += f"; marked: {ranks_text(odd)}" if odd and len(odd) < n else ""
    return words + (f"; the incident begins at step {first}" if first is not None else "")


def _short(name: str) -> str:
    return name if len(name) <= 60 else f"{name[:40]}...{name[-16:]}"
