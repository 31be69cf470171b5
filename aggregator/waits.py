"""What a Python stack says about a rank: whether it waits for other ranks, for a device, for its data, or for nobody.

Pure functions of frames ('file:line function' a line, outermost first), as tables `stack` and `failure` hold them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal["communication", "backward", "device", "data", "debugger", "own"]

# Where torch's Python code calls into a collective, or waits for one. `checkpoint` and `elastic` do other work too.
_COMMUNICATION = re.compile(
    r"/torch/distributed/(?!checkpoint/|elastic/|run\.py|launch\.py)|/torch/nn/parallel/(distributed|comm|scatter_gather)\.py"
    r"|/torch/nn/modules/_functions\.py|/torch/_C/_distributed_c10d"
)
_BACKWARD = re.compile(r"/torch/autograd/(graph|__init__)\.py$")
_DEVICE = re.compile(r"/torch/(cuda|accelerator|xpu|npu)/(__init__|streams|graphs)\.py$")
_LOADER = re.compile(r"/torch/utils/data/(dataloader|_utils/[\w/]+)\.py$")
_DEBUGGER = re.compile(r"/(pdb|bdb|ipdb|pudb)(/\w+)?\.py$|/(debugpy|pydevd|_pydevd_bundle|ipdb|pudb)/|/code\.py$")
_MODULES = re.compile(r"/torch/nn/modules/(module|container)\.py$|/torch/_dynamo/")
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[\d.]*/|^<frozen |/torch/")
_THROUGH = frozenset({"wrapper", "_fn", "inner", "decorate_context", "wrapped", "__call__"})  # decorators of torch's
_FRAME = re.compile(r"^(.*):(\d+|\?\?\?) (.*)$")


@dataclass(frozen=True)
class Frame:
    path: str
    line: str
    function: str

    @property
    def text(self) -> str:
        return f"{self.path.rpartition('/')[2]}:{self.line} {self.function}"


@dataclass(frozen=True)
class Place:
    """Where a rank stands. `where` is the innermost frame of the user's own code, `what` the call it waits in."""

    kind: Kind
    where: str
    what: str = ""

    @property
    def text(self) -> str:
        return f"{self.what} ({self.where})" if self.what and self.where else self.what or self.where


def frames_of(text: str) -> list[Frame]:
    """Frames, outermost first; lines that are none are left out."""
    return [Frame(*m.groups()) for line in text.splitlines() if (m := _FRAME.match(line))]


@lru_cache(maxsize=4096)
def place_of(text: str) -> Place | None:
    """What the stack says; None without one."""
    frames = frames_of(text)
    if not frames:
        return None
    own = [f for f in frames if not _LIBRARY.search(f.path)]
    where = (own or frames)[-1].text
    inner = frames[::-1]
    if any(_DEBUGGER.search(f.path) for f in frames):
        return Place("debugger", where)
    if any(_LOADER.search(f.path) for f in _inside(inner, own)):
        return Place("data", where, "its data loader's workers")
    if _BACKWARD.search(inner[0].path):
        return Place("backward", where, "backward")
    torch = _torch_frames(inner)
    if any(_COMMUNICATION.search(f.path) for f in torch):
        return Place("communication", where, _called([f for f in torch if _COMMUNICATION.search(f.path)]))
    if torch and _DEVICE.search(torch[0].path):
        return Place("device", where, torch[0].function)
    return Place("own", where, "" if inner[0].text == where else inner[0].function)


def user_code(text: str) -> tuple[tuple[str, str], ...]:
    """The user's functions on this stack, outermost first, wherever in the innermost of them it stands."""
    own = [f for f in frames_of(text) if not _LIBRARY.search(f.path)]
    return tuple((f.path, f.function if f is own[-1] else f"{f.function}:{f.line}") for f in own)


def _inside(inner: Sequence[Frame], own: Sequence[Frame]) -> list[Frame]:
    """Frames called, directly or not, by the user's innermost frame."""
    found = []
    for f in inner:
        if own and f is own[-1]:
            break
        found.append(f)
    return found


def _torch_frames(inner: Sequence[Frame]) -> list[Frame]:
    """The innermost frames as long as they are torch's, up to the modules that it was called through."""
    found: list[Frame] = []
    for f in inner:
        if "/torch/" not in f.path or _MODULES.search(f.path):
            break
        found.append(f)
    return found


def _called(torch: Sequence[Frame]) -> str:
    """The function that the program called: the outermost that is no decorator."""
    named = [f.function for f in torch if f.function not in _THROUGH]
    return named[-1] if named else torch[-1].function
