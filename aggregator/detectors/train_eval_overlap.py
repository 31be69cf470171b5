"""Samples that are in both the training and the evaluation data.

Reads     loader, batch (training passes; passes without a backward)
Says      how many evaluation samples training consumed too: by ids where both read one data set, else by content
Unknown   data sets of their own whose contents change from pass to pass (augmentation); evaluation without a loader
Blind to  duplicates that are not the same bytes; other samples of the same source (one patient, one author)
Do        split once, by a fixed seed or by file, and give both loaders disjoint parts; look for duplicates before the
          split
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding, Severity

CODE = "TRAIN_EVAL_OVERLAP"
NEEDS = {"batch": 1, "loader": 1}
PARAMS = {
    "compared": 2_000_000,  # samples, about 2 s on two cores; of a larger run a share of the ids and contents
}

# A pass evaluates when no backward runs in it and either autograd is off or it reads all of its data: a loop that takes
# one batch from a new iterator at each step does neither. It is compared with the training pass before it and the one
# after: in cross-validation the next fold's validation data was this fold's training data, and only one of the two is
# the model's own. `chain` is a loader's data set and all choices made of it, `root` the object that ids count in;
# `twin` the same across ranks, where contents are compared.
SQL = """
WITH told AS (
    SELECT rank, attempt, pid, loader, iterator, dataset_class, levels, samples, batch_size, drop_last,
           CASE WHEN dataset >= 0 THEN dataset END AS root,
           first_value(dataset_digest) OVER (PARTITION BY rank, attempt, pid, dataset ORDER BY seq) AS digest,
           coalesce(TRY_CAST(json_extract_string(TRY_CAST(levels AS JSON), '$[#-1][1]') AS BIGINT), -1) AS length
    FROM loader
), pass AS (
    SELECT b.rank, b.attempt, b.pid, b.loader, b.iterator, min(b.seq) AS first_seq, min(b.step) AS first_step,
           max(b.step) AS last_step, count(*) FILTER (b."end" = '') AS batches,
           bool_or(b."end" = 'StopIteration') AS whole, max(b.backwards) = min(b.backwards) AS still,
           bool_or(b.grad_enabled AND b."end" = '') AS graded
    FROM batch b GROUP BY ALL
), known AS (
    SELECT p.*, t.root, t.levels, t.dataset_class, t.length, t.samples, hash(t.root, t.digest, t.levels) AS chain,
           hash(t.dataset_class, t.digest, t.levels) AS twin, g.rank IS NOT NULL AS trains,
           g.rank IS NULL AND p.still AND p.batches > 0 AND (NOT p.graded OR p.whole AND p.batches > 1) AS evaluates
    FROM pass p JOIN told t USING (rank, attempt, pid, loader, iterator)
    LEFT JOIN training_pass g USING (rank, attempt, pid, loader, iterator)
), training AS (
    SELECT * FROM known WHERE trains
), evaluation AS (
    SELECT * FROM known WHERE evaluates
), placed AS (
    SELECT e.*, p.chain AS before, n.chain AS after FROM evaluation e
    ASOF LEFT JOIN training p
        ON p.rank = e.rank AND p.attempt = e.attempt AND p.pid = e.pid AND p.first_seq <= e.first_seq
    ASOF LEFT JOIN training n
        ON n.rank = e.rank AND n.attempt = e.attempt AND n.pid = e.pid AND n.first_seq >= e.first_seq
), reading AS (
    SELECT rank, attempt, pid, chain, unnest([before, after]) AS other, hash(before, after) AS place,
           min(first_step) AS first_step, max(last_step) AS last_step, count(*) AS passes, bool_or(whole) AS whole,
           any_value(twin) AS twin, any_value(root) AS root, any_value(levels) AS levels,
           any_value(dataset_class) AS dataset_class, min(samples) AS samples, max(length) AS length
    FROM placed GROUP BY rank, attempt, pid, chain, before, after
), trained AS (
    SELECT rank, attempt, pid, chain, any_value(twin) AS twin, any_value(root) AS root, any_value(levels) AS levels,
           min(samples) AS samples, max(length) AS length
    FROM training GROUP BY ALL
), pair AS (
    SELECT r.*, t.twin AS other_twin, t.root IS NOT DISTINCT FROM r.root AND r.root IS NOT NULL AS one_root,
           t.levels AS other_levels, t.samples AS other_samples, t.length AS other_length
    FROM reading r JOIN trained t ON (t.rank, t.attempt, t.pid, t.chain) = (r.rank, r.attempt, r.pid, r.other)
), needed AS (
    SELECT * FROM known
    WHERE evaluates AND chain IN (SELECT chain FROM pair) OR trains AND chain IN (SELECT other FROM pair)
), thin AS (
    SELECT CASE WHEN sum(n) <= $compared THEN 18446744073709551615::UBIGINT
                ELSE (1.8e19 * $compared / sum(n))::UBIGINT END AS cutoff
    FROM (SELECT sum(greatest(b.samples, 0)) AS n FROM needed JOIN batch b USING (rank, attempt, pid, loader, iterator))
), by_id AS (
    SELECT DISTINCT k.rank, k.attempt, k.pid, k.chain, k.trains,
           unnest([x FOR x IN b.ids IF hash(x) <= thin.cutoff]) AS id
    FROM needed k JOIN batch b USING (rank, attempt, pid, loader, iterator), thin WHERE b."end" = '' AND len(b.ids) > 0
), shared AS (
    SELECT p.rank, p.attempt, p.pid, p.chain, p.other, p.place, count(*) AS shared
    FROM pair p
    JOIN by_id e ON (e.rank, e.attempt, e.pid, e.chain) = (p.rank, p.attempt, p.pid, p.chain) AND NOT e.trains
    JOIN by_id t ON (t.rank, t.attempt, t.pid, t.chain, t.id) = (p.rank, p.attempt, p.pid, p.other, e.id) AND t.trains
    WHERE p.one_root GROUP BY ALL
), counted AS (
    SELECT rank, attempt, pid, chain, trains, count(*) AS ids FROM by_id GROUP BY ALL
), sample AS (  -- a stream has no ids, so that only its first pass can be counted
    SELECT k.attempt, k.twin, k.trains, k.rank, b.seq, len(b.ids) > 0 AS named, unnest(
               [{'at': coalesce(b.ids[i], i), 'digest': b.digests[i]} FOR i IN range(1, len(b.digests) + 1)
                IF hash(b.digests[i]) <= thin.cutoff]) AS one
    FROM needed k JOIN batch b USING (rank, attempt, pid, loader, iterator), thin
    WHERE b."end" = '' AND len(b.digests) > 0 AND (len(b.ids) > 0 OR k.iterator = 0)
), by_content AS (  -- one row per sample and content
    SELECT attempt, twin, trains, CASE WHEN named THEN hash(one.at) ELSE hash(rank, seq, one.at) END AS key,
           one.digest AS digest, count(*) AS times
    FROM sample GROUP BY ALL
), content AS (
    SELECT attempt, twin, trains, digest, count(*) AS keys FROM by_content GROUP BY ALL
), contents AS (
    SELECT attempt, twin, trains, sum(keys) AS keys, sum(keys) FILTER (keys > 1) AS doubled, count(*) AS different
    FROM content GROUP BY ALL
), steady AS (
    SELECT attempt, twin, trains, count(*) FILTER (times > 1 AND digests = 1) AS fixed,
           count(*) FILTER (digests > 1) AS varied
    FROM (SELECT attempt, twin, trains, key, sum(times) AS times, count(*) AS digests FROM by_content GROUP BY ALL)
    GROUP BY ALL
), met AS (
    SELECT p.attempt, p.twin, p.other_twin, sum(e.keys) AS met
    FROM (SELECT DISTINCT attempt, twin, other_twin FROM pair) p
    JOIN content e ON (e.attempt, e.twin) = (p.attempt, p.twin) AND NOT e.trains
    SEMI JOIN content t ON (t.attempt, t.twin, t.digest) = (p.attempt, p.other_twin, e.digest) AND t.trains
    GROUP BY ALL
)
SELECT p.attempt, p.rank, p.place::VARCHAR, p.chain::VARCHAR, p.twin::VARCHAR, p.other_twin::VARCHAR, p.dataset_class,
       p.levels, p.other_levels, p.first_step, p.last_step, p.whole,
       coalesce(p.samples >= 0 AND p.samples < p.length, FALSE),
       coalesce(p.other_samples >= 0 AND p.other_samples < p.other_length, FALSE), p.one_root, coalesce(c.ids, 0),
       coalesce(o.ids, 0), coalesce(s.shared, 0), coalesce(e.keys, 0), coalesce(m.met, 0), coalesce(t.keys, 0),
       coalesce(t.doubled, 0), coalesce(t.different, 0), coalesce(y.fixed, 0), coalesce(y.varied, 0)
FROM pair p
LEFT JOIN counted c ON (c.rank, c.attempt, c.pid, c.chain) = (p.rank, p.attempt, p.pid, p.chain) AND NOT c.trains
LEFT JOIN counted o ON (o.rank, o.attempt, o.pid, o.chain) = (p.rank, p.attempt, p.pid, p.other) AND o.trains
LEFT JOIN shared s ON (s.rank, s.attempt, s.pid, s.chain, s.other, s.place) =
                      (p.rank, p.attempt, p.pid, p.chain, p.other, p.place)
LEFT JOIN contents e ON (e.attempt, e.twin) = (p.attempt, p.twin) AND NOT e.trains
LEFT JOIN contents t ON (t.attempt, t.twin) = (p.attempt, p.other_twin) AND t.trains
LEFT JOIN steady y ON (y.attempt, y.twin) = (p.attempt, p.other_twin) AND y.trains
LEFT JOIN met m ON (m.attempt, m.twin, m.other_twin) = (p.attempt, p.twin, p.other_twin)
ORDER BY p.attempt, p.chain, p.rank, p.place, p.other
"""

FEWEST = 8  # samples of one content, or ids whose contents stay: below it chance and real duplicates can do it
SLIGHT_RATIO = 0.01  # of the evaluation data: less tilts no measure, such as one sample at the edge of a split
ERROR_RATE = 1e-5  # of the comparison of contents, per pair of data sets: 1e-3 of the run's budget of 1 %
MANIFOLD = 4.0  # times what duplicates within the training data predict: real duplicates come in clusters
DIGESTS = 2**32


class Row(NamedTuple):
    attempt: int
    rank: int
    place: str  # between which training data the evaluation passes lie
    chain: str  # evaluation data of this process
    twin: str  # the same data on all ranks
    other_twin: str  # training data of a pass next to it, likewise
    dataset_class: str
    levels: str
    other_levels: str
    first_step: int
    last_step: int
    whole: bool
    picked: bool  # the evaluation's sampler takes a part of its data set
    other_picked: bool  # so does training's
    one_root: bool  # ids count in one object
    ids: int  # different samples of the evaluation data, on this rank
    other_ids: int  # of the training data
    shared: int  # of both
    contents: int  # samples of the evaluation data with a content digest, on all ranks
    met: int  # of them, with the content of a training sample
    other_contents: int  # training samples with a content digest
    doubled: int  # of them, with the content of another one
    different: int  # different contents
    fixed: int  # training samples seen more than once with one content
    varied: int  # with several

    @property
    def itself(self) -> bool:
        """The training data itself, or a part taken of it: a measure on the training data, perhaps on purpose."""
        own, other = self.levels.rstrip("]"), self.other_levels.rstrip("]")
        if self.picked or self.other_picked or not (self.one_root or self.twin == self.other_twin):
            return False
        return own.startswith(other)

    @property
    def inside(self) -> bool:
        """All of the evaluation data was trained on."""
        return self.shared == self.ids if self.one_root else self.met == self.contents


def findings(rows: Iterable[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    rows = list(rows)
    if not rows:
        yield Abstention("INSUFFICIENT_EVIDENCE", "no evaluation reads its data from a loader, or no training does")
        return
    places = [list(g) for _, g in groupby(rows, key=lambda r: (r.attempt, r.chain, r.rank, r.place))]
    judged = [(p, _overlaps(p)) for p in places]
    clean = any(over is False for _, over in judged)
    hit = [min(p, key=lambda r: r.shared if r.one_root else r.met) for p, over in judged if over]
    for _, alike in groupby(sorted(hit, key=lambda r: (r.attempt, r.twin, r.one_root, r.rank)),
                            key=lambda r: (r.attempt, r.twin, r.one_root)):  # fmt: skip
        said = _finding(list(alike), clean)
        if said is not None:
            yield said
    if any(over is None for _, over in judged):
        yield Abstention(
            "INSUFFICIENT_EVIDENCE", "contents can't be compared: too few, or new in each pass (augmentation)"
        )
    elif len({r.rank for r in rows}) < run.world_size and not hit:
        seen = len({r.rank for r in rows})
        yield Abstention("INSUFFICIENT_EVIDENCE", f"evaluation on {seen} of {run.world_size} ranks was recorded")


def _overlaps(place: Sequence[Row]) -> bool | None:
    """Whether the data overlaps with all training data next to it; None when that can't be told."""
    said = [_overlap(r) for r in place]
    if False in said:
        return False
    return None if None in said else True


def _overlap(row: Row) -> bool | None:
    if row.one_root and row.ids and row.other_ids:
        return row.shared > 0
    if not row.contents or not row.other_contents:
        return None
    if row.met >= FEWEST and row.met >= SLIGHT_RATIO * row.contents and _unlikely(row):
        return True
    if row.fixed < FEWEST or row.varied:
        return None
    return None if row.met >= FEWEST else False


def _unlikely(row: Row) -> bool:
    """More contents in common than duplicates within the training data, and chance, lead one to expect.

    Were both drawn alike, an evaluation sample would meet a twin as often as a training sample does.
    """
    expected = (row.doubled + 1) / (row.other_contents + 2) + row.different / DIGESTS
    excess = row.met - MANIFOLD * expected * row.contents
    # Hoeffding: the chance that `met` of n exceeds its expectation by that much is below exp(-2 excess^2 / n)
    return excess > 0 and math.exp(-2 * excess**2 / row.contents) < ERROR_RATE


def _finding(rows: Sequence[Row], clean: bool) -> Finding | None:
    """What one evaluation data set shares with training, as the ranks saw it. `clean`: another one shares nothing."""
    first = rows[0]
    itself, inside = all(r.itself for r in rows), all(r.inside for r in rows)
    if itself and (clean or not all(r.whole for r in rows)):
        return None  # a look at the training data beside a real evaluation
    count, of = (first.shared, first.ids) if first.one_root else (first.met, first.contents)
    whole_root = first.one_root and first.other_levels.rstrip("]").startswith(first.levels.rstrip("]"))
    severity: Severity = (
        "note" if itself or count < SLIGHT_RATIO * of or (clean and (inside or whole_root)) else "warning"
    )
    ranks = tuple(sorted({r.rank for r in rows}))
    how = f"the very samples (ids in one data set), on rank {first.rank}" if first.one_root else "by their content"
    return Finding(
        ranks=ranks,
        first_step=max(1, min(r.first_step for r in rows)),
        last_step=max(r.last_step for r in rows),
        attempt=first.attempt,
        severity=severity,
        evidence_state="OBSERVED" if first.one_root else "INFERRED",
        subject=first.dataset_class,
        summary="evaluation reads the training data itself"
        if itself
        else f"{count} of {of} evaluation samples of {first.dataset_class} ({count / of:.0%}) were trained on too: "
        f"{how}",
        evidence=tuple(
            Evidence(r.rank, r.first_step, "evaluation samples that training consumed too",
                     str(r.shared if r.one_root else r.met), "0")
            for r in rows[:8]
        ),
        cannot_conclude=("whether a measure on the training data is meant",) if itself or inside else (),
        next_check="split once, with one seed, and give training and evaluation parts that are disjoint",
    )  # fmt: skip
