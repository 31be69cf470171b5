"""Layers begin with weights that no draw gives: units that are all alike, copies of each other, or far too large ones.

Reads     initial, param, tensor, checkpoint
Says      which layers of which model on which ranks, as a note: a program may mean it
Unknown   weights that were loaded: a trained model is no draw
Blind to  weights that come from a file without torch.load, safetensors or load_state_dict; too small weights; a single
          layer that is too large; stacks that torch itself copies; layers of classes of one's own, embeddings, and all
          that the initial probe is blind to
Do        look at the init function of the layers named; copies come from one module used in several places by
          deepcopy, constants from zeros_ or ones_ meant for something else. Loaded weights need nothing
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ..changes import common
from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, unheard

CODE = "INIT_SUSPECT"
NEEDS = {"initial": 1, "param": 1, "tensor": 1}
PARAMS: Mapping[str, object] = {}
# Of 256 numbers from a draw nearly all differ, in 8 bits of mantissa (bfloat16) more than half still; a table that is
# made by a rule (an identity, a range in every row) repeats itself.
DRAWN = 0.5
LEAST_ELEMENTS = 16  # two draws of so many numbers of at least 8 bits agree by chance once in 2**128
# A layer multiplies the size of its input by rms * sqrt(fan_in): usual schemes give 0.5 to 1.5. Ten each makes a
# hundred of two layers; where one alone is so large, sparse inputs or a layer that scales them back may ask for it.
GAIN = 10.0
FEWEST = 2  # layers
MOSTLY = 0.5  # of the layers
SHOWN = 8

SQL = """
WITH loaded AS (
    SELECT DISTINCT rank, attempt FROM checkpoint
    WHERE step <= 1 AND (event = 'load' OR (event = 'apply' AND part = 'model'))
),
starts AS (
    SELECT rank, attempt, pid, generation, unnest(CASE WHEN len(tensors) = 0 THEN range(len(digest)) ELSE tensors END)
           AS index, unnest(digest) AS digest
    FROM (SELECT * FROM param WHERE stage = 'start'
          QUALIFY row_number() OVER (PARTITION BY rank, attempt, pid, generation ORDER BY step, seq) = 1)
)
SELECT i.rank, i.attempt, i.model, i.place, i.units, i.inputs, i.fan_in, i.sampled, i.different, i.rms, i.constant,
       i.bias_constant, i.copied, i.trained, i.module, t.shape, t.dtype, s.digest, l.rank IS NOT NULL AS loaded
FROM initial i JOIN tensor t USING (rank, attempt, pid, generation, index)
LEFT JOIN starts s USING (rank, attempt, pid, generation, index)
LEFT JOIN loaded l ON l.rank = i.rank AND l.attempt = i.attempt
ORDER BY i.attempt, i.rank, i.model, i.place
"""


class Row(NamedTuple):
    """One layer on one rank."""

    rank: int
    attempt: int
    model: int
    place: int
    units: int
    inputs: int
    fan_in: int
    sampled: int
    different: int
    rms: float
    constant: bool
    bias_constant: bool
    copied: bool
    trained: bool
    module: str
    shape: str
    dtype: str
    digest: int | None
    loaded: bool

    @property
    def gain(self) -> float:
        return self.rms * math.sqrt(self.fan_in)


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One note per attempt, model and kind."""
    models: dict[tuple[int, int, int], list[Row]] = defaultdict(list)
    for r in rows:
        if not r.loaded:
            models[r.attempt, r.model, r.rank].append(r)
    said: dict[tuple[int, int, str, tuple[str, ...]], list[Row]] = defaultdict(list)
    for (attempt, model, _), layers in models.items():
        for kind, found in (("alike", _alike(layers)), ("copies", _copies(layers)), ("large", _large(layers))):
            if found:
                said[attempt, model, kind, tuple(r.module for r in found)].append(found[0])
    layer = {(r.attempt, r.rank, r.model, r.module): r for r in rows}
    for (attempt, model, kind, names), leads in said.items():
        yield _finding(kind, leads, [layer[attempt, leads[0].rank, model, n] for n in names])
    if not models:
        yield Abstention("NOT_APPLICABLE", "the weights were loaded before the first update")
    yield from unheard(run)


def _alike(layers: Sequence[Row]) -> list[Row]:
    """A layer and the next one that takes its outputs, both constant: its units compute one thing and get one gradient.

    Of zeros only where there is no other weight in the model: layers on residual branches begin at zero on purpose."""
    whole = all(r.constant for r in layers)
    found: dict[str, Row] = {}
    for one, other in pairwise(layers):
        joined = one.units == other.inputs and one.units >= 2 and one.bias_constant and one.trained and other.trained
        if joined and one.constant and other.constant and (whole or (one.rms > 0 and other.rms > 0)):
            found |= {one.module: one, other.module: other}
    return list(found.values())


def _copies(layers: Sequence[Row]) -> list[Row]:
    """Layers whose weights are the same draw."""
    same: dict[tuple[str, str, int], list[Row]] = defaultdict(list)
    for r in layers:
        drawn = r.sampled >= LEAST_ELEMENTS and r.different >= DRAWN * r.sampled
        if drawn and r.trained and not r.copied and r.digest is not None:
            same[r.shape, r.dtype, r.digest].append(r)
    return [r for several in same.values() if len(several) > 1 for r in several]


def _large(layers: Sequence[Row]) -> list[Row]:
    found = [r for r in layers if r.trained and r.gain >= GAIN]
    return found if len(found) >= max(FEWEST, MOSTLY * len(layers)) else []


_SAYS = {
    "alike": "all weights are equal in each of {names}: the units of a layer compute the same and get one gradient",
    "copies": "each of the weights of {names} is a copy of another of them, bit by bit",
    "large": "the weights of {names} multiply the size of what they get by {gain:.3g} and more in each layer",
}
_CANNOT = {
    "alike": "whether something between the layers tells their units apart, as dropout does",
    "copies": "whether it is meant, as where a layer is copied to begin alike; copies at different depths part by "
              "themselves, side by side on the same input they stay alike",
    "large": "whether normalisation behind the layers takes the size out again",
}  # fmt: skip
_CHECK = {
    "alike": "draw the weights (torch.nn.init); a constant serves for biases and norms only",
    "copies": "build each layer anew in place of copy.deepcopy, and seed once, not before each layer",
    "large": "divide by the square root of the inputs, as torch.nn.init.kaiming_normal_ and xavier_normal_ do",
}


def _finding(kind: str, leads: Sequence[Row], layers: Sequence[Row]) -> Finding:
    ranks = tuple(sorted({r.rank for r in leads}))
    names = [r.module for r in layers]
    gain = min(r.gain for r in layers)
    expected = {"alike": "a draw", "copies": "a draw of its own", "large": f"about 1, below {GAIN:g}"}[kind]
    return Finding(
        ranks=ranks, first_step=1, attempt=leads[0].attempt, severity="note", subject=f"{names[0]}.weight",
        summary=f"before the first update on {listed(ranks)} " + _SAYS[kind].format(names=common(names), gain=gain),
        evidence=tuple(Evidence(r.rank, 1, f"{r.module}.weight ({r.shape})", _value(kind, r), expected)
                       for r in layers[:SHOWN]),
        cannot_conclude=(_CANNOT[kind],), next_check=_CHECK[kind],
    )  # fmt: skip


def _value(kind: str, r: Row) -> str:
    if kind == "copies":
        return f"fingerprint {r.digest or 0:#x}"
    return f"all {r.rms:.4g} in size" if kind == "alike" else f"{r.gain:.3g} times"
