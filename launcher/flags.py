"""Takes the `--tdbg-*` options out of the command line; everything else goes to torchrun untouched and in order.

An option is ours only where torchrun itself would still read options: before the script. Where that is, torchrun's own
parser says, so abbreviations, `=` forms and options of a later release need nothing from us.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from tdbg.rankagent import contract
from tdbg.rankagent.contract import TdbgError

PREFIX = "--tdbg-"
_PROBE = "\0"  # no argument of a process can hold this, so it can't be taken for one of the user's
_FALSE = ("", "0", "false", "no", "off")
_TRUE = ("1", "true", "yes", "on")
FEWEST_SAMPLE_SECONDS = 0.1  # one sample takes 1 to 3 ms: at 10 a second still about 1-3 % of one core

FEWEST_STALL_SECONDS = 3.0  # progress is looked for once a second, and three stacks are taken before it is a stall


@dataclass(frozen=True)
class Option:
    """One of our options. `variable` is "" where it is no setting; `value` names what follows, "" for nothing."""

    flag: str
    variable: str
    value: str
    help: str


OPTIONS = (
    Option("--tdbg-dir", contract.STORE, "DIR", f"the store to keep runs in (default ./{contract.DEFAULT_STORE})"),
    Option("--tdbg-live", contract.LIVE, "", "show the live screen on the terminal while it trains"),
    Option("--tdbg-off", contract.OFF, "", "record nothing: plain torchrun"),
    Option("--tdbg-watch-steps", contract.WATCH_STEPS, "N",
           f"record everything at each of the first N steps (default {contract.DEFAULT_WATCH_STEPS})"),
    Option("--tdbg-budget", contract.BUDGET, "PERCENT|off",
           f"cost per step to stay under afterwards (default {contract.DEFAULT_BUDGET_PERCENT})"),
    Option("--tdbg-sample-seconds", contract.SAMPLE_SECONDS, "S", "time between samples of the machine (default 1)"),
    Option("--tdbg-stall-seconds", contract.STALL_SECONDS, "S",
           f"least time without any progress that is called a stall (default {contract.DEFAULT_STALL_SECONDS:.0f})"),
    Option("--tdbg-run-name", contract.RUN_NAME, "NAME", "the run's id (default: time, script and a random part)"),
    Option("--tdbg-exec", "", "", "then -- and any launcher's command: run that instead of torchrun"),
    Option("--tdbg-help", "", "", "show these options and exit"),
    Option("--tdbg-version", "", "", "show tdbg's version and exit"),
)  # fmt: skip
_BY_FLAG = {o.flag: o for o in OPTIONS}


@dataclass(frozen=True)
class CommandLine:
    """`settings` by variable; `asked`: the flags without a variable; `rest`: torchrun's (or the command's) part."""

    settings: dict[str, str] = field(default_factory=dict)
    asked: frozenset[str] = frozenset()
    rest: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """The settings with their defaults filled in. `budget` is a percentage or "off"."""

    store: Path
    live: bool
    off: bool
    watch_steps: int
    budget: float | str
    sample_seconds: float
    run_name: str
    stall_seconds: float = contract.DEFAULT_STALL_SECONDS


def take(argv: Sequence[str], torchrun_parser: Callable[[], ArgumentParser]) -> CommandLine:
    """Split the command line. Raises TdbgError for an option that starts like ours and is none, or lacks its value.

    The parser is asked for only when an option of ours stands behind something else, so `--tdbg-help` and
    `--tdbg-exec` need no torch.
    """
    settings: dict[str, str] = {}
    asked: set[str] = set()
    rest: list[str] = []
    left = list(argv)
    while left:
        token = left.pop(0)
        if "--tdbg-exec" in asked and not token.startswith(PREFIX):
            return CommandLine(settings, frozenset(asked), tuple(left if token == "--" else [token, *left]))
        if not token.startswith(PREFIX) or not _before_script(rest, torchrun_parser):
            rest.append(token)
            continue
        option, value = _ours(token, left)
        if option.variable:
            settings[option.variable] = value
        else:
            asked.add(option.flag)
    return CommandLine(settings, frozenset(asked), tuple(rest))


def _ours(token: str, left: list[str]) -> tuple[Option, str]:
    name, equals, value = token.partition("=")
    option = _BY_FLAG.get(name)
    if option is None:
        raise TdbgError(f"unknown option {name}", f"tdbg's options: {', '.join(sorted(_BY_FLAG))}")
    if not option.value:
        if equals:
            raise TdbgError(f"{name} takes no value, got {value!r}", f"write {name} alone")
        return option, "1"
    if not equals:
        if not left:
            raise TdbgError(f"{name} needs a value", f"write {name} {option.value}")
        value = left.pop(0)
    return option, value


class _ParserSays(Exception):
    """Raised instead of argparse's own way to stop the program."""


def _before_script(taken: list[str], torchrun_parser: Callable[[], ArgumentParser]) -> bool:
    """Whether torchrun, having read `taken`, would take the next argument for an option of its own or the script."""
    if not taken:
        return True
    parser = torchrun_parser()

    def stop(*_: object, **__: object) -> NoReturn:
        raise _ParserSays

    # argparse documents these three as the methods to replace. A line that torchrun refuses, or answers with its
    # help, is left as it is: torchrun will say so itself.
    parser.error = parser.exit = parser.print_help = stop  # type: ignore[method-assign]
    try:
        return bool(getattr(parser.parse_known_args([*taken, _PROBE])[0], "training_script", None) == _PROBE)
    except _ParserSays:
        return False


def read_settings(env: Mapping[str, str]) -> Settings:
    """Settings from the variables. Raises TdbgError that names the variable (its flag sets it) and the value."""
    return Settings(
        store=Path(env.get(contract.STORE) or contract.DEFAULT_STORE).expanduser().absolute(),
        live=_switch(env, contract.LIVE),
        off=_switch(env, contract.OFF),
        watch_steps=_watch_steps(env),
        budget=_budget(env),
        sample_seconds=_sample_seconds(env),
        run_name=_run_name(env),
        stall_seconds=_stall_seconds(env),
    )


def _wrong(variable: str, value: str, wanted: str) -> TdbgError:
    flag = next(o.flag for o in OPTIONS if o.variable == variable)
    return TdbgError(f"{flag} ({variable}) is {value!r}", f"it must be {wanted}")


def _switch(env: Mapping[str, str], variable: str) -> bool:
    value = env.get(variable, "").strip().lower()
    if value not in (*_FALSE, *_TRUE):
        raise _wrong(variable, value, "1 or 0")
    return value in _TRUE


def _watch_steps(env: Mapping[str, str]) -> int:
    value = env.get(contract.WATCH_STEPS, "").strip() or str(contract.DEFAULT_WATCH_STEPS)
    if not value.isdecimal():
        raise _wrong(contract.WATCH_STEPS, value, "a whole number of steps, 0 or more")
    return int(value)


def _budget(env: Mapping[str, str]) -> float | str:
    value = env.get(contract.BUDGET, "").strip().lower() or str(contract.DEFAULT_BUDGET_PERCENT)
    if value == "off":
        return value
    number = _number(value)
    if not 0 < number <= 100:
        raise _wrong(contract.BUDGET, value, "a percentage above 0 and up to 100, or off")
    return number


def _sample_seconds(env: Mapping[str, str]) -> float:
    value = env.get(contract.SAMPLE_SECONDS, "").strip() or "1"
    if not FEWEST_SAMPLE_SECONDS <= _number(value) < math.inf:
        raise _wrong(contract.SAMPLE_SECONDS, value, f"a number of seconds, {FEWEST_SAMPLE_SECONDS} or more")
    return float(value)


def _stall_seconds(env: Mapping[str, str]) -> float:
    value = env.get(contract.STALL_SECONDS, "").strip() or str(contract.DEFAULT_STALL_SECONDS)
    if not FEWEST_STALL_SECONDS <= _number(value) < math.inf:
        raise _wrong(contract.STALL_SECONDS, value, f"a number of seconds, {FEWEST_STALL_SECONDS:.0f} or more")
    return float(value)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _run_name(env: Mapping[str, str]) -> str:
    value = env.get(contract.RUN_NAME, "").strip()
    if value == "latest":
        raise _wrong(contract.RUN_NAME, value, 'another name: "latest" stands for the newest run')
    return value


def help_text() -> str:
    """Our part of `tdbg-run --help`."""
    lines = ["tdbg options (before the script; each sets the variable in brackets, the flag wins):"]
    for o in OPTIONS:
        lines.append(f"  {o.flag} {o.value}".rstrip())
        lines.append(f"                        {o.help}" + (f" [{o.variable}]" if o.variable else ""))
    return "\n".join(lines)
