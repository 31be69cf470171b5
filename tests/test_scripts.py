"""scripts/new and scripts/catalogue, tried in a copy of the tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("launcher", "rankagent", "aggregator", "scripts", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / ".types").mkdir()
    (tmp_path / ".types" / "tdbg").symlink_to("..")
    return tmp_path


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command whose `tdbg` is the copy, from a folder that has nothing to do with it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TDBG_")} | {"PYTHONPATH": str(tree / ".types")}
    return subprocess.run(
        [sys.executable, *command], cwd="/", env=env, capture_output=True, text=True, timeout=200, check=False
    )


def script(tree: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(tree, str(tree / "scripts" / name), *arguments)


def test_a_new_probe_and_a_new_detector_have_the_shape_and_pass_their_own_tests(tree: Path) -> None:
    assert script(tree, "new", "probe", "threads_alive").returncode == 0
    assert script(tree, "new", "detector", "skip_alone").returncode == 0
    written = ["tests/rankagent/probes/test_threads_alive.py", "tests/aggregator/detectors/test_skip_alone.py"]
    shape = run(tree, "-c", "from tdbg.aggregator.detector import load; print([m.CODE for m in load()])")
    assert "'SKIP_ALONE'" in shape.stdout, shape.stderr
    probe_shape = "tests/test_architecture.py::test_a_probe_says_what_it_writes_and_costs_and_misses_and_has_one_way_in"
    tests = run(
        tree, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tree), "-c", str(tree / "pyproject.toml"),
        *(str(tree / t) for t in written), f"{tree / probe_shape}[threads_alive]",
    )  # fmt: skip
    assert "6 passed" in tests.stdout, tests.stdout + tests.stderr


def test_what_is_new_is_formatted_and_linted(tree: Path) -> None:
    script(tree, "new", "probe", "threads_alive")
    script(tree, "new", "detector", "skip_alone")
    files = [str(p) for p in tree.rglob("*.py") if p.stem.removeprefix("test_") in ("threads_alive", "skip_alone")]
    assert len(files) == 4
    for command in (["format", "--check"], ["check"]):
        done = run(tree, "-m", "ruff", *command, "--no-cache", "--config", str(tree / "pyproject.toml"), *files)
        assert done.returncode == 0, done.stdout + done.stderr


def test_an_existing_file_is_never_overwritten(tree: Path) -> None:
    before = (tree / "rankagent" / "probes" / "step.py").read_text()
    refused = script(tree, "new", "probe", "step")
    assert (refused.returncode, "step.py exists" in refused.stderr) == (2, True)
    assert (tree / "rankagent" / "probes" / "step.py").read_text() == before


@pytest.mark.parametrize("name", ["Bad", "../up", "a-b", "_x", "1st"])
def test_a_name_that_is_no_module_name_is_refused(tree: Path, name: str) -> None:
    refused = script(tree, "new", "detector", name)
    assert (refused.returncode, "is no module name" in refused.stderr) == (2, True)


def test_a_catalogue_is_stale_after_a_change_and_current_after_it_is_written(tree: Path) -> None:
    assert script(tree, "catalogue").returncode == 0
    assert script(tree, "catalogue", "--check").returncode == 0
    script(tree, "new", "probe", "threads_alive")
    stale = script(tree, "catalogue", "--check")
    assert (stale.returncode, "rankagent/README.md is stale" in stale.stdout) == (1, True)
    assert script(tree, "catalogue").returncode == 0
    text = (tree / "rankagent" / "README.md").read_text()
    assert "| `threads` | int32 |  | threads alive, the main one included |" in text
    assert "- **Blind to** threads that native code starts" in text


def test_the_catalogue_gives_each_parameter_its_reason(tree: Path) -> None:
    script(tree, "new", "detector", "skip_alone")
    script(tree, "catalogue")
    text = (tree / "aggregator" / "README.md").read_text()
    assert "### `SKIP_ALONE` (`skip_alone.py`)" in text
    assert "| `first_step` | 1 | step 0 holds what came before training |" in text


def test_an_introduction_written_by_hand_stays(tree: Path) -> None:
    script(tree, "catalogue")
    path = tree / "aggregator" / "README.md"
    path.write_text("# Mine\n\nBy hand.\n\n" + path.read_text()[path.read_text().index("<!--") :])
    script(tree, "catalogue")
    assert path.read_text().startswith("# Mine\n\nBy hand.\n\n<!--")


def test_a_catalogue_without_its_marker_is_left_alone(tree: Path) -> None:
    (tree / "aggregator" / "README.md").write_text("all by hand\n")
    refused = script(tree, "catalogue")
    assert (refused.returncode, "marker line" in refused.stderr) == (2, True)
    assert (tree / "aggregator" / "README.md").read_text() == "all by hand\n"
