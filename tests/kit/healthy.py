"""A healthy run as rows: two shuffled epochs of data-parallel training, with every table that a rule may read."""

from __future__ import annotations

import random

from tdbg.rankagent.tables import known_tables

from .rows import Rows, bits

STEPS = 24  # two epochs of PASS batches each
PASS = 12
HELD = 3  # batches of an evaluation after each epoch
BATCH = 4
TENSORS = ("in.weight", "in.bias", "out.weight", "out.bias")
SHAPES = ("8x4", "8", "2x8", "2")
DEVICE = [c.name for c in known_tables()["memory"].columns if c.name.startswith("cuda_") and c.unit == "B"]
BUFFERS = ("norm.mean", "norm.count")  # indices 4 and 5 of the catalogue


def healthy(ranks: int = 4, steps: int = STEPS) -> Rows:
    """The rows of `ranks` ranks that train one model under DDP and do everything right."""
    rows = Rows()
    for rank in range(ranks):
        _start(rows, rank, ranks)
        for step in range(1, steps + 1):
            _step(rows, rank, ranks, step)
        last = {"rank": rank, "pid": 100 + rank, "step": steps}
        digests = [1000 * steps + t for t in range(len(TENSORS))]
        rows.add("param", **last, stage="final", generation=1, l2=[1.0] * 4, digest=digests)
        rows.add("event", **last, kind="end", detail="")
        rows.add("exit", **last, of_pid=100 + rank, ended_ns=10**12, oom_kills=0)
    return rows


def _start(rows: Rows, rank: int, ranks: int) -> None:
    me = {"rank": rank, "pid": 100 + rank}
    peers = ",".join(map(str, range(ranks)))
    for key, value in (("version.torch", "2.9.0"), ("code.model", "c0ffee"), ("argv", "-x")):
        rows.add("identity", **me, key=key, value=value, rule="must")
    rows.add("seed", **me, library="torch", call="manual_seed", seed="7", where="train.py:9")
    rows.add("rng", **me, torch_digest=5, torch_seed=7, torch_seeded=True)
    for step in (2, 3, 4):  # each rank has a stream of its own by then
        rows.add("rng", **me, step=step, torch_digest=50_000 + 1000 * rank + step, torch_seed=7, torch_seeded=True,
                 moved="torch:data")  # fmt: skip
    for index, (name, shape) in enumerate(zip(TENSORS, SHAPES, strict=True)):
        rows.add("tensor", **me, generation=1, index=index, kind="param", name=name, model_type="Net", shape=shape,
                 dtype="float32", numel=8, trainable=True, sharing="ddp", peers=peers, broadcast=-1)  # fmt: skip
    for index, name in enumerate(BUFFERS, start=len(TENSORS)):
        rows.add("tensor", **me, generation=1, index=index, kind="buffer", name=name, model_type="Net", shape="8",
                 dtype="float32", numel=8, optimizer=-1, sharing="ddp", peers=peers, broadcast=1)  # fmt: skip
    rows.add("mode", **me, step=1, backwards=1, model_type="Net")
    for place, (index, name, units, inputs) in enumerate(((0, "in", 8, 4), (2, "out", 2, 8))):
        rows.add("initial", **me, step=1, generation=1, index=index, place=place, units=units, inputs=inputs,
                 fan_in=inputs, sampled=16, different=16, rms=inputs**-0.5, trained=True, module=name)  # fmt: skip
    rows.add("output", **me, step=2, generation=1, modules=3)
    rows.add("param", **me, step=1, stage="start", generation=1, l2=[1.0] * 4, digest=[1, 2, 3, 4])
    rows.add(
        "optim", **me, step=1, class_name="AdamW", lr=0.001, settings='{"weight_decay": 0.01}', tensors=4, members=77
    )
    split = {"num_replicas": ranks, "replica": rank, "seed": 7, "shuffle": True}
    split |= {"length": PASS * BATCH, "dataset_length": ranks * PASS * BATCH}
    rows.add("sampler", **me, class_name="DistributedSampler", event="init", **split)
    for epoch in range(STEPS // PASS):
        at = {"step": epoch * PASS + 1, "epoch": epoch}
        rows.add("sampler", **me, class_name="DistributedSampler", event="set_epoch", **at, **split)
        rows.add("sampler", **me, class_name="DistributedSampler", event="iter", **at, **split)
        rows.add("loader", **me, step=at["step"], iterator=epoch, batch_size=BATCH, sampler_class="DistributedSampler",
                 shuffle=1, batches=PASS, samples=PASS * BATCH, dataset_class="Rows", dataset_digest="d",
                 dataset_length=ranks * PASS * BATCH, levels=f'[["Rows", {ranks * PASS * BATCH}, ""]]',
                 workers=2, worker_start="fork")  # fmt: skip
        for worker in (0, 1):
            for fetches in (0, 1, 2, 4):  # torch's stream is each worker's own and drawn from, the other one unused
                own = 10_000 * rank + 1000 * epoch + 100 * worker + fetches
                rows.add("stream", **me, step=at["step"], iterator=epoch, worker=worker, fetches=fetches,
                         names="torch,dataset.rng", digests=[own, 5], origins=[own - fetches, 1])  # fmt: skip


def shard(rank: int, ranks: int, epoch: int) -> list[int]:
    """The samples that a rank reads in an epoch, in order."""
    order = list(range(ranks * PASS * BATCH))
    random.Random(epoch).shuffle(order)
    return order[rank::ranks]


def sketch(rank: int, step: int) -> list[float]:
    """Two numbers per tensor of a rank's own gradient."""
    drawn = random.Random(1000 * rank + step)
    return [drawn.uniform(-1, 1) for _ in range(2 * len(TENSORS))]


def _step(rows: Rows, rank: int, ranks: int, step: int) -> None:
    me = {"rank": rank, "pid": 100 + rank, "step": step}
    epoch, index = divmod(step - 1, PASS)
    ids = shard(rank, ranks, epoch)[index * BATCH : (index + 1) * BATCH]
    rows.add("batch", **me, iterator=epoch, index=index, samples=BATCH, ids=ids, backwards=step - 1,
             digests=[7919 * i + 1 for i in ids], grad_enabled=True)  # fmt: skip
    rows.add("input", **me, source="batch", tensors=2, rows=BATCH)
    rows.add("labels", **me, iterator=epoch, index=index, elements=8 * BATCH, supervised=6 * BATCH, rows=BATCH,
             ignored=-100, told=step > 1, path="['labels']", tokens="same")  # fmt: skip
    rows.add("step", **me, optimizers=1, backwards=1, watched=True, cadence=1, step_ns=10**7, agent_ns=10**4)
    rows.add("loss", **me, backwards=1, total=1 / step + rank / 100, last=1.0, first_nonfinite=-1, scale=1.0)
    mean_loss = 1 / step + (ranks - 1) / 200
    rows.add("logged", **me, first=step, global_step=step, updates=1, micros=1, returned=1 / step + rank / 100,
             magnitude=1 / step + rank / 100, entered=mean_loss, stands=mean_loss, history=mean_loss)  # fmt: skip
    rows.add("grad", **me, stage="local", generation=1, l2=[1.0 + rank] * 4, valid=True, scale=1.0, synced=1,
             sketch=sketch(rank, step))  # fmt: skip
    reduced = [500 * step + t for t in range(len(TENSORS))]
    mean = [sum(parts) / ranks for parts in zip(*(sketch(r, step) for r in range(ranks)), strict=True)]
    rows.add("delivered", **me, generation=1, digest=reduced, sketch=mean, reduction="mean")
    rows.add("grad", **me, stage="reduced", generation=1, l2=[1.0] * 4, digest=reduced, valid=True, scale=1.0)
    rows.add("param", **me, stage="end", generation=1, l2=[1.0] * 4, digest=[1000 * step + t for t in range(4)])
    for stage, moment in (("start", step - 1), ("end", step)):
        rows.add("optim_state", **me, stage=stage, generation=1, tensors=[0, 1, 2, 3],
                 keys='{"exp_avg": "digest", "step": "number"}' if moment else "",
                 digest=[300 * moment + t for t in range(4)] + [bits(moment)] * 4 if moment else [])  # fmt: skip
    rows.add("buffer", **me, stage="sync", generation=1, tensors=[4, 5], digest=[step, step])
    rows.add("buffer", **me, stage="end", generation=1, tensors=[4, 5], digest=[step * 10 + rank, step])
    rows.add("schedule", **me, position=step, bad_epochs=-1, cooldown=-1, best="nan", class_name="LambdaLR")
    rows.add("clip", **me, max_norm=1.0, norm_type=2.0, norm=0.5, calls=1)
    if step > 1:
        rows.add("leftover", **me, parameter="in.bias")
    rows.add("memory", **me, rss_bytes=10**9, anon_bytes=8 * 10**8, shared_bytes=10**6, vms_bytes=4 * 10**9,
             data_bytes=2 * 10**9, limit_as_bytes=-1, limit_data_bytes=-1, dataset_items=1, cuda_device=-1,
             **dict.fromkeys(DEVICE, -1))  # fmt: skip
    rows.add("phase", **me, data_ns=10**6, forward_ns=10**6, backward_ns=10**6, optimizer_ns=10**6, other_ns=10**6)
    for nth, site in enumerate(("train.py:31 mean", "train.py:35 correct")):
        rows.add("collective", **me, group="0", ranks=list(range(ranks)), position=2 * step - 1 + nth, op="all_reduce",
                 signature="float32[1] SUM", root=-1, site=site, callers="train.py:60 main", source="call")  # fmt: skip
    if index == PASS - 1:
        rows.add("batch", **me, iterator=epoch, index=PASS, backwards=step, end="StopIteration")
        _evaluate(rows, me, rank, ranks, epoch)


def _evaluate(rows: Rows, me: dict[str, int], rank: int, ranks: int, epoch: int) -> None:
    """A pass over held-out data of its own, without autograd."""
    about = {"loader": 1, "iterator": epoch}
    held = ranks * HELD * BATCH
    rows.add("loader", **me, **about, batch_size=BATCH, sampler_class="SequentialSampler", dataset=1, batches=HELD,
             samples=HELD * BATCH, dataset_class="Held", dataset_digest="h", dataset_length=held,
             levels=f'[["Held", {held}, ""]]')  # fmt: skip
    for index in range(HELD):
        ids = [(index * BATCH + i) * ranks + rank for i in range(BATCH)]
        rows.add("batch", **me, **about, index=index, samples=BATCH, ids=ids, backwards=me["step"], grad_enabled=False,
                 digests=[104729 * (i + 1) for i in ids])  # fmt: skip
    rows.add("batch", **me, **about, index=HELD, backwards=me["step"], end="StopIteration")
    rows.add("evaluation", **me, **about, backwards=me["step"], forwards=1, in_eval=True, reacting=1, model_type="Net")
