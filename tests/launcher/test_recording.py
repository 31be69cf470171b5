"""A run that can't be recorded in full leaves nothing behind and changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tdbg.launcher import recording
from tdbg.launcher.flags import read_settings
from tdbg.launcher.job import Job


def test_a_full_disk_at_the_start_leaves_no_folder_and_no_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording, "Recorder", full)
    before = dict(os.environ)
    with pytest.raises(OSError, match="No space left"):
        recording.Recording(Job(["tdbg-run"], "t.py"), read_settings({"TDBG_DIR": str(tmp_path)}), {})
    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == before
