"""The first step, metric and rank at which two runs part: `tdbg compare A B`.

What must be equal bit for bit is laid side by side in the order of a step: settings, state of the optimizer, samples
and their content, loss, gradients, parameters. A setting or a sample that differs parts the runs there (OBSERVED). Of
numbers that differ the size decides (parting.py): rounding makes small differences that grow, a change makes a jump.
Runs that begin from other parameters, models or seeds share no step and are not compared. A run that resumed from the
other's checkpoint is laid beside the steps after it, so this is the drill for a resume. Times and memory are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .pairing import Pair, aligned, no_common_start, other_batches, other_model
from .parting import Parting, differences, parting, within_noise
from .presence import presence
from .side import WHOLE_ELEMENTS, Rows, Side, folded, in_force, names, read
from .store import Store
from .wording import counted, ranks_text

Outcome = Literal["DIVERGED", "IDENTICAL", "WITHIN_NOISE", "INSUFFICIENT_EVIDENCE", "NOT_COMPARABLE"]
CHOSEN = ("samples", "content of samples")  # what is no result of arithmetic
EXACT = ("loss", "reduced gradient", "buffer", "parameter")  # in the order in which a step makes them
NUMBERS = ("loss", "gradient norm")
SHOWN = 4  # tensors or settings by name


@dataclass(frozen=True)
class Unlike:
    """Something that the two runs were not started alike with; None: not there."""

    key: str
    a: str | None
    b: str | None


@dataclass(frozen=True)
class Comparison:
    """What is said of two runs. Steps are A's; `ranks` those that differ at the first step."""

    a: str
    b: str
    outcome: Outcome
    why: str
    first_step: int | None = None
    metric: str | None = None
    subject: str | None = None
    ranks: tuple[int, ...] = ()
    identity_differences: tuple[Unlike, ...] = ()
    offset: int = 0  # steps of A before B's first one
    compared_steps: int = 0
    last_equal_step: int | None = None


@dataclass(frozen=True)
class Difference:
    """What differs at one step."""

    step: int
    kind: str
    ranks: tuple[int, ...]
    subject: str
    words: str


def compare(rows_a: Rows, a: Side, rows_b: Rows, b: Side) -> Comparison:
    """Lay B beside A. `rows_a` and `rows_b` are asked for the names of tensors alone."""
    other_size = a.world_size != b.world_size
    said = _compared(*(folded(rows_a, a), folded(rows_b, b)) if other_size else (a, b))
    said = replace(said, identity_differences=(*_identity(a, b), *_changed_files(a, b)))
    if said.outcome == "DIVERGED" and said.metric in ("reduced gradient", "buffer", "parameter"):
        assert said.first_step is not None
        rank, step = said.ranks[0], said.first_step
        mine, other = names(rows_a, said.metric, rank, step), names(rows_b, said.metric, rank, step - said.offset)
        odd = [n for n, v in mine.items() if n in other and other[n] != v]
        said = replace(said, subject=_listed(odd) or None)
    return said


def opened(store: Store) -> Side:
    """One opened run, read."""
    known = presence(store)
    return read(store.rows, store.about.id, known.world_size, not known.gaps)


def _compared(a: Side, b: Side) -> Comparison:
    def said(outcome: Outcome, why: str, **more: Any) -> Comparison:
        return Comparison(a.run, b.run, outcome, why, **more)

    for side in (a, b):
        if not side.series["loss"] or not side.model:
            return said("INSUFFICIENT_EVIDENCE", f"{side.run} recorded no loss or no parameters")
    if other := other_model(a, b):
        return said("NOT_COMPARABLE", f"the models differ: {other}")
    pair = aligned(a, b)
    steps, ranks = pair.steps, a.ranks & b.ranks
    more: dict[str, Any] = {"offset": pair.offset, "compared_steps": len(steps)}
    if not steps or not ranks:
        return said("NOT_COMPARABLE", f"they have no step in common{pair.how}", **more)
    if no := no_common_start(pair, ranks):
        return said("NOT_COMPARABLE", no, **more)
    if a.world_size != b.world_size and (no := other_batches(pair)):
        return said("NOT_COMPARABLE", no, **more)
    exact = list(_exact(pair))
    first_bits = min((d.step for d in exact), default=None)
    every = [*_state(pair, ranks), *_settings(pair, ranks), *_chosen(pair), *_jumps(pair, exact)]
    odd = _first(every)
    extent = f"{counted(len(steps), 'step')} of {ranks_text(ranks)}{pair.how}"
    if odd is not None:
        begin = odd.step - 1 if odd.step > steps.start else None
        before = "at the first common step" if begin is None else _until(first_bits, odd.step, begin)
        return said(
            "DIVERGED",
            f"{_together(every, odd)} at step {odd.step}, {ranks_text(odd.ranks)}; {before}; compared: {extent}",
            first_step=odd.step, metric=odd.kind, subject=odd.subject or None, ranks=odd.ranks, last_equal_step=begin,
            **more,
        )  # fmt: skip
    if first_bits is None:
        return said(*_equal(pair, ranks, extent), **more)
    lows = a.low_precision or b.low_precision
    series = [(differences(x, y), x) for x, y in pair.numbers("loss").values()]
    largest = max((v for d, _ in series for v in d.values()), default=0.0)
    size = f"{largest:.2g} of their size"
    bits = f"bits differ from step {first_bits} on"
    if all(within_noise(d, x, lows) for d, x in series):
        why = f"{bits}, yet never by a jump, and losses end no farther apart than rounding or their own steps make them"
        return said("WITHIN_NOISE", f"{why} (at most {size}); compared: {extent}", **more)
    why = f"{bits} and the losses drift apart, up to {size}, yet never by a jump: rounding does so in the long run"
    return said("INSUFFICIENT_EVIDENCE", f"{why}, a very small change too; compared: {extent}", **more)


def _together(every: Sequence[Difference], first: Difference) -> str:
    """What differs at the first odd step, in the order of a step; beside what was chosen no numbers, which follow."""
    words = [d.words for d in every if d.step == first.step]
    chosen = [d.words for d in every if d.step == first.step and d.kind not in (*NUMBERS, *EXACT)]
    words = chosen or words
    return "; ".join(words[:SHOWN]) + (f" and {len(words) - SHOWN} more" if len(words) > SHOWN else "")


def _until(first_bits: int | None, step: int, begin: int) -> str:
    if first_bits is None or first_bits >= step:
        return f"all that both recorded is the same, bit for bit, up to step {begin}"
    return f"before it nothing but rounding differs, from step {first_bits} on"


def _equal(pair: Pair, ranks: set[int], extent: str) -> tuple[Outcome, str]:
    a, b = pair.a, pair.b
    lacking = [s.run for s in (a, b) if not s.whole]
    if lacking:
        return (
            "INSUFFICIENT_EVIDENCE",
            f"all that was recorded agrees, but something of {lacking[0]} was lost; {extent}",
        )
    if len(ranks) < max(a.world_size, b.world_size) or not any(pair.both("parameter")):
        return "INSUFFICIENT_EVIDENCE", f"losses agree, but parameters were not compared on all ranks; {extent}"
    ends = f"; {a.run} has {counted(a.steps, 'step')}, {b.run} {b.steps}" if a.steps != b.steps + pair.offset else ""
    return "IDENTICAL", f"settings, samples, losses, gradients and parameters are the same, bit for bit: {extent}{ends}"


# ------------------------------------------------------------ what differs


def _first(found: Iterable[Difference]) -> Difference | None:
    """The earliest; of one step the one that comes first in it: the order in which they are asked for."""
    return min(found, key=lambda d: d.step, default=None)


def _exact(pair: Pair) -> Iterator[Difference]:
    """Per kind the first step at which bits differ."""
    for kind in EXACT:
        if kind == "reduced gradient" and not pair.windows_agree:
            continue
        if kind in ("parameter", "buffer") and not pair.windows_agree and pair.a.elements > WHOLE_ELEMENTS:
            continue
        yield from _differing(pair, kind, f"the bits of {kind}s differ")


def _chosen(pair: Pair) -> Iterator[Difference]:
    for kind in CHOSEN:
        yield from _differing(pair, kind, f"{kind} {'differ' if kind == 'samples' else 'differs'}")


def _differing(pair: Pair, kind: str, words: str) -> Iterator[Difference]:
    step, ranks = None, []
    for (rank, at), x, y in pair.both(kind):
        if step is not None and at > step:
            break
        if x != y and not (x != x and y != y):  # NaN on both sides is no difference
            step = at
            ranks.append(rank)
    if step is not None:
        yield Difference(step, kind, tuple(ranks), "", words)


def _settings(pair: Pair, ranks: set[int]) -> Iterator[Difference]:
    """Per key the first step at which the settings in force differ."""
    found: dict[str, dict[int, tuple[int, str, str]]] = {}
    for rank, key in sorted(pair.a.settings.keys() & pair.b.settings.keys()):
        if rank in ranks:
            mine = in_force(pair.a.settings[rank, key], pair.steps)
            other = in_force({s + pair.offset: v for s, v in pair.b.settings[rank, key].items()}, pair.steps)
            step = next((s for s in pair.steps if s in mine and s in other and mine[s] != other[s]), None)
            if step is not None:
                found.setdefault(key, {})[rank] = (step, mine[step], other[step])
    for key, by_rank in found.items():
        step = min(s for s, _, _ in by_rank.values())
        hit = tuple(sorted(r for r, (s, _, _) in by_rank.items() if s == step))
        _, x, y = by_rank[hit[0]]
        what, _, where = key.partition(" of ")
        for name, u, v in _unfolded(what, x, y):
            yield Difference(step, name, hit, name, f"{name} of {where} is {u} and {v}")


def _unfolded(what: str, x: str, y: str) -> Iterator[tuple[str, str, str]]:
    if what != "settings":
        yield what, x, y
        return
    u, v = json.loads(x), json.loads(y)
    for name in sorted(u.keys() | v.keys()):
        if u.get(name) != v.get(name):
            yield name, str(u.get(name)), str(v.get(name))


def _state(pair: Pair, ranks: set[int]) -> Iterator[Difference]:
    """Which kinds of state an optimizer held at the first common update: a resume that lost them shows here."""
    step, hit = pair.steps.start, dict[int, tuple[str, str]]()
    for (rank, at, optimizer), mine in pair.a.state.items():
        other = pair.b.state.get((rank, at - pair.offset, optimizer))
        if at == step and rank in ranks and other is not None and other != mine:
            hit[rank] = (mine or "none", other or "none")
    if hit:
        x, y = hit[min(hit)]
        yield Difference(step, "optimizer state", tuple(sorted(hit)), x if y == "none" else y,
                         f"the optimizer met its first common update with other state: {x} and {y}")  # fmt: skip


def _jumps(pair: Pair, exact: Sequence[Difference]) -> Iterator[Difference]:
    """The first step at which numbers part; dated to the first odd bits where these lead straight into it."""
    low = pair.a.low_precision or pair.b.low_precision
    for kind in NUMBERS:
        found: dict[int, Parting] = {}
        for rank, both in pair.numbers(kind).items():
            apart = parting(differences(*both), low)
            if apart is not None:
                found[rank] = apart
        if not found:
            continue
        step = min(p.step for p in found.values())
        hit = tuple(r for r, p in found.items() if p.step == step)
        origin = _first(exact)
        p = found[hit[0]]
        if (
            origin is None or origin.step >= step
        ):  # nothing differed before, so every rank that differs now does so by it
            hit = tuple(r for r, both in pair.numbers(kind).items() if differences(*both).get(step, 0.0) != 0.0)
        words = f"the {kind} parts by {p.size:.2g} of its size"
        words += f", where rounding had made {p.before:.2g} so far" if p.before else ""
        if origin is not None and origin.step == step - 1 and p.before == 0.0:
            yield replace(origin, words=f"{origin.words}, and from the next step on {words}")
        else:
            yield Difference(step, kind, hit, "", words)


def _identity(a: Side, b: Side) -> Iterator[Unlike]:
    for key in sorted(a.identity.keys() | b.identity.keys()):
        if a.identity.get(key) != b.identity.get(key):
            yield Unlike(key, a.identity.get(key), b.identity.get(key))


def _changed_files(a: Side, b: Side) -> Iterator[Unlike]:
    """Checkpoints that one run saved and the other loaded from the same path, with other content than any of it."""
    for saver, loader in ((a, b), (b, a)):
        for (digest, size), path in loader.loaded.items():
            saved = [key for key, (_, at) in saver.saved.items() if at == path]
            if saved and (digest, size) not in saver.saved:
                was, now = (f"{n} bytes, crc32 {d:08x}" for d, n in (saved[-1], (digest, size)))
                texts = (was, now) if saver is a else (now, was)
                yield Unlike(f"checkpoint {path}", *texts)


def _listed(several: Sequence[str]) -> str:
    more = f" and {len(several) - SHOWN} more" if len(several) > SHOWN else ""
    return ", ".join(several[:SHOWN]) + more
