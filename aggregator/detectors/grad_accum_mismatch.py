"""Accumulated steps are not made of the micro-batches they should be: leftovers, odd windows, a declared number, waste.

Reads     step, batch, loader (training passes), declared
Says      the ranks, the first such step, how many backwards it had and how many are usual or declared
Unknown   no batches are known and nothing was declared; fewer than three whole windows
Blind to  windows that are as long as usual and yet begin in one pass and end in the next
Do        step at the last micro-batch of a pass, or drop it; count micro-batches over the whole loop, not by the
          index in the pass; let the framework's own accumulation setting and the loop say the same number;
          zero_grad() belongs behind step(), not before backward()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity
from ..groups import listed, unheard

CODE = "GRAD_ACCUM_MISMATCH"
NEEDS = {"step": 1}
PARAMS: Mapping[str, object] = {
    "windows": 3,  # before one number can be called usual: the fewest that have a majority with one exception
}
SHOWN = 8
# What is odd in more windows than this is how the program works: batches by token budget, a schedule. A single odd one
# among four is the least that leaves a usual number.
RARE = 0.25

# A window is what the main loader gave between two updates. That it holds micro-batches and no losses beside them
# shows in its backwards, which are as many, or a fixed multiple. The last of a pass may be short.
SQL = """
WITH part AS (
    SELECT rank, attempt, loader, iterator, step, count(*) AS n FROM training_batch GROUP BY ALL
), main AS (
    SELECT rank, attempt, loader FROM part GROUP BY rank, attempt, loader
    QUALIFY row_number() OVER (PARTITION BY rank, attempt ORDER BY sum(n) DESC, loader) = 1
), ended AS (
    SELECT p.*, max(step) OVER (PARTITION BY rank, attempt, iterator) = step AS ends
    FROM part p JOIN main USING (rank, attempt, loader)
), taken AS (
    SELECT rank, attempt, step, max(backwards) AS backwards, max(discarded) AS discarded, max(optimizers) AS optimizers
    FROM step GROUP BY ALL
), win AS (
    SELECT t.rank, t.attempt, t.step, t.backwards, t.discarded, coalesce(sum(e.n), 0) AS n, count(e.n) AS passes,
           max(e.iterator) AS pass, coalesce(bool_or(e.ends), FALSE) AS ends
    FROM taken t LEFT JOIN ended e USING (rank, attempt, step) WHERE t.optimizers > 0 GROUP BY ALL
), known AS (
    SELECT *, median(backwards / n) FILTER (n > 0) OVER (PARTITION BY rank, attempt) AS per_batch FROM win
), whole AS (  -- windows of one pass that are not its last
    SELECT *, n > 0 AND passes = 1 AND NOT ends AND discarded = 0 AS inner_one,
           n > 0 AND backwards = per_batch * n AS plain
    FROM known
), usual AS (
    SELECT rank, attempt, mode(n) FILTER (inner_one) AS n, count(*) FILTER (inner_one) AS windows,
           mode(backwards) FILTER (inner_one OR n = 0) AS backwards,
           count(*) FILTER (inner_one OR n = 0) AS counted
    FROM whole GROUP BY ALL
), sizes AS (
    SELECT rank, attempt, pass, n, count(*) AS times FROM whole WHERE inner_one GROUP BY ALL
), of_pass AS (
    SELECT rank, attempt, pass, arg_max(n, times) AS n FROM sizes GROUP BY ALL
    HAVING sum(times) >= $windows AND 2 * max(times) > sum(times)
), judged AS (
    SELECT w.*, u.n AS usual, u.windows, u.backwards AS usual_backwards, u.counted, coalesce(p.n, u.n) AS due,
           w.plain AND w.passes > 1 AND w.discarded = 0 AND w.n > u.n AND u.n > 1 AS leaked,
           w.plain AND w.inner_one AND w.n <> coalesce(p.n, u.n) AND coalesce(p.n, u.n) > 1 AS odd,
           w.discarded > 0 AS wasted, w.discarded > 0 AND w.passes > 1 AS wasted_end
    FROM whole w JOIN usual u USING (rank, attempt) LEFT JOIN of_pass p USING (rank, attempt, pass)
), steady AS (  -- what is told again in between is a schedule, or the next of several trainings in one process
    SELECT rank, attempt, source, max(value)::INTEGER AS value FROM (
        SELECT *, max(step) OVER w > min(step) OVER w AS again FROM declared
        WHERE key = 'gradient_accumulation_steps' WINDOW w AS (PARTITION BY rank, attempt)
    ) WHERE NOT again GROUP BY rank, attempt, source HAVING min(value) = max(value)
), declared_one AS (  -- a trainer tells what it sits on as well, or keeps it to itself
    SELECT rank, attempt, max(value) AS value, arg_max(source, value) AS source FROM steady GROUP BY ALL
)
SELECT j.rank, j.attempt, count(*), coalesce(max(usual), 0), max(windows), coalesce(max(usual_backwards), 0),
       max(counted), count(*) FILTER (inner_one AND n = usual),
       min(step) FILTER (leaked), count(*) FILTER (leaked), arg_min(n, step) FILTER (leaked), max(step) FILTER (leaked),
       min(step) FILTER (odd), count(*) FILTER (odd), arg_min(n, step) FILTER (odd), max(step) FILTER (odd),
       arg_min(due, step) FILTER (odd), min(step) FILTER (wasted), count(*) FILTER (wasted),
       arg_min(discarded, step) FILTER (wasted), max(step) FILTER (wasted), min(step) FILTER (wasted_end),
       max(d.value), any_value(d.source),
       min(step) FILTER (inner_one AND n <> d.value AND backwards <> d.value OR n = 0 AND backwards <> d.value),
       count(*) FILTER (inner_one AND n <> d.value AND backwards <> d.value OR n = 0 AND backwards <> d.value),
       min(step) FILTER (inner_one OR n = 0)
FROM judged j LEFT JOIN declared_one d ON d.rank = j.rank AND d.attempt = j.attempt
GROUP BY j.rank, j.attempt ORDER BY j.attempt, j.rank
"""


class Row(NamedTuple):
    """One rank's windows in one attempt. A window that is inner lies in one pass and is not its last."""

    rank: int
    attempt: int
    steps: int
    usual: int  # micro-batches of an inner window, the commonest number
    windows: int  # inner windows
    backwards: int  # of an inner window, or of any where no batches are known
    counted: int
    alike: int  # inner windows of the usual size
    leak: int | None  # first step that began with micro-batches of the pass before
    leaks: int
    leak_size: int | None
    last_leak: int | None
    odd: int | None  # first inner window of another size
    odds: int
    odd_size: int | None
    last_odd: int | None
    due: int | None
    waste: int | None  # first step before which gradients of some backwards were thrown away
    wastes: int
    wasted: int | None  # backwards
    last_waste: int | None
    waste_end: int | None  # the same where they were the last of a pass
    declared: int | None
    source: str | None
    against: int | None  # first step of another number than the declared one
    againsts: int
    first: int | None  # step of the first window that could keep to it


Judge = Callable[[Sequence[Row]], "Finding | None"]


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """At most one finding of each kind and attempt."""
    least = PARAMS["windows"]
    assert isinstance(least, int)
    told = [r for r in rows if r.windows >= least or r.declared is not None or r.wastes]
    if not told:
        why = f"fewer than {least} windows of a training pass are known, and nothing was declared"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    judges: tuple[Judge, ...] = (_declared, _leaked, _odd, _wasted)
    for _, members in groupby(told, key=lambda r: r.attempt):
        several = list(members)
        for judge in judges:
            found = judge(several)
            if found is not None:
                yield found
    yield from unheard(run)


def _said(hit: Sequence[Row], first: int, last: int, severity: Severity, what: str, metric: str, value: str,
          expected: str, check: str, open_: tuple[str, ...] = ()) -> Finding:  # fmt: skip
    return Finding(
        ranks=tuple(r.rank for r in hit),
        first_step=first,
        last_good_step=first - 1 if first > 1 else None,
        last_step=last,
        attempt=hit[0].attempt,
        severity=severity,
        subject="gradient accumulation",
        summary=f"{listed(r.rank for r in hit)}: {what}",
        evidence=tuple(Evidence(r.rank, first, metric, value, expected) for r in hit[:SHOWN]),
        cannot_conclude=open_,
        next_check=check,
    )


def _declared(rows: Sequence[Row]) -> Finding | None:
    """The program told its framework one number and steps after another.

    From the start: where the first windows keep to it, what comes later may be another training of the same process.
    """
    hit = [r for r in rows if r.declared is not None and r.declared > 1 and r.against is not None
           and r.against == r.first and r.counted >= 3 and 2 * r.againsts > r.counted]  # fmt: skip
    if not hit:
        return None
    r = hit[0]
    return _said(
        hit,
        min(h.against or 0 for h in hit),
        max(h.steps for h in hit),
        "warning",
        f"{r.source} was told to accumulate {r.declared} backwards a step, and steps are taken after {r.backwards}, "
        f"so at {r.againsts} of {r.counted} steps",
        "backwards in the step",
        str(r.backwards),
        str(r.declared),
        "step only when the framework's accumulation says so, or declare the number that is meant",
    )


def _leaked(rows: Sequence[Row]) -> Finding | None:
    hit = [r for r in rows if r.leak is not None]
    if not hit:
        return None
    r = hit[0]
    return _said(
        hit,
        min(h.leak or 0 for h in hit),
        max(h.last_leak or 0 for h in hit),
        "warning",
        f"step {r.leak} is made of {r.leak_size} micro-batches, {r.usual} are usual: the last ones of the pass before "
        f"were left over and went into it; so at {r.leaks} step(s)",
        "micro-batches in the step, of two passes",
        str(r.leak_size),
        str(r.usual),
        "step on what is left at the end of a pass, or drop those micro-batches before their backward",
    )


def _odd(rows: Sequence[Row]) -> Finding | None:
    hit = [r for r in rows if r.odd is not None and 2 * r.alike > r.windows]
    if not hit:
        return None
    r = hit[0]
    rare = all(h.odds <= RARE * h.windows for h in hit)
    return _said(
        hit,
        min(h.odd or 0 for h in hit),
        max(h.last_odd or 0 for h in hit),
        "warning" if rare else "note",
        f"step {r.odd} is made of {r.odd_size} micro-batches in the middle of a pass, {r.due} are usual; so at "
        f"{r.odds} of {r.windows} such steps",
        "micro-batches in the step",
        str(r.odd_size),
        str(r.due),
        "look at the condition under which the loop steps: it may count from another number",
        () if rare else ("whether the number varies on purpose, as with a budget of tokens",),
    )


def _wasted(rows: Sequence[Row]) -> Finding | None:
    hit = [r for r in rows if r.waste is not None]
    if not hit or any(r.wastes > RARE * r.steps for r in hit):
        return None  # step after step: a method that needs a gradient before the one it steps on
    at_end = [r for r in hit if r.waste_end is not None]
    r = (at_end or hit)[0]
    first = r.waste_end if r.waste_end is not None else r.waste or 1
    where = "at the end of a pass " if at_end else ""
    return _said(
        at_end or hit,
        first,
        max(h.last_waste or 0 for h in hit),
        "warning" if at_end else "note",
        f"the gradients of {r.wasted} backward(s) {where}were thrown away before step {first} used them; so at "
        f"{r.wastes} step(s)",
        "backwards whose gradients no update used",
        str(r.wasted),
        "0",
        "step on what is left at the end of a pass" if at_end else "see why the loop leaves those steps out",
        () if at_end else ("whether they were left out on purpose, as for a batch that is not finite",),
    )
