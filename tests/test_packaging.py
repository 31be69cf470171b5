"""What a wheel built from this tree holds, and that both doors open in an environment it is installed in."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("packaging")  # the tests share what one job or build left

ROOT = Path(__file__).parents[1]
PACKAGES = ("launcher", "rankagent", "aggregator")
LOADED = "import sys; print('_tdbg_agent' in sys.modules)"


def run(*command: str | Path, **variables: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TDBG_", "PYTHON"))}
    done = subprocess.run([*map(str, command)], env=clean | variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def copy_of_the_tree(to: Path) -> Path:
    """The files that a build reads, so that no build folder is left in the repository."""
    for name in (*PACKAGES, "scripts"):
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    return to


def build_wheel(tree: Path | str, to: Path) -> Path:
    # without isolation: setuptools is one of the test extras, so nothing has to be downloaded
    run(sys.executable, "-m", "pip", "wheel", tree, "--no-deps", "--no-build-isolation", "--wheel-dir", to)
    (wheel,) = to.glob("tdbg-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = copy_of_the_tree(tmp_path_factory.mktemp("tree"))
    # what an earlier build has left, of a detector that has since been deleted from the source
    stale = tree / "build" / "lib" / "tdbg" / "aggregator" / "detectors" / "stale.py"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    return build_wheel(tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing in it but the wheel: no torch, no other dependency."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel)
    return folder


def site_packages(environment: Path) -> Path:
    (found,) = environment.glob("lib/python3*/site-packages")
    return found


def test_every_module_of_the_three_packages_is_in_the_wheel_and_nothing_else(contents: set[str]) -> None:
    sources = {f"tdbg/{p.relative_to(ROOT)}" for package in PACKAGES for p in (ROOT / package).rglob("*.py")}
    assert {n for n in contents if n.endswith(".py")} == sources


def test_the_door_lies_at_the_top_level_of_the_wheel(contents: set[str]) -> None:
    assert {n for n in contents if not n.startswith(("tdbg/", "tdbg-"))} == {"tdbg.pth"}


def test_the_licence_and_both_commands_are_in_the_wheel(wheel: Path, contents: set[str]) -> None:
    assert any(n.endswith("licenses/LICENSE") for n in contents)
    (name,) = (n for n in contents if n.endswith("entry_points.txt"))
    points = configparser.ConfigParser()
    points.read_string(zipfile.ZipFile(wheel).read(name).decode())
    assert dict(points["console_scripts"]) == {
        "tdbg-run": "tdbg.launcher.run:main",
        "tdbg": "tdbg.aggregator.cli:main",
    }


def test_a_wheel_built_from_the_source_distribution_has_the_door_too(tmp_path: Path) -> None:
    tree = copy_of_the_tree(tmp_path / "tree")
    sdist = f"import os, setuptools.build_meta as b; os.chdir({str(tree)!r}); b.build_sdist('dist')"
    run(sys.executable, "-c", sdist)
    (archive,) = (tree / "dist").glob("*.tar.gz")
    assert "tdbg.pth" in zipfile.ZipFile(build_wheel(archive, tmp_path / "wheel")).namelist()


@pytest.mark.parametrize("doors", ["first", "second", "both"])
def test_each_door_and_both_together_open_in_an_installed_environment(environment: Path, doors: str) -> None:
    agent = site_packages(environment) / "tdbg" / "rankagent"
    variables = {"TDBG_RUN": "/nowhere"}
    if doors != "second":
        variables["PYTHONPATH"] = str(agent / "bootstrap")
    if doors != "first":
        variables["TDBG_BOOT"] = str(agent / "boot.py")
    assert run(environment / "bin" / "python", "-c", LOADED, **variables) == "True\n"


@pytest.mark.parametrize("flags", [["-I"], ["-E"], ["-X", "dev", "-W", "error"]])
def test_a_wrapper_that_resets_pythonpath_is_still_injected(environment: Path, flags: list[str]) -> None:
    boot = str(site_packages(environment) / "tdbg" / "rankagent" / "boot.py")
    python = environment / "bin" / "python"
    assert run("env", "PYTHONPATH=/nowhere", python, *flags, "-c", LOADED, TDBG_RUN="/r", TDBG_BOOT=boot) == "True\n"


def test_an_installed_environment_is_silent_and_shut_outside_a_run(environment: Path) -> None:
    assert run(environment / "bin" / "python", "-X", "dev", "-W", "error", "-c", LOADED) == "False\n"


def test_the_door_does_nothing_without_its_variable_but_look_for_it() -> None:
    (line,) = (ROOT / "scripts" / "tdbg.pth").read_text().splitlines()
    imports, _, rest = line.partition(";")
    assert imports == "import os"
    assert rest.lstrip().startswith('os.environ.get("TDBG_BOOT") and ')


def test_uninstalling_takes_the_door_away(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", tmp_path / "bin" / "python"]
    run(*pip, "install", "--no-deps", wheel)
    assert (site_packages(tmp_path) / "tdbg.pth").exists()
    run(*pip, "uninstall", "--yes", "tdbg")
    assert not list(tmp_path.rglob("tdbg*"))
