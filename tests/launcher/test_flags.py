"""Which arguments are tdbg's, which are torchrun's, and which are the script's own."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tdbg.launcher import flags
from tdbg.rankagent import contract
from tdbg.rankagent.contract import TdbgError


def take(*argv: str) -> flags.CommandLine:
    return flags.take(argv, get_args_parser)


def test_the_list_of_flags_and_variables_is_frozen() -> None:
    assert {o.flag: o.variable for o in flags.OPTIONS} == {
        "--tdbg-dir": "TDBG_DIR",
        "--tdbg-live": "TDBG_LIVE",
        "--tdbg-off": "TDBG_OFF",
        "--tdbg-watch-steps": "TDBG_WATCH_STEPS",
        "--tdbg-budget": "TDBG_BUDGET",
        "--tdbg-sample-seconds": "TDBG_SAMPLE_SECONDS",
        "--tdbg-stall-seconds": "TDBG_STALL_SECONDS",
        "--tdbg-run-name": "TDBG_RUN_NAME",
        "--tdbg-exec": "",
        "--tdbg-help": "",
        "--tdbg-version": "",
    }
    assert {o.variable for o in flags.OPTIONS if o.variable} == set(contract.SETTINGS)


@pytest.mark.parametrize("dir_form", [("--tdbg-dir", "/d"), ("--tdbg-dir=/d",)])
def test_both_forms_are_taken_out_wherever_they_stand_before_the_script(dir_form: tuple[str, ...]) -> None:
    line = take("--nproc-per-node", "2", *dir_form, "--standalone", "--tdbg-live", "train.py", "--lr", "1")
    assert line.settings == {"TDBG_DIR": "/d", "TDBG_LIVE": "1"}
    assert line.rest == ("--nproc-per-node", "2", "--standalone", "train.py", "--lr", "1")


@pytest.mark.parametrize(
    "argv",
    [
        ("train.py", "--tdbg-live", "--tdbg-nonsense", "--tdbg-dir=x"),
        ("--nproc-per-node=auto", "train.py", "--tdbg-off"),
        ("--nproc_per_node", "auto", "-m", "pkg.train", "--tdbg-off"),
        ("--nproc", "2", "--no-python", "bash", "--tdbg-run-name", "x"),
        ("--standalone", "-r", "3", "--", "train.py", "--tdbg-live"),
        ("--rdzv-conf", "timeout=3", "--max-restarts=-1", "train.py", "--", "--tdbg-live"),
    ],
)
def test_the_scripts_own_arguments_are_never_touched(argv: tuple[str, ...]) -> None:
    line = take(*argv)
    assert line.rest == argv
    assert not line.settings


@pytest.mark.parametrize("value", ["-1", "-r", "--tdbg-live"])
def test_a_value_is_what_follows_whatever_it_looks_like(value: str) -> None:
    line = take("--tdbg-run-name", value, "train.py")
    assert line.settings == {"TDBG_RUN_NAME": value}
    assert line.rest == ("train.py",)


@pytest.mark.parametrize(
    "before",
    [("--log-dir", "logs"), ("--log-dir=logs",), ("--nnodes", "1:2"), ("--master-port", "-5"), ("-t", "3"), ("-m",)],
)
def test_torchruns_own_values_are_not_mistaken_for_the_script(before: tuple[str, ...]) -> None:
    line = take(*before, "--tdbg-live", "train")
    assert line.settings == {"TDBG_LIVE": "1"}
    assert line.rest == (*before, "train")


def test_an_option_of_a_later_torchrun_needs_no_release_of_ours() -> None:
    def later() -> argparse.ArgumentParser:
        parser = get_args_parser()
        parser.add_argument("--warp-speed", nargs=2)
        return parser

    line = flags.take(("--warp-speed", "9", "8", "--tdbg-live", "train.py", "--tdbg-off"), later)
    assert line.settings == {"TDBG_LIVE": "1"}
    assert line.rest == ("--warp-speed", "9", "8", "train.py", "--tdbg-off")


def test_a_value_that_torchrun_still_waits_for_is_left_to_its_own_complaint() -> None:
    assert take("--log-dir", "--tdbg-live", "train.py").rest == ("--log-dir", "--tdbg-live", "train.py")


@pytest.mark.parametrize("option", ["--tdbg-nonsense", "--tdbg-liv", "--tdbg-"])
def test_an_unknown_option_is_an_error_that_lists_ours(option: str) -> None:
    with pytest.raises(TdbgError, match=f"unknown option {option}") as caught:
        take(option, "train.py")
    assert "--tdbg-budget" in caught.value.hint


def test_a_missing_or_superfluous_value_is_an_error() -> None:
    with pytest.raises(TdbgError, match="--tdbg-dir needs a value"):
        take("--tdbg-dir")
    with pytest.raises(TdbgError, match="--tdbg-live takes no value, got 'yes'"):
        take("--tdbg-live=yes", "train.py")


def test_exec_takes_the_rest_as_the_command_and_needs_no_torch() -> None:
    def no_torch() -> argparse.ArgumentParser:
        raise AssertionError("torch was asked for")

    line = flags.take(("--tdbg-exec", "--tdbg-dir", "d", "--", "srun", "--", "x", "--tdbg-off"), no_torch)
    assert line.asked == {"--tdbg-exec"}
    assert line.settings == {"TDBG_DIR": "d"}
    assert line.rest == ("srun", "--", "x", "--tdbg-off")


def test_settings_have_their_defaults_and_an_absolute_store() -> None:
    s = flags.read_settings({})
    assert (s.watch_steps, s.budget, s.sample_seconds, s.live, s.off, s.run_name) == (100, 0.5, 1.0, False, False, "")
    assert s.store == Path("tdbg_runs").absolute()


def test_settings_come_from_variables() -> None:
    s = flags.read_settings(
        {"TDBG_DIR": "/s", "TDBG_LIVE": "yes", "TDBG_OFF": "0", "TDBG_WATCH_STEPS": "7", "TDBG_BUDGET": "OFF",
         "TDBG_SAMPLE_SECONDS": "0.5", "TDBG_RUN_NAME": "a"}
    )  # fmt: skip
    assert (s.store, s.live, s.off, s.watch_steps, s.budget) == (Path("/s"), True, False, 7, "off")
    assert (s.sample_seconds, s.run_name) == (0.5, "a")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("TDBG_WATCH_STEPS", "-1"), ("TDBG_WATCH_STEPS", "many"), ("TDBG_BUDGET", "0"), ("TDBG_BUDGET", "nan"),
     ("TDBG_SAMPLE_SECONDS", "0"), ("TDBG_SAMPLE_SECONDS", "inf"), ("TDBG_LIVE", "maybe"),
     ("TDBG_RUN_NAME", "latest")],
)  # fmt: skip
def test_a_wrong_setting_is_named_with_its_flag_and_value(variable: str, value: str) -> None:
    flag = next(o.flag for o in flags.OPTIONS if o.variable == variable)
    with pytest.raises(TdbgError) as caught:
        flags.read_settings({variable: value})
    assert flag in caught.value.message
    assert repr(value) in caught.value.message
    assert caught.value.hint


def test_the_help_names_every_option() -> None:
    assert all(o.flag in flags.help_text() for o in flags.OPTIONS)
