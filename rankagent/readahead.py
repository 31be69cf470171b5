"""Loaders that fetch batches before training gets them: the batches wait here until they are handed out.

Accelerate's loaders read one batch ahead to know which is the last, its dispatcher reads on rank 0 for all ranks,
Lightning reads one ahead of data without a length, and torchdata's loader reads again what a resumed pass had consumed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from . import guard
from .afterimport import when
from .patch import Undo, replace, undo_all


class Waiting:
    """Batches fetched inside one pass of such a loader and not handed out yet: groups, oldest first.

    What is handed out at once is one group: one batch, one of each loader that is read side by side, or one for each of
    the `ranks` that a dispatcher serves (0 without). `skip` groups at the start are never handed out. `ends` are the
    ends of the loaders' passes, which come before the last batch is handed out.
    """

    def __init__(self, skip: int = 0, grouped: bool = False, ranks: int = 0) -> None:
        self.groups: deque[list[Any]] = deque()
        self.skip, self.grouped, self.ranks = skip, grouped, ranks
        self.ends: list[Any] = []
        self.iterator: Any = None  # a dispatcher's own, which only rank 0 reads

    def open_group(self) -> None:
        self.groups.append([])

    def add(self, fetched: Any) -> None:
        if not self.grouped or not self.groups:
            self.open_group()
        self.groups[-1].append(fetched)

    def next_group(self) -> list[Any]:
        """What is handed out now; empty when nothing of it was fetched in this process."""
        while self.groups:
            group = self.groups.popleft()
            if group and self.skip:
                self.skip -= 1
            elif group:
                return group
        return []


class Discarded(Waiting):
    """Batches that are read only to find the place where a resumed pass goes on: training never gets them."""

    def add(self, fetched: Any) -> None:
        return


class Following:
    """The frameworks' loaders, each followed from the import of its module on.

    `fetching` is the pass that fetches at this moment, None where training itself does. `hand(group, batch, waiting)`
    is called when a group is handed out, `end(waiting)` when the pass is over. `follow_tasks(original)` replaces the
    `_reset` of a loader with workers that is not derived from torch's.
    """

    def __init__(self, active: Callable[[], bool], off: Callable[[Exception], None],
                 hand: Callable[[list[Any], Any, Waiting], None], end: Callable[[Waiting], None],
                 follow_tasks: Callable[[Any], Any]) -> None:  # fmt: skip
        self.active, self.off, self.hand, self.end, self.follow_tasks = active, off, hand, end, follow_tasks
        self.fetching: Waiting | None = None
        self.undos: list[Undo] = []
        for name, follow in (
            ("accelerate.data_loader", self._accelerate),
            ("torchdata.stateful_dataloader.stateful_dataloader", self._torchdata),
            ("lightning.pytorch.loops.fetchers", self._lightning),
            ("pytorch_lightning.loops.fetchers", self._lightning),
        ):
            when(name, partial(self._came, follow))

    def _came(self, follow: Callable[[Any], None], module: Any) -> None:
        if self.active():
            guard.attempt(self.off, follow, module)

    def undo(self) -> None:
        """Leave the frameworks as they were found."""
        undo_all(self.undos)()

    def _patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        if hasattr(owner, name):
            self.undos.append(replace(owner, name, make))

    def within(self, waiting: Waiting | None, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`fn(*args)`, with all that is fetched in it put into `waiting`."""
        before, self.fetching = self.fetching, waiting
        try:
            return fn(*args, **kwargs)
        finally:
            self.fetching = before

    # -------------------------------------------------------- accelerate

    def _accelerate(self, module: Any) -> None:
        for name in ("DataLoaderShard", "DataLoaderDispatcher"):
            owner = getattr(module, name, None)
            if owner is not None:
                self._patch(owner, "__iter__", self._whole_pass)
                self._patch(owner, "_fetch_batches", self._fetch_batches)

    def _whole_pass(self, original: Any) -> Any:
        def __iter__(loader: Any) -> Any:
            if not self.active():
                return original(loader)
            skip = getattr(loader, "skip_batches", 0)
            dispatches = hasattr(type(loader), "_fetch_batches")
            ranks = getattr(getattr(loader, "state", None), "num_processes", 1) if dispatches else 0
            waiting = Waiting(skip if isinstance(skip, int) else 0, dispatches, ranks)
            return self._follow(loader, original(loader), waiting)

        return __iter__

    def _follow(self, loader: Any, generator: Any, waiting: Waiting) -> Iterator[Any]:
        box: list[Any] = []  # not a local name: this frame must not hold the batch while training has it
        try:
            while True:
                try:
                    box.append(self.within(waiting, next, generator))
                except StopIteration:
                    break
                guard.attempt(self.off, self._hand_next, waiting, box)
                yield box.pop()
        finally:
            getattr(generator, "close", lambda: None)()  # a plain iterator has none
            if getattr(loader, "end_of_dataloader", False):  # trainers that count leave at the last batch
                guard.attempt(self.off, self.end, waiting)

    def _hand_next(self, waiting: Waiting, box: list[Any]) -> None:
        self.hand(waiting.next_group(), box[0], waiting)

    def _fetch_batches(self, original: Any) -> Any:
        def _fetch_batches(loader: Any, iterator: Any) -> Any:
            waiting = self.fetching
            if waiting is not None:
                waiting.open_group()
                waiting.iterator = iterator
            return original(loader, iterator)

        return _fetch_batches

    # -------------------------------------------------------- torchdata

    def _torchdata(self, module: Any) -> None:
        self._patch(getattr(module, "StatefulDataLoader", None), "_get_iterator", self._resumed)
        self._patch(getattr(module, "_StatefulMultiProcessingDataLoaderIter", None), "_reset", self.follow_tasks)

    def _resumed(self, original: Any) -> Any:
        def _get_iterator(loader: Any) -> Any:
            return self.within(Discarded(), original, loader)

        return _get_iterator

    # -------------------------------------------------------- lightning

    def _lightning(self, module: Any) -> None:
        ahead = getattr(module, "_PrefetchDataFetcher", None)
        self._patch(ahead, "__iter__", self._prefetch)
        self._patch(ahead, "__next__", self._prefetched)
        self._patch(ahead, "reset", self._prefetch_over)
        self._patch(getattr(module, "_DataFetcher", None), "__next__", self._fetch)

    def _prefetch(self, original: Any) -> Any:
        def __iter__(fetcher: Any) -> Any:
            if not self.active():
                return original(fetcher)
            waiting = Waiting(grouped=True)
            result = self.within(waiting, original, fetcher)  # its `reset` ends the pass before
            if getattr(fetcher, "length", None) is None:  # else it doesn't read ahead
                fetcher.__dict__["_tdbg_waiting"] = waiting
            return result

        return __iter__

    def _prefetched(self, original: Any) -> Any:
        def __next__(fetcher: Any) -> Any:
            waiting = fetcher.__dict__.get("_tdbg_waiting")
            if waiting is None:
                return original(fetcher)
            batch = self.within(waiting, original, fetcher)
            guard.attempt(self.off, self._hand_next, waiting, [batch])
            return batch

        return __next__

    def _fetch(self, original: Any) -> Any:
        def __next__(fetcher: Any) -> Any:
            if self.fetching is not None:
                self.fetching.open_group()
            return original(fetcher)

        return __next__

    def _prefetch_over(self, original: Any) -> Any:
        def reset(fetcher: Any) -> None:
            waiting = fetcher.__dict__.pop("_tdbg_waiting", None)
            if waiting is not None:
                guard.attempt(self.off, self.end, waiting)
            original(fetcher)

        return reset
