"""The report: one page that holds all of the verdict, fetches nothing, runs nothing, and stays small."""

from __future__ import annotations

import json
import re
import shutil
import stat
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kit.healthy import BATCH, PASS, healthy
from kit.page import Page, read
from kit.plants import PLANTS
from kit.rows import Rows
from kit.runs import write_run
from tdbg.aggregator.cli import main
from tdbg.aggregator.series import MOST_LINES, STRETCHES, series
from tdbg.aggregator.store import Store

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\x1b[2J\u202e\u200b"
BROWSERS = ("chromium", "google-chrome", "chromium-browser")


def _page(run: Path, to: Path) -> tuple[str, Page]:
    assert main(["report", str(run), "-o", str(to)]) == 0
    html = to.read_text()
    return html, read(html)


def _sections(page: Page) -> list[str]:
    return [words for level, words in page.headings if level == 2]


@pytest.mark.parametrize("name", ["healthy", "faulty"])
def test_a_page_is_well_formed_fetches_nothing_runs_nothing_and_links_into_itself(
    templates: Path, tmp_path: Path, name: str
) -> None:
    html, page = _page(templates / name, tmp_path / "x.html")
    assert (page.unbalanced, page.fetched, page.run) == ([], [], [])
    assert len(page.ids) == len(set(page.ids))
    assert set(page.links) <= set(page.ids)
    assert page.described
    assert all(page.described)
    assert not re.search(r"https?://|@import|url\((?!#)", html)
    assert html.index("Content-Security-Policy") < html.index("<style>")
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_the_verdict_comes_first_with_the_evidence_pictures_and_what_is_not_known(
    templates: Path, tmp_path: Path
) -> None:
    _, page = _page(templates / "faulty", tmp_path / "x.html")
    text = " ".join(page.text)
    assert _sections(page) == ["Incidents", "Failure modes", "What happened", "Time and memory", "Ranks",
                               "What it ran with", "Data coverage",
                               "What was not recorded or could not be judged"]  # fmt: skip
    first = text.index("FAILURE: 1 failure mode: silent error")
    assert first < text.index("Failure modes") < text.index("What happened")
    assert "Who holds the same bits of parameter" in text
    assert "OBSERVED" in text
    assert "Evidence of PARAM_DESYNC" in text


def test_every_incident_rule_and_event_of_the_verdict_is_on_the_page(
    templates: Path, tmp_path: Path, capsys: Any
) -> None:
    _, page = _page(templates / "faulty", tmp_path / "x.html")
    text = " ".join(page.text)
    capsys.readouterr()
    assert main(["verdicts", str(templates / "faulty"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    for i in said["incidents"]:
        assert i["summary"] in text
        assert all(e["value"] in text for e in i["evidence"])
    for r in said["verdicts"]:
        assert r["reason_code"] in text
        if r["outcome"] == "INSUFFICIENT_EVIDENCE":
            assert " ".join(r["why"].split()) in text


def test_an_incomplete_recording_is_said_in_the_verdict_and_never_called_clean(tmp_path: Path) -> None:
    run = write_run(tmp_path, healthy(3), "r", world_size=4)
    html, _ = _page(run, tmp_path / "x.html")
    verdict = html[html.index("<section class=") : html.index("<nav")]
    assert "verdict incomplete" in verdict
    assert "INCOMPLETE" in verdict
    assert "rank 3" in verdict
    assert "NOTHING_FOUND" not in html


def test_keys_in_which_ranks_differ_come_before_those_that_agree(tmp_path: Path) -> None:
    rows = healthy(3)
    rows.connection.execute("UPDATE identity SET value = 'dec0de' WHERE key = 'code.model' AND rank = 1")
    _, page = _page(write_run(tmp_path, rows, "r"), tmp_path / "x.html")
    text = page.text
    begin = text.index("Differs between ranks")
    assert begin < text.index("dec0de", begin) < text.index("The same on all ranks")


def test_what_each_pass_consumed_is_counted(tmp_path: Path) -> None:
    rows = healthy(2)
    rows.connection.execute("""UPDATE batch SET ids = (SELECT b.ids FROM batch b WHERE b.rank = 0 AND b.step = 1 AND
        b."end" = '' LIMIT 1) WHERE rank = 1 AND step = 1 AND "end" = ''""")
    _, page = _page(write_run(tmp_path, rows, "r"), tmp_path / "x.html")
    begin = page.text.index("read by nobody") + 1
    name, ranks, batches, samples, length, different, shared, repeated, missing = page.text[begin : begin + 9]
    assert (name, ranks, batches, samples) == ("1", "2", str(2 * PASS), str(2 * PASS * BATCH))
    assert (length, different, shared) == (samples, str(2 * PASS * BATCH - BATCH), str(BATCH))
    assert (repeated, missing) == ("0", str(BATCH))


def _hostile() -> Rows:
    rows = healthy(2)
    PLANTS["PARAM_DESYNC"].apply(rows)
    long = "x" * 10_000
    for sql in (
        f"UPDATE tensor SET name = name || '{_q(EVIL)}' WHERE index = 0",
        f"UPDATE tensor SET name = '{long}' WHERE index = 1",
        f"UPDATE identity SET value = '{_q(EVIL)}' || rank WHERE key = 'argv'",
        f"UPDATE identity SET value = '{long}' WHERE key = 'code.model'",
    ):
        rows.connection.execute(sql)
    for rank in (0, 1):
        rows.add("failure", rank=rank, pid=100 + rank, step=20, kind="exception", type=EVIL, message=EVIL + long,
                 frames=EVIL, during=EVIL)  # fmt: skip
    return rows


def _q(text: str) -> str:
    return text.replace("'", "''")


def test_names_from_a_run_are_neither_markup_nor_endless(tmp_path: Path) -> None:
    run = write_run(tmp_path, _hostile(), "r", command=["train.py", EVIL, "y" * 10_000], script=EVIL, host=EVIL)
    html, page = _page(run, tmp_path / "x.html")
    assert (page.unbalanced, page.run, page.fetched) == ([], [], [])
    assert "alert(1)" in " ".join(page.text)  # it is there, as text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\u200b]", html)
    assert max(map(len, page.text)) < 1200
    assert "10000 characters" in html


def test_a_page_of_many_ranks_is_no_longer_than_a_mail_takes_and_shows_the_odd_one(tmp_path: Path) -> None:
    rows = healthy(4)
    for name in ("step", "loss", "memory", "phase"):
        rows.connection.execute(f"""
            INSERT INTO {name} BY NAME SELECT * EXCLUDE (n) REPLACE (n AS rank, 100 + n AS pid)
            FROM {name} CROSS JOIN range(4, 256) r(n) WHERE rank = 3
        """)
    rows.connection.execute("UPDATE loss SET total = total * 50 WHERE rank = 77 AND step = 20")
    run = write_run(tmp_path, rows, "many")
    html, page = _page(run, tmp_path / "x.html")
    assert len(html) < 1_500_000
    assert (page.unbalanced, page.run) == ([], [])
    with Store(run) as store:
        drawn = series(store, "loss", 0, (77,))
    assert drawn is not None
    assert [line.rank for line in drawn.lines] == [77]
    assert drawn.band is not None
    assert drawn.band.ranks == 255
    assert max(drawn.band.high) < max(drawn.lines[0].values)


def test_a_long_run_keeps_its_extremes_when_it_is_thinned(tmp_path: Path) -> None:
    rows = healthy(2, steps=4)
    rows.connection.execute("""
        INSERT INTO loss BY NAME SELECT * EXCLUDE (n) REPLACE (n AS step, 1.0 AS total)
        FROM loss CROSS JOIN range(5, 20001) s(n) WHERE step = 4
    """)
    for step, value in ((7777, "1e6"), (12001, "-1e6"), (15555, "'nan'")):
        rows.connection.execute(f"UPDATE loss SET total = {value} WHERE rank = 1 AND step = {step}")
    with Store(write_run(tmp_path, rows, "r")) as store:
        drawn = series(store, "loss", 0)
    assert drawn is not None
    assert len(drawn.lines) <= MOST_LINES
    odd = dict(zip(drawn.lines[1].steps, drawn.lines[1].values, strict=True))
    assert len(odd) <= 3 * (STRETCHES + 1)
    assert (odd[7777], odd[12001]) == (1e6, -1e6)
    assert odd[15555] != odd[15555]


def test_where_it_goes(templates: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--store", str(templates), "report", "healthy", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"schema": "tdbg.report/1", "run": "healthy", "path": "healthy.html",
                    "bytes": (tmp_path / "healthy.html").stat().st_size}  # fmt: skip
    assert stat.S_IMODE((tmp_path / "healthy.html").stat().st_mode) == 0o600
    before = (tmp_path / "healthy.html").read_bytes()
    assert main(["--store", str(templates), "report", "healthy", "-o", "-"]) == 0
    assert capsys.readouterr().out == before.decode()  # the same run gives the same page
    for wrong in (tmp_path / "nowhere" / "x.html", tmp_path):
        assert main(["--store", str(templates), "report", "healthy", "-o", str(wrong)]) == 2
        out, err = capsys.readouterr()
        assert (out, len(err.splitlines())) == ("", 2)
        assert str(wrong) in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["healthy.html"]


@pytest.mark.timeout(120)
def test_a_browser_opens_it_without_an_error_and_without_a_request(templates: Path, tmp_path: Path) -> None:
    browser = next((b for name in BROWSERS if (b := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    path = tmp_path / "x.html"
    run = write_run(tmp_path, _hostile(), "r", command=["train.py", EVIL])
    _page(run, path)
    asked, said = _opened(browser, path, tmp_path / "1")
    assert (asked, "CONSOLE" in said) == ([], False)
    bad = tmp_path / "bad.html"  # so that this test is known to see what it looks for
    bad.write_text('<img src="http://127.0.0.1:9/x.png"><script>console.error("no")</script>')
    asked, said = _opened(browser, bad, tmp_path / "2")
    assert (asked, "CONSOLE" in said) == (["http://127.0.0.1:9/x.png"], True)


def _opened(browser: str, path: Path, folder: Path) -> tuple[list[str], str]:
    """What a page asked the network for (the browser itself looks for updates at its maker's), and what was logged."""
    folder.mkdir()
    done = subprocess.run(
        [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--no-first-run", f"--user-data-dir={folder / 'profile'}",
         "--enable-logging=stderr", f"--log-net-log={folder / 'net.json'}", f"--screenshot={folder / 'x.png'}",
         "--window-size=390,1200", path.as_uri()],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (folder / "x.png").stat().st_size > 1000
    maker = r"https?://([a-z0-9.-]+[.])?(google|gvt1|googleapis|gstatic)[.]com/"
    own = rf"(file|data|chrome|chrome-extension|devtools):|{maker}"
    urls = re.findall(r'"url":"([^"]+)"', (folder / "net.json").read_text())
    return sorted({u for u in urls if not re.match(own, u)}), done.stderr
