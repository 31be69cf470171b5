"""`tdbg explain`: what the detectors say of themselves, for every code, from the installed files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tdbg.aggregator import detector
from tdbg.aggregator.cli import main
from tdbg.aggregator.codes import CODES
from tdbg.aggregator.outputs.rules import WIDTH
from tdbg.aggregator.rulebook import explain, intro, labelled

DOC = """What it is,
in two lines.

Reads     a, b
Says      much, and
          more
Unknown   little

Blind to  nothing
Do        look
"""


def test_a_docstring_is_read_with_the_lines_that_go_on() -> None:
    assert intro(DOC) == "What it is, in two lines."
    assert dict(labelled(DOC)) == {"Reads": "a, b", "Says": "much, and more", "Unknown": "little",
                                   "Blind to": "nothing", "Do": "look"}  # fmt: skip


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_explained_with_what_to_do(code: str, capsys: Any) -> None:
    assert main(["explain", code]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{code}: {CODES[code]}\n")
    assert all(len(line) <= WIDTH for line in text.splitlines()[1:])
    rule = explain(code)
    labels = dict(rule.labels)
    assert set(labels) == set(detector.LABELS)
    assert len(labels["Do"]) > 40
    for heading in ("What to do:", "It says:", "It reads:", "It abstains on:", "It is blind to:"):
        assert heading in text
    module = detector.load_one(rule.file.removesuffix(".py"))
    numbers = {s.name: s.value for s in rule.settings}
    assert {k: repr(v) for k, v in module.PARAMS.items()}.items() <= numbers.items()


def test_a_code_in_any_case_is_taken_and_a_wrong_one_names_its_neighbours(capsys: Any) -> None:
    assert main(["explain", "grad-desync", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["schema"], said["reason_code"], said["mode"]) == ("tdbg.explain/1", "GRAD_DESYNC", "silent error")
    assert "model.module" in said["labels"]["do"]
    assert main(["explain", "GRAD_DSYNC"]) == 2
    assert "GRAD_DESYNC" in capsys.readouterr().err
    assert main(["explain", "xyz"]) == 2
    assert "lists them all" in capsys.readouterr().err


def test_the_list_has_every_code_once(capsys: Any) -> None:
    assert main(["explain"]) == 0
    words = capsys.readouterr().out.split()
    assert all(words.count(code) == 1 for code in CODES)
    assert main(["explain", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["codes"]
    assert sorted(c["reason_code"] for c in listed) == sorted(CODES)
    assert all(c["rule"] for c in listed)
