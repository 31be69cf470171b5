"""A resumed run lacks state: weights, optimizer, scheduler or scaler; as a note random streams or the data's epoch.

Reads     checkpoint, schedule, optim, sampler, loader, rng, probe
Says      which parts did not come back on which ranks, at which step, what the file held, what stood at the next update
Unknown   weights of a checkpoint loaded alone, with nothing that shows a resume; runs of one update after it
Blind to  what the checkpoints probe is blind to; ranks that get everything from another one; schedules without a torch
          scheduler; the place within an epoch
Do        save and load all of: model, optimizer, scheduler, scaler, random state, step and sampler epoch; then lay
          the resumed run beside the uninterrupted one: `tdbg compare A B`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .. import resumes
from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity
from ..resumes import Restored
from ..wording import ranks_text

CODE = "RESUME_INCOMPLETE"
NEEDS = {"step": 1}
PARAMS: dict[str, object] = {}

SQL = """
WITH moves AS (
    SELECT rank, attempt, pid, optimizer, step, position,
           (position - lag(position) OVER w) / nullif(step - lag(step) OVER w, 0) AS pace
    FROM schedule WINDOW w AS (PARTITION BY rank, attempt, pid, scheduler ORDER BY seq)
), draws AS (
    SELECT DISTINCT rank, attempt FROM rng WHERE moved <> ''
), lrs AS (
    SELECT rank, attempt, count(DISTINCT lr) AS lrs FROM optim GROUP BY ALL
)
SELECT (SELECT count(*) > 0 FROM probe WHERE name = 'checkpoints' AND state = 'installed'),
       c.rank, c.attempt, c.pid, c.step, c.seq, c.time_ns, c.number, c.source, c.backwards, c.object, c.nth, c.params,
       c.entries, c.covered, c.position, c.lr, c.event, c.part, c.path, c.class_name, c.parts,
       CASE WHEN c.part = 'model' THEN (SELECT arg_min(s.epoch, s.seq) FROM sampler s
           WHERE s.rank = c.rank AND s.attempt = c.attempt AND s.pid = c.pid AND s.seq > c.seq
             AND s.event = 'iter' AND s.shuffle) END,
       CASE WHEN c.part = 'model' THEN coalesce((SELECT arg_min(l.skipped, l.seq) FROM loader l
           WHERE l.rank = c.rank AND l.attempt = c.attempt AND l.pid = c.pid AND l.seq > c.seq), 0) ELSE 0 END,
       d.rank IS NOT NULL, coalesce(l.lrs, 0),
       CASE WHEN c.part = 'scheduler' THEN (SELECT max(m.position) FROM moves m
           WHERE m.rank = c.rank AND m.attempt = c.attempt AND m.pid = c.pid AND m.optimizer = c.object
             AND m.step >= c.step) END,
       CASE WHEN c.part = 'scheduler' THEN (SELECT max(m.pace) FROM moves m
           WHERE m.rank = c.rank AND m.attempt = c.attempt AND m.pid = c.pid AND m.optimizer = c.object
             AND m.step > c.step) END
FROM (SELECT 1) LEFT JOIN checkpoint c ON TRUE
LEFT JOIN draws d ON d.rank = c.rank AND d.attempt = c.attempt
LEFT JOIN lrs l ON l.rank = c.rank AND l.attempt = c.attempt
ORDER BY c.attempt, c.rank, c.seq
"""

Row = resumes.Event
ORDER = ("model", "optimizer", "scheduler", "scaler", "sampler", "rng")
# without them other updates are made; the rest only draws other numbers
GRAVE = ("model", "optimizer", "scheduler", "scaler")
# A LambdaLR may be given a function that begins later; its rate is that of the file from the start then. Such rates
# agree to rounding; 5 % leaves room for the steps between the save and the count in the function.
LATER_LAMBDA = 0.05


@dataclass
class Missing:
    """The parts that one rank lacks after one resume."""

    of: Restored
    parts: dict[str, tuple[Evidence, ...]] = field(default_factory=dict)
    slight: set[str] = field(default_factory=set)  # of the grave ones, those that changed nothing so far
    open: str = ""  # why a part can't be judged

    @property
    def subject(self) -> str:
        return ", ".join(p for p in ORDER if p in self.parts)


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per step and set of missing parts, for all ranks with them; of repeated ones the first."""
    if not rows or rows[0].rank is None:
        seen = bool(rows and rows[0].installed)
        why = "no checkpoint was saved or loaded" if seen else "checkpoints were not recorded"
        yield Abstention("NOT_APPLICABLE" if seen and not run.missing_ranks else "INSUFFICIENT_EVIDENCE", why)
        return
    found = list(resumes.restored(rows))
    judged = [_judge(r, run) for r in found if r.why]
    groups: dict[tuple[int, int, str], list[Missing]] = {}
    for m in judged:
        if m.parts:
            groups.setdefault((m.of.attempt, m.of.step, m.subject), []).append(m)
    said: set[tuple[int, tuple[int, ...], str]] = set()
    for (attempt, _, subject), alike in groups.items():
        ranks = tuple(sorted({m.of.rank for m in alike}))
        if (attempt, ranks, subject) not in said:
            said.add((attempt, ranks, subject))
            yield _finding(alike, ranks)
    unsure = next((r for r in found if not r.why and r.file and _of_a_training(r)), None)
    reasons = [m.open for m in judged if m.open]
    if reasons:
        yield Abstention("INSUFFICIENT_EVIDENCE", reasons[0])
    elif unsure is not None:
        why = "only the weights of a checkpoint were loaded, and nothing shows whether its training was to go on"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    elif run.missing_ranks:
        yield Abstention("INSUFFICIENT_EVIDENCE", f"nothing was recorded of {ranks_text(run.missing_ranks)}")
    elif not judged:
        yield Abstention("NOT_APPLICABLE", "no training went on from a checkpoint")


def _of_a_training(of: Restored) -> bool:
    """Whether the file holds more of a training than its weights."""
    return bool({"optimizer", "scheduler", "scaler", "rng"} & set(of.held)) or any(v > 0 for v in of.counters.values())


def _judge(of: Restored, run: RunFacts) -> Missing:
    found = Missing(of)
    for standing in of.standing("optimizer", 1):
        if standing.covered > 0 or of.applied("optimizer"):
            _weights(found, standing)
            _optimizer(found, standing)
            _scheduler(found, standing, run)
            _scaler(found, standing)
    if of.file is not None:
        _randomness(found)
    return found


def _weights(found: Missing, standing: Row) -> None:
    lacking = [e for e in found.of.applied("model") if e.entries < e.params]
    if standing.covered < standing.params and lacking:
        e = lacking[0]
        found.parts["model"] = (Evidence(e.rank, e.step, f"parameters of {e.class_name} in what was loaded",
                                         str(e.entries), str(e.params)),)  # fmt: skip


def _optimizer(found: Missing, standing: Row) -> None:
    of = found.of
    if standing.entries != 0 or any(e.object == standing.object for e in of.applied("optimizer")):
        return  # it has state, however that came; or what was loaded was empty
    if of.held.get("optimizer") == 0 or (of.saved is not None and of.saved.backwards == 0):
        return  # it was saved before the first update
    after = of.standing("optimizer", 2, standing.object)
    if not after:
        found.open = (
            "whether the optimizer keeps state is not known: it made one update only since the weights were loaded"
        )
    elif after[0].entries > 0:
        name = f"parameters with state in {standing.class_name} before its first update"
        found.parts["optimizer"] = (Evidence(standing.rank, standing.step, name, "0", str(after[0].entries)),)


def _scheduler(found: Missing, standing: Row, run: RunFacts) -> None:
    of = found.of
    schedulers = of.standing("scheduler", 1, standing.object)
    if not schedulers or any(e.position != 0 for e in schedulers) or of.applied("scheduler"):
        return
    reached = max((e.reached or 0 for e in schedulers), default=0)
    expected, known_by = _expected(of, reached, schedulers[0].step)
    if expected <= 0:
        return
    # told where to stand by an argument of its step(); Accelerate steps once per rank
    if any(e.pace is not None and e.pace > max(run.world_size, 1) for e in schedulers):
        return
    first = schedulers[0]
    lr = of.held.get("lr", of.saved.lr if of.saved is not None else None)
    if "Lambda" in first.class_name and lr is not None and abs(first.lr - lr) <= LATER_LAMBDA * abs(lr):
        return
    if reached == 0:
        found.open = found.open or "the scheduler was not stepped since: whether it was set by hand is not known"
        return
    if first.lrs <= 1:
        found.slight.add("scheduler")
    what = f"position of {first.class_name} at the first update"
    found.parts["scheduler"] = (Evidence(first.rank, first.step, what, "0", f"{expected} ({known_by})"),)


def _expected(of: Restored, reached: int, since: int) -> tuple[int, str]:
    """Where the schedule stood when the file was saved: (position, how that is known); 0 when it isn't."""
    if "scheduler" in of.held:
        return int(of.held["scheduler"]), "in the file"
    if of.saved is not None and of.saved.position >= 0:
        return of.saved.position, "when the file was saved"
    second = [e for e in of.standing("scheduler", 2) if e.position > 0]
    for name, count in of.counters.items():
        if count > 0 and ("epoch" in name.lower() or second):  # a count of steps speaks only of schedules by step
            return count, f"{name} in the file"
    return 0, ""


def _scaler(found: Missing, standing: Row) -> None:
    of = found.of
    scalers = of.standing("scaler", 1, standing.object)
    progress = "scaler" in of.held or any(v > 0 for v in of.counters.values()) or of.held.get("optimizer", 0) > 0
    if scalers and not of.applied("scaler") and progress:
        e = scalers[0]
        found.parts["scaler"] = (Evidence(e.rank, e.step, f"{e.class_name}.load_state_dict", "not called", "called"),)


def _randomness(found: Missing) -> None:
    of = found.of
    model = of.applied("model")[-1]
    if model.draws and not of.applied("rng"):
        held = "in the file" if "rng" in of.held else "not in the file"
        found.parts["rng"] = (Evidence(of.rank, of.step, "state of random streams", f"not set again ({held})", "set"),)
    epochs = [v for k, v in of.counters.items() if "epoch" in k.lower() and v > 0]
    if epochs and model.epoch == 0 and not model.skipped and not of.applied("data"):
        what = "epoch of the shuffling sampler in the first pass"
        found.parts["sampler"] = (Evidence(of.rank, of.step, what, "0", f"{epochs[0]} or later"),)


def _finding(alike: Sequence[Missing], ranks: tuple[int, ...]) -> Finding:
    first = alike[0]
    of = first.of
    grave = [p for p in ORDER if p in first.parts and p in GRAVE and any(p not in m.slight for m in alike)]
    severity: Severity = "warning" if grave else "note"
    evidence = [e for m in alike[:8] for p in ORDER for e in m.parts.get(p, ())]
    never = ""
    if of.file is not None:
        held = [p for p in (*GRAVE, "rng") if p in of.held]
        evidence.append(
            Evidence(of.rank, of.file.step, f"held by {of.file.path or 'the file'}", ", ".join(held) or "nothing")
        )
        absent = [p for p in GRAVE if p in first.parts and p not in held]
        never = f"; the file holds no state of the {' or '.join(absent)}" if absent else ""
    consequence = "" if grave else ": the run is no exact continuation"
    return Finding(
        ranks=ranks, first_step=of.step, attempt=of.attempt, severity=severity, subject=first.subject,
        summary=f"training went on from a checkpoint on {ranks_text(ranks)} without its state of: {first.subject}"
                f"{consequence}{never} (a resume, as {of.why})",
        evidence=tuple(evidence), cannot_conclude=("whether the state was left out on purpose",),
        next_check="save and load the state_dict of " + ", ".join(grave) if grave
                   else "save and set again the random streams and the sampler's epoch, if runs must be repeatable",
    )  # fmt: skip
