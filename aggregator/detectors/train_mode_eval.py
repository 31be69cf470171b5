"""A trained model ran without autograd, in train mode, over data that training does not use: an evaluation with dropout
that drops, or with normalisation by the batch at hand, whose statistics then hold evaluation data.

Reads     evaluation, loader, batch
Says      the model, the ranks, the first such evaluation and its data set; never more than a note
Unknown   no evaluation of a trained model was seen; data that may be training's own (statistics estimated anew, a
          measure on the training data); several runs over the same data, as Monte Carlo dropout makes them
Blind to  what table evaluation is; single modules in train mode below a model in eval mode; rates kept elsewhere
Do        model.eval() before evaluation and model.train() after it; under torch.no_grad() a model is still in train
          mode
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..detector import RunFacts
from ..findings import Abstention, Evidence, Finding
from ..groups import listed, unheard

CODE = "TRAIN_MODE_EVAL"
NEEDS = {"evaluation": 1, "batch": 1}
PARAMS: Mapping[str, object] = {
    "fewest": 2,  # batches of a pass that was left early: one alone may be a look at shapes or at an example
}
SHOWN = 8

# Data feeds training when a backward follows one of its batches before the next batch is given: also of loaders that
# are begun anew for each step. Two loaders may read the same data when they, or their objects (`dataset`), or class and
# length of these are the same and nothing shows that they differ: a digest that both have, or choices made of the
# object (`levels`). A choice of training's choice is training data again.
SQL = """
WITH told AS (
    SELECT rank, attempt, pid, loader, iterator, dataset, dataset_class, dataset_length, dataset_digest AS digest,
           rtrim(levels, ']') AS levels, batches AS all_batches
    FROM loader
), given AS (
    SELECT rank, attempt, pid, loader, iterator, backwards, "end",
           lead(backwards) OVER (PARTITION BY rank, attempt, pid ORDER BY seq) > backwards AS trains
    FROM batch
), trained AS (
    SELECT DISTINCT rank, attempt, pid, loader, dataset, dataset_class, dataset_length, digest, levels
    FROM told SEMI JOIN (SELECT * FROM given WHERE trains AND "end" = '') USING (rank, attempt, pid, loader, iterator)
), pass AS (
    SELECT rank, attempt, pid, loader, iterator, max(backwards) = min(backwards) AS still,
           count(*) FILTER ("end" = '') AS batches, bool_or("end" = 'StopIteration') AS ended
    FROM given GROUP BY ALL
), seen AS (
    SELECT e.*, p.batches, t.dataset_class,
           p.ended OR p.batches >= $fewest OR (p.batches >= t.all_batches AND t.all_batches > 0) AS enough,
           count(*) OVER (PARTITION BY e.rank, e.attempt, e.pid, e.model, e.backwards, t.dataset, t.levels) AS passes,
           t.dataset >= 0 AND NOT EXISTS (
               SELECT 1 FROM trained o
               WHERE (o.rank, o.attempt, o.pid) = (e.rank, e.attempt, e.pid) AND (o.loader = e.loader OR (
                   (o.dataset = t.dataset OR (o.dataset_class = t.dataset_class
                    AND o.dataset_length = t.dataset_length
                    AND (o.digest = t.digest OR o.digest = '' OR t.digest = '')))
                   AND (starts_with(o.levels, t.levels) OR starts_with(t.levels, o.levels))))) AS other
    FROM evaluation e JOIN pass p USING (rank, attempt, pid, loader, iterator)
    JOIN told t USING (rank, attempt, pid, loader, iterator)
    WHERE p.still
)
SELECT rank, attempt, model, model_type, greatest(step, 1), batches, dataset_class, in_eval, dropout, norms, names,
       forwards = 1 AND passes = 1, other, enough
FROM seen ORDER BY attempt, model, step, seq, rank
"""


class Row(NamedTuple):
    """One pass over a loader in which a trained model ran without autograd and no backward did, on one rank."""

    rank: int
    attempt: int
    model: int
    model_type: str
    step: int
    batches: int
    dataset_class: str
    in_eval: bool
    dropout: int
    norms: int
    names: str
    once: bool  # the model ran once over each batch, and training went on before the next pass
    other: bool  # no training pass reads this data
    enough: bool

    @property
    def in_train(self) -> bool:
        return not self.in_eval and self.dropout + self.norms > 0


def findings(rows: Sequence[Row], run: RunFacts) -> Iterator[Finding | Abstention]:
    """One note per attempt and model: of its first evaluation in train mode, and the ranks of that."""
    found = False
    for attempt, model in sorted({(r.attempt, r.model) for r in rows}):
        mine = [r for r in rows if (r.attempt, r.model) == (attempt, model)]
        hit = [r for r in mine if r.in_train and r.once and r.other and r.enough]
        if hit:
            found = True
            born = {r.rank: r for r in reversed(hit) if r.step == hit[0].step}  # the first evaluation of each rank
            yield _finding([born[rank] for rank in sorted(born)], hit, [r for r in mine if not r.in_train])
    if any(r.in_train for r in rows) and not found:
        yield Abstention(
            "INSUFFICIENT_EVIDENCE",
            "what ran in train mode may be meant: on training's own data, several times over, or for one batch",
        )
    elif not rows:
        yield Abstention("INSUFFICIENT_EVIDENCE", "no pass over a loader without a backward was recorded")
    yield from unheard(run)


def _finding(born: Sequence[Row], hit: Sequence[Row], good: Sequence[Row]) -> Finding:
    first = born[0]
    ranks = tuple(r.rank for r in born)
    several = first.dropout + first.norms
    names = first.names.split(",")[:3]
    what = f"{several} module{'s act' if several > 1 else ' acts'} otherwise in eval mode, as {', '.join(names)}"
    stays = "; the statistics of its normalisation took in that data" if first.norms else ""
    return Finding(
        ranks=ranks,
        first_step=first.step,
        last_good_step=max((r.step for r in good if r.step < first.step), default=None),
        last_step=max(r.step for r in hit),
        attempt=first.attempt,
        severity="note",
        subject=first.model_type,
        summary=f"{first.model_type} ran in train mode, without autograd, over {first.batches} batches of "
        f"{first.dataset_class} that training does not use, on {listed(ranks)} before the update of step {first.step}: "
        f"{what}{stays}",
        evidence=tuple(
            Evidence(r.rank, r.step, "modules in train mode in an evaluation", str(r.dropout + r.norms), "0")
            for r in born[:SHOWN]
        ),
        cannot_conclude=("whether it is meant, as where dropout is sampled or each batch's own statistics are wanted",),
        next_check="call model.eval() before the evaluation and model.train() after it",
    )
