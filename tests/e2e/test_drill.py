"""The drills of scripts/drill, in short: two runs each, with seeds of their own."""

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


@pytest.mark.parametrize("name", ["kill", "launcher", "full-disk"])
def test_two_runs_of_each_drill_miss_nothing(name: str) -> None:
    code, said = drill(name, "--times", "2", "--seed", "11")
    assert code == 0, said
    rows = 4 if name == "full-disk" else 2  # one that fills up and one that is read-only, each time
    assert len(re.findall(r"^ +\d+  ok  ", said, re.MULTILINE)) == rows, said
    if name == "full-disk" and "skipped" in said:
        pytest.skip(re.findall(r"skipped, (.*)", said)[0])


def test_a_drill_that_does_not_exist_is_a_wrong_command_line() -> None:
    code, said = drill("earthquake")
    assert (code, "invalid choice" in said) == (2, True)
