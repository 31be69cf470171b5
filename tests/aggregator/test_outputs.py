"""What is drawn: cleaned text, valid JSON, and screens of fixed width made from values alone."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from tdbg.aggregator.findings import DataQuality, Evidence, Finding, Incident, RuleVerdict, Verdict
from tdbg.aggregator.outputs import json as as_json
from tdbg.aggregator.outputs import text
from tdbg.aggregator.outputs.clean import clean
from tdbg.aggregator.outputs.tui import Screen, rank_lines, screen
from tdbg.aggregator.outputs.units import duration, memory, number
from tdbg.aggregator.ranks import RankRow, what_sets_apart
from tdbg.aggregator.wording import ranks_text, spans

WHOLE = DataQuality(True, (), 0, (0, 1), {0: 9, 1: 9})
FINDING = Finding((1,), 7, "w differs", subject="w", last_good_step=3, evidence=(Evidence(1, 7, "digest", "1", "2"),),
                  cannot_conclude=("who wrote it",), next_check="look")  # fmt: skip
VERDICT = Verdict("r", "/s/r", "finished", 2, 9, 1, WHOLE, (RuleVerdict("A", "CLEAR", "checked"),), ())
FAULTY = replace(VERDICT, incidents=(Incident("A-1", "A", FINDING),))
EVIL = "a\x1b[2J\x9b31m\x07\r\n\t\u202e\u2028\u200b[bold]b"


def _draw(s: Screen, width: int = 80, height: int = 24, **options: object) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, **options)  # type: ignore[arg-type]
    console.print(screen(s, width, height))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def _rows(n: int) -> tuple[RankRow, ...]:
    return tuple(RankRow(r, "node", 0, 100 + r, 50, 1, 0.5 + r / 1000, 2.0, 1e7, 1 << 30) for r in range(n))


@pytest.mark.parametrize("bad", ["\x1b[2J", "\x9b31m", "\x07", "\r", "\n", "\t", "\x00", "\u202e", "\u2066", "\u2028",
                                 "\u200b", "\ue000", "\ud800", "\x7f"])  # fmt: skip
def test_nothing_that_a_terminal_acts_on_survives_cleaning(bad: str) -> None:
    shown = clean(f"a{bad}b")
    assert shown.isprintable()
    assert shown.startswith("a\\")
    assert shown.endswith("b")


def test_cleaning_leaves_ordinary_text_of_any_language_alone() -> None:
    for plain in ("layers.0.mlp.weight", "größe", "学習率", "naïve 50 %"):
        assert clean(plain) == plain


def test_json_is_valid_whatever_the_numbers_are() -> None:
    value = {"a": math.nan, "b": [math.inf, -math.inf, 1.5], 3: b"\x01", "e": {"t": (1, None)}, "f": EVIL}
    loaded = json.loads(as_json.dumps(value), parse_constant=lambda c: pytest.fail(c))
    assert loaded == {"a": "NaN", "b": ["Infinity", "-Infinity", 1.5], "3": "01", "e": {"t": [1, None]}, "f": EVIL}


def test_an_incident_says_when_it_was_last_good_and_what_is_not_known() -> None:
    shown = text.incident(FAULTY.incidents[0])
    assert "from step 7 (last good 3)" in shown
    assert "rank 1 step 7 digest = 1 (expected 2)" in shown
    assert "not known: who wrote it" in shown
    assert "next: look" in shown


def test_a_fault_without_a_step_is_from_the_start() -> None:
    shown = text.incident(Incident("A-1", "A", replace(FINDING, first_step=None)))
    assert "from the start" in shown


def test_no_incident_says_what_it_stands_on() -> None:
    v = replace(VERDICT, verdicts=(RuleVerdict("A", "CLEAR", ""), RuleVerdict("B", "INSUFFICIENT_EVIDENCE", "")))
    assert text.found(v) == ["no incident; 1 rule clear, 1 without enough evidence"]


def test_warnings_of_data_quality_are_all_listed_and_cut_only_in_the_summary() -> None:
    v = replace(VERDICT, data_quality=replace(WHOLE, complete=False, warnings=tuple("abcdef"), dropped_events=4))
    assert len(text.quality(v.data_quality)) == 7
    assert "6 warnings, 4 rows lost" in text.quality(v.data_quality)[0]
    assert "and 3 more" in text.summary(v, "tdbg verdicts r")


def test_units_are_those_people_read() -> None:
    assert [duration(n) for n in (None, 5, 12_300, 45_600_000, 7_800_000_000)] == [
        "-",
        "5 ns",
        "12.3 us",
        "45.6 ms",
        "7.8 s",
    ]
    assert [memory(n) for n in (None, 12, 2048, 3 << 20, 5 << 30)] == ["-", "12 B", "2 KiB", "3 MiB", "5 GiB"]
    assert [number(n) for n in (None, math.nan, 0.123456789)] == ["-", "NaN", "0.123457"]


def test_ranks_are_named_in_spans() -> None:
    assert spans([3, 1, 2, 7, 8, 10]) == "1-3, 7, 8, 10"
    assert (ranks_text([]), ranks_text([4]), ranks_text(range(1000))) == ("no rank", "rank 4", "ranks 0-999")


def test_a_small_job_has_a_line_a_rank_and_incidents_below() -> None:
    drawn = _draw(Screen(FAULTY, "running", tuple(what_sets_apart(_rows(2), FAULTY.incidents))))
    lines = drawn.splitlines()
    assert lines[0].startswith("run r: running, 2 ranks, 9 steps")
    assert lines[2].split()[:3] == ["0", "node", "50"]
    assert lines[3].split()[-1] == "A"
    assert any(line.startswith("A ") and "w differs" in line for line in lines[4:])
    assert "q quits" in lines[-1]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 12), (200, 50)])
@pytest.mark.parametrize("ranks", [1, 8, 64, 1000])
def test_the_screen_fits_its_terminal_however_many_ranks_and_incidents(width: int, height: int, ranks: int) -> None:
    many = tuple(Incident(f"A-{n}", "SOME_LONG_REASON_CODE", replace(FINDING, summary="x" * 300)) for n in range(50))
    rows = tuple(replace(r, apart="SLOW" * 20 if r.rank % 3 == 0 else "") for r in _rows(ranks))
    quality = replace(WHOLE, complete=False, warnings=("y" * 300,) * 9)
    drawn = _draw(Screen(replace(FAULTY, incidents=many, data_quality=quality), "running", rows), width, height)
    assert len(drawn.splitlines()) <= height
    assert max(map(len, drawn.splitlines())) <= width
    assert "more: tdbg incidents" in drawn or width < 80


def test_many_alike_ranks_fold_into_one_line_with_their_spread_and_the_odd_one_stays() -> None:
    rows = [replace(r, apart="PARAM_DESYNC") if r.rank == 5 else r for r in _rows(64)]
    lines = [cells for cells, _ in rank_lines(rows, 10)]
    assert len(lines) == 2
    assert lines[0][0].startswith("5 ")
    assert lines[0][-1] == "PARAM_DESYNC"
    assert lines[1][0] == "0-4, 6-63 (63)"
    assert lines[1][2] == "0.5..0.563"
    assert lines[1][-1] == "63 ranks alike"


def test_a_rank_is_set_apart_by_its_incidents_its_lag_or_its_memory() -> None:
    rows = [*_rows(3), replace(_rows(4)[3], steps=40, rss_bytes=3 << 30), RankRow(4, apart="recorded nothing")]
    apart = [r.apart for r in what_sets_apart(rows, FAULTY.incidents)]
    assert apart == ["", "A", "", "10 steps behind, memory 3.0x the median", "recorded nothing"]


def test_a_lag_that_may_be_the_reading_itself_sets_no_rank_apart() -> None:
    rows = [*_rows(2), replace(_rows(3)[2], steps=40)]  # 10 steps of 10 ms
    assert [r.apart for r in what_sets_apart(rows, (), reading_ns=10**9)] == ["", "", ""]
    assert [r.apart for r in what_sets_apart(rows, (), reading_ns=10**8)] == ["", "", "10 steps behind"]


def test_notes_set_no_rank_apart() -> None:
    note = Incident("A-1", "A", replace(FINDING, severity="note"))
    assert [r.apart for r in what_sets_apart(_rows(2), [note])] == ["", ""]


def test_hostile_names_are_drawn_as_text_not_as_markup_or_escapes() -> None:
    incidents = (Incident("A-1", EVIL, replace(FINDING, summary=EVIL)),)
    rows = (RankRow(0, EVIL, apart=EVIL),)
    quality = replace(WHOLE, complete=False, warnings=(EVIL,))
    v = replace(VERDICT, run=EVIL, incidents=incidents, data_quality=quality)
    drawn = _draw(Screen(v, "running", rows), 200)
    assert not {"\x1b", "\x9b", "\x07", "\u202e", "\r", "\t"} & set(drawn)
    assert "[bold]b" in drawn


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Screen(FAULTY, "running", _rows(2))
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;31m" in _draw(shown, force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "31m" not in _draw(shown, force_terminal=True)
