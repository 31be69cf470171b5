"""The learning rate is gone while updates go on: the schedule was over before training, or is past its turning point.

Reads     optim (lr of each group, in force until it changes), step (updates), schedule
Says      the optimizer, since which step, how many updates were made in vain, how fast the scheduler moved
Unknown   fewer than three steps; lr that was not recorded as a number; several optimizers of which not all step
Blind to  groups that had no lr from the start (frozen on purpose); schedules kept outside param_groups
Do        give the schedule as many steps as training takes (updates, not batches; once per update; not once per
          rank), or end training there
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, unheard

CODE = "LR_EXHAUSTED"
NEEDS = {"optim": 1, "step": 1}
PARAMS: Mapping[str, object] = {
    # of a group's largest lr so far. An update with that one changes a weight by about a thousandth of itself, so what
    # is left is 1e-9 of it: below half a unit in the last place of float32 (6e-8), it rounds to no change.
    "gone": 1e-6,
}
LEAST_STEPS = 3  # a schedule that ends with training reaches zero at its last step, or one past it
# Of all steps: a cosine is below a millionth of its top for 0.064 % of its length, a square for 0.1 %, a fourth power
# for 3.2 %.
LEAST_SHARE = 0.05
SHOWN = 8
PLATEAU = "ReduceLROnPlateau"

# Rows of optim are written on a change and hold until the next. `since` is where the last stretch without lr begins.
# An update is certain to be one of this optimizer's where as many stepped as there are.
SQL = """
WITH taken AS (
    SELECT rank, attempt, step, max(optimizers) AS optimizers FROM step GROUP BY ALL
), steps AS (
    SELECT rank, attempt, count(*) AS steps, max(step) AS last FROM taken GROUP BY ALL
), kept AS (
    SELECT rank, attempt, pid, optimizer, "group", step, seq, class_name, lr, max(lr) OVER so_far AS top
    FROM optim WINDOW so_far AS (PARTITION BY rank, attempt, pid, optimizer, "group" ORDER BY step, seq)
), alive AS (
    SELECT *, max(seq) FILTER (isnan(lr) OR top <= 0 OR lr > $gone * top)
                  OVER (PARTITION BY rank, attempt, pid, optimizer, "group") AS alive_at,
           max(top) OVER (PARTITION BY rank, attempt, pid, optimizer, "group") AS most
    FROM kept
), groups AS (
    SELECT rank, attempt, pid, optimizer, "group", any_value(class_name) AS class_name, any_value(most) AS most,
           min(step) FILTER (seq > coalesce(alive_at, -1)) AS since, arg_max(lr, seq) AS lr,
           bool_or(isnan(lr)) AS unread
    FROM alive GROUP BY ALL
), optimizers AS (
    SELECT rank, attempt, optimizer, any_value(class_name) AS class_name, max(most) FILTER (NOT isnan(most)) AS most,
           max(lr) FILTER (most > 0) AS lr, bool_or(unread) AS unread,
           count(*) OVER (PARTITION BY rank, attempt) AS held,
           CASE WHEN count(*) FILTER (most > 0) = count(since) FILTER (most > 0) THEN max(since) FILTER (most > 0) END
               AS since
    FROM groups GROUP BY rank, attempt, optimizer
), moved AS (
    SELECT rank, attempt, optimizer, scheduler, any_value(class_name) AS class_name, step,
           max(position) AS position, max("end") AS "end"
    FROM schedule WHERE position >= 0 GROUP BY rank, attempt, optimizer, scheduler, step
), paces AS (
    SELECT *, (position - lag(position) OVER w) / (step - lag(step) OVER w) AS pace
    FROM moved WINDOW w AS (PARTITION BY rank, attempt, scheduler ORDER BY step)
), schedules AS (
    SELECT rank, attempt, optimizer, string_agg(DISTINCT class_name, ', ' ORDER BY class_name) AS names,
           median(pace) AS pace
    FROM paces GROUP BY ALL
), turned AS (  -- a cosine that ran on past its lowest point: lr rises again
    SELECT m.rank, m.attempt, m.optimizer, max(m."end") AS "end", min(m.step) AS step, max(m.position) AS position
    FROM moved m WHERE m.class_name = 'CosineAnnealingLR' AND m."end" > 0 AND m.position > m."end" GROUP BY ALL
), risen AS (
    SELECT t.*, arg_max(k.lr, k.seq) AS lr, min(k.lr) AS least
    FROM turned t JOIN kept k ON k.rank = t.rank AND k.attempt = t.attempt AND k.optimizer = t.optimizer
        AND k.step >= t.step - 1
    GROUP BY ALL HAVING max(k.lr) > min(k.lr)
)
SELECT o.rank, o.attempt, o.optimizer, o.class_name, s.steps, s.last, coalesce(o.most, 0), coalesce(o.lr, 0), o.unread,
       o.since, (SELECT count(*) FROM taken t WHERE t.rank = o.rank AND t.attempt = o.attempt AND t.step >= o.since
                 AND t.optimizers >= o.held),
       coalesce(c.names, ''), c.pace, r."end", r.step, r.position
FROM optimizers o JOIN steps s USING (rank, attempt)
LEFT JOIN schedules c ON c.rank = o.rank AND c.attempt = o.attempt AND c.optimizer = o.optimizer
LEFT JOIN risen r ON r.rank = o.rank AND r.attempt = o.attempt AND r.optimizer = o.optimizer
ORDER BY o.attempt, o.optimizer, o.rank
"""


class Row(NamedTuple):
    """One optimizer of a rank."""

    rank: int
    attempt: int
    optimizer: int
    class_name: str
    steps: int
    last: int
    most: float  # the largest lr that a group had
    lr: float  # the largest in force at the end
    unread: bool  # some lr was not known as a number
    since: int | None  # first step of the last stretch in which no group has any lr left
    updates: int  # in that stretch
    schedulers: str
    pace: float | None  # positions that a scheduler moves on per step
    end: int | None  # where a cosine turned
    turned: int | None  # first step that was seen past it
    position: int | None


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One warning per attempt and optimizer whose lr is gone; a note for a cosine that rises again."""
    if not rows or all(r.unread or r.steps < LEAST_STEPS for r in rows):
        why = f"fewer than {LEAST_STEPS} steps, or no learning rate that is known as a number"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    known = [r for r in rows if not r.unread]
    if any(r.since is not None and not r.updates and r.since < r.last for r in known):
        yield Abstention(
            "INSUFFICIENT_EVIDENCE", "an optimizer without lr is one of several, and which stepped isn't known"
        )
    for _, members in groupby(known, key=lambda r: (r.attempt, r.optimizer)):
        several = list(members)
        gone = [r for r in several if r.since is not None and r.updates >= max(LEAST_STEPS, LEAST_SHARE * r.steps)]
        if gone:
            yield _gone(gone)
        risen = [r for r in several if r.turned is not None and r not in gone]
        if risen:
            yield _risen(risen)
    yield from unheard(run)


def _gone(rows: Sequence[Row]) -> Finding:
    r = min(rows, key=lambda r: r.since or 0)
    since = r.since or 1
    # it lowers lr again and again because nothing improves: there it did what it is for
    meant = r.schedulers == PLATEAU and r.lr > 0
    pace = f"; the scheduler moves on by {r.pace:g} a step" if r.pace is not None and r.pace > 1 else ""
    return Finding(
        ranks=tuple(sorted(m.rank for m in rows)),
        first_step=since,
        last_good_step=since - 1 if since > 1 else None,
        last_step=max(m.last for m in rows),
        attempt=r.attempt,
        severity="note" if meant else "warning",
        subject=f"lr of {r.class_name}",
        summary=f"the learning rate of {r.class_name} on {listed(m.rank for m in rows)} is {r.lr:g} from step {since} "
        f"on, after {r.most:g}, and {r.updates} of {r.steps} steps were updates with it{pace}",
        evidence=tuple(
            Evidence(m.rank, m.since, "largest lr of any group", f"{m.lr:g}", f"more than 1e-6 of {m.most:g}")
            for m in rows[:SHOWN]
        )
        + tuple(Evidence(m.rank, m.last, f"positions a step of {m.schedulers}", f"{m.pace:g}", "1")
                for m in rows[:1] if m.pace is not None and m.pace > 1),
        cannot_conclude=("whether these last steps were meant to change nothing",),
        next_check="compare the schedule's length with the number of updates: batches, epochs, accumulation and the "
        "number of ranks enter it, and a scheduler may be stepped more than once an update",
    )  # fmt: skip


def _risen(rows: Sequence[Row]) -> Finding:
    r = rows[0]
    return Finding(
        ranks=tuple(sorted(m.rank for m in rows)),
        first_step=min(m.turned or 0 for m in rows),
        last_step=max(m.last for m in rows),
        attempt=r.attempt,
        severity="note",
        subject=f"lr of {r.class_name}",
        summary=f"CosineAnnealingLR on {listed(m.rank for m in rows)} was stepped to {r.position}, past its T_max of "
        f"{r.end}: the learning rate rises again",
        evidence=tuple(
            Evidence(m.rank, m.turned, "position of the scheduler", str(m.position), f"at most {m.end}")
            for m in rows[:SHOWN]
        ),
        cannot_conclude=("whether it is meant as a cycle",),
        next_check="set T_max to the number of times that the scheduler is stepped, or use CosineAnnealingWarmRestarts",
    )
