"""Which findings follow others: of one chain the first link keeps its severity, those that follow become notes.

Pure functions of values. "Follows" is an order that was seen, in time or along the way that values take through a step;
it never says what caused what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .findings import SEVERITIES, Finding
from .stages import order

Coded = tuple[str, Finding]

# Non-finite values travel this way within a step: data, loss, gradients, parameters.
NONFINITE = ("NONFINITE_INPUT", "NONFINITE_LOSS", "NONFINITE_GRAD", "NONFINITE_PARAM")

# What differs between replicas makes these differ. Parameters do not make reduced gradients differ: the reduction
# hands every replica the same.
REPLICAS = {
    "HPARAM_DESYNC": ("GRAD_DESYNC", "OPTIM_STATE_DESYNC", "PARAM_DESYNC"),
    "GRAD_DESYNC": ("OPTIM_STATE_DESYNC", "PARAM_DESYNC"),
    "OPTIM_STATE_DESYNC": ("PARAM_DESYNC",),
    "PARAM_DESYNC": ("OPTIM_STATE_DESYNC",),  # weight decay reads the parameters
}

OUTLIER = "GRAD_OUTLIER_RANK"

# Shards drawn from different orders overlap, and what is drawn twice leaves something out.
SHARDS = {
    "SAMPLER_SEED_MISMATCH": ("SHARD_OVERLAP", "SHARD_MISSING", "EPOCH_NOT_RESHUFFLED"),
    "SHARD_OVERLAP": ("SHARD_MISSING",),
}


def followers_to_notes(findings: Sequence[Coded]) -> list[Coded]:
    """All findings; each that follows another of its chain is a note that names the chain's first link."""
    said = _deaths_to_notes(findings)
    for codes, follows, key in CHAINS:
        links = sorted((cf for cf in said if cf[0] in codes), key=key)
        roots: dict[int, Coded] = {}  # index of a link -> first link of its chain
        for i, link in enumerate(links):
            before = next((j for j in range(i) if follows(links[j], link)), None)
            if before is not None:
                roots[i] = roots.get(before, links[before])
        notes = {id(links[i][1]): _note(links[i][1], root) for i, root in roots.items()}
        said = [(code, notes.get(id(f), f)) for code, f in said]
    return said


def _note(finding: Finding, root: Coded) -> Finding:
    code, first = root
    at = "" if first.first_step is None else f" at step {first.first_step}"
    return replace(finding, severity="note", summary=f"follows {code}{at}: {finding.summary}")


# -------------------------------------------------------- ranks that ended for want of memory


def _deaths_to_notes(findings: Sequence[Coded]) -> list[Coded]:
    """A rank ends once: where every rank that failed first ran out of memory, and nobody failed before it, OOM says it.

    Several ranks may run out of memory in one step, each with a finding of its own: RANK_FAILED names them together.
    """
    short = [cf for cf in findings if cf[0] == "OOM"]
    return [(code, _death(f, short) if code == "RANK_FAILED" else f) for code, f in findings]


def _death(finding: Finding, short: Sequence[Coded]) -> Finding:
    rank_of = SEVERITIES.index(finding.severity)
    causes = [cf for cf in short if cf[1].attempt == finding.attempt and SEVERITIES.index(cf[1].severity) <= rank_of
              and _ended(cf[1]) and set(cf[1].ranks) & set(finding.ranks)]  # fmt: skip
    told = {rank for _, f in causes for rank in f.ranks}
    return _note(finding, causes[0]) if set(finding.ranks) <= told and causes else finding


def _ended(short: Finding) -> bool:
    """A failed allocation that the program caught ended nobody: OOM calls that a warning."""
    return short.severity == "critical"


# -------------------------------------------------------- values that are not finite


def _nonfinite_key(link: Coded) -> tuple[int, ...]:
    code, f = link
    return (f.attempt, f.first_step or 0, NONFINITE.index(code))


def _nonfinite_follows(earlier: Coded, later: Coded) -> bool:
    """Whether `later` began while `earlier` was there: same attempt and, within one step, in the chain's order."""
    (code_a, a), (code_b, b) = earlier, later
    if a.attempt != b.attempt or code_a == code_b or a.first_step is None or b.first_step is None:
        return False
    if a.first_step == b.first_step:
        # before the reduction spreads them, values of one rank can't have come from another in the same step
        apart = code_b != "NONFINITE_PARAM" and not set(a.ranks) & set(b.ranks)
        return NONFINITE.index(code_a) < NONFINITE.index(code_b) and not apart
    # `later` began after its last good check; when `earlier` was over by then, they are two events
    over = a.first_step if a.last_step is None else max(a.last_step, a.first_step)
    return a.first_step < b.first_step and _began_after(b) <= over


def _began_after(f: Finding) -> int:
    return (f.first_step or 0) - 1 if f.last_good_step is None else f.last_good_step


# -------------------------------------------------------- the same update on unlike machines

# What an update is computed with: other kernels round otherwise.
_MACHINE = ("env.", "version.", "cpu.", "device.", "flag.", "threads.", "packages")


def _machine_key(link: Coded) -> tuple[int, ...]:
    return (link[1].attempt, link[0] != "IDENTITY_MISMATCH")


def _machine_follows(earlier: Coded, later: Coded) -> bool:
    """State that an update left different on the very ranks whose environment differs. The parameters speak for
    themselves: that replicas differ is what does the harm."""
    (code_a, a), (code_b, b) = earlier, later
    known = code_a == "IDENTITY_MISMATCH" and code_b == "OPTIM_STATE_DESYNC" and a.subject.startswith(_MACHINE)
    return known and b.point == "state_end" and a.attempt == b.attempt and set(a.ranks) == set(b.ranks)


# -------------------------------------------------------- replicas that come apart


def _replica_key(link: Coded) -> tuple[int, ...]:
    code, f = link
    return (f.attempt, f.first_step or 0, _place(code, f))


def _place(code: str, f: Finding) -> int:
    """Where in the step it was seen first. What began somewhere between two sampled steps was carried into the later
    one: its place there says nothing, so that it goes by what makes what differ."""
    carried = f.last_good_step is not None and f.first_step is not None and f.last_good_step < f.first_step - 1
    return order(
        {"PARAM_DESYNC": "param_end", "OPTIM_STATE_DESYNC": "state_end"}.get(code, f.point) if carried else f.point
    )


def _replica_follows(earlier: Coded, later: Coded) -> bool:
    """Same ranks, no graver, and `later` was never seen good once `earlier` had come before it."""
    (code_a, a), (code_b, b) = earlier, later
    if a.attempt != b.attempt or code_b not in REPLICAS.get(code_a, ()) or a.first_step is None or b.first_step is None:
        return False
    if set(a.ranks) != set(b.ranks) or SEVERITIES.index(a.severity) > SEVERITIES.index(b.severity):
        return False
    if code_b == "GRAD_DESYNC" and a.point != "clip":
        return False  # of the settings only a clipping threshold reaches the gradients
    exact = a.last_good_step == a.first_step - 1
    if a.first_step == b.first_step and exact and order(b.point) < order(a.point):
        return False  # it was there in this step before the other began in it, however much earlier it arose
    at_once = b.last_good_step is None or b.last_good_step <= a.first_step
    return at_once and _replica_key(earlier) < _replica_key(later)


def _outlier_key(link: Coded) -> tuple[int, ...]:
    return (link[1].attempt, link[0] == OUTLIER, link[1].first_step or 0)


def _outlier_follows(earlier: Coded, later: Coded) -> bool:
    """A rank whose replica came apart before its gradients stood apart: another model has other gradients."""
    (code_a, a), (code_b, b) = earlier, later
    if code_a == OUTLIER or code_b != OUTLIER or a.attempt != b.attempt:
        return False
    if a.first_step is None or b.first_step is None or a.first_step > b.first_step:
        return False
    return set(b.ranks) <= set(a.ranks) and SEVERITIES.index(a.severity) <= SEVERITIES.index(b.severity)


# -------------------------------------------------------- samples that are shared out wrongly


def _shard_key(link: Coded) -> tuple[int, ...]:
    code, f = link
    return (f.attempt, [*SHARDS, "SHARD_MISSING", "EPOCH_NOT_RESHUFFLED"].index(code), f.first_step or 0)


def _shard_follows(earlier: Coded, later: Coded) -> bool:
    """Passes of a distributed sampler from the mismatch on. Of its two settings only the epoch can repeat an order."""
    (code_a, a), (code_b, b) = earlier, later
    if a.attempt != b.attempt or code_b not in SHARDS.get(code_a, ()) or a.first_step is None or b.first_step is None:
        return False
    if max(a.first_step, 1) > b.first_step or SEVERITIES.index(a.severity) > SEVERITIES.index(b.severity):
        return False
    if code_a == "SAMPLER_SEED_MISMATCH":
        by_epoch = code_b != "EPOCH_NOT_RESHUFFLED" or a.subject == "sampler.epoch"
        return "Distributed" in b.subject and by_epoch
    return a.subject == b.subject


# -------------------------------------------------------- one growth, told more than once

GROWTH = ("OOM_PRECURSOR", "MEMORY_LEAK", "MEMORY_IMBALANCE")


def _growth_key(link: Coded) -> tuple[int, ...]:
    code, f = link
    return (f.attempt, GROWTH.index(code), f.first_step or 0)


def _growth_follows(earlier: Coded, later: Coded) -> bool:
    """Memory that heads for a limit grows, and who grows alone holds more than the others: the first of them says it.

    Of the growth of a whole node other ranks may be told: each that is named in both is told once."""
    (code_a, a), (code_b, b) = earlier, later
    less_grave = SEVERITIES.index(a.severity) > SEVERITIES.index(b.severity)
    return code_a != code_b and a.attempt == b.attempt and set(b.ranks) <= set(a.ranks) and not less_grave


Follows = Callable[[Coded, Coded], bool]
Key = Callable[[Coded], tuple[int, ...]]
CHAINS: tuple[tuple[frozenset[str], Follows, Key], ...] = (
    (frozenset(NONFINITE), _nonfinite_follows, _nonfinite_key),
    (frozenset({"IDENTITY_MISMATCH", "OPTIM_STATE_DESYNC"}), _machine_follows, _machine_key),
    # before those of replicas: what is a note there still is the reason why gradients differ
    (frozenset([*REPLICAS, "BUFFER_DESYNC", OUTLIER]), _outlier_follows, _outlier_key),
    (frozenset(REPLICAS), _replica_follows, _replica_key),
    (frozenset([*SHARDS, *(c for later in SHARDS.values() for c in later)]), _shard_follows, _shard_key),
    (frozenset(GROWTH), _growth_follows, _growth_key),
)
