"""A loader's worker process: how it tells its rank what it saw.

Each worker appends lines to a file of its own in the rank's record folder, `worker-PID`, before it hands the batch
over; the main process reads it when it takes a batch. One write per line: no lock, no thread, nothing that could block
on the other side, and nothing is added to the queue that the batches travel through. Forked workers inherit what the
rank installed; one that was spawned comes in through the injection doors and installs it itself (`start_spawned`).
"""

from __future__ import annotations

import json
import os
from typing import Any

from . import fetches, guard, identity

FILE_LIMIT_BYTES = 1 << 20  # per worker process: some 4,000 messages


class Line:
    """The worker's end: a file that is opened with the first message of this process."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.pid = self.fd = -1
        self.written = 0

    def send(self, message: fetches.Message) -> None:
        """Append one message. Raises OSError when the disk is full."""
        if self.pid != os.getpid():  # a fork server's children inherit an open one
            path = os.path.join(self.folder, f"worker-{os.getpid()}")
            self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self.pid, self.written = os.getpid(), 0
        line = json.dumps(message).encode() + b"\n"
        if self.written + len(line) <= FILE_LIMIT_BYTES:
            self.written += os.write(self.fd, line)


class Reader:
    """The main process's end, for one worker."""

    def __init__(self, folder: str, pid: int) -> None:
        self.path = os.path.join(folder, f"worker-{pid}")
        self.at = 0
        self.fd = -1

    def read(self) -> list[fetches.Message]:
        """The messages that have come since the last call."""
        if self.fd < 0:
            try:
                self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return []
        raw = os.pread(self.fd, FILE_LIMIT_BYTES, self.at)
        whole = raw[: raw.rfind(b"\n") + 1]
        self.at += len(whole)
        return [m for m in map(_message, whole.splitlines()) if m is not None]

    def close(self) -> None:
        """All was read: the file has served."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            os.unlink(self.path)


def _message(line: bytes) -> fetches.Message | None:
    try:
        message = json.loads(line)
    except ValueError:  # a line that a full disk cut short
        return None
    return message if isinstance(message, dict) else None


def watch(torch: Any, fetcher: Any, line: Line, seedings_seen: bool) -> fetches.Watch | None:
    """The watch of a fetcher in a worker; None in any other process."""
    info = torch.utils.data.get_worker_info()
    if info is None:
        return None

    return fetches.Watch(torch, fetcher, info.id, seedings_seen, line.send)


def start_spawned(torch: Any) -> None:
    """In a process below a rank's main one: watch the batches that it makes if it turns out to be a worker."""
    folder = identity.parents_folder(os.environ)
    if folder is not None:
        line = Line(str(folder))
        guard.attempt(lambda e: None, fetches.install, torch, lambda fetcher: watch(torch, fetcher, line, False))
