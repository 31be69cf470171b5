"""The one build step of our own: puts the second door, `tdbg.pth`, where Python looks for it at every start.

Named in pyproject.toml as setuptools' `build_py`. A wheel's top level becomes the site-packages folder, and only there
is a `.pth` read; no declaration of setuptools can place a single file there. An editable install has no such file:
it is served by the first door (PYTHONPATH) alone.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools.command.build_py import build_py

DOOR = "scripts/tdbg.pth"


class BuildPy(build_py):  # type: ignore[misc]  # setuptools ships no types
    """setuptools' own, plus the door; in a fresh folder, as detectors and probes are found by folder."""

    def run(self) -> None:
        if not self.editable_mode:
            # a detector that was deleted from the source must not live on in the wheel through an old build folder
            shutil.rmtree(Path(self.build_lib, "tdbg"), ignore_errors=True)
        super().run()
        if not self.editable_mode:
            self.mkpath(self.build_lib)
            self.copy_file(DOOR, self._door())

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs: list[str] = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else [*outputs, self._door()]

    def get_source_files(self) -> list[str]:
        """What a source distribution needs beside the packages, so that a wheel can be built from it."""
        return [*super().get_source_files(), DOOR, "scripts/build_door.py"]

    def _door(self) -> str:
        return str(Path(self.build_lib, "tdbg.pth"))
