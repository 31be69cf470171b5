"""One planted fault per reason code: with the healthy run, what the properties of all detectors are tested on.

`PLANTS` holds for each reason code a function that changes the rows of a healthy run, and what must be found. A new
detector adds one entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .healthy import BATCH, PASS, STEPS, sketch
from .rows import Rows


@dataclass(frozen=True)
class Plant:
    """`apply` turns the healthy run of 3 ranks or more into a faulty one. `ranks` None: all of them are named."""

    apply: Callable[[Rows], object]
    ranks: tuple[int, ...] | None
    first_step: int | None
    facts: Mapping[str, Any] = field(default_factory=dict)  # what the run's own record says, e.g. status="failed"


def sql(*statements: str) -> Callable[[Rows], None]:
    """A plant that is nothing but statements over the tables."""

    def apply(rows: Rows) -> None:
        for statement in statements:
            rows.connection.execute(statement)

    return apply


def lost(rows: Rows) -> None:
    """From step 9 on rank 2's part is in no reduced gradient."""
    ranks = rows.connection.execute("SELECT count(DISTINCT rank) FROM grad").fetchall()[0][0]
    for step in range(9, STEPS + 1):
        parts = [sketch(r, step) for r in range(ranks) if r != 2]
        rows.connection.execute("UPDATE delivered SET sketch = ? WHERE step = ?",
                                [[sum(p) / ranks for p in zip(*parts, strict=True)], step])  # fmt: skip


def _longer(rows: Rows) -> None:
    """The run goes on: its own gradients of three times as many steps."""
    for shift in (STEPS, 2 * STEPS):
        rows.connection.execute(f"""INSERT INTO grad SELECT * REPLACE (step + {shift} AS step, seq + 100000 AS seq)
            FROM grad WHERE stage = 'local' AND step <= {STEPS}""")


def _longer_times(rows: Rows, tables: tuple[str, ...] = ("step", "phase")) -> None:
    """The run goes on: its times, of three times as many steps."""
    for shift in (STEPS, 2 * STEPS):
        for table in tables:
            rows.connection.execute(f"""INSERT INTO {table} SELECT * REPLACE (step + {shift} AS step,
                seq + {100000 * shift} AS seq) FROM {table} WHERE step <= {STEPS}""")


def slow(rows: Rows) -> None:
    """From step 9 on rank 2's forward takes three times as long, and its peers wait for it."""
    _longer_times(rows)
    rows.connection.execute("UPDATE phase SET forward_ns = 3 * forward_ns WHERE rank = 2 AND step >= 9")
    rows.connection.execute("""UPDATE phase SET reduce_wait_ns = 2000000, backward_ns = backward_ns + 2000000
        WHERE rank <> 2 AND step >= 9""")


def slower(rows: Rows) -> None:
    """From step 40 on every step takes twice as long."""
    _longer_times(rows)
    rows.connection.execute("UPDATE step SET step_ns = 2 * step_ns WHERE step >= 40")
    rows.connection.execute("UPDATE phase SET other_ns = other_ns + 10000000 WHERE step >= 40")


def starved(rows: Rows) -> None:
    """All ranks wait 30 ms for each batch."""
    _longer_times(rows, ("step", "phase", "batch"))
    rows.connection.execute("UPDATE batch SET index = index + step WHERE step > 24")
    rows.connection.execute("UPDATE phase SET data_ns = 30000000")
    rows.connection.execute("UPDATE step SET step_ns = step_ns + 30000000")


def loud(rows: Rows) -> None:
    """From step 25 on rank 2's own gradients are 16 times as large as before."""
    _longer(rows)
    rows.connection.execute("""UPDATE grad SET l2 = list_transform(l2, lambda x: x * 16)
        WHERE stage = 'local' AND rank = 2 AND step >= 25""")


def resumed(rows: Rows) -> None:
    """Every rank begins with the weights of a checkpoint and loads its schedule, yet the optimizer has no state."""
    held = '{"model": 4, "optimizer": 4, "scheduler": 9, "counters": {"epoch": 3}}'
    for (rank,) in rows.connection.execute("SELECT DISTINCT rank FROM step").fetchall():
        me = {"rank": rank, "pid": 100 + rank, "step": 1}
        applied = {"event": "apply", "params": 4, "entries": 4}
        rows.add("checkpoint", **me, event="load", number=1, path="/a/last.pt", parts=held)
        rows.add("checkpoint", **me, **applied, part="model", source=1)
        rows.add("checkpoint", **me, **applied, part="scheduler", position=9)
        for nth, entries in ((1, 0), (2, 4)):
            rows.add("checkpoint", **(me | {"step": nth}), event="update", part="optimizer", nth=nth,
                     class_name="AdamW", params=4, covered=4, entries=entries)  # fmt: skip


def surge(rows: Rows) -> None:
    """At step 50 the gradients of all ranks are 40 times as large."""
    _longer(rows)
    rows.connection.execute("""UPDATE grad SET l2 = list_transform(l2, lambda x: x * 40)
        WHERE stage = 'local' AND step = 50""")


def spike(rows: Rows) -> None:
    """The run goes on with losses near 1, and at step 50 rank 2's is 9."""
    for shift in (STEPS, 2 * STEPS):
        rows.connection.execute(f"""INSERT INTO loss SELECT * REPLACE (step + {shift} AS step, seq + 100000 AS seq)
            FROM loss WHERE step <= {STEPS}""")
    rows.connection.execute("UPDATE loss SET total = 1 + hash(step) % 100 / 1000 + rank / 1000")
    rows.connection.execute("UPDATE loss SET total = 9 WHERE rank = 2 AND step = 50")


def leaking(rows: Rows) -> None:
    """The run goes on, and rank 2 keeps 20 MB more at each step."""
    for shift in (STEPS, 2 * STEPS):
        rows.connection.execute(f"""INSERT INTO memory SELECT * REPLACE (step + {shift} AS step, seq + 100000 AS seq)
            FROM memory WHERE step <= {STEPS}""")
    rows.connection.execute("UPDATE memory SET anon_bytes = anon_bytes + step * 20000000 WHERE rank = 2")


def out_of_memory(rows: Rows) -> None:
    """In step 9 rank 2 asks for more than there is."""
    rows.add("oom", rank=2, pid=102, step=9, kind="host", during="forward", type="MemoryError", device=-1,
             requested_bytes=10**9, in_use_bytes=10**10, parameters_bytes=10**9, others_bytes=8 * 10**9)  # fmt: skip


def dead(rows: Rows) -> None:
    """On every rank `act` gives zero at each step, and what feeds it gets no gradient."""
    rows.connection.execute("UPDATE grad SET l2 = [0, 0, l2[3], l2[4]]")
    for (rank,) in rows.connection.execute("SELECT DISTINCT rank FROM step").fetchall():
        for step in range(3, STEPS + 1):
            rows.add("constant", rank=rank, pid=100 + rank, step=step, generation=1, calls=1, same=True, equal=True,
                     zero=True, witness_same=-1, module="act", module_type="ReLU", op="relu", fed_by="addmm",
                     tensors=[0])  # fmt: skip


REDUCING = (
    "train.py:30 main\n/v/site-packages/torch/_tensor.py:9 backward\n/v/site-packages/torch/autograd/graph.py:8 run"
)


def halted(rows: Rows) -> None:
    """In step 9 rank 2 waits for a file that never comes, the others for its gradients, until somebody ends the job."""
    rows.connection.execute("DELETE FROM step WHERE step > 8")
    rows.connection.execute("DELETE FROM event WHERE kind = 'end'")
    rows.connection.execute("UPDATE exit SET exit_code = -15, stopped_by_launcher = TRUE, step = 8, ended_ns = 10**15")
    for (rank,) in rows.connection.execute("SELECT DISTINCT rank FROM step ORDER BY 1").fetchall():
        stalled(rows, rank, "train.py:20 wait_for" if rank == 2 else REDUCING, step=8)


def stalled(rows: Rows, rank: int, *stacks: str, **values: Any) -> None:
    """A look at a stall of 31 s: three samples over four seconds in which the rank did next to nothing."""
    stacks = stacks * 3 if len(stacks) == 1 else stacks
    row = {"rank": rank, "pid": 999, "stall": 1, "look": 1, "of_pid": 100 + rank, "limit_ns": 30 * 10**9,
           "quiet_ns": 31 * 10**9, "window_ns": 4 * 10**9, "busy_ns": 10**7, "io_bytes": 100, "samples": len(stacks),
           "event": "stall", "phase": "other", "state": "S"} | values  # fmt: skip
    rows.add("stall", **row)
    me = {k: row[k] for k in ("node", "rank", "pid", "stall", "look", "step", "attempt") if k in row}
    for sample, frames in enumerate(stacks, start=1):
        rows.add("stack", **me, sample=sample, frames=frames)


CHANGED = "[digest[1], 999, digest[3], digest[4]]"  # the second tensor's bits are others

PLANTS: dict[str, Plant] = {
    "PARAM_DESYNC": Plant(
        sql(f"UPDATE param SET digest = {CHANGED} WHERE rank = 2 AND stage <> 'start' AND step >= 9"), (2,), 9
    ),
    "BUFFER_DESYNC": Plant(
        sql("UPDATE buffer SET digest = [999, digest[2]] WHERE rank = 2 AND stage = 'sync' AND step >= 9"), (2,), 9
    ),
    "GRAD_DESYNC": Plant(
        sql(f"UPDATE grad SET digest = {CHANGED} WHERE rank = 2 AND stage = 'reduced' AND step >= 9",
            f"UPDATE param SET digest = {CHANGED} WHERE rank = 2 AND stage <> 'start' AND step >= 9"),
        (2,), 9,
    ),
    "REDUCTION_WRONG": Plant(lost, (2,), 9),
    "GRAD_OUTLIER_RANK": Plant(loud, (2,), 25),
    "GRAD_SPIKE": Plant(surge, None, 50),
    "GRAD_VANISHED": Plant(sql("UPDATE grad SET l2 = [0, 0, 0, 0] WHERE stage = 'local' AND step >= 9"), None, 9),
    "LOSS_SPIKE": Plant(spike, (2,), 50),
    "HPARAM_DESYNC": Plant(
        lambda rows: rows.add("optim", rank=2, pid=102, step=9, class_name="AdamW", lr=0.0005,
                              settings='{"weight_decay": 0.01}', tensors=4, members=77),
        (2,), 9,
    ),
    "OPTIM_STATE_DESYNC": Plant(
        sql("UPDATE optim_state SET digest = list_concat(list_transform(digest[1:4], lambda d: d + 7), digest[5:8]) "
            "WHERE rank = 2 AND stage = 'end' AND step >= 9",
            f"UPDATE param SET digest = {CHANGED} WHERE rank = 2 AND stage <> 'start' AND step >= 10"),
        (2,), 9,
    ),
    "STEP_DESYNC": Plant(sql("UPDATE step SET backwards = 2 WHERE rank = 2 AND step >= 9"), (2,), 9),
    "COLLECTIVE_MISMATCH": Plant(
        sql("DELETE FROM collective WHERE step > 9 OR (step = 9 AND position % 2 = 0)",
            "UPDATE collective SET op = 'broadcast', signature = 'float32[1]', root = 0 WHERE rank = 2 AND step = 9"),
        (2,), 9,
    ),
    "AMP_OVERFLOW": Plant(
        sql("UPDATE loss SET scale = 1024", "UPDATE step SET skipped = TRUE WHERE step >= 9"), None, 9
    ),
    "CLIP_BEFORE_UNSCALE": Plant(
        sql("UPDATE loss SET scale = 1024", "UPDATE clip SET scaled = 1 WHERE rank = 2 AND step >= 9"), (2,), 9
    ),
    "NO_VALIDATION": Plant(sql("DELETE FROM batch WHERE loader = 1"), None, None),
    "GRAD_NOT_ZEROED": Plant(sql("UPDATE leftover SET kept = TRUE WHERE rank = 2 AND step >= 9"), (2,), 9),
    "GRAD_ACCUM_MISMATCH": Plant(
        sql("UPDATE step SET discarded = 1, backwards = 2 WHERE rank = 2 AND step = 9"), (2,), 9
    ),
    "NONFINITE_INPUT": Plant(
        sql("UPDATE input SET nonfinite = 1, path = '[0]', dtype = 'float32', positions = [2] "
            "WHERE rank = 2 AND step = 9",
            "UPDATE loss SET nonfinite = 1, total = 'nan', first_nonfinite = 0 WHERE rank = 2 AND step = 9"),
        (2,), 9,
    ),
    "EVAL_MODE_TRAINING": Plant(
        lambda rows: rows.add("mode", rank=2, pid=102, step=9, backwards=1, in_eval=1, before=8, sensitive=1,
                              model_type="Net", names="drop"), (2,), 9,
    ),
    "TRAIN_MODE_EVAL": Plant(
        sql(f"UPDATE evaluation SET in_eval = FALSE, dropout = 1, names = 'drop' WHERE rank = 2 AND step > {PASS}"),
        (2,), STEPS,
    ),
    "NONFINITE_LOSS": Plant(
        sql("UPDATE loss SET nonfinite = 1, total = 'nan', first_nonfinite = 0 WHERE rank = 2 AND step >= 9"), (2,), 9
    ),
    "LOGGED_LOSS_MISMATCH": Plant(
        sql("UPDATE logged SET stands = entered / 3, history = entered / 3 WHERE rank = 2 AND step >= 9"), (2,), 9
    ),
    "NONFINITE_GRAD": Plant(
        sql("UPDATE grad SET nonfinite = [2] WHERE rank = 2 AND stage = 'local' AND step >= 9",
            "UPDATE grad SET nonfinite = [2] WHERE stage = 'reduced' AND step >= 9"),
        (2,), 9,
    ),
    "NONFINITE_PARAM": Plant(sql("UPDATE param SET nonfinite = [2] WHERE rank = 2 AND step >= 9"), (2,), 9),
    "INIT_SUSPECT": Plant(sql("UPDATE initial SET constant = TRUE, bias_constant = TRUE"), None, 1),
    "DEAD_MODULE": Plant(dead, None, 1),
    "PARAM_NEVER_UPDATED": Plant(
        sql("UPDATE grad SET l2 = [l2[1], l2[2], -1, l2[4]]",
            "UPDATE param SET digest = [digest[1], digest[2], 3, digest[4]]",
            "INSERT INTO unreached SELECT rank, attempt, 1, time_ns, 900000 + seq, pid, 1, 3, 3, 3, 'out', [2] "
            "FROM param WHERE stage = 'final'"), None, 1,
    ),
    "TIE_BROKEN": Plant(
        sql("INSERT INTO tensor SELECT * REPLACE (2 AS generation, 9 AS step) FROM tensor",
            "UPDATE tensor SET aliases = 'out.weight' WHERE generation = 1 AND index = 0",
            "DELETE FROM tensor WHERE generation = 1 AND index = 2"), None, 9,
    ),
    "PARAM_NOT_OPTIMIZED": Plant(
        sql("UPDATE tensor SET optimizer = -1 WHERE index = 2",
            "UPDATE param SET digest = [digest[1], digest[2], 3, digest[4]]"), None, 1,
    ),
    "LR_EXHAUSTED": Plant(
        sql("INSERT INTO optim SELECT * REPLACE (13 AS step, seq + 9999 AS seq, 0.0 AS lr) FROM optim WHERE step = 1"),
        None, 13,
    ),
    "LOSS_NOT_NORMALISED": Plant(  # two steps' batches become one step's
        sql("UPDATE loss SET undivided = TRUE, backwards = 2", "UPDATE step SET backwards = 2",
            "UPDATE batch SET step = (step + 1) // 2 WHERE loader = 0", "UPDATE batch SET backwards = index"),
        None, 1,
    ),
    "SEED_MISMATCH": Plant(sql("UPDATE rng SET torch_seed = 99 WHERE rank = 2"), (2,), None),
    "NOT_SEEDED": Plant(sql("UPDATE rng SET torch_seeded = FALSE", "DELETE FROM seed"), None, None),
    "SAMPLER_SEED_MISMATCH": Plant(sql("UPDATE sampler SET seed = 8 WHERE rank = 2"), (2,), 1),
    "SHARD_OVERLAP": Plant(
        sql("UPDATE batch SET ids = o.ids, digests = o.digests FROM batch o WHERE batch.rank = 2 AND o.rank = 1 "
            "AND o.loader = batch.loader AND o.iterator = batch.iterator AND o.index = batch.index"),
        (1, 2), 1,
    ),
    "SHARD_MISSING": Plant(
        sql("""UPDATE loader SET dataset_length = 900, levels = '[["Rows", 900, ""]]'"""), None, PASS
    ),
    "SAMPLES_DROPPED": Plant(  # a quarter of what the sampler deals fills no batch
        sql("UPDATE sampler SET dataset_length = dataset_length * 4 / 3",
            f"UPDATE loader SET samples = {PASS * BATCH * 4 // 3}, batch_size = {PASS * BATCH}, drop_last = TRUE"),
        None, PASS,
    ),
    "TRAIN_EVAL_OVERLAP": Plant(  # every evaluation sample has the content of a training sample
        sql("UPDATE batch SET digests = [7919 * i + 1 FOR i IN ids] WHERE loader = 1"), None, PASS
    ),
    "SHARD_UNEVEN": Plant(sql(f"DELETE FROM batch WHERE rank = 2 AND index = {PASS - 1}"), (2,), PASS - 1),
    "EPOCH_NOT_RESHUFFLED": Plant(
        sql("UPDATE batch SET ids = o.ids FROM batch o WHERE batch.iterator = 1 AND o.iterator = 0 "
            "AND o.loader = batch.loader AND o.rank = batch.rank AND o.index = batch.index"),
        None, PASS + 1,
    ),
    "DATA_ERROR_SWALLOWED": Plant(
        lambda rows: rows.add("making", rank=2, pid=102, step=9, worker=1, fetches=5, asked=4, made=3, same_size=4,
                              nones=1, none_caught=1, exceptions="ValueError", samples_traced=20, samples_caught=1),
        (2,), 9,
    ),
    "WORKER_SEED_DUPLICATED": Plant(
        sql("UPDATE stream SET digests = [digests[1], 50 + fetches] WHERE rank = 2"), (2,), None
    ),
    "RNG_DUPLICATED": Plant(
        sql("UPDATE rng SET torch_digest = step WHERE rank IN (1, 2)",
            "UPDATE grad SET l2 = [5, 6, 7, 8] WHERE rank IN (1, 2) AND stage = 'local'",
            "UPDATE loss SET total = 1 / step WHERE rank IN (1, 2)"),
        (1, 2), 1,
    ),
    "DATA_REPEATED": Plant(
        sql("UPDATE loader SET iterable = TRUE",
            # both workers of rank 2 give the batches 0, 1, 2 ...; those of the other ranks give every second one
            "UPDATE batch SET ids = [], worker = index % 2",
            "UPDATE batch SET digests = o.digests FROM batch o WHERE batch.rank = 2 AND o.rank = 3 "
            "AND o.iterator = batch.iterator AND o.index = batch.index // 2"),
        (2,), 2,
    ),
    "IDENTITY_MISMATCH": Plant(
        sql("UPDATE identity SET value = 'decade' WHERE rank = 2 AND key = 'code.model'"), (2,), None
    ),
    "RESTARTED": Plant(sql("INSERT INTO step SELECT * REPLACE (1 AS attempt) FROM step WHERE step <= 3"), None, 1),
    "RESUME_INCOMPLETE": Plant(resumed, None, 1),
    "RANK_FAILED": Plant(
        sql("UPDATE exit SET exit_code = -15, stopped_by_launcher = TRUE, step = 9, ended_ns = ended_ns + 1",
            "UPDATE exit SET exit_code = -9, stopped_by_launcher = FALSE, step = 8, ended_ns = 1 WHERE rank = 2",
            "DELETE FROM step WHERE step > 9 OR (step > 8 AND rank = 2)", "DELETE FROM event WHERE kind = 'end'"),
        (2,), 9, {"status": "failed"},
    ),
    "HANG": Plant(halted, (2,), 9, {"status": "killed"}),
    "STRAGGLER": Plant(slow, (2,), 9),
    "SLOWDOWN": Plant(slower, None, 40),
    "DATA_STARVED": Plant(starved, None, 6),
    "CHECKPOINT_STALL": Plant(
        sql("UPDATE phase SET checkpoint_ns = 100000000 WHERE rank = 2 AND step % 2 = 0",
            "UPDATE step SET step_ns = step_ns + 100000000 WHERE step % 2 = 0"),
        (2,), 4,
    ),
    "MEMORY_LEAK": Plant(leaking, (2,), 1),
    "MEMORY_IMBALANCE": Plant(sql("UPDATE memory SET anon_bytes = anon_bytes * 3 WHERE rank = 2"), (2,), None),
    "OOM": Plant(out_of_memory, (2,), 9),
    "OOM_PRECURSOR": Plant(
        sql("UPDATE memory SET limit_as_bytes = 10000000000",
            "UPDATE memory SET vms_bytes = vms_bytes + step * 200000000 WHERE rank = 2"),
        (2,), 1,
    ),
}  # fmt: skip
