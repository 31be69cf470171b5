"""One row a rank: host, steps, last loss and gradient norm, step time, memory, and what sets it apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from .findings import SEVERITIES, Incident
from .gradnorm import LAST_STEPS, is_sharded, sharded_norms
from .store import Store

# A rank whose memory or step time is half as much again as its peers' median is worth a word in a table. It is no
# finding: the rules for imbalance and stragglers have their own, stricter tests.
APART_RATIO = 1.5
# Ranks are read one after the other: in a run that went on meanwhile (or whose ranks outlived their launcher) a lag of
# so little time may be the reading itself.
READING_NS = 5 * 10**9
APART_RANKS = 3  # with two ranks there is no majority to stand apart from

# `schema` is main (everything) or recent (the newest segments): a live screen must cost the same at any hour.
SQL = """
WITH s AS (
    SELECT rank, attempt, max(step) AS steps, max(time_ns) AS seen_ns, arg_max(pid, step) AS pid,
           median(step_ns) FILTER (WHERE step_ns > 0) AS step_ns
    FROM {schema}.step GROUP BY rank, attempt
), l AS (
    SELECT rank, attempt, arg_max(total / greatest(backwards, 1), step) AS loss
    FROM {schema}.loss GROUP BY rank, attempt
), g AS (
    SELECT rank, attempt, arg_max(sqrt(list_sum([x * x for x in l2 if NOT x < 0])), step * 2 + (stage = 'reduced')::INT)
           AS norm
    FROM {schema}.grad WHERE stage = 'reduced' OR valid GROUP BY rank, attempt
), m AS (
    SELECT rank, attempt, arg_max(rss_bytes, step) AS rss, arg_max(cuda_reserved_bytes, step) AS cuda
    FROM {schema}.memory GROUP BY rank, attempt
)
SELECT s.rank, s.attempt, s.pid, s.steps, s.seen_ns, l.loss, g.norm, s.step_ns, m.rss, m.cuda
FROM s LEFT JOIN l USING (rank, attempt) LEFT JOIN g USING (rank, attempt) LEFT JOIN m USING (rank, attempt)
ORDER BY s.rank, s.attempt
"""


@dataclass(frozen=True)
class RankRow:
    """A rank's last attempt. None: not recorded. `loss` is the mean over the last step's backwards; `grad_norm` of the
    gradient that the optimizer got (of a sharded model: of all its parts), of the rank's own one where that was not
    measured."""

    rank: int
    host: str = ""
    attempt: int = 0
    pid: int | None = None
    steps: int = 0
    seen_ns: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    step_ns: float | None = None
    rss_bytes: int | None = None
    cuda_bytes: int | None = None
    apart: str = ""


def rank_rows(store: Store, incidents: Sequence[Incident] = (), world_size: int = 0, recent: bool = False
              ) -> tuple[RankRow, ...]:  # fmt: skip
    """Every expected rank, those that recorded nothing included."""
    rows: dict[int, RankRow] = {r: RankRow(r, apart="recorded nothing") for r in range(world_size)}
    hosts = _hosts(store)
    for p in sorted((p for p in store.processes if p.kind == "rank"), key=lambda p: p.attempt):
        steps = p.state.step if p.state else 0
        rows[p.index] = RankRow(p.index, hosts.get((p.attempt, p.index), ""), p.attempt, p.pid, steps)
    schema = "recent" if recent else "main"
    sharded = dict[tuple[int, int], float]()
    parts = is_sharded(store)
    if parts:
        last = sharded_norms(store, schema, LAST_STEPS)
        sharded = {(rank, attempt): norm for rank, attempt, _, norm in sorted(last, key=lambda n: n[2])}
    for rank, attempt, pid, steps, seen, loss, own, step_ns, rss, cuda in store.rows(SQL.format(schema=schema)):
        old = rows.get(rank)
        if old and old.attempt > attempt:
            continue
        host = hosts.get((attempt, rank), "")
        norm = sharded.get((rank, attempt)) if parts else own
        rows[rank] = RankRow(rank, host, attempt, pid, steps, seen, loss, norm, step_ns, rss,
                             None if cuda is None or cuda < 0 else cuda)  # fmt: skip
    whole = store.about.said_status in ("finished", "failed")
    return tuple(what_sets_apart([rows[r] for r in sorted(rows)], incidents, 0 if whole else READING_NS))


def what_sets_apart(rows: Sequence[RankRow], incidents: Sequence[Incident], reading_ns: int = 0) -> Iterable[RankRow]:
    """Fill `apart`: the rank's incidents above a note and the values that differ, a lag only beyond `reading_ns`."""
    behind = max((r.steps for r in rows), default=0)
    memory, time = _median(rows, lambda r: r.rss_bytes), _median(rows, lambda r: r.step_ns)
    for row in rows:
        named = [i for i in incidents if row.rank in i.finding.ranks]
        named.sort(key=lambda i: SEVERITIES.index(i.finding.severity))
        notes = list(dict.fromkeys(_word(i) for i in named if i.finding.severity != "note"))
        lag = behind - row.steps
        # one step apart is how ranks look when read at one moment
        if row.pid is not None and lag >= 2 and lag * (row.step_ns or reading_ns) >= reading_ns:
            notes.append(f"{lag} steps behind")
        notes += _ratio("memory", row.rss_bytes, memory) + _ratio("step time", row.step_ns, time)
        yield replace(row, apart=", ".join([*filter(None, [row.apart]), *notes]))


def _word(incident: Incident) -> str:
    """The reason code; of a rank that hangs also where it is stuck."""
    where = (
        f" stuck in {incident.finding.subject}" if incident.reason_code == "HANG" and incident.finding.subject else ""
    )
    return incident.reason_code + where


def _median(rows: Sequence[RankRow], value: Callable[[RankRow], float | None]) -> float | None:
    known = [v for r in rows if (v := value(r))]
    return median(known) if len(known) >= APART_RANKS else None


def _ratio(what: str, value: float | None, usual: float | None) -> list[str]:
    if not value or not usual or value < APART_RATIO * usual:
        return []
    return [f"{what} {value / usual:.1f}x the median"]


def _hosts(store: Store) -> dict[tuple[int, int], str]:
    """Host by (attempt, rank), as the nodes' launchers say."""
    about = store.about
    return {(a, r): n.host for n in about.nodes for a, ranks in n.attempts.items() for r in ranks}
