"""Faults of seeds, samplers, shards, data sets and loader workers."""

from __future__ import annotations

from .faults import Drawn, fault
from .recipes import Truth


@fault("SEED_MISMATCH", wraps=("ddp", "fsdp2"), ranks=(3, 4), loaders=("sampler", "tensors", "subset"))
def seeded_otherwise(d: Drawn) -> Truth:
    rank = d.rank()
    d.recipe["own_seeds"] = False
    d.plant("seed", rank=rank)
    # a buffer drawn at the start is another one there, unless the wrapper sends it to all
    return Truth(("SEED_MISMATCH",), (rank,), None, False, "", ("BUFFER_DESYNC",))


_SAMPLED = {"wraps": ("ddp", "ddp", "fsdp2"), "loaders": ("sampler",), "steps": (30, 60)}
_AFTER_SAMPLER = ("SHARD_OVERLAP", "SHARD_MISSING", "EPOCH_NOT_RESHUFFLED")


@fault("SAMPLER_SEED_MISMATCH", **_SAMPLED)
def sampler_seeded_otherwise(d: Drawn) -> Truth:
    rank = d.rank()
    d.plant("sampler_seed", rank=rank)
    return Truth(("SAMPLER_SEED_MISMATCH",), d.apart(rank), None, False, "", _AFTER_SAMPLER)


@fault("SAMPLER_SEED_MISMATCH", **_SAMPLED, accumulate=(1,))
def epoch_not_set_on_one_rank(d: Drawn) -> Truth:
    rank = d.rank()
    d.plant("set_epoch_not_here", rank=rank)
    return Truth(("SAMPLER_SEED_MISMATCH",), d.apart(rank), None, False, "", _AFTER_SAMPLER)


@fault("SHARD_OVERLAP", wraps=("ddp", "fsdp2"), loaders=("batch_sampler", "sampler"), workers=(0, 0, 2))
def data_not_split(d: Drawn) -> Truth:
    d.recipe["loader"]["kind"] = "sampler"
    d.plant("no_sampler")
    return Truth(("SHARD_OVERLAP",), d.everyone, None, False, "", ("RNG_DUPLICATED", "SHARD_MISSING"))


@fault("SHARD_OVERLAP", wraps=("ddp", "fsdp2"), loaders=("stream",), workers=(0, 2))
def stream_not_split_by_rank(d: Drawn) -> Truth:
    d.recipe["loader"]["augment"] = False  # else no two contents are alike, and a stream has no ids
    d.plant("not_split_by_rank")
    return Truth(("SHARD_OVERLAP",), d.everyone, None, False, "", ("RNG_DUPLICATED", "SHARD_MISSING"))


@fault("SHARD_OVERLAP", wraps=("ddp",), loaders=("subset",), workers=(0,))
def slice_taken_twice(d: Drawn) -> Truth:
    rank = d.rank()
    d.plant("same_slice", rank=rank)
    return Truth(("SHARD_OVERLAP",), tuple(sorted((rank, (rank + 1) % d.ranks))), None, False, "", ("SHARD_MISSING",))


@fault("SHARD_MISSING", wraps=("ddp", "fsdp2"), loaders=("subset",), workers=(0,), accumulate=(1,), steps=(40, 60))
def slice_with_a_hole(d: Drawn) -> Truth:
    rank = d.rank()
    d.plant("slice_hole", rank=rank, batches=d.chance.choice((2, 3)))
    return Truth(("SHARD_MISSING",), None, None, False, "", ("SHARD_UNEVEN",))


@fault("SHARD_UNEVEN", wraps=("ddp",), loaders=("sampler", "batch_sampler", "stateful"), workers=(0,), accumulate=(1,))
def batch_size_differs(d: Drawn) -> Truth:
    rank = d.rank()
    d.plant("batch_size", rank=rank)
    return Truth(("SHARD_UNEVEN",), d.apart(rank), None, False, "", ("SHARD_MISSING",))


@fault("EPOCH_NOT_RESHUFFLED", **_SAMPLED, accumulate=(1,))
def epoch_never_set(d: Drawn) -> Truth:
    d.plant("no_set_epoch")
    return Truth(("EPOCH_NOT_RESHUFFLED",), d.everyone, None, False)


@fault("SAMPLES_DROPPED", wraps=("ddp", "fsdp2"), loaders=("sampler",), steps=(24, 40), accumulate=(1,))
def a_third_dropped(d: Drawn) -> Truth:
    batch = d.recipe["loader"]["batch"] * 4
    share = int(batch * d.chance.choice((1.5, 1.6)))
    d.recipe["loader"] |= {"batch": batch, "samples": share * d.ranks, "drop_last": True}
    d.plant("samples_dropped")
    return Truth(("SAMPLES_DROPPED",), d.everyone, None, False, "", ("SHARD_MISSING",))


@fault("DATA_REPEATED", wraps=("ddp", "fsdp2"), loaders=("stream",), workers=(2,))
def stream_not_split_by_worker(d: Drawn) -> Truth:
    d.recipe["loader"] |= {"workers": 2, "augment": False}
    d.plant("not_split_by_worker")
    return Truth(("DATA_REPEATED",), d.everyone, None, False, "", ("SHARD_MISSING",))


@fault("TRAIN_EVAL_OVERLAP", wraps=("ddp", "fsdp2"), loaders=("sampler", "batch_sampler"), workers=(0,))
def evaluates_on_training_data(d: Drawn) -> Truth:
    d.recipe["eval_every"] = 8
    d.recipe["loader"]["augment"] = False
    d.recipe["extras"] = [e for e in d.recipe["extras"] if e != "eval_on_rank0"]
    how = d.chance.choice(("same", "copied"))
    d.plant("eval_overlap", count=d.chance.choice((24, 40)), how=how)
    # copies, and a ConcatDataset, have ids of their own; the contents of training batches are looked at in watched
    # steps only
    return Truth(("TRAIN_EVAL_OVERLAP",), None, None, history=True)


_SWALLOWED = {"wraps": ("ddp",), "loaders": ("sampler",), "accumulate": (1,), "steps": (30, 50), "schedules": ("",)}


def broken_samples(d: Drawn, share: float) -> list[int]:
    many = d.recipe["loader"]["samples"]
    return sorted(d.chance.sample(range(many), max(4, int(many * share))))


@fault("DATA_ERROR_SWALLOWED", **_SWALLOWED, workers=(0, 2))
def neighbour_handed_out(d: Drawn) -> Truth:
    d.plant("swallow_neighbour", broken=broken_samples(d, 0.08))
    return Truth(("DATA_ERROR_SWALLOWED",), None, None, False, "", ("DATA_REPEATED", "SHARD_OVERLAP"))


@fault("DATA_ERROR_SWALLOWED", **_SWALLOWED, workers=(0, 2))
def nothing_handed_out(d: Drawn) -> Truth:
    d.plant("swallow_none", broken=broken_samples(d, 0.08))
    allow = ("SHARD_UNEVEN", "SHARD_MISSING", "SAMPLES_DROPPED")
    return Truth(("DATA_ERROR_SWALLOWED",), None, None, False, "", allow, mild=True)  # a filter may be meant


@fault("DATA_ERROR_SWALLOWED", **_SWALLOWED, workers=(2,))
def batch_left_out(d: Drawn) -> Truth:
    d.recipe["loader"] |= {"workers": 2}
    d.plant("swallow_loop", broken=broken_samples(d, 0.0))
    return Truth(("DATA_ERROR_SWALLOWED",), None, None, False, "", ("SHARD_UNEVEN", "SHARD_MISSING", "SAMPLES_DROPPED"))


_AUGMENTED = {"wraps": ("ddp",), "models": ("mlp", "conv"), "loaders": ("sampler",), "workers": (2,), "steps": (24, 40)}


@fault("WORKER_SEED_DUPLICATED", **_AUGMENTED)
def workers_seeded_alike(d: Drawn) -> Truth:
    d.recipe["loader"] |= {"workers": 2, "augment": True}
    d.plant("worker_seed")
    return Truth(("WORKER_SEED_DUPLICATED",), d.everyone, None, False, "", ("RNG_DUPLICATED",))


@fault("WORKER_SEED_DUPLICATED", **_AUGMENTED)
def generator_copied_to_workers(d: Drawn) -> Truth:
    d.recipe["loader"] |= {"workers": 2, "augment": True}
    d.plant("generator_copied")
    return Truth(("WORKER_SEED_DUPLICATED",), d.everyone, None, False, "", ("RNG_DUPLICATED",))
