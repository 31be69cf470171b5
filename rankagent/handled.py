"""Exceptions that a data set or a collate function handles inside, and which sample it hands out in their place.

Nothing comes out of such code that tells of them, so it is traced: the frames of the user's own files only, without
line events, and only while a batch is made. Python calls the tracer once per function call. Code without a handler is
never traced, nor is a thread that somebody else traces (a debugger, a coverage tool).
"""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

# what ends iterations and generators is no error; `hasattr` and defaults of getattr raise the third
ORDINARY = (StopIteration, StopAsyncIteration, GeneratorExit, AttributeError)
_PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"  # folder of the standard library
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages", _PYTHON))
_HANDLER = dis.opmap.get("POP_EXCEPT", -1)  # every except clause and every with statement ends in one (3.10 to 3.14)


class Sample:
    """What happened while the data set made one sample."""

    __slots__ = ("at_first", "caught", "instead", "nested", "returned")

    def __init__(self) -> None:
        self.caught: list[str] = []  # classes of the exceptions that were raised inside, in order
        self.at_first: Any = None  # the index when the first of them was raised
        self.nested: Any = None  # index of the last call of the data set by itself since then
        self.returned: Any = None  # what that call gave
        self.instead: int | None = None  # index of the sample that was handed out in place of the one asked for


class Tracer:
    """Watches one data set and its collate function. `start`, make a batch, `stop`, then read `samples`."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self.files = _files(dataset, collate)
        entry = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
        self.entry: CodeType | None = entry if entry is not None and entry.co_filename in self.files else None
        self.index = entry.co_varnames[1] if entry is not None and entry.co_argcount > 1 else ""
        self.samples: list[Sample] = []
        self.outside: list[str] = []  # exceptions handled while no sample was being made: in the collate function
        self.calls = 0
        self._open: list[FrameType] = []

    @property
    def worth_it(self) -> bool:
        """Whether some code in the files can handle an exception at all."""
        return bool(self.files) and any(map(_handles, self.files.values()))

    def start(self) -> bool:
        """Trace this thread from here; False when somebody else does."""
        if sys.gettrace() is not None:
            return False
        self.samples, self.outside, self.calls, self._open = [], [], 0, []
        sys.settrace(self._called)
        return True

    def stop(self) -> None:
        if sys.gettrace() == self._called:  # bound methods are made anew at each look
            sys.settrace(None)
        self._open.clear()
        for sample in self.samples:
            sample.returned = sample.at_first = None  # nothing of the user's is kept

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.calls += 1
        code = frame.f_code
        if code is self.entry:
            frame.f_trace_lines = False
            if not self._open:
                self.samples.append(Sample())
            elif self.samples[-1].caught:
                self.samples[-1].nested = frame.f_locals.get(self.index)
            self._open.append(frame)
            return self._in_entry
        if code.co_filename in self.files:
            frame.f_trace_lines = False
            return self._in_file
        return None

    def _in_file(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception" and not issubclass(arg[0], ORDINARY):
            self._raised(arg[0].__name__)
        return self._in_file

    def _in_entry(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception" and not issubclass(arg[0], ORDINARY):
            self._raised(arg[0].__name__)
        elif event == "return" and self._open:
            self._open.pop()
            sample = self.samples[-1]
            if self._open:
                sample.returned = arg
            elif sample.caught and arg is not None:
                self._handed_out(sample, frame, arg)
        return self._in_entry

    def _raised(self, name: str) -> None:
        if not self._open:
            self.outside.append(name)
            return
        sample = self.samples[-1]
        if not sample.caught:
            sample.at_first = self._open[0].f_locals.get(self.index)
        sample.caught.append(name)

    def _handed_out(self, sample: Sample, frame: FrameType, result: Any) -> None:
        """The sample of another index: the data set asked itself for it, or changed the index that it was given."""
        asked: Any = sample.at_first
        now: Any = frame.f_locals.get(self.index)
        if sample.nested is not None and sample.returned is result:
            now = sample.nested
        try:
            asked, now = int(asked), int(now)
        except (TypeError, ValueError):
            return
        if asked != now:
            sample.instead = now


def _files(dataset: Any, collate: Any) -> dict[str, list[CodeType]]:
    """The user's own files behind a data set and a collate function, with the code of each that may be run."""
    found: dict[str, list[CodeType]] = {}
    by_class = not hasattr(collate, "__code__")  # a collate function may be an object that can be called
    for owner in (*type(dataset).__mro__, *(type(collate).__mro__ if by_class else (collate,))):
        module = sys.modules.get(getattr(owner, "__module__", None) or "")
        path = getattr(module, "__file__", None)
        if path and not any(part in path for part in _LIBRARIES):
            for code in _codes(vars(owner).values() if isinstance(owner, type) else (owner,)):
                found.setdefault(code.co_filename, []).append(code)
            for code in _codes(vars(module).values()):
                if code.co_filename in found:
                    found[code.co_filename].append(code)
    return found


def _codes(values: Any) -> Iterator[CodeType]:
    for value in list(values):
        value = getattr(value, "__func__", getattr(value, "fget", None) or value)
        code = getattr(value, "__code__", None)
        if isinstance(code, CodeType):
            yield code


def _handles(codes: list[CodeType]) -> bool:
    waiting = list(codes)
    while waiting:
        code = waiting.pop()
        if _HANDLER in code.co_code[::2]:
            return True
        waiting += [c for c in code.co_consts if isinstance(c, CodeType)]
    return False
