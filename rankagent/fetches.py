"""What happens while a loader makes a batch, in a worker process or in the rank's own: streams moved, samples lost.

torch's fetchers are the one place that every loader makes its batches in, so they are watched there. A watch belongs to
one fetcher, that is to one worker and pass. What it has to say goes to `deliver`: in a worker that is a file which the
rank's main process reads (`worker`), in the main process a list.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import guard, torchprivate
from .dataset import levels, root_ids
from .handled import Tracer
from .patch import Undo, replace, undo_all
from .samples import batch_size
from .streams import Stream, global_streams, module_generators, owned_generators, owned_stream

Message = dict[str, Any]

WATCHED_FETCHES = 100  # the first of each watch are looked at one by one, like the close watch of the steps
EVERY_FETCH = 16  # after that this share of them
DEAR_EVERY_FETCH = 64  # where tracing costs more than the limit below; EVERY_FETCH among the first
CALL_NS = 2_000  # what the tracer costs per function call of the traced code: 1.3 to 2.7 us, python 3.11 and 3.12
WORKER_LIMIT_NS, MAIN_LIMIT_NS = 2_000_000, 600_000  # of tracing per batch: in a worker it runs beside training
STREAM_FETCHES = (1, 2, 4, 8)  # after these the streams are looked at again: two moves tell drawing from seeding
MESSAGES_LIMIT = 256  # about single batches, per watch
HABIT_SAMPLES, HABIT_RATIO = 64, 0.5  # exceptions in half of so many samples are how this code works


class Watch:
    """Watches the batches that one fetcher makes."""

    def __init__(
        self, torch: Any, fetcher: Any, worker: int, seedings_seen: bool, deliver: Callable[[Message], None]
    ) -> None:
        self.torch, self.worker, self.deliver = torch, worker, deliver
        self.seedings_seen = seedings_seen
        self.collate = fetcher.collate_fn
        self.chain = levels(fetcher.dataset)
        self.auto = bool(fetcher.auto_collation)
        self.on = True
        self.fetches = self.judged = self.traced = self.caught = self.said = 0
        self.untraced = 0  # batches that could not be traced, as somebody else traces this thread
        self.dear = False
        self.same_size = 0  # batches in which as many samples came out of the collate function as went in
        self.listed: list[Any] = []  # positions that the batch in the making was asked for
        self.given: list[bool] = []  # per sample of the batch in the making: it is None
        root = self.chain[0].dataset
        tracer = Tracer(root, self.collate)
        self.tracer = tracer if tracer.worth_it else None
        self.tracing = False
        owned = owned_generators(root, "dataset", {})
        owned_generators(self.collate, "collate", owned)
        for module in {type(root).__module__, getattr(self.collate, "__module__", "")}:
            if module.partition(".")[0] not in ("torch", "numpy", "random", "builtins"):
                module_generators(module, owned)
        known = {id(torch.default_generator)}
        self.owned = {name: g for name, g in owned.items() if id(g) not in known}
        self.look()

    def off(self, error: Exception) -> None:
        """An error of ours: this watch says so and looks no more."""
        self.on = False
        if self.tracer is not None:
            self.tracer.stop()
        self.deliver({"kind": "error", "text": guard.describe(error)})

    def look(self) -> None:
        """Say how the streams stand."""
        found: list[Stream] = global_streams(self.torch, self.seedings_seen)
        found += [owned_stream(name, generator) for name, generator in self.owned.items()]
        self.deliver({"kind": "streams", "worker": self.worker, "fetches": self.fetches,
                      "names": [s.name for s in found], "digests": [s.digest for s in found],
                      "origins": [s.origin for s in found], "untraced": self.untraced})  # fmt: skip

    def begin(self, index: Any) -> None:
        self.listed = list(index) if self.auto else [index]
        self.given = []
        wanted = self.tracer is not None and not self.spared()
        self.tracing = wanted and self.tracer is not None and self.tracer.start()
        self.untraced += wanted and not self.tracing

    def quiet(self) -> bool:
        """Whether this batch is passed on with a look for None alone: 1 us instead of 15."""
        return self.fetches >= WATCHED_FETCHES and self.fetches % EVERY_FETCH != 0

    def spared(self) -> bool:
        """Whether this batch is not traced, as that costs too much."""
        every = EVERY_FETCH if self.fetches < WATCHED_FETCHES else DEAR_EVERY_FETCH
        return self.dear and self.fetches % every != 0

    def samples(self, data: Any) -> None:
        """The samples as the data set gave them, before they are put together."""
        self.given = [s is None for s in data] if self.auto and isinstance(data, list) else [data is None]

    def done(self, data: Any, failed: bool = False) -> None:
        """The batch is made, or an exception came out of the making."""
        if self.tracing and self.tracer is not None:
            self.tracer.stop()
        self.fetches += 1
        if not failed:
            self.judge(data)
        if self.fetches in STREAM_FETCHES:
            self.look()

    def judge_late(self, index: Any, data: Any) -> None:
        """A batch that nobody looked at closely turned out to be odd."""
        self.listed = list(index) if self.auto else [index]
        self.judge(data)

    def judge(self, data: Any) -> None:
        """Say what was odd about this batch, if anything was."""
        tracer = self.tracer if self.tracing else None
        samples = tracer.samples if tracer is not None else []
        if tracer is not None:
            self.dear = tracer.calls * CALL_NS > (WORKER_LIMIT_NS if self.worker >= 0 else MAIN_LIMIT_NS)
            self.traced += len(samples)
            self.caught += sum(bool(s.caught) for s in samples)
            if self.traced >= HABIT_SAMPLES and self.caught > HABIT_RATIO * self.traced:
                self.tracer = None
        self.judged += 1
        made = batch_size(data) if self.auto else 1
        full = len(self.given) or len(self.listed)
        self.same_size += made == full
        short = 0 <= made < full and self.same_size > 0
        outside = tracer.outside if tracer is not None else []
        caught = [i for i, s in enumerate(samples) if s.caught]
        if not (any(self.given) or caught or short or outside) or self.said >= MESSAGES_LIMIT:
            return
        self.said += 1
        asked = [] if None in self.listed[:1] else root_ids(self.chain, self.listed)
        ids = asked if len(asked) == max(len(self.given), len(samples)) else []
        instead = [i for i in caught if samples[i].instead is not None]
        kinds = sorted({name for i in caught for name in samples[i].caught} | set(outside))
        self.deliver({
            "kind": "batch", "worker": self.worker, "fetches": self.fetches, "asked": full, "made": made,
            "first": asked[0] if asked else -1,
            "nones": sum(self.given), "none_ids": [ids[i] for i, none in enumerate(self.given) if none and ids],
            "none_caught": sum(none and bool(s.caught) for none, s in zip(self.given, samples, strict=False)),
            "caught_ids": [ids[i] for i in caught if ids], "instead_of": [ids[i] for i in instead if ids],
            "instead": [samples[i].instead for i in instead if ids], "outside": len(outside),
            "exceptions": ", ".join(kinds[:8]), "samples_traced": self.traced, "samples_caught": self.caught,
            "judged": self.judged, "same_size": self.same_size,
        })  # fmt: skip


class Collate:
    """Stands in a fetcher for its collate function, so that the samples are seen before they are put together."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __call__(self, data: Any) -> Any:
        watch = self.watch
        if watch.on and (not watch.quiet() or data is None or (type(data) is list and any(s is None for s in data))):
            guard.attempt(watch.off, watch.samples, data)
        return watch.collate(data)


def install(torch: Any, make: Callable[[Any], Watch | None]) -> Undo:
    """Watch every batch that a fetcher of this process and of those forked from it makes; `make` builds its watch."""

    def wrap(original: Any) -> Any:
        def fetch(fetcher: Any, index: Any) -> Any:
            watch = fetcher.__dict__.get("_tdbg_watch")
            if watch is None:
                watch = fetcher.__dict__["_tdbg_watch"] = guard.attempt(lambda e: None, begin, fetcher) or NOBODY
            if not watch.on:
                return original(fetcher, index)
            if watch.quiet():
                watch.given, watch.tracing = [], False
                data = original(fetcher, index)
                if watch.given:  # there was a None among the samples
                    guard.attempt(watch.off, watch.judge_late, index, data)
                watch.fetches += 1
                return data
            guard.attempt(watch.off, watch.begin, index)
            try:
                data = original(fetcher, index)
            except BaseException:
                guard.attempt(watch.off, watch.done, None, True)
                raise
            guard.attempt(watch.off, watch.done, data)
            return data

        return fetch

    def begin(fetcher: Any) -> Watch | None:
        watch = make(fetcher)
        if watch is not None:
            fetcher.collate_fn = Collate(watch)
        return watch

    return undo_all([replace(kind, "fetch", wrap) for kind in torchprivate.fetcher_classes(torch)])


class _Nobody:
    """Stands for the watch of a fetcher that nobody watches."""

    on = False


NOBODY = _Nobody()
