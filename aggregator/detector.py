"""What a detector is, how the folder of them is found and checked, and how one is run.

A detector is a module in `detectors/` with a docstring (labels Reads, Says, Unknown, Blind to, Do) and

    CODE      reason code(s): a str, or a tuple of str for a tight family
    NEEDS     {table: fewest ranks that must have rows in it}; fewer means INSUFFICIENT_EVIDENCE before the query runs
    PARAMS    {name: value} used as $name in SQL, each with its reason in a comment beside it
    SQL       one statement
    Row       NamedTuple with the columns of SQL, in order
    findings  (rows, run) -> iterator of Finding or Abstention; for a family, of (code, Finding or Abstention)

No finding and no abstention means CLEAR for each code.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import duckdb

from .findings import Abstention, Checked, Finding, RuleVerdict

LABELS = ("Reads", "Says", "Unknown", "Blind to", "Do")
NAMES = ("CODE", "NEEDS", "PARAMS", "SQL", "Row", "findings")


@dataclass(frozen=True)
class RunFacts:
    """What a detector may know of a run beside its query's rows."""

    world_size: int
    status: str = "finished"
    ranks_seen: tuple[int, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    nodes: int = 1
    local_world_size: int = 0
    last_step: Mapping[int, int] = field(default_factory=dict)
    watch_steps: int = 100


@dataclass(frozen=True)
class Ruling:
    """All that one detector says: a verdict per code and the findings behind it."""

    verdicts: tuple[RuleVerdict, ...]
    findings: tuple[tuple[str, Finding], ...]


def codes_of(module: ModuleType) -> tuple[str, ...]:
    """The reason codes of a detector module."""
    return (module.CODE,) if isinstance(module.CODE, str) else tuple(module.CODE)


def names() -> tuple[str, ...]:
    """The modules of `detectors/`, in alphabetical order."""
    from . import detectors

    return tuple(sorted(info.name for info in pkgutil.iter_modules(detectors.__path__)))


def load_one(name: str) -> ModuleType:
    """One module of `detectors/`. Raises TypeError that names the file when it lacks a part of the contract."""
    module = importlib.import_module(f"{__package__}.detectors.{name}")
    missing = [n for n in NAMES if not hasattr(module, n)]
    missing += [f"the docstring label {label!r}" for label in LABELS if f"\n{label} " not in (module.__doc__ or "")]
    if missing:
        raise TypeError(f"{module.__file__}: a detector needs {', '.join(missing)}")
    return module


def load() -> tuple[ModuleType, ...]:
    """Every detector. Raises TypeError that names the file at the first that lacks a part of the contract."""
    return tuple(load_one(name) for name in names())


def run(module: ModuleType, connection: duckdb.DuckDBPyConnection, facts: RunFacts,
        coverage: dict[str, tuple[int, int]] | None = None) -> Ruling:  # fmt: skip
    """Judge one run by one detector. Errors of the query or the function are not caught here (see `verdict`).

    `coverage` keeps what was counted per table, so that twenty detectors don't count the same rows twenty times.
    """
    codes = codes_of(module)
    checked, lacking = _coverage(module.NEEDS, connection, {} if coverage is None else coverage)
    if lacking:
        outcome = Abstention("INSUFFICIENT_EVIDENCE", lacking)
        return Ruling(tuple(RuleVerdict(c, outcome.outcome, outcome.why, checked) for c in codes), ())
    cursor = connection.execute(module.SQL, _parameters(module))
    rows = [module.Row(*r) for r in cursor.fetchall()]
    said: dict[str, list[Finding | Abstention]] = {c: [] for c in codes}
    for item in module.findings(rows, facts):
        code, what = item if isinstance(item, tuple) else (codes[0], item)
        said[code].append(what)
    verdicts = tuple(_verdict(c, said[c], checked) for c in codes)
    return Ruling(verdicts, tuple((c, f) for c in codes for f in said[c] if isinstance(f, Finding)))


def _parameters(module: ModuleType) -> dict[str, Any]:
    return {k: v for k, v in module.PARAMS.items() if f"${k}" in module.SQL}


def _coverage(needs: Mapping[str, int], connection: duckdb.DuckDBPyConnection,
              coverage: dict[str, tuple[int, int]]) -> tuple[Checked, str]:  # fmt: skip
    """What the needed tables hold, and a sentence when that is too little."""
    checked = Checked()
    for table, fewest in needs.items():
        if table not in coverage:
            coverage[table] = connection.execute(
                f'SELECT count(DISTINCT (attempt, step)) FILTER (WHERE step > 0), count(DISTINCT rank) FROM "{table}"'
            ).fetchall()[0]
        steps, ranks = coverage[table]
        if ranks < fewest:
            return checked, f"table {table} has rows of {ranks} rank(s), {fewest} needed"
        if not checked.ranks:
            checked = Checked(steps, ranks, table)
    return checked, ""


def _verdict(code: str, said: list[Finding | Abstention], checked: Checked) -> RuleVerdict:
    findings = [s for s in said if isinstance(s, Finding)]
    if findings:
        return RuleVerdict(code, "INCIDENT", findings[0].summary, checked)
    for s in said:
        if isinstance(s, Abstention):
            return RuleVerdict(code, s.outcome, s.why, checked)
    return RuleVerdict(code, "CLEAR", f"checked {checked.steps} steps of {checked.ranks} rank(s)", checked)
