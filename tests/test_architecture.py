"""The rules that keep the house simple: who may import whom, what a probe and a detector have, how a file looks.

Read from the source alone (imports within functions count as well), so that a rule holds for code no test runs.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tdbg.aggregator import detector
from tdbg.rankagent import contract

ROOT = Path(__file__).parents[1]
PACKAGES = ("launcher", "rankagent", "aggregator")
FORMAT = {f"tdbg.rankagent.{m}" for m in ("contract", "tables", "nodetables", "record", "readback", "seal")}
# modules that are no package: the interpreter's own, and the user's
NO_PACKAGE = {"__future__", "sitecustomize", "_frozen_importlib", "_frozen_importlib_external"}

# libraries of the exporters: each is imported in its own exporter, when that is asked for
TRACKERS = ("mlflow", "opentelemetry", "prometheus_client", "tensorboard", "wandb")

# package -> modules it may import beside the standard library and itself; a name stands for all below it
MAY_IMPORT = {
    "launcher": {"torch", "psutil", "pynvml", "pyarrow", "tdbg.rankagent", *FORMAT},
    "rankagent": {"numpy", "torch", "pyarrow", "_tdbg_agent"},
    "aggregator": {
        "duckdb",
        "pyarrow",
        "numpy",
        "rich",
        "matplotlib",
        "jinja2",
        *TRACKERS,
        "tdbg.rankagent.probes",
        *FORMAT,
    },
}
# these two without what is below them: the launcher needs the agent's folder, the reader which probe fills which table
ITSELF_ONLY = {"tdbg.rankagent", "tdbg.rankagent.probes"}
# module -> the only places (path prefixes) that may import it
ONLY_IN = {
    "rich": ("aggregator/outputs/",),
    "matplotlib": ("aggregator/outputs/",),
    "jinja2": ("aggregator/outputs/",),
    **dict.fromkeys(TRACKERS, ("aggregator/outputs/exporters/",)),
    "pyarrow": ("launcher/", "aggregator/", "rankagent/seal.py"),  # never in a rank
    "_tdbg_agent": ("rankagent/boot.py",),
    "sitecustomize": ("rankagent/bootstrap/sitecustomize.py",),
}
# a rank's start executes these before torch is there, and the reader imports the probes for their tables
NO_TORCH_AT_THE_TOP = ("rankagent/probes/", *(f"rankagent/{m.rsplit('.')[-1]}.py" for m in FORMAT))


@dataclass(frozen=True)
class Import:
    """One imported name, absolute (`tdbg.rankagent.contract`). `top`: at module level, outside `if TYPE_CHECKING`."""

    file: str
    line: int
    name: str
    relative: bool
    top: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.name}"


def python_files(*folders: str) -> list[Path]:
    """All Python source below the folders, scripts without a suffix included."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if "__pycache__" in path.parts or not path.is_file():
                continue
            if path.suffix == ".py" or (not path.suffix and path.open("rb").readline().endswith(b"python3\n")):
                found.append(path)
    return found


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
    below = {
        id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)
    }
    typing_only = {
        id(n)
        for i in ast.walk(tree)
        if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.dump(i.test)
        for n in ast.walk(i)
    }
    file = path.relative_to(ROOT)
    package = ["tdbg", *file.parent.parts]
    for node in ast.walk(tree):
        top = id(node) not in below | typing_only
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(str(file), node.lineno, alias.name, False, top)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                # "from . import x" may name a module or a value: only below a package is the name part of the path
                name = f"{stem}.{alias.name}" if _is_package(stem) else stem
                yield Import(str(file), node.lineno, name, bool(node.level), top)


def _is_package(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "tdbg" and (ROOT.joinpath(*parts[1:]) / "__init__.py").exists()


IMPORTS = [i for package in PACKAGES for path in python_files(package) for i in imports_of(path)]


def is_below(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(allowed + ".")


def is_allowed(name: str, package: str) -> bool:
    if name.split(".")[0] in sys.stdlib_module_names | NO_PACKAGE or is_below(name, f"tdbg.{package}"):
        return True
    return name in MAY_IMPORT[package] or any(is_below(name, a) for a in MAY_IMPORT[package] - ITSELF_ONLY)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_the_table_allows(package: str) -> None:
    own = [i for i in IMPORTS if i.file.startswith(f"{package}/")]
    assert own, "this test looks in the wrong place"
    assert not [str(i) for i in own if not is_allowed(i.name, package)]


@pytest.mark.parametrize("name", ONLY_IN)
def test_some_modules_are_imported_in_one_place_only(name: str) -> None:
    assert not [str(i) for i in IMPORTS if is_below(i.name, name) and not i.file.startswith(ONLY_IN[name])]


def test_the_walk_sees_imports_in_functions_and_through_relative_names() -> None:
    seen = {(i.file, i.name, i.top) for i in IMPORTS}
    assert ("rankagent/tables.py", "tdbg.rankagent.probes", False) in seen
    assert ("rankagent/probes/step.py", "tdbg.rankagent.tables", True) in seen
    assert ("aggregator/detector.py", "duckdb", True) in seen


def test_the_agent_names_itself_relatively_as_it_has_another_name_in_a_rank() -> None:
    own = [i for i in IMPORTS if i.file.startswith("rankagent/") and is_below(i.name, "tdbg")]
    assert not [str(i) for i in own if not i.relative]


def test_probes_and_the_format_do_not_import_torch_at_the_top() -> None:
    heavy = ("torch", "pyarrow")
    early = [i for i in IMPORTS if i.top and i.file.startswith(NO_TORCH_AT_THE_TOP) and i.name.split(".")[0] in heavy]
    assert not [str(i) for i in early if i.file != "rankagent/seal.py"]


def test_a_run_can_be_read_where_torch_and_the_launcher_cannot_be_imported() -> None:
    modules = [_module(p) for p in python_files("aggregator")]
    blocked = "import sys; sys.modules['torch'] = None; sys.modules['tdbg.launcher'] = None\n"
    outcome = _python(blocked + f"import importlib\nfor m in {modules!r}: importlib.import_module(m)")
    assert outcome == "", outcome


def test_tables_are_described_without_torch_and_pyarrow() -> None:
    code = "import sys; from tdbg.rankagent.tables import known_tables; known_tables()\n"
    assert _python(code + "print({'torch', 'pyarrow'} & set(sys.modules) or '')").strip() == ""


def test_no_bare_package_name_is_ever_imported() -> None:
    assert not {*PACKAGES, "boot"} & set(sys.modules), "import tdbg.NAME: the bare names belong to users' projects"
    modules = [_module(p) for p in python_files(*PACKAGES) if p.name not in ("sitecustomize.py", "boot.py")]
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
    outcome = _python(code + f"print({set(PACKAGES)!r} & set(sys.modules) or '')")
    assert outcome.strip() == "", outcome


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("tdbg", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _python(code: str) -> str:
    """Everything that a new interpreter prints, its errors included."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TDBG_", "PYTHONPATH"))}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


# ---------------------------------------------------------------- errors of ours

GUARDS = {"rankagent/boot.py": 1, "rankagent/bootstrap/sitecustomize.py": 1, "rankagent/guard.py": 2}


def broad_excepts(path: Path) -> int:
    """How many clauses catch every exception and let it end there."""
    found = 0
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.dump(node.type) if node.type else "BaseException"
            ends_here = not any(isinstance(n, ast.Raise) and n.exc is None for n in ast.walk(node))
            found += ends_here and bool(re.search(r"'(Base)?Exception'|^BaseException$", caught))
        elif isinstance(node, ast.Call) and "suppress" in ast.dump(node.func):
            found += any(isinstance(a, ast.Name) and a.id in ("Exception", "BaseException") for a in node.args)
    return found


def test_the_agent_catches_everything_in_two_places_beside_its_doors() -> None:
    counts = {str(p.relative_to(ROOT)): broad_excepts(p) for p in python_files("rankagent")}
    too_many = {f: n for f, n in counts.items() if n > GUARDS.get(f, 0)}
    assert not too_many, "let guard.attempt call it: it says which probe failed, and switches it off"
    assert set(GUARDS) <= {f for f, n in counts.items() if n}, "this test looks in the wrong place"


# ---------------------------------------------------------------- probes, detectors, variables

PROBES = [p for p in python_files("rankagent/probes") if p.name != "__init__.py"]


@pytest.mark.parametrize("path", PROBES, ids=[p.stem for p in PROBES])
def test_a_probe_says_what_it_writes_and_costs_and_misses_and_has_one_way_in(path: Path) -> None:
    tree = ast.parse(path.read_text())
    doc = ast.get_docstring(tree) or ""
    for label in ("Writes", "Costs", "Blind to"):
        assert re.search(rf"^{label}\b", doc, re.MULTILINE), f"{path}: the docstring lacks a line {label!r}"
    names = {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
    names |= {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    assert names & {"TABLE", "TABLES"}, f"{path}: a probe declares TABLE or TABLES beside the code that fills it"
    assert "install" in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, f"{path}: no function install"


def test_every_detector_has_the_shape_of_one() -> None:
    assert detector.load()


def test_every_variable_of_ours_is_listed_in_the_contract() -> None:
    listed = {*contract.SETTINGS, *contract.INTERNAL}
    used = {}
    for path in python_files(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used |= dict.fromkeys(re.findall(r"^TDBG_[A-Z_]+$", node.value), path)
    assert not {v: str(p) for v, p in used.items() if v not in listed}
    assert used, "this test looks in the wrong place"


# ---------------------------------------------------------------- files

ALL = python_files(*PACKAGES, "tests", "scripts")
SHELL = [p for p in (ROOT / "scripts").iterdir() if p.is_file() and p not in ALL] + [ROOT / ".ci" / "run"]
MOST_LINES = 350  # a file of more lines holds two ideas
DRAWERS = {"utils", "util", "common", "helpers", "misc", "base", "manager", "core"}
UNFINISHED = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "X" * 3, "raise NotImplemented" + "Error"]))


def named(paths: list[Path]) -> list[str]:
    return [str(p.relative_to(ROOT)) for p in paths]


def test_every_file_says_at_its_head_what_it_is_for() -> None:
    assert not named([p for p in ALL if p.stat().st_size and not ast.get_docstring(ast.parse(p.read_text()))])


def test_no_file_is_too_long_to_be_read_in_one_go() -> None:
    assert not named([p for p in ALL + SHELL if len(p.read_text().splitlines()) > MOST_LINES])


def test_no_file_is_a_drawer() -> None:
    assert not named([p for p in ALL if p.stem in DRAWERS or p.parent.name in DRAWERS])


def test_nothing_is_left_for_later() -> None:
    assert not named([p for p in ALL + SHELL if UNFINISHED.search(p.read_text())])


def test_nothing_else_has_come_to_the_top_level() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    allowed = {*PACKAGES, "tests", "scripts", ".ci", ".github", ".gitignore"}
    allowed |= {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"}
    assert {Path(f).parts[0] for f in listed} <= allowed
