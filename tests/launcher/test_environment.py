"""What the ranks' environment gets beside the user's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tdbg.launcher.environment import agent_folder, apply, environment

RUN, AGENT = Path("/store/run"), Path("/lib/rankagent")


def made(old: dict[str, str], settings: dict[str, str] | None = None) -> dict[str, str]:
    return environment(old, RUN, 3, settings or {}, AGENT)


def test_only_tdbgs_variables_and_the_path_change() -> None:
    old = {"HOME": "/root", "TDBG_CLAIM": "77", "TDBG_RUN": "/an/outer/run"}
    assert made(old, {"TDBG_WATCH_STEPS": "5"}) == {
        "HOME": "/root",
        "TDBG_RUN": "/store/run",
        "TDBG_BOOT": "/lib/rankagent/boot.py",
        "TDBG_NODE": "3",
        "TDBG_WATCH_STEPS": "5",
        "PYTHONPATH": "/lib/rankagent/bootstrap",
    }
    assert old["TDBG_CLAIM"] == "77"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "OURS"),
        ("", "OURS"),
        (".", "OURS:."),
        ("/a:/b", "OURS:/a:/b"),
        ("/a::/b", "OURS:/a::/b"),
        ("/a:", "OURS:/a:"),
        ("/a:OURS:/b", "OURS:/a:/b"),
        ("OURS", "OURS"),
    ],
)
def test_the_folder_is_first_once_and_no_empty_element_is_made(before: str | None, after: str) -> None:
    ours = "/lib/rankagent/bootstrap"
    old = {} if before is None else {"PYTHONPATH": before.replace("OURS", ours)}
    assert made(old)["PYTHONPATH"] == after.replace("OURS", ours)


def test_doing_it_twice_changes_nothing_more() -> None:
    once = made({"PYTHONPATH": "/a"})
    assert made(once) == once


def test_the_agents_folder_is_that_of_the_installed_package() -> None:
    assert agent_folder().is_absolute()
    assert (agent_folder() / "contract.py").is_file()


def test_applying_sets_and_removes_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TDBG_CLAIM", "1")
    monkeypatch.delenv("TDBG_NODE", raising=False)
    before = dict(os.environ)
    try:
        apply({k: v for k, v in before.items() if k != "TDBG_CLAIM"} | {"TDBG_NODE": "0"})
        assert "TDBG_CLAIM" not in os.environ
        assert os.environ["TDBG_NODE"] == "0"
    finally:
        apply(before)
    assert dict(os.environ) == before
