"""What the detectors say of themselves, read from their docstrings and from the comments beside their settings.

`tdbg explain` and the catalogue in README.md both stand on this, so that a rule is described in one place: its file.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

from . import detector
from .codes import CODES

LABEL = re.compile(r"^(Writes|Costs|Reads|Says|Unknown(?: when)?|Blind to|Do) +(.*)$")


@dataclass(frozen=True)
class Setting:
    """A number that a rule goes by, as Python writes it, and the reason for it ("" where its name says all)."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Rule:
    """One reason code as its detector explains it; all but the first two are empty for a code without a rule."""

    code: str
    meaning: str
    file: str = ""
    rule: str = ""  # what the detector decides, in a sentence
    labels: tuple[tuple[str, str], ...] = ()  # (label, text) in the order of the docstring
    needs: tuple[tuple[str, int], ...] = ()  # (table, fewest ranks with rows in it)
    settings: tuple[Setting, ...] = ()


def explain(code: str) -> Rule:
    """One code. Raises KeyError for what is none. Cost: reads the source of the detectors until one has it."""
    for name in detector.names():
        module = detector.load_one(name)
        if code in detector.codes_of(module):
            doc = module.__doc__ or ""
            return Rule(code, CODES.get(code, intro(doc)), f"{name}.py", intro(doc), tuple(labelled(doc)),
                        tuple(module.NEEDS.items()), tuple(settings(module)))  # fmt: skip
    return Rule(code, CODES[code])


def intro(doc: str) -> str:
    """What a docstring says before its labels, as one paragraph."""
    lines = []
    for line in doc.splitlines():
        if LABEL.match(line):
            break
        lines.append(line.strip())
    return " ".join(lines).strip()


def labelled(doc: str) -> Iterator[tuple[str, str]]:
    """(label, text) of each labelled line with the indented lines that continue it."""
    label, text = "", ""
    for line in doc.splitlines():
        if found := LABEL.match(line):
            if label:
                yield label, text
            label, text = found.groups()
        elif label and line.startswith(" ") and line.strip():
            text += " " + line.strip()
        elif label:
            yield label, text
            label = ""
    if label:
        yield label, text


def settings(module: ModuleType) -> Iterator[Setting]:
    """Each entry of PARAMS, then each numeric constant of the module."""
    source = inspect.getsource(module)
    comments = _comments(source)
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if not isinstance(target, ast.Name) or value is None or not target.id.isupper():
            continue
        if target.id == "PARAMS" and isinstance(value, ast.Dict):
            for key, item in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant):
                    reason = _reason(comments, key.lineno, item.end_lineno or item.lineno)
                    yield Setting(str(key.value), repr(module.PARAMS[key.value]), reason)
        elif target.id == "PARAMS":  # several rules share them: their reasons stand in that module
            yield from (Setting(str(k), repr(v), "") for k, v in module.PARAMS.items())
        elif isinstance(getattr(module, target.id), int | float):
            reason = _reason(comments, node.lineno, node.end_lineno or node.lineno)
            yield Setting(target.id, repr(getattr(module, target.id)), reason)


def _comments(source: str) -> dict[int, tuple[str, bool]]:
    """Line -> (its comment, whether the line holds nothing else)."""
    return {
        t.start[0]: (t.string.lstrip("# ").strip(), t.line.strip().startswith("#"))
        for t in tokenize.generate_tokens(io.StringIO(source).readline)
        if t.type == tokenize.COMMENT and not t.string.startswith(("# fmt", "# type", "# noqa"))
    }


def _reason(comments: dict[int, tuple[str, bool]], first: int, last: int) -> str:
    """The comment block right above the lines, then the comments beside them."""
    above: list[str] = []
    while comments.get(first - len(above) - 1, ("", False))[1]:
        above.insert(0, comments[first - len(above) - 1][0])
    return " ".join(above + [comments[n][0] for n in range(first, last + 1) if n in comments])
