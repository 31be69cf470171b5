"""`tdbg-run`: torchrun with a witness. Prepares the run, runs torchrun in this very process, closes the run.

torchrun runs on the main thread with the user's own arguments, so that flags, signals, exit code, stderr and process
tree are those of the installed release. Nothing that fails here before or after it may change any of that.
"""

from __future__ import annotations

import importlib
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NoReturn

from tdbg.rankagent.contract import TdbgError

from . import flags, torchelastic
from .execute import execute
from .guard import guarded
from .job import Job, of_command, of_torchrun
from .recording import Recording, say, version


class NoTorch(TdbgError):
    """torch is missing, broken or too old; exit code 1, as from a torchrun that can't start."""


def main(argv: Sequence[str] | None = None) -> int:
    """The console command. Leaves by torchrun's own exception when torchrun does."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except TdbgError as e:
        say(str(e))
        return 1 if isinstance(e, NoTorch) else 2


def _main(argv: list[str]) -> int:
    line = flags.take(argv, lambda: _parser(torchrun()))
    if "--tdbg-version" in line.asked:
        print(f"tdbg {version()}")
        return 0
    if "--tdbg-help" in line.asked:
        print(flags.help_text())
        return 0
    settings = flags.read_settings({**os.environ, **line.settings})
    if "--tdbg-exec" in line.asked:
        return _execute(line, settings)
    module = torchrun()
    args = _read(_parser(module), line.rest)
    recording = None
    if settings.off:
        os.environ.update(line.settings)
    else:
        recording = _begin(lambda: of_torchrun(args, argv, os.environ, torch_version()), settings, line)
    error = _torchrun(module, line.rest, recording)
    if recording is not None:
        _end(recording, error)
    if error is not None:
        _leave(error)
    return 0


# ---------------------------------------------------------------- torch


def torchrun() -> ModuleType:
    """torch's launcher. Raises NoTorch."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as e:
        raise NoTorch(f"torch can't be imported by {sys.executable}: {e}", "install torch 2.4 or newer") from None
    oldest = ".".join(map(str, torchelastic.OLDEST_TORCH))
    if too_old(str(torch.__version__)):
        raise NoTorch(f"torch {torch.__version__} is too old", f"install torch {oldest} or newer")
    try:
        return importlib.import_module("torch.distributed.run")
    except (ImportError, OSError) as e:
        raise NoTorch(
            f"this torch has no torchrun: {e}", f"install torch {oldest} or newer with torch.distributed"
        ) from None


def torch_version() -> str:
    return str(importlib.import_module("torch").__version__)


def too_old(torch: str) -> bool:
    """Whether a version such as 2.13.0+cpu is older than what the ranks' agent is made for."""
    numbers = tuple(int(n) for n in torch.split("+")[0].split(".")[:2] if n.isdecimal())
    return len(numbers) == 2 and numbers < torchelastic.OLDEST_TORCH


def _parser(module: ModuleType) -> ArgumentParser:
    parser: ArgumentParser = module.get_args_parser()
    return parser


def _read(parser: ArgumentParser, rest: Sequence[str]) -> Namespace:
    """torchrun's view of its arguments. It prints help or an error and exits (0 or 2) as torchrun would."""
    try:
        return parser.parse_args(list(rest))
    except SystemExit as e:
        if not e.code:
            print(f"\n{flags.help_text()}")
        raise


def _torchrun(module: ModuleType, rest: Sequence[str], recording: Recording | None) -> BaseException | None:
    """Run torchrun to its end; gives the exception it ended with, after printing it as the interpreter would."""
    undo = _observe(recording) if recording is not None else None
    try:
        module.main(list(rest))
    except SystemExit as e:
        return e
    except BaseException as e:  # printed now, so that the summary stands below it; raised again by `_leave`
        e.__traceback__ = e.__traceback__.tb_next if e.__traceback__ else None
        sys.excepthook(type(e), e, e.__traceback__)
        return e
    finally:
        if undo is not None:
            undo()
    return None


def _leave(error: BaseException) -> NoReturn:
    """End with torchrun's exception, already printed: the interpreter then does what it does for torchrun."""
    if not isinstance(error, SystemExit):
        sys.excepthook = lambda *_: None
    raise error


# ---------------------------------------------------------------- the run around it


def _begin(job: Callable[[], Job], settings: flags.Settings, line: flags.CommandLine) -> Recording | None:
    """Start recording, or say in one line why not: the job runs either way."""

    def why_not(text: str) -> None:
        say(f"not recording: {text} (--tdbg-dir gives another store)")

    return guarded(why_not, lambda: Recording(job(), settings, line.settings))


def _observe(recording: Recording) -> Callable[[], None] | None:
    """Let the supervisor see the ranks that torchrun starts. Gives the undo."""
    supervisor = recording.supervisor

    def begin() -> Callable[[], None]:
        undo, why_not = torchelastic.observe(supervisor)
        if why_not:
            supervisor.ranks.told = False
            supervisor.note("supervisor", why_not)
        supervisor.start()
        return undo

    return guarded(lambda why: say(f"the node is not watched: {why}"), begin)


def _end(recording: Recording, error: BaseException | None) -> None:
    """Close the run. Whatever fails in it, and a second Ctrl-C, leaves torchrun's exit code as it is."""
    status, code = "finished", 0
    if error is not None:
        recording.supervisor.stopped(torchelastic.failures(error))
        status = "killed" if torchelastic.was_signal(error) else "failed"
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
    guarded(lambda why: say(f"{recording.run}: the run could not be closed: {why}"), recording.end, status, code)


def _execute(line: flags.CommandLine, settings: flags.Settings) -> int:
    if not line.rest:
        raise TdbgError("--tdbg-exec has no command", "write tdbg-run --tdbg-exec -- accelerate launch train.py")
    recording = None
    env = {**os.environ, **line.settings}
    if not settings.off:
        recording = _begin(lambda: of_command(line.rest, os.environ), settings, line)
    if recording is None:
        return execute(line.rest, env, on_stop=lambda: None)[0]
    recording.supervisor.ranks.told = False  # this launcher tells us nothing: ranks are found by what they write
    guarded(lambda why: say(f"the node is not watched: {why}"), recording.supervisor.start)
    try:
        code, stopped = execute(line.rest, os.environ, on_stop=lambda: recording.supervisor.stopping({}))
    except TdbgError:
        recording.discard()
        raise
    status = "killed" if stopped else "failed" if code else "finished"
    guarded(lambda why: say(f"{recording.run}: the run could not be closed: {why}"), recording.end, status, code)
    return code


if __name__ == "__main__":
    sys.exit(main())
