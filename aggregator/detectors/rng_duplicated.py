"""Random streams that should differ are the same on several ranks, and what came of it.

Reads     rng (digests and who drew), stream (workers), grad (stage local) and loss (whether ranks compute the same),
          tensor (which ranks are replicas), batch (whether they read the same samples)
Says      the ranks and streams; a warning where data comes from them, so that ranks compute the same gradient
Unknown   ranks that no wrapper joins; runs that end before step 3
Blind to  streams of devices; generators that user code makes for itself in the rank's own process
Do        seed streams that must differ by rank (seed + rank) for dropout and augmentation, and streams that must
          agree (samplers, initialisation) by one seed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, unheard

CODE = "RNG_DUPLICATED"
NEEDS = {"rng": 1}
PARAMS = {
    "steps": 3,  # in which all gradient norms and the loss agree bit for bit: one could be a batch that ranks share
}

# One seed for all ranks is common and good practice: initial weights, random splits. Equal streams alone are nothing.
# They must be drawn from for what each rank should have of its own: dropout in the forward, augmentation in workers (a
# note), the data itself (a warning, where the consequence is seen).
SQL = """
WITH member AS (
    SELECT attempt, rank, max(peers) AS peers FROM tensor
    WHERE kind = 'param' AND sharing IN ('ddp', 'late', 'hook') AND peers <> '' GROUP BY ALL
), seen AS (
    SELECT r.attempt, r.rank, m.peers, r.step, r.moved, unnest(['torch', 'numpy', 'random']) AS name,
           unnest([torch_digest, numpy_digest, python_digest]) AS digest
    FROM rng r LEFT JOIN member m USING (attempt, rank) WHERE r.step BETWEEN 2 AND 4
), path AS (  -- a stream of one rank over the steps that were looked at
    SELECT attempt, coalesce(peers, '') AS peers, rank, name, hash(list((step, digest) ORDER BY step)) AS states,
           coalesce(bool_or(contains(moved, name || ':data')), FALSE) AS data,
           coalesce(bool_or(contains(moved, name || ':forward')), FALSE) AS forward
    FROM seen GROUP BY ALL HAVING data OR forward
), lane AS (  -- the streams of a worker
    SELECT attempt, rank, loader, iterator, worker, unnest(string_split(names, ',')) AS name, fetches,
           unnest(digests) AS digest
    FROM stream JOIN training_pass USING (attempt, rank, pid, loader, iterator) WHERE worker >= 0 AND fetches <= 2
), drawn AS (
    SELECT attempt, rank, loader, worker, name, hash(list((fetches, digest) ORDER BY fetches)) AS states
    FROM lane WHERE iterator = 0 AND digest <> 0 GROUP BY ALL HAVING count(DISTINCT digest) = 3
), equal AS (
    SELECT attempt, peers, name || ' in the ' || CASE WHEN bool_and(data) THEN 'data' ELSE 'forward' END AS stream,
           list(rank ORDER BY rank) AS ranks, bool_and(data) AS data
    FROM path GROUP BY attempt, peers, name, states HAVING count(*) > 1
    UNION ALL
    SELECT attempt, coalesce(peers, ''), name || ' in workers', list(DISTINCT rank ORDER BY rank), TRUE
    FROM drawn LEFT JOIN member USING (attempt, rank) GROUP BY attempt, peers, name, loader, worker, states
    HAVING count(DISTINCT rank) > 1
), own AS (
    SELECT g.attempt, g.rank, g.step, hash(list(g.l2 ORDER BY g.micro)) AS norms, bool_or(list_max(g.l2) > 0) AS alive
    FROM grad g WHERE g.stage = 'local' AND g.valid AND g.step > 0 GROUP BY ALL
), computed AS (
    SELECT o.attempt, o.rank, o.step, m.peers, hash(o.norms, l.total) AS what
    FROM own o JOIN member m USING (attempt, rank) JOIN loss l USING (attempt, rank, step)
    WHERE o.alive AND l.backwards > 0 AND l.nonfinite = 0
), common AS (
    SELECT attempt, peers, step FROM computed GROUP BY ALL
    HAVING count(DISTINCT rank) = (SELECT count(*) FROM member m WHERE m.attempt = computed.attempt
                                   AND m.peers = computed.peers)
), alike AS (
    SELECT attempt, peers, list(rank ORDER BY rank) AS ranks, any_value(steps) AS steps, min(first_step) AS first_step,
           max(last_step) AS last_step
    FROM (SELECT attempt, peers, rank, hash(list(what ORDER BY step)) AS whole, count(*) AS steps,
                 min(step) AS first_step, max(step) AS last_step
          FROM computed JOIN common USING (attempt, peers, step) GROUP BY ALL)
    GROUP BY attempt, peers, whole HAVING count(*) > 1
), shared_samples AS (
    SELECT DISTINCT attempt FROM training_batch WHERE len(ids) > 0 GROUP BY attempt, iterator, index
    HAVING count(DISTINCT rank) > 1 AND min(hash(ids)) = max(hash(ids))
)
SELECT e.attempt, e.peers, e.stream, e.ranks, e.data,
       coalesce((SELECT max(a.steps) FROM alike a WHERE (a.attempt, a.peers) = (e.attempt, e.peers)
                 AND list_has_all(a.ranks, e.ranks)), 0),
       coalesce((SELECT min(a.first_step) FROM alike a WHERE (a.attempt, a.peers) = (e.attempt, e.peers)
                 AND list_has_all(a.ranks, e.ranks)), 0),
       coalesce((SELECT max(a.last_step) FROM alike a WHERE (a.attempt, a.peers) = (e.attempt, e.peers)
                 AND list_has_all(a.ranks, e.ranks)), 0),
       e.attempt IN (SELECT attempt FROM shared_samples), TRUE
FROM equal e
UNION ALL SELECT attempt, '', '', [], FALSE, 0, 0, 0, FALSE, count(DISTINCT rank) FILTER (step BETWEEN 2 AND 4) > 1
          FROM rng GROUP BY attempt
ORDER BY ALL
"""


class Row(NamedTuple):
    """One stream that several ranks share; without a stream: whether streams were looked at in this attempt."""

    attempt: int
    peers: str
    stream: str
    ranks: Sequence[int]
    data: bool  # drawn from outside of the model
    steps: int  # in which these ranks had the same gradient norms and losses, of all that can be compared
    first_step: int
    last_step: int
    same_samples: bool  # ranks read the same ids somewhere: then that is why
    looked: bool


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    if run.world_size < 2:
        yield Abstention("NOT_APPLICABLE", "one rank has nobody to share a stream with")
        return
    yield from unheard(run)
    for _, members in groupby(rows, key=lambda r: r.attempt):
        several = list(members)
        streams = [r for r in several if r.stream]
        if any(not r.looked for r in several):
            yield Abstention("INSUFFICIENT_EVIDENCE", "the run ended before two ranks' streams could be compared")
        grave = [r for r in streams if r.data and r.steps >= PARAMS["steps"] and not r.same_samples]
        if grave:
            yield _same_work(grave)
        elif any(r.peers for r in streams):
            yield _note([r for r in streams if r.peers])
        elif streams:
            why = "ranks share streams that they draw from, but no wrapper says that they train one model"
            yield Abstention("INSUFFICIENT_EVIDENCE", why)


def _same_work(rows: Sequence[Row]) -> Finding:
    ranks = tuple(sorted({rank for r in rows for rank in r.ranks}))
    streams = sorted({r.stream for r in rows})
    steps = max(r.steps for r in rows)
    first = min(r.first_step for r in rows)
    return Finding(
        ranks=ranks,
        first_step=first,
        last_step=max(r.last_step for r in rows),
        attempt=rows[0].attempt,
        severity="warning",
        subject=", ".join(streams),
        summary=f"{listed(ranks)} draw their data from one random stream ({', '.join(streams)}) and compute the same "
        f"gradient, bit for bit, in all {steps} steps that were compared",
        evidence=tuple(
            Evidence(r, first, "loss and norms of this rank's own gradients", "the same", "its own") for r in ranks[:16]
        ),
        next_check="seed what draws data with the rank as well, e.g. base + rank",
    )  # fmt: skip


def _note(rows: Sequence[Row]) -> Finding:
    ranks = tuple(sorted({rank for r in rows for rank in r.ranks}))
    streams = sorted({r.stream for r in rows})
    return Finding(
        ranks=ranks,
        first_step=None,
        attempt=rows[0].attempt,
        severity="note",
        subject=", ".join(streams),
        summary=f"{listed(ranks)} draw the same random numbers: {', '.join(streams)}",
        evidence=tuple(Evidence(rank, None, "random streams drawn from", "the same", "its own") for rank in ranks[:16]),
        cannot_conclude=("whether it matters: each rank has samples of its own",),
        next_check="seed with the rank as well once the model is built, if masks and augmentation should differ",
    )  # fmt: skip
