"""Global seeds differ between ranks with no pattern, some ranks were never seeded, or nobody seeded anything.

Reads     rng (before the first update), seed (who called), tensor (whether ranks hold different parts of the model)
Says      SEED_MISMATCH: the library, the ranks and their seeds; NOT_SEEDED: that the run can't be repeated
Unknown   two seeded ranks that differ: any two numbers fit base + k * rank
Blind to  generators that user code makes for itself; seeds set after the first update
Do        call torch.manual_seed with one number on all ranks, or with base + rank, and write it down; never from a
          clock
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import split
from ..wording import ranks_text

CODE = ("SEED_MISMATCH", "NOT_SEEDED")
NEEDS = {"rng": 1}
PARAMS = {
    "last_step": 1,  # seeds are judged at the first update; what is seeded later can't explain how training began
}

SQL = """
WITH first AS (
    SELECT * FROM rng WHERE step <= $last_step
    QUALIFY row_number() OVER (PARTITION BY rank, attempt ORDER BY step, seq DESC) = 1
), flat AS (
    SELECT rank, attempt, 'torch' AS library, torch_seeded AS seeded, torch_seed::VARCHAR AS seed FROM first
    UNION ALL SELECT rank, attempt, 'numpy', numpy_seeded AND numpy_seed <> '', numpy_seed FROM first
    UNION ALL SELECT rank, attempt, 'random', python_seeded AND python_seed <> '', python_seed FROM first
), caller AS (
    SELECT rank, attempt, library, arg_max("where", seq) AS place FROM seed WHERE step <= $last_step GROUP BY ALL
), parts AS (
    SELECT attempt, count(DISTINCT CASE WHEN shards <> '' THEN shards ELSE peers END) AS groups FROM tensor
    WHERE (peers <> '' OR shards <> '') AND sharing <> 'plain' GROUP BY attempt
)
SELECT f.attempt, f.library, f.rank, f.seeded, f.seed, coalesce(c.place, ''), coalesce(p.groups, 0)
FROM flat f LEFT JOIN caller c USING (rank, attempt, library) LEFT JOIN parts p USING (attempt)
ORDER BY f.attempt, f.library = 'random', f.library = 'numpy', f.rank
"""

FEWEST_FOR_PATTERN = 3  # two numbers always lie on one line through base + k * rank


class Row(NamedTuple):
    attempt: int
    library: str
    rank: int
    seeded: bool
    seed: str
    place: str
    replica_groups: int


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[tuple[str, Finding | Abstention]]:
    rows = list(rows)
    for attempt in sorted({r.attempt for r in rows}):
        yield from _attempt([r for r in rows if r.attempt == attempt], run)


def _attempt(rows: Sequence[Row], run: RunFacts) -> Iterator[tuple[str, Finding | Abstention]]:
    ranks = sorted({r.rank for r in rows})
    if len(ranks) < run.world_size:
        why = f"the random streams of {len(ranks)} of {run.world_size} ranks were recorded"
        yield from ((code, Abstention("INSUFFICIENT_EVIDENCE", why)) for code in CODE)
    if run.world_size < 2:
        yield "SEED_MISMATCH", Abstention("NOT_APPLICABLE", "one rank has nobody to differ from")
    if not any(r.seeded for r in rows):
        yield "SEED_MISMATCH", Abstention("NOT_APPLICABLE", "no rank seeded anything before the first update")
        if len(ranks) == run.world_size:  # a rank without a record may have seeded
            yield "NOT_SEEDED", _not_seeded(ranks, rows[0].attempt)
    elif run.world_size > 1:
        for library in dict.fromkeys(r.library for r in rows):
            said = _library([r for r in rows if r.library == library], run)
            if said is not None:
                yield "SEED_MISMATCH", said


def _not_seeded(ranks: Sequence[int], attempt: int) -> Finding:
    return Finding(
        ranks=tuple(ranks),
        first_step=None,
        attempt=attempt,
        severity="note",
        subject="torch, numpy, random",
        summary="no rank seeded torch, numpy or random before the first update: the run can't be repeated",
        evidence=tuple(Evidence(r, None, "seeding calls", "none", "one per library in use") for r in ranks[:8]),
        next_check="call torch.manual_seed (and numpy.random.seed, random.seed) before the model is built",
    )


def _library(rows: Sequence[Row], run: RunFacts) -> Finding | Abstention | None:
    """What one library's seeds show; None when it was seeded nowhere or the seeds follow a pattern."""
    seeds = {r.rank: r.seed for r in rows if r.seeded}
    unseeded = tuple(r.rank for r in rows if not r.seeded)
    if not seeds:
        return None
    library = rows[0].library
    if unseeded:
        say = f"{library} was never seeded on {ranks_text(unseeded)}, but on {ranks_text(tuple(seeds))} it was"
        return _mismatch(rows, unseeded, say, ())
    if _has_pattern(seeds, run, rows[0].replica_groups > 1):
        return None
    if len(seeds) < FEWEST_FOR_PATTERN:
        return Abstention("INSUFFICIENT_EVIDENCE", f"two {library} seeds that differ always fit base + k * rank")
    parts = split(seeds)
    odd = parts.odd if parts.decided else _off_the_line(seeds) or parts.odd
    say = f"{library} seeds are neither equal nor base + k * rank: {ranks_text(odd)} " + (
        f"differ{'s' if len(odd) == 1 else ''} from the others" if len(odd) < len(seeds) else "have unrelated seeds"
    )
    return _mismatch(rows, odd, say, () if len(odd) < len(seeds) else ("which rank's seed was meant",))


def _mismatch(rows: Sequence[Row], odd: tuple[int, ...], say: str, unknown: tuple[str, ...]) -> Finding:
    shown = [r for r in rows if r.rank in odd][:6] + [r for r in rows if r.rank not in odd][:2]
    return Finding(
        ranks=odd,
        first_step=None,
        attempt=rows[0].attempt,
        severity="warning",
        subject=rows[0].library,
        summary=say,
        evidence=tuple(
            Evidence(r.rank, None, f"{r.library} seed", _seed_text(r), "all equal, or base + k * rank")
            for r in sorted(shown)
        ),
        cannot_conclude=(*unknown, "whether anything that must agree was drawn from these streams"),
        next_check="seed every rank with one number, or with one number plus its rank",
    )


def _seed_text(row: Row) -> str:
    text = row.seed if row.seeded else "never seeded"
    return f"{text} ({row.place})" if row.place else text


def _has_pattern(seeds: Mapping[int, str], run: RunFacts, mesh: bool) -> bool:
    """All equal, or base + k * place for one k; a place is the rank, the local rank or a mesh coordinate."""
    if len(set(seeds.values())) == 1:
        return True
    numbers = _integers(seeds)
    if numbers is None or len(numbers) < FEWEST_FOR_PATTERN:
        return False
    places = [{r: r for r in numbers}]
    if run.local_world_size > 1:
        places.append({r: r % run.local_world_size for r in numbers})
    if mesh:  # pipeline or tensor parallel ranks seed by stage or by group, which is rank // m or rank % m
        for m in (m for m in range(2, run.world_size) if run.world_size % m == 0):
            places += [{r: r // m for r in numbers}, {r: r % m for r in numbers}]
    return any(_on_a_line(numbers, place) for place in places)


def _on_a_line(numbers: Mapping[int, int], place: Mapping[int, int]) -> bool:
    low = min(numbers, key=lambda r: place[r])
    other = next((r for r in numbers if place[r] != place[low]), None)
    if other is None:
        return False
    rise, run = numbers[other] - numbers[low], place[other] - place[low]
    return all((numbers[r] - numbers[low]) * run == rise * (place[r] - place[low]) for r in numbers)


def _off_the_line(seeds: Mapping[int, str]) -> tuple[int, ...]:
    """The one rank without which the others are base + k * rank; empty when there is none or more than one."""
    numbers = _integers(seeds)
    if numbers is None or len(numbers) <= FEWEST_FOR_PATTERN:
        return ()
    rest = {r: {q: n for q, n in numbers.items() if q != r} for r in numbers}
    fits = [r for r, others in rest.items() if _on_a_line(others, {q: q for q in others})]
    return tuple(fits) if len(fits) == 1 else ()


def _integers(seeds: Mapping[int, str]) -> dict[int, int] | None:
    try:
        return {r: int(s) for r, s in seeds.items()}
    except ValueError:  # a text, an array or a float: equality is all that can be judged
        return None
