"""A batch of runs: the odd one, or why there is none; what could not be compared is never taken for alike."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from kit.healthy import healthy
from kit.runs import write_run
from tdbg.aggregator.cli import main
from tdbg.aggregator.compare import Comparison, Outcome, Unlike
from tdbg.aggregator.scan import Scan, scan

SHORT: dict[str, Outcome] = {"=": "IDENTICAL", "~": "WITHIN_NOISE", "x": "DIVERGED", "?": "INSUFFICIENT_EVIDENCE",
                             "/": "NOT_COMPARABLE"}  # fmt: skip


def _scan(names: str, pairs: str) -> Scan:
    """`pairs`: an outcome for each pair in order: ab ac ad bc bd cd."""
    said = {}
    for (x, y), sign in zip(combinations(names, 2), pairs.split(), strict=True):
        step = 7 if sign == "x" else None
        said[x, y] = Comparison(x, y, SHORT[sign], f"{x}{sign}{y}", first_step=step, metric="loss" if step else None)
    return scan(names, said)


@pytest.mark.parametrize(
    ("names", "pairs", "outcome", "run"),
    [
        ("abc", "= = =", "ALL_ALIKE", None),
        ("abc", "= ~ ~", "ALL_ALIKE", None),
        ("ab", "=", "ALL_ALIKE", None),
        ("abc", "= x x", "OUTLIER", "c"),
        ("abcd", "x ~ ~ x x =", "OUTLIER", "b"),
        ("ab", "x", "NO_SINGLE_OUTLIER", None),  # no majority
        ("abc", "x x x", "NO_SINGLE_OUTLIER", None),  # nobody agrees
        ("abcd", "= x x x x =", "NO_SINGLE_OUTLIER", None),  # two sides of equal size
        ("abcde", "= = x x = x x x x x", "NO_SINGLE_OUTLIER", None),  # two odd ones
        ("abc", "/ / /", "NO_SINGLE_OUTLIER", None),  # other seeds
        ("abc", "= / /", "NO_SINGLE_OUTLIER", None),  # one of another seed is no outlier
        ("abcd", "= x / x / /", "OUTLIER", "c"),  # two agree, one parts from both; one of another seed beside them
        ("abcd", "= = x = x ?", "NO_SINGLE_OUTLIER", None),  # it was not seen to part from all of them
        ("abc", "= = ?", "NO_SINGLE_OUTLIER", None),  # never ALL_ALIKE where a pair could not be judged
        ("abc", "? ? ?", "NO_SINGLE_OUTLIER", None),
        ("abc", "~ ~ x", "NO_SINGLE_OUTLIER", None),  # noise that adds up to a difference
    ],
)  # fmt: skip
def test_the_outcome_of_a_batch(names: str, pairs: str, outcome: str, run: str | None) -> None:
    said = _scan(names, pairs)
    assert (said.outcome, said.run) == (outcome, run)
    assert said.why
    for name in names:
        signs = [s for (x, y), s in zip(combinations(names, 2), pairs.split(), strict=True) if name in (x, y)]
        assert said.scores[name] == signs.count("x")


def test_renaming_and_reordering_moves_the_outlier_and_changes_nothing_else() -> None:
    for odd in "abcd":
        pairs = " ".join("x" if odd in pair else "=" for pair in combinations("abcd", 2))
        assert _scan("abcd", pairs).run == odd


def test_what_an_outlier_alone_was_started_with_is_told() -> None:
    def pair(x: str, y: str, outcome: Outcome, *unlike: Unlike) -> Comparison:
        return Comparison(x, y, outcome, "why", first_step=3, metric="loss", identity_differences=unlike)

    said = scan("abc", {
        ("a", "b"): pair("a", "b", "DIVERGED", Unlike("tf32", "on", "off"), Unlike("host", "1", "2")),
        ("a", "c"): pair("a", "c", "DIVERGED", Unlike("tf32", "on", "off"), Unlike("host", "1", "3")),
        ("b", "c"): pair("b", "c", "IDENTICAL", Unlike("host", "2", "3")),
    })  # fmt: skip
    assert said.run == "a"
    assert said.runs[0].started_otherwise == (Unlike("tf32", "on", "off"),)


def test_the_command_on_runs(tmp_path: Path, capsys: Any) -> None:
    for name in "pqrs":
        rows = healthy(2)
        if name == "r":
            rows.connection.execute("UPDATE loss SET total = total * 1.1 + 0.1 WHERE step >= 12")
        write_run(tmp_path, rows, name)
    where = ("--store", str(tmp_path), "scan")
    assert main([*where, "p", "q", "r", "s", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["schema"], said["outcome"], said["run"]) == ("tdbg.scan/1", "OUTLIER", "r")
    assert said["scores"] == {"p": 1, "q": 1, "r": 3, "s": 1}
    assert next(r for r in said["runs"] if r["run"] == "r")["first"]["first_step"] == 12
    assert main([*where, "p", "q", "r", "s"]) == 0
    first, _, _, head, odd, *_ = capsys.readouterr().out.splitlines()
    assert first == "OUTLIER: r"
    assert head.split()[:1] == ["run"]
    assert odd.split() == ["r", "3", "of", "3", "step", "12,", "loss"]
    assert main([*where, "p", "p"]) == 2
    assert "two different runs" in capsys.readouterr().err
    assert main([*where, "p", "nowhere"]) == 3
