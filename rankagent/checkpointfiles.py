"""Which file a checkpoint is: where it was written to or read from, and what tells one content of it from another."""

from __future__ import annotations

import os
import zlib
from typing import Any

DIGEST_BYTES = (
    65536  # read at each end of a file: a checkpoint that was written again differs in its first or last part
)


def pick(args: Any, kwargs: Any, at: int, name: str) -> Any:
    """An argument that was given by position or by name."""
    return args[at] if len(args) > at else kwargs.get(name)


def target(args: Any, kwargs: Any) -> Any:
    """Where torch.distributed.checkpoint saves to or loads from."""
    given = kwargs.get("checkpoint_id")
    writer = kwargs.get("storage_writer") or kwargs.get("storage_reader")
    return given if given is not None else getattr(writer, "path", pick(args, kwargs, 1, ""))


def path_of(file: Any) -> str:
    """The absolute path of a file that was given by name, or of a file object that has one."""
    name = file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", "")
    return os.path.realpath(name) if isinstance(name, (str, os.PathLike)) and os.fspath(name) else ""


def identity_of(path: str) -> dict[str, int]:
    """What tells one content of a file from another; nothing for a folder or a file that can't be read."""
    try:
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            head = file.read(DIGEST_BYTES)
            file.seek(max(about.st_size - DIGEST_BYTES, 0))
            digest = zlib.crc32(file.read(DIGEST_BYTES), zlib.crc32(head, about.st_size & 0xFFFFFFFF))
    except OSError:
        return {}
    return {"size_bytes": about.st_size, "mtime_ns": about.st_mtime_ns, "inode": about.st_ino, "digest": digest}
