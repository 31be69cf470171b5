"""The two injection doors: the agent's package is there before the first line, and nothing else is different."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tdbg.rankagent import contract

AGENT = Path(contract.__file__).parent
FIRST_DOOR = AGENT / "bootstrap"
SECOND_DOOR = Path(__file__).parents[1] / "scripts" / "tdbg.pth"
LOADED = "import sys; print('_tdbg_agent' in sys.modules)"
# Run with -S. Some distributions' interpreters have a sitecustomize of their own, which is then the user's.
NO_OTHER = """
import sys
class OnlyTheFirst:
    seen = []
    def find_spec(self, name, path=None, target=None):
        if name == "sitecustomize":
            self.seen.append(name)
            if len(self.seen) > 1:
                raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, OnlyTheFirst())
import sitecustomize
"""


def python(
    *arguments: str,
    door: bool = True,
    behind: str | None = None,
    cwd: Path | None = None,
    boot: Path = FIRST_DOOR,
    **variables: str,
) -> tuple[str, str, int]:
    """(stdout, stderr, exit code) of a Python process below tdbg-run; `behind` is the PYTHONPATH that the user had."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TDBG_", "PYTHON"))}
    path = [*([str(boot)] if door else []), *([behind] if behind is not None else [])]
    env = clean | ({"PYTHONPATH": os.pathsep.join(path)} if path else {}) | {contract.RUN_DIR: "/nowhere"} | variables
    done = subprocess.run([sys.executable, *arguments], env=env, cwd=cwd, capture_output=True, text=True, timeout=60)
    return done.stdout, done.stderr, done.returncode


def users_sitecustomize(folder: Path, code: str) -> str:
    (folder / "sitecustomize.py").write_text(code)
    return str(folder)


def agent_with(folder: Path, afterimport: str | None) -> Path:
    """A copy of both doors whose agent is only the given `afterimport.py`; returns its first door."""
    shutil.copytree(FIRST_DOOR, folder / "bootstrap", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(AGENT / "boot.py", folder)
    (folder / "__init__.py").write_text("")
    if afterimport is not None:
        (folder / "afterimport.py").write_text(afterimport)
    return folder / "bootstrap"


def test_the_first_door_loads_the_agent_before_the_first_line() -> None:
    assert python("-c", LOADED) == ("True\n", "", 0)


def test_without_a_run_folder_the_first_door_stays_shut() -> None:
    assert python("-c", LOADED, TDBG_RUN="") == ("False\n", "", 0)


def test_the_public_package_is_not_imported() -> None:
    code = "import sys; print(sorted(m for m in sys.modules if m.split('.')[0] in ('tdbg', 'rankagent', 'boot')))"
    # an editable install announces the namespace package by itself: what counts is that the door adds nothing
    assert python("-c", code) == python("-c", code, door=False)


def test_the_start_imports_nothing_that_a_bare_interpreter_has_not_got() -> None:
    code = f"""
import os, sys
before = set(sys.modules)
names = {{"__file__": {str(AGENT / "boot.py")!r}}}
exec(open(names["__file__"]).read(), names)
error = names["start"]()
print(error, sorted(m for m in set(sys.modules) - before if not m.startswith(("_tdbg_agent", "__future__"))))
"""
    assert python("-I", "-S", "-c", code) == (" []\n", "", 0), "each of these costs every process below tdbg-run"


def test_the_users_own_sitecustomize_behind_ours_runs_and_is_the_one_in_sys_modules(tmp_path: Path) -> None:
    behind = users_sitecustomize(tmp_path, "print('user'); mine = True")
    code = f"import sys, sitecustomize; print(sitecustomize.mine, {LOADED.split('print(')[1][:-1]})"
    assert python("-c", code, behind=behind) == ("user\nTrue True\n", "", 0)


def test_without_a_sitecustomize_of_the_users_ours_stays_and_is_complete() -> None:
    code = f"{NO_OTHER}print(OnlyTheFirst.seen, sitecustomize.loaded, repr(sitecustomize.not_started))"
    assert python("-S", "-c", code) == ("['sitecustomize', 'sitecustomize'] True ''\n", "", 0)


@pytest.mark.parametrize("fault", ["raise RuntimeError('mine')", "import no_such_module", "import sys; sys.exit(7)"])
def test_a_failing_sitecustomize_of_the_users_fails_as_it_does_without_us(tmp_path: Path, fault: str) -> None:
    behind = users_sitecustomize(tmp_path, fault)
    out, err, code = python("-c", "print('main')", behind=behind, door=False)
    assert err, "this fault shows nothing without us: nothing is tested"
    ours = python("-c", "print('main')", behind=behind)
    # the last line: a SystemExit there is shown with its traceback, which has one more frame with us
    assert (ours[0], ours[1].splitlines()[-1], ours[2]) == (out, err.splitlines()[-1], code)


def test_the_agent_is_loaded_although_the_users_sitecustomize_fails(tmp_path: Path) -> None:
    assert python("-c", LOADED, behind=users_sitecustomize(tmp_path, "1 / 0"))[0] == "True\n"


@pytest.mark.parametrize("change", ["", "import sys; sys.path.insert(0, '/mine')", "import sys; sys.path = ['/mine']"])
def test_the_path_is_what_the_users_sitecustomize_made_of_it_and_our_folder(tmp_path: Path, change: str) -> None:
    behind = users_sitecustomize(tmp_path, change)
    show = "import json, site, sys; site.main(); print(json.dumps(sys.path))"
    plain = json.loads(python("-S", "-c", show, behind=behind, door=False)[0])
    ours = json.loads(python("-S", "-c", show, behind=behind)[0])
    assert [p for p in ours if p != str(FIRST_DOOR)] == plain
    assert ours.count(str(FIRST_DOOR)) == 1


def test_two_installations_of_ours_in_a_row_end_at_the_users_file(tmp_path: Path) -> None:
    other = agent_with(tmp_path / "other", "def arm(): print('a second arming')")
    user = tmp_path / "user"
    user.mkdir()
    behind = os.pathsep.join([str(other), users_sitecustomize(user, "print('user')")])
    assert python("-c", LOADED, behind=behind) == ("user\nTrue\n", "", 0)


@pytest.mark.parametrize("flag", ["-E", "-I", "-S"])
def test_an_interpreter_that_is_told_to_ignore_us_runs_in_silence(flag: str) -> None:
    assert python(flag, "-c", LOADED) == ("False\n", "", 0)


@pytest.mark.parametrize("flags", [["-X", "dev", "-W", "error"], ["-bb", "-W", "error", "-X", "warn_default_encoding"]])
def test_the_strictest_interpreter_has_nothing_to_say(flags: list[str]) -> None:
    assert python(*flags, "-c", LOADED) == ("True\n", "", 0)


def test_an_empty_entry_in_pythonpath_keeps_its_meaning(tmp_path: Path) -> None:
    (tmp_path / "here.py").write_text("print('here')")
    script = tmp_path / "scripts" / "script.py"
    script.parent.mkdir()
    script.write_text(f"import here; {LOADED}")
    plain = python(str(script), behind=os.pathsep, door=False, cwd=tmp_path)
    assert plain == ("here\nFalse\n", "", 0)
    assert python(str(script), behind="", cwd=tmp_path) == ("here\nTrue\n", "", 0)


def test_a_working_folder_that_is_gone_is_no_error(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, subprocess, sys; os.rmdir({str(gone)!r}); subprocess.run([sys.executable, '-c', {LOADED!r}])"
    assert python("-c", code, cwd=gone)[:2] == ("True\n", "")


@pytest.mark.parametrize("name", ["tdbg", "launcher", "rankagent", "aggregator", "boot", "agent", "contract", "record"])
def test_a_users_own_module_keeps_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("mine = True")
    (tmp_path / "script.py").write_text(f"import {name}; print({name}.mine)")
    assert python(str(tmp_path / "script.py")) == ("True\n", "", 0)


COUNT = "import builtins\ndef arm(): builtins.armed = getattr(builtins, 'armed', 0) + 1"


def test_both_doors_and_a_repeated_one_arm_the_agent_once(tmp_path: Path) -> None:
    door = agent_with(tmp_path / "copy", COUNT)
    code = f"import builtins; [exec(open({str(SECOND_DOOR)!r}).read()) for _ in range(2)]; print(builtins.armed)"
    assert python("-c", code, boot=door, TDBG_BOOT=str(door.parent / "boot.py")) == ("1\n", "", 0)


def second_door(folder: Path, *flags: str, **variables: str) -> tuple[str, str, int]:
    """A process in which `site` reads our `.pth`, while PYTHONPATH is not ours."""
    shutil.copy(SECOND_DOOR, folder)
    return python(*flags, "-c", f"import site; site.addsitedir({str(folder)!r}); {LOADED}", door=False, **variables)


@pytest.mark.parametrize("flag", ["-E", "-I", "-s"])
def test_the_second_door_serves_where_pythonpath_does_not(tmp_path: Path, flag: str) -> None:
    assert second_door(tmp_path, flag, TDBG_BOOT=str(AGENT / "boot.py")) == ("True\n", "", 0)


def test_the_second_door_is_shut_without_its_variable(tmp_path: Path) -> None:
    assert second_door(tmp_path) == ("False\n", "", 0)


@pytest.mark.parametrize("boot", ["/no/such/file", "/", "relative", "not python"])
def test_the_second_door_stays_silent_whatever_its_variable_says(tmp_path: Path, boot: str) -> None:
    if boot == "not python":
        boot = str(tmp_path / "boot.py")
        Path(boot).write_text("this is no Python")
    assert second_door(tmp_path, "-X", "dev", TDBG_BOOT=boot) == ("False\n", "", 0)


@pytest.mark.parametrize(
    ("afterimport", "why"),
    [
        (None, "ImportError"),
        ("def arm(): raise OSError('disk')", "OSError: disk"),
        ("1 / 0", "ZeroDivisionError"),
        ("this is no Python", "SyntaxError"),
    ],
)
def test_a_broken_agent_leaves_the_program_alone_and_can_be_asked_why(
    tmp_path: Path, afterimport: str | None, why: str
) -> None:
    door = agent_with(tmp_path / "copy", afterimport)
    assert python("-c", "print('main')", boot=door) == ("main\n", "", 0)
    out, err, code = python("-S", "-c", f"{NO_OTHER}print(sitecustomize.not_started)", boot=door)
    assert (out[: len(why)], err, code) == (why, "", 0)


def test_a_missing_boot_file_leaves_the_program_alone(tmp_path: Path) -> None:
    door = agent_with(tmp_path / "copy", COUNT)
    (tmp_path / "copy" / "boot.py").unlink()
    assert python("-c", "print('main')", boot=door) == ("main\n", "", 0)


def test_ctrl_c_during_the_start_is_the_users(tmp_path: Path) -> None:
    door = agent_with(tmp_path / "copy", "def arm(): raise KeyboardInterrupt")
    assert python("-c", "print('main')", boot=door)[2] != 0


def test_the_boot_folder_holds_nothing_that_could_hide_a_users_module() -> None:
    assert {p.name for p in FIRST_DOOR.iterdir()} - {"__pycache__"} == {"sitecustomize.py"}


def test_the_first_door_is_short_enough_to_be_read_at_a_glance() -> None:
    assert len((FIRST_DOOR / "sitecustomize.py").read_text().splitlines()) < 30
