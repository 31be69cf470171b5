"""A user's own SQL over a run: one reading statement, over this run's files and nothing else."""

from __future__ import annotations

from typing import Any

import duckdb

from .store import Store
from .wrong_use import WrongUse


def ask(store: Store, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Column names and rows. The connection itself opens no file outside the run; the statement's kind is checked too,
    since writing into the run folder would otherwise be open to it.
    """
    try:
        statements = duckdb.extract_statements(sql)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            raise WrongUse("tdbg sql takes one reading statement",
                           "SELECT, WITH ... SELECT, FROM, DESCRIBE, SUMMARIZE or SHOW TABLES")  # fmt: skip
        return store.query(sql)
    except duckdb.Error as e:
        lines = [line for line in str(e).strip().splitlines() if line.strip()]
        raise WrongUse(
            lines[0] if lines else type(e).__name__, "`SHOW TABLES` and `DESCRIBE TABLE` list what there is"
        ) from None
