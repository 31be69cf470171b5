"""Writing a page: whole or not at all, readable by its user only, as the run that it tells of."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write(path: Path, text: str) -> int:
    """Write beside `path` and put it in place. Gives its size in bytes; raises OSError, and then changes nothing."""
    data = text.encode("utf-8", "backslashreplace")
    if path.is_dir():
        raise IsADirectoryError(21, "it is a folder")
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # made with 0600
    try:
        with os.fdopen(number, "wb") as out:
            out.write(data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return len(data)
