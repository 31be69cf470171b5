"""The drills of scripts/drill, in short: one run each, with a seed of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DRILL = Path(__file__).parents[2] / "scripts" / "drill"


def drill(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(DRILL), *arguments], capture_output=True, text=True, timeout=280, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["kill", "launcher", "full-disk", "hang", "leak", "straggler", "compare"])
def test_a_run_of_each_drill_misses_nothing(name: str) -> None:
    code, said = drill(name, "--times", "1", "--seed", "11")
    assert code == 0, said
    rows = 2 if name == "full-disk" else 1  # one that fills up and one that is read-only
    assert len(re.findall(r"^ +\d+  ok  ", said, re.MULTILINE)) == rows, said
    if name == "full-disk" and "skipped" in said:
        pytest.skip(re.findall(r"skipped, (.*)", said)[0])


def test_a_drill_that_does_not_exist_is_a_wrong_command_line() -> None:
    code, said = drill("earthquake")
    assert (code, "invalid choice" in said) == (2, True)
