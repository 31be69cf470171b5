"""Rows of step times, made by expressions over rank and step."""

from __future__ import annotations

from .rows import Rows

PHASES = ("data", "forward", "backward", "optimizer", "communication", "checkpoint", "evaluation", "other")
COLUMNS = {f"{p}_ns": "0" for p in PHASES} | {
    "forward_ns": "3e6", "backward_ns": "5e6", "optimizer_ns": "1e6", "other_ns": "1e6", "reduce_wait_ns": "0",
    "cpu_ns": "8e6", "cpu_wait_ns": "0",
}  # fmt: skip


def timed(ranks: int, steps: int, **given: str) -> Rows:
    """Healthy steps of 10 ms; `given` are SQL expressions of `rank` and `step` for columns of phase, in ns.

    A step takes what its phases take (or `step_ns`); each takes the batch `step` of its one pass.
    """
    rows = Rows()
    total = given.pop("step_ns", " + ".join(f"{p}_ns" for p in PHASES))
    columns = COLUMNS | given
    rows.connection.execute(f"""
        CREATE TABLE made AS SELECT rank::INTEGER AS rank, 0 AS attempt, step::BIGINT AS step,
            {", ".join(f"({value})::BIGINT AS {name}" for name, value in columns.items())}
        FROM range({ranks}) r(rank), range(1, {steps + 1}) s(step);
        INSERT INTO phase BY NAME SELECT * FROM made;
        INSERT INTO step BY NAME SELECT rank, attempt, step, 1 AS backwards, 1 AS optimizers, 0 AS agent_ns,
            ({total})::BIGINT AS step_ns FROM made;
        INSERT INTO batch BY NAME SELECT rank, attempt, step, 1 AS pid, 0 AS loader, 0 AS iterator, step - 1 AS index,
            8 AS samples, true AS grad_enabled, '' AS "end", step - 1 AS backwards FROM made;
        DROP TABLE made""")
    for rank in range(ranks):
        rows.add("loader", rank=rank, pid=1, workers=2)
    return rows
