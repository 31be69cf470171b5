"""Optimizer settings, the clipping threshold or a scheduler's position differ between ranks that train one model.

Reads     optim, clip, schedule, step, tensor, probe; param, grad, delivered, loss (whether unwrapped ranks train one
          model); event (Join)
Says      which ranks stand apart, which setting, its values, and from which step on
Unknown   optimizers of different class or size on the ranks; ranks that no process group joins
Blind to  settings kept outside param_groups; schedules that are no torch schedulers, until values differ
Do        set schedules and settings from the same numbers on every rank: from broadcast values, never from a local
          loss or a local clock; step the scheduler on all ranks or on none
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, split, unheard
from ..tied import TIED

CODE = "HPARAM_DESYNC"
NEEDS = {"optim": 1, "step": 1}
# How the update is computed, not what it computes: torch documents the results as equal.
IMPLEMENTATION = ("foreach", "fused", "capturable")
SHOWN = 8  # ranks that evidence lists for each setting
ABSENT = "(absent)"
CLIPPING, SCHEDULER = -1, -2

# A rank's history of one parameter group is compared by one hash; only groups whose histories differ are laid out
# step by step. A value counts at a step only for ranks that took it: ranks that stop early do not differ.
SQL = """
WITH entered AS (
    SELECT attempt, step, row_number() OVER (PARTITION BY attempt, rank, pid ORDER BY seq) AS nth
    FROM event WHERE kind = 'join'
),
shift AS (  -- ranks of which Join let some run out of data begin the next pass with unequal step numbers
    SELECT attempt, min(step) AS step
    FROM (SELECT attempt, min(step) AS step FROM entered GROUP BY attempt, nth HAVING min(step) <> max(step))
    GROUP BY attempt
),
taken AS (
    SELECT s.rank, s.attempt, max(s.step) AS last FROM step s LEFT JOIN shift USING (attempt)
    WHERE shift.step IS NULL OR s.step < shift.step GROUP BY ALL
),
latest AS (
    SELECT rank, attempt, optimizer, "group", step, arg_max(lr, seq) AS lr, arg_max(settings, seq) AS settings,
           arg_max(class_name, seq) AS class_name, arg_max(tensors, seq) AS tensors, arg_max(members, seq) AS members
    FROM optim GROUP BY ALL
),
suspect AS (
    SELECT attempt, optimizer, "group" FROM (
        SELECT rank, attempt, optimizer, "group",
               hash(list((step, lr, settings, class_name, tensors, members) ORDER BY step)) AS history
        FROM latest GROUP BY ALL)
    GROUP BY ALL HAVING min(history) <> max(history)
),
seen AS (SELECT l.* FROM latest l JOIN suspect USING (attempt, optimizer, "group")),
point AS (
    SELECT p.attempt, p.optimizer, p."group", p.step, r.rank
    FROM (SELECT DISTINCT attempt, optimizer, "group", step FROM seen) p
    JOIN (SELECT DISTINCT attempt, optimizer, "group", rank FROM seen) r USING (attempt, optimizer, "group")
    JOIN taken t ON t.attempt = p.attempt AND t.rank = r.rank AND t.last >= p.step
),
in_force AS MATERIALIZED (
    SELECT p.*, s.lr, s.settings, s.class_name, s.tensors, s.members
    FROM point p ASOF JOIN seen s
      ON p.attempt = s.attempt AND p.optimizer = s.optimizer AND p."group" = s."group" AND p.rank = s.rank
     AND p.step >= s.step
),
alike AS (
    SELECT attempt, optimizer, "group", step, lead(step) OVER w AS next,
           min((class_name, tensors, members)) = max((class_name, tensors, members)) AS alike
    FROM in_force GROUP BY attempt, optimizer, "group", step
    WINDOW w AS (PARTITION BY attempt, optimizer, "group" ORDER BY step)
),
given AS (
    SELECT attempt, optimizer, "group", step, rank, 'lr' AS key, CAST(lr AS VARCHAR) AS value FROM in_force
    UNION ALL
    SELECT attempt, optimizer, "group", step, rank, entry.key,
           coalesce(CAST(TRY_CAST(entry.value AS DOUBLE) AS VARCHAR), entry.value)  -- 1 and 1.0 are one value
    FROM (SELECT *, unnest(coalesce(  -- a text that is no JSON (NaN in it) is compared as a whole
              map_entries(CAST(CASE WHEN json_valid(settings) THEN settings END AS JSON)::MAP(VARCHAR, VARCHAR)),
              [{'key': 'settings', 'value': settings}])) AS entry
          FROM in_force WHERE settings <> '')
),
value AS (
    SELECT attempt, optimizer, "group", step, rank, key, coalesce(g.value, $absent) AS value
    FROM (SELECT DISTINCT attempt, optimizer, "group", step, key FROM given)
    JOIN point USING (attempt, optimizer, "group", step)
    LEFT JOIN given g USING (attempt, optimizer, "group", step, rank, key)
),
clipped AS (SELECT DISTINCT attempt, rank FROM clip),
clip_value AS (
    SELECT attempt, step, rank, max_norm, norm_type FROM clip
    UNION ALL  -- a rank that never clips while others do, unless its probe could not look
    SELECT c.attempt, c.step, t.rank, NULL, NULL
    FROM (SELECT DISTINCT attempt, step FROM clip) c
    JOIN taken t ON t.attempt = c.attempt AND t.last >= c.step
    WHERE (t.attempt, t.rank) NOT IN (SELECT (attempt, rank) FROM clipped)
      AND (t.attempt, t.rank) NOT IN (SELECT (attempt, rank) FROM probe WHERE state <> 'installed')
),
clip_step AS (
    SELECT attempt, step, lead(step) OVER (PARTITION BY attempt ORDER BY step) AS next,
           min(coalesce(max_norm, -1)) <> max(coalesce(max_norm, -1)) AS norm,
           min(coalesce(norm_type, -1)) <> max(coalesce(norm_type, -1)) AS kind
    FROM clip_value GROUP BY attempt, step
),
standing AS (  -- schedulers of one number are compared while they are of one class
    SELECT s.attempt, s.scheduler, s.step, s.rank, unnest([
               {'key': 'scheduler.last_epoch', 'value': CAST(s.position AS VARCHAR)},
               {'key': 'scheduler.num_bad_epochs', 'value': CAST(s.bad_epochs AS VARCHAR)},
               {'key': 'scheduler.cooldown_counter', 'value': CAST(s.cooldown AS VARCHAR)},
               {'key': 'scheduler.best', 'value': CAST(s.best AS VARCHAR)}], recursive := TRUE)
    FROM schedule s JOIN taken t ON t.attempt = s.attempt AND t.rank = s.rank AND t.last >= s.step
    JOIN (SELECT attempt, scheduler FROM schedule
          GROUP BY ALL HAVING min(class_name) = max(class_name)) alike
      ON alike.attempt = s.attempt AND alike.scheduler = s.scheduler
),
stood AS (
    SELECT attempt, scheduler, key, step, min(value) <> max(value) AS differs,
           lead(step) OVER (PARTITION BY attempt, scheduler, key ORDER BY step) AS next
    FROM standing GROUP BY attempt, scheduler, key, step HAVING min(rank) <> max(rank)
),
begun AS (  -- what is updated with which settings at the first step, however the groups are laid out
    SELECT attempt, optimizer, rank, hash(lr, settings) AS settings, bit_xor(members) AS members,
           bit_xor(hash(members)) AS parts, string_agg(CAST(tensors AS VARCHAR), '+' ORDER BY "group") AS sizes
    FROM (FROM latest WHERE members <> 0 QUALIFY step = min(step) OVER (PARTITION BY rank, attempt, optimizer))
    GROUP BY ALL
),
grouping AS (
    SELECT attempt, optimizer, rank, bit_xor(members) AS held, bit_xor(parts) AS parts,
           bit_xor(hash(members, settings)) AS applied, string_agg(sizes, ', ' ORDER BY sizes) AS sizes
    FROM begun GROUP BY ALL
),
regrouped AS (
    SELECT attempt, optimizer FROM grouping GROUP BY ALL
    HAVING min(held) = max(held) AND min(parts) <> max(parts) AND min(applied) <> max(applied)
),
checked AS (
    SELECT v.attempt, v.optimizer, v."group", v.key, v.step, any_value(a.next) AS next,
           min(value) <> max(value) AS differs
    FROM value v JOIN alike a ON a.alike AND a.attempt = v.attempt AND a.optimizer = v.optimizer
     AND a."group" = v."group" AND a.step = v.step
    GROUP BY ALL
    UNION ALL SELECT attempt, -1, -1, 'clip.max_norm', step, next, norm FROM clip_step
    UNION ALL SELECT attempt, -1, -1, 'clip.norm_type', step, next, kind FROM clip_step
    UNION ALL SELECT attempt, -2, scheduler, key, step, next, differs FROM stood
    UNION ALL SELECT attempt, -3, optimizer, 'param_groups', 1, NULL, TRUE FROM regrouped
),
apart AS (
    SELECT attempt, optimizer, "group", key, min(step) FILTER (differs) AS first,
           arg_max(coalesce(next - 1, -1), step) FILTER (differs) AS until
    FROM checked GROUP BY ALL HAVING bool_or(differs)
),
member AS (
    SELECT a.*, v.rank, v.value FROM apart a JOIN value v
      ON v.attempt = a.attempt AND v.optimizer = a.optimizer AND v."group" = a."group" AND v.key = a.key
     AND v.step = a.first
    UNION ALL
    SELECT a.*, v.rank,
           coalesce(CAST(CASE a.key WHEN 'clip.max_norm' THEN v.max_norm ELSE v.norm_type END AS VARCHAR), $absent)
    FROM apart a JOIN clip_value v ON a.optimizer = -1 AND v.attempt = a.attempt AND v.step = a.first
    UNION ALL
    SELECT a.*, v.rank, v.value FROM apart a JOIN standing v
      ON a.optimizer = -2 AND v.attempt = a.attempt AND v.scheduler = a."group" AND v.key = a.key AND v.step = a.first
    UNION ALL
    SELECT a.*, v.rank, printf('%s parameters (%x)', v.sizes, v.applied) FROM apart a JOIN grouping v
      ON a.optimizer = -3 AND v.attempt = a.attempt AND v.optimizer = a."group"
),
census AS (
    SELECT (SELECT count(DISTINCT rank) FROM optim) AS ranks,
           (SELECT coalesce(bool_and(sharing = 'plain' AND peers = ''), FALSE) FROM tensor) AS independent,
           (SELECT coalesce(bool_and(sharing = 'plain'), FALSE) FROM tensor)
               AND NOT EXISTS (FROM ({tied})) AS untied,
           (SELECT min(step) FROM shift) AS shifted, (SELECT count(*) FROM alike WHERE NOT alike) AS unlike
),
report AS (
    SELECT m.attempt, m.key, m.optimizer, m."group", m.first,
           CASE WHEN m.until < 0 THEN (SELECT min(last) FROM taken t WHERE t.attempt = m.attempt AND t.last >= m.first)
                ELSE m.until END AS last,
           list(m.rank ORDER BY m.rank) AS ranks, list(m.value ORDER BY m.rank) AS value_list
    FROM member m GROUP BY m.attempt, m.key, m.optimizer, m."group", m.first, m.until
)
SELECT * FROM census LEFT JOIN report ON TRUE ORDER BY attempt, first, optimizer, "group", key = 'lr' DESC, key
""".replace("{tied}", TIED)
PARAMS = {"absent": ABSENT}  # how a setting that a rank does not have is written


class Row(NamedTuple):
    """One setting of one parameter group that differs, beside facts on the comparison; `key` None when none does."""

    seen: int  # ranks with settings
    independent: bool  # no process group joins the ranks
    untied: bool  # no wrapper holds the models, and nothing shows that they are replicas
    shifted: int | None  # first step at which Join has made the ranks' step numbers unequal
    unlike: int  # points at which optimizers of one number had another class or size
    attempt: int
    key: str | None
    optimizer: (
        int  # -1: gradient clipping; -2, -3: a scheduler's position, an optimizer's groups; its number is `group`
    )
    group: int
    first: int
    last: int
    ranks: list[int]
    values: list[str]


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One finding per setting, set of ranks and first step."""
    census = rows[0]
    if run.world_size < 2:
        yield Abstention("NOT_APPLICABLE", "a single rank has nobody to differ from")
        return
    if census.independent:
        yield Abstention("NOT_APPLICABLE", "no process group joins the ranks: each may train with settings of its own")
        return
    together: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if row.key is not None:
            odd = split(dict(zip(row.ranks, row.values, strict=True)))
            together[row.attempt, row.key, row.first, odd.odd, odd.decided].append(row)
    if together and census.untied:
        why = "settings differ, but nothing shows that the ranks train one model: no wrapper, nothing that agrees"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
        return
    for same in together.values():
        yield _finding(same)
    if census.seen < 2:
        yield Abstention("INSUFFICIENT_EVIDENCE", f"optimizer settings of {census.seen} rank(s) only")
    if census.unlike:
        yield Abstention(
            "INSUFFICIENT_EVIDENCE",
            "the ranks' optimizers differ in class or in their groups' parameters: not compared",
        )
    if census.shifted is not None:
        why = f"from step {census.shifted} on the ranks' steps do not correspond, since Join let some run out of data"
        yield Abstention("INSUFFICIENT_EVIDENCE", why)
    yield from unheard(run)


def _finding(same: Sequence[Row]) -> Finding:
    first = same[0]
    odd = split(dict(zip(first.ranks, first.values, strict=True)))
    expected = str(odd.shared) if odd.decided else "the same on all ranks"
    mine = {r: v for r, v in zip(first.ranks, first.values, strict=True) if r in odd.odd}
    values = " and ".join(sorted(set(mine.values()))[:3])
    others = f", the others have {expected}" if odd.decided else ""
    have = "have" if len(odd.odd) > 1 else "has"
    return Finding(
        ranks=odd.odd,
        first_step=first.first,
        last_good_step=first.first - 1 if first.first > 1 else None,
        last_step=max(r.last for r in same),
        attempt=first.attempt,
        subject=first.key or "",
        severity="note" if first.key in IMPLEMENTATION or first.optimizer == SCHEDULER else "critical",
        summary=f"{first.key}: {listed(odd.odd)} {have} {values} from step {first.first} on{others}",
        evidence=tuple(_evidence(same)),
        cannot_conclude=() if odd.decided else ("which value was meant: no majority of the ranks agrees",),
        point="clip" if first.optimizer == CLIPPING else "setting",
        next_check="compare what sets it on each rank: arguments, a scheduler fed with the rank's own metric, a resume",
    )


def _evidence(same: Sequence[Row]) -> Iterator[Evidence]:
    for row in same[:SHOWN]:
        odd = split(dict(zip(row.ranks, row.values, strict=True)))
        where = f" (scheduler {row.group})" if row.optimizer == SCHEDULER else ""
        where = where if row.optimizer < 0 else f" (optimizer {row.optimizer}, group {row.group})"
        expected = str(odd.shared) if odd.decided else "the same on all ranks"
        shown = [(r, v) for r, v in zip(row.ranks, row.values, strict=True) if r in odd.odd][:SHOWN]
        for rank, value in shown:
            yield Evidence(rank, row.first, f"{row.key}{where}", value, expected)
