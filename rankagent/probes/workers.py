"""What happens while batches are made, in loader workers or in the rank itself: streams drawn from, samples lost.

Writes    stream, making
Costs     60 us at the first batches of a pass; 1 us a batch to look for messages; the making of batches is traced only
          where a data set's code can handle exceptions, within 0.6 ms a batch in the rank, 2 ms in a worker, and after
          the first 100 batches every 16th
Blind to  data sets that are not made of Python code; messages of workers that end after the rank has
"""

from __future__ import annotations

import os
from typing import Any

from .. import torchprivate, worker
from ..agent import Emit
from ..fetches import Message, Watch
from ..fetches import install as install_watches
from ..patch import Undo
from ..tables import Column, Table
from .failure import PROBE

STREAM = Table("stream", (
    Column("loader", "int32", "", "see loader"),
    Column("iterator", "int32", "", "see loader"),
    Column("worker", "int32", "", "worker that makes the batches; -1: the rank's own process does"),
    Column("fetches", "int64", "", "batches that it had made in this pass"),
    Column("untraced", "int64", "", "of these, batches in whose making no exception could be seen, as a debugger or coverage tool traces there"),
    Column("names", "text", "", "streams, comma separated: torch, numpy, random, then generators that user objects own"),
    Column("digests", "int64[]", "", "digest of the state of each, alike in all processes; 0 for one that is not in use"),
    Column("origins", "int64[]", "", "per stream a number that changes when it is seeded anew; -1 where that can't be seen"),
), "how the random streams stood before the first batch of a pass and after some of the next, per worker")  # fmt: skip

MAKING = Table("making", (
    Column("loader", "int32", "", "see loader"),
    Column("iterator", "int32", "", "see loader"),
    Column("worker", "int32", "", "worker that made the batch; -1: the rank's own process did"),
    Column("fetches", "int64", "", "batches that it had made in this pass, this one included"),
    Column("asked", "int32", "", "samples that the batch was to be made of"),
    Column("made", "int32", "", "samples in the batch; -1 unknown"),
    Column("judged", "int32", "", "batches of this pass and worker so far whose size was looked at"),
    Column("same_size", "int32", "", "of them, those that held as many samples as were asked for"),
    Column("first", "int64", "", "id of the first sample asked for; -1 unknown"),
    Column("nones", "int32", "", "samples that the data set gave as None"),
    Column("none_caught", "int32", "", "of them, those during whose making an exception was raised"),
    Column("none_ids", "int64[]", "", "their ids"),
    Column("caught_ids", "int64[]", "", "ids of samples during whose making an exception was raised and handled"),
    Column("instead_of", "int64[]", "", "ids asked for in whose place the data set gave the sample of another id"),
    Column("instead", "int64[]", "", "positions in the data set of the samples given instead, in the same order"),
    Column("outside", "int32", "", "exceptions handled outside of any sample: in the collate function or in an iterable data set"),
    Column("samples_traced", "int64", "", "samples of this pass and worker so far that were watched for exceptions"),
    Column("samples_caught", "int64", "", "of them, those during whose making one was raised"),
    Column("exceptions", "text", "", "classes of the exceptions of this batch"),
), "one row per batch that lost samples or handled exceptions while it was made")  # fmt: skip

TABLES = (STREAM, MAKING)

EVERY_BATCHES = 16  # workers' files are read at the first batches of a pass, then at every 16th and at its end


def install(emit: Emit) -> Undo:
    agent = emit.agent
    folder = agent.recorder.folder
    line = worker.Line(folder)
    readers: dict[tuple[int, int], tuple[worker.Reader, int]] = {}  # (loader, pid) -> reader, pass

    counts: dict[int, tuple[int, int]] = {}  # loader -> pass, batches of it so far

    def make(fetcher: Any) -> Watch | None:
        if os.getpid() != agent.recorder.pid:
            return worker.watch(agent.torch, fetcher, line, True)
        if not agent.live or "workers" in agent.disabled:
            return None
        messages: list[Message] = []
        fetcher.__dict__["_tdbg_messages"] = messages
        return Watch(agent.torch, fetcher, -1, True, messages.append)

    def taken(iterator: Any, loader: int, number: int, end: str) -> None:
        fetcher = iterator.__dict__.get("_dataset_fetcher")
        if fetcher is not None:
            messages = fetcher.__dict__.get("_tdbg_messages", ())
            for message in messages:
                tell(message, loader, number)
            if messages:
                messages.clear()
            return
        processes = iterator.__dict__.get("_workers") or ()
        of, index = counts.get(loader, (-1, 0))
        if of != number:
            index = 0
            follow(loader, number, [p.pid for p in processes if p.pid])
        counts[loader] = number, index + 1
        if index < 4 or index % EVERY_BATCHES == 0 or end:
            drain(loader)
        if end == "StopIteration" and not getattr(iterator, "_persistent_workers", False):
            follow(loader, number, [])

    def follow(loader: int, number: int, pids: list[int]) -> None:
        """These are now the workers of this loader; what older ones have left is read and their files go."""
        for key in [k for k in readers if k[0] == loader and k[1] not in pids]:
            reader, of = readers.pop(key)
            for message in reader.read():
                tell(message, loader, of)
            reader.close()
        for pid in pids:
            known = readers.get((loader, pid))
            readers[loader, pid] = (known[0] if known else worker.Reader(folder, pid), number)

    def drain(loader: int) -> None:
        for (of, _), (reader, number) in readers.items():
            if of == loader:
                for message in reader.read():
                    tell(message, loader, number)

    def tell(message: Message, loader: int, number: int) -> None:
        m = message
        if m["kind"] == "streams":
            emit(
                STREAM,
                (loader, number, m["worker"], m["fetches"], m["untraced"]),
                (",".join(m["names"]), m["digests"], m["origins"]),
            )
        elif m["kind"] == "batch":
            emit(MAKING, (loader, number, *(m[c.name] for c in MAKING.fixed[2:])), [m[c.name] for c in MAKING.variable])
        else:
            raise RuntimeError(f"in a loader's worker: {m.get('text')}")

    def ending() -> None:
        for loader in {key[0] for key in readers}:
            follow(loader, 0, [])

    if not torchprivate.fetcher_classes(agent.torch):
        emit(PROBE, (), ("workers", "unavailable", "this torch makes batches elsewhere"))
    agent.batch_taken = lambda *of: emit.guarded(taken, *of)
    emit.on("close", ending)
    return install_watches(agent.torch, make)
