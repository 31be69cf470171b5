"""Optimizer state that replicas must share differs: moments, momentum, step counters, or whether there is any.

Reads     optim_state, optim_loaded, tensor, param, grad, delivered, loss, step, event (Join)
Says      which ranks stand apart, which state of which parameters, from which step on, and who had loaded state then
Unknown   parameters without a wrapper whose ranks are not shown to train one model; steps that no longer correspond
Blind to  what the optimizer_state probe is blind to; a difference in a part of a large tensor between its windows
Do        load or reset the optimizer's state on every rank, or none; after a resume load the same file everywhere; a
          step that some ranks skipped (scaler, an exception) leaves counters apart
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .. import replicas
from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity
from ..groups import listed
from ..replicas import FINAL, START, Parting
from ..settled import settled_sql
from ..tied import TIED

CODE = "OPTIM_STATE_DESYNC"
NEEDS = {"optim_state": 1, "tensor": 1}
PARAMS: Mapping[str, object] = {}
ABSENT = -1  # mark of a parameter without this state

# Each state of a parameter is compared like a tensor of its own: number `index * KEYS + n` in a catalogue that has one
# line per parameter and state, n counting the run's states. A rank that looked at a parameter at some step and did not
# find a state that others have there lacks it.
KEYS = 1024
_KEY = f"""
SELECT key, row_number() OVER (ORDER BY key) % {KEYS} AS n, kind = 'number' AS number FROM (
    SELECT key, max(keys ->> ('$."' || key || '"')) AS kind
    FROM (SELECT keys, unnest(json_keys(keys)) AS key FROM (SELECT DISTINCT keys FROM optim_state WHERE keys <> ''))
    GROUP BY key)
"""
# Only attempts in which some rows differ as a whole are laid out by key: a healthy run costs one hash a row.
_SWEEPS = f"""
    WITH once AS (
        SELECT rank, attempt, pid, generation, optimizer, keys, tensors, digest, greatest(step, 1) AS step,
               CASE stage WHEN 'start' THEN 0 WHEN 'end' THEN 1 ELSE 2 END AS sweep
        FROM optim_state WHERE len(tensors) > 0
    ),
    whole AS (
        SELECT rank, attempt, pid, generation, step, sweep, bool_or(keys <> '') AS any_key,
               bit_xor(hash(optimizer, keys, tensors, digest)) AS h
        FROM once GROUP BY ALL
    ),
    unequal AS (
        SELECT DISTINCT attempt FROM (
            SELECT attempt FROM whole GROUP BY attempt, step, sweep HAVING min(h) <> max(h))
    ),
    found AS (
        SELECT *, CASE WHEN keys <> '' THEN json_keys(keys) ELSE [] END AS found
        FROM once WHERE attempt IN (FROM unequal)
    ),
    wanted AS (SELECT DISTINCT attempt, step, sweep, unnest(found) AS key FROM found)
    SELECT f.rank, f.attempt, f.pid, f.generation, f.step, f.sweep,
           flatten(list(list_transform(f.tensors, lambda i: i * {KEYS} + k.n) ORDER BY f.optimizer, k.n)) AS tensors,
           flatten(list(CASE WHEN list_contains(f.found, w.key)
                             THEN f.digest[(list_position(f.found, w.key) - 1) * len(f.tensors) + 1 :
                                           list_position(f.found, w.key) * len(f.tensors)]
                             ELSE list_transform(f.tensors, lambda i: {ABSENT}) END ORDER BY f.optimizer, k.n)) AS marks
    FROM found f JOIN wanted w USING (attempt, step, sweep) JOIN ({_KEY}) k ON k.key = w.key
    GROUP BY ALL
    UNION ALL
    SELECT rank, attempt, pid, generation, step, sweep, [0], [CAST(h % 2147483647 AS BIGINT)]
    FROM whole WHERE any_key AND attempt NOT IN (FROM unequal)"""
_CATALOGUE = f"""(
            SELECT t.* REPLACE (t.index * {KEYS} + k.n AS index, k.key || ' of ' || t.name AS name,
                                CASE WHEN k.number THEN 1 ELSE t.numel END AS numel)
            FROM tensor t CROSS JOIN ({_KEY}) k)"""

# the state of what no reduction is declared for follows its parameters, which are PARAM_DESYNC's
_REDUCED = "kind = 'param' AND sharing NOT IN ('outside', 'ignored', 'duplicated')"

SQL = f"""
WITH parted AS ({replicas.parted_sql(_SWEEPS, _REDUCED, whole=0, settled=settled_sql(">"),
                                     catalogue=_CATALOGUE)})
SELECT r, r.name IS NOT NULL AND split_part(r.name, ' of ', 1) IN (SELECT key FROM ({_KEY}) WHERE number) AS number,
       coalesce(r.attempt IN ({TIED}), FALSE) AS tied,
       (SELECT coalesce(list(DISTINCT l.rank ORDER BY l.rank), []) FROM optim_loaded l
        WHERE l.attempt = r.attempt AND greatest(l.step, 1) <= r.first
          AND l.step > coalesce(r.last_good, 0)) AS loads
FROM parted r
"""  # fmt: skip


class Row(NamedTuple):
    """One state of one parameter that differs (see `replicas.Row`), and what is known beside it."""

    parted: dict[str, Any]
    number: bool  # the marks are the bits of numbers
    tied: bool  # without a wrapper, but shown to be replicas
    loads: list[int]  # ranks that loaded optimizer state since it was last seen equal


NO_WRAPPER = (
    "that these are replicas is not declared: no wrapper holds the parameters, their ranks share a process group"
)
WHAT = "optimizer state"


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per set of ranks and first step."""
    parted = [replicas.Row(*r.parted.values()) for r in rows]
    beside = {id(p): r for p, r in zip(parted, rows, strict=True)}
    abstention = replicas.unjudged(parted[0], run.world_size)
    if abstention and not parted[0].kinds and run.world_size > 1:
        yield Abstention("NOT_APPLICABLE", "no optimizer keeps state that replicas share: it has none, or spreads it")
        return
    if abstention:
        yield abstention
        return
    differing = [p for p in parted if p.name is not None]
    for parting in replicas.partings([p for p in differing if p.sharing != "plain" or beside[id(p)].tied], WHAT):
        yield from _finding(parting, beside, run)
    if any(p.sharing == "plain" and not beside[id(p)].tied for p in differing):
        why = "optimizer state of unwrapped models differs, and nothing shows that the ranks train one model"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    yield from replicas.left_open(parted[0], run)


def _finding(parting: Parting, beside: Mapping[int, Row], run: RunFacts) -> Iterator[Finding]:
    # the state that was last seen equal speaks: of a large tensor each sweep sees another part
    rows = tuple(sorted(parting.rows, key=lambda p: -(p.last_good or 0)))
    first = rows[0]
    severity: Severity = "warning" if first.sharing == "plain" else "critical"
    number = {id(p): beside[id(p)].number for p in rows}
    when, loads = _loads(parting, beside[id(first)].loads)
    if first.first_sweep == FINAL:
        if run.status != "finished":
            return  # ranks that were stopped are not at one point of the program
        severity, when = "note", ", when the process ended"
    elif all(p.settled for p in rows):
        severity, when = "note", ", yet the parameters agree all the same" + when
    elif any(p.first_sweep == START for p in rows):
        when = ", before the update" + when
    parting = replace(
        parting, rows=rows, severity=severity, when=when + _lacks(first),
        cannot_conclude=(NO_WRAPPER,) if first.sharing == "plain" else (),
        next_check="load the optimizer's state on every rank, or broadcast it; look for what writes to it there",
    )  # fmt: skip
    found = replicas.finding(parting, lambda row, mark: _shown(mark, number[id(row)]))
    evidence = tuple(replace(e, metric=e.metric.removesuffix(" digest")) for e in found.evidence)
    yield replace(found, evidence=(*loads, *evidence))


def _loads(parting: Parting, loads: Sequence[int]) -> tuple[str, tuple[Evidence, ...]]:
    """Whether some ranks only had loaded optimizer state since it was last seen equal."""
    first = parting.rows[0]
    if not loads or set(loads) >= set(first.ranks):
        return "", ()
    evidence = (Evidence(r, first.first, "optimizer.load_state_dict", "called", "on all ranks or none") for r in loads)
    return f"; load_state_dict had been called on {listed(loads)} only", tuple(evidence)


def _lacks(first: replicas.Row) -> str:
    without = [r for r, m in zip(first.ranks, first.marks, strict=True) if m == ABSENT]
    return f"; {listed(without)} {'has' if len(without) == 1 else 'have'} none" if without else ""


def _shown(mark: object, number: bool) -> str:
    """A mark as people read it."""
    if mark == ABSENT:
        return "none"
    if not number:
        return f"digest {replicas.digits(mark)}"
    value: float = struct.unpack("<d", struct.pack("<q", int(str(mark))))[0]
    return f"{value:g}"
