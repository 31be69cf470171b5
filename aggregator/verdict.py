"""Everything that tdbg says about a run, as one value: each rule's verdict, the incidents, and how whole the data is.

A rule that fails is itself reported and breaks nothing else. A rule that found nothing in data with holes does not say
CLEAR. Reason codes without a rule are listed, never left out.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

from . import detector
from .codes import CODES
from .damage import may_be_damage
from .detector import Ruling
from .findings import Finding, RuleVerdict, Verdict
from .incidents import incidents
from .presence import Gap, Presence, presence, steady_gaps
from .stages import placed
from .store import Store
from .views import VIEWS

NO_RULE = "no rule for this code in this version"


@dataclass
class _Judging:
    """What has been said so far."""

    verdicts: dict[str, RuleVerdict] = field(default_factory=dict)
    findings: list[tuple[str, Finding]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    suspicious: bool = False  # a query failed as it would on a damaged file
    coverage: dict[str, tuple[int, int]] = field(default_factory=dict)


def judge(store: Store, now_ns: int | None = None) -> Verdict:
    """Run every rule over an open run."""
    while True:
        present = presence(store, now_ns)
        said = _ask_all(store, present)
        # a query may have met damage inside a file that looked whole: leave the file out, then ask again
        if not said.suspicious or not store.drop_damaged():
            break
    quality = present.quality
    warnings = (*quality.warnings, *said.warnings)
    about = store.about
    return Verdict(
        run=about.id, path=str(store.path), status=present.status, world_size=present.world_size, steps=present.steps,
        attempts=present.attempts,
        data_quality=replace(quality, warnings=warnings, complete=quality.complete and not said.warnings),
        verdicts=tuple(said.verdicts.get(c, RuleVerdict(c, "NOT_APPLICABLE", NO_RULE)) for c in _codes(said)),
        incidents=placed(incidents(said.findings), lambda sql, given: store.connection.execute(sql, given).fetchall()),
        meta={"script": about.script, "command": list(about.command), "start_ns": about.start_ns},
    )  # fmt: skip


def _codes(said: _Judging) -> Iterable[str]:
    return (*CODES, *(c for c in said.verdicts if c not in CODES))


def _ask_all(store: Store, present: Presence) -> _Judging:
    said = _Judging()
    broken: list[tuple[str, Exception]] = []
    for name in detector.names():
        try:
            module = detector.load_one(name)
        except Exception as e:  # a rule that can't even be imported must not silence the others
            broken.append((name, e))
            continue
        _ask(module, store, present, said)
    for name, error in broken:
        _report(name, _codes_in_source(name, said), error, said)
    return said


def _ask(module: ModuleType, store: Store, present: Presence, said: _Judging) -> None:
    codes = detector.codes_of(module)
    try:
        ruling = detector.run(module, store.connection, present.facts, said.coverage)
        tables = tables_read(module)
        gaps = [g for g in present.gaps if not g.table or g.table in tables]
        if any(v.outcome == "CLEAR" for v in ruling.verdicts) and not gaps:
            gaps += steady_gaps(store, tables, present.world_size)
    except Exception as e:
        _report(module.__name__.rpartition(".")[2], codes, e, said)
        return
    for v in sober(ruling, gaps, present.absent):
        said.verdicts[v.reason_code] = v
    said.findings += ruling.findings


def sober(ruling: Ruling, gaps: list[Gap], absent: Mapping[str, str]) -> Iterable[RuleVerdict]:
    """The ruling's verdicts; CLEAR over data with holes and a hypothesis become INSUFFICIENT_EVIDENCE."""
    for v in ruling.verdicts:
        states = {f.evidence_state for code, f in ruling.findings if code == v.reason_code}
        if v.outcome == "CLEAR" and gaps:
            more = f" (and {len(gaps) - 1} more)" if len(gaps) > 1 else ""
            yield replace(v, outcome="INSUFFICIENT_EVIDENCE",
                          why=f"nothing found in what was recorded, but {gaps[0].why}{more}")  # fmt: skip
        elif v.outcome == "INCIDENT" and states == {"HYPOTHESIS"}:
            yield replace(v, outcome="INSUFFICIENT_EVIDENCE", why=f"a hypothesis only: {v.why}")
        else:
            known = [reason for table, reason in absent.items() if f"table {table} has rows of" in v.why]
            yield replace(v, why="; ".join([v.why, *known]))


def tables_read(module: ModuleType) -> set[str]:
    """Tables that a detector needs or its query names, directly or through a shared view."""
    words = set(re.findall(r"\w+", module.SQL)) | set(module.NEEDS)
    for sql in reversed(VIEWS):  # a later view may stand on an earlier one
        defined = re.search(r"VIEW (\w+) AS", sql)
        if defined and defined[1] in words:
            words |= set(re.findall(r"\w+", sql))
    return words


def _report(name: str, codes: Iterable[str], error: Exception, said: _Judging) -> None:
    first = (str(error).strip().splitlines() or [""])[0]
    said.suspicious |= may_be_damage(error)
    said.warnings.append(f"rule {name} failed: {type(error).__name__}: {first}")
    for code in codes:
        said.verdicts[code] = RuleVerdict(code, "INSUFFICIENT_EVIDENCE",
                                          f"this rule failed: {type(error).__name__}: {first}")  # fmt: skip


def _codes_in_source(name: str, said: _Judging) -> list[str]:
    """Codes that a module which can't be imported speaks for, as far as its text tells."""
    spec = importlib.util.find_spec(f"{__package__}.detectors.{name}")
    text = Path(spec.origin).read_text(errors="replace") if spec and spec.origin else ""
    return [c for c in CODES if re.search(rf"""["']{c}["']""", text) and c not in said.verdicts]
