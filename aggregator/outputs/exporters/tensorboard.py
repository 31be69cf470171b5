"""TensorBoard event files: a folder a rank, so that TensorBoard lays ranks over each other; incidents as text.

Goes to the folder of -o, else ./RUN-tensorboard. NaN and Inf are kept: TensorBoard marks them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...exporting import Point
from ...findings import Verdict
from ..clean import clean
from ..text import found
from . import Target

EXTRA = ("tensorboard", "tensorboard")


class TensorBoard:
    """A writer a rank and attempt, open until the end."""

    def __init__(self, folder: Path, library: Any) -> None:
        self.where = f"tensorboard --logdir {folder}"
        self._folder, self._library, self._writers = folder, library, dict[str, Any]()
        self._steps = 0

    def points(self, points: Sequence[Point]) -> None:
        for p in points:
            name = f"rank-{p.rank:05d}" + (f"-attempt-{p.attempt}" if p.attempt else "")
            value = self._library.Value(tag=p.metric, simple_value=p.value)
            self._add(name, self._library.Summary(value=[value]), p.step, p.time_ns / 1e9)
            self._steps = max(self._steps, p.step)
        for writer in self._writers.values():
            writer.flush()

    def incidents(self, verdict: Verdict) -> None:
        text = "\n\n".join(["    " + clean(line) for line in found(verdict)])  # indented: Markdown leaves it alone
        value = self._library.Value(tag="incidents", metadata=self._library.text(), tensor=self._library.string(text))
        self._add("incidents", self._library.Summary(value=[value]), self._steps, None)

    def close(self, status: str) -> None:
        for writer in self._writers.values():
            writer.close()

    def _add(self, name: str, summary: Any, step: int, time_s: float | None) -> None:
        if name not in self._writers:
            self._writers[name] = self._library.EventFileWriter(str(self._folder / name))
        event = self._library.Event(summary=summary, step=step)
        if time_s is not None:
            event.wall_time = time_s
        self._writers[name].add_event(event)


class _Library:
    """The few names of TensorBoard that are needed; importing them takes a second."""

    def __init__(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.EventFileWriter, self.Event, self.Summary = EventFileWriter, event_pb2.Event, summary_pb2.Summary
        self.Value, self._summary, self._tensor = summary_pb2.Summary.Value, summary_pb2, tensor_pb2
        self._string = types_pb2.DT_STRING

    def text(self) -> Any:
        plugin = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        return self._summary.SummaryMetadata(plugin_data=plugin)

    def string(self, text: str) -> Any:
        return self._tensor.TensorProto(dtype=self._string, string_val=[text.encode()])


def begin(target: Target) -> TensorBoard:
    library = _Library()
    folder = Path(target.output or f"{target.run}-tensorboard")
    folder.mkdir(parents=True, exist_ok=True)
    return TensorBoard(folder, library)
