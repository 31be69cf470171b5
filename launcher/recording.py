"""One run, as the launcher sees it: folder, files, supervisor before torchrun; status, sealing, summary after it."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from tdbg.rankagent import contract
from tdbg.rankagent.record import Recorder

from . import environment, programs, rundir
from .flags import Settings
from .guard import guarded
from .job import Job
from .node import gpu
from .node.host import Host
from .node.process import Tree
from .sampling import Sampler
from .supervisor import SEAL_SECONDS, SEAL_SECONDS_AFTER_SIGNAL, Supervisor


def say(text: str) -> None:
    """One line of ours on stderr."""
    print(f"tdbg-run: {text}", file=sys.stderr, flush=True)


class Recording:
    """A run that is being recorded. Making it raises OSError or TdbgError, and then nothing has changed."""

    def __init__(self, job: Job, settings: Settings, flags: Mapping[str, str]) -> None:
        self._reader_env = dict(os.environ)  # for `tdbg`: without the doors into the ranks
        store = settings.store
        name = rundir.plain(settings.run_name) if settings.run_name else job.shared_id
        name = name or rundir.fresh_id(job.script, time.time())
        self.run = rundir.make_run_folder(store, name, shared=job.nodes > 1)
        try:
            self._open(job, settings, flags)
        except BaseException:
            if job.nodes <= 1:  # a folder shared with other nodes is theirs as well
                shutil.rmtree(self.run, ignore_errors=True)
            raise

    def _open(self, job: Job, settings: Settings, flags: Mapping[str, str]) -> None:
        host = socket.gethostname()
        self.node_file = rundir.node_json(self.run, job.node, host)
        self.node_file.write()
        self.run_file = self._make_run_file(job, settings, host)
        folder = contract.process_dir(self.run, "node", job.node, 0, os.getpid())
        recorder = Recorder(folder, rank=-1, attempt=0)
        self.supervisor = Supervisor(
            self.run, job.node, self.node_file, self.run_file, recorder,
            make_sampler=lambda s: self._sampler(recorder, job.node, settings, s),
            stall_seconds=settings.stall_seconds,
        )  # fmt: skip
        self.watch = programs.start_watch(self.run, self._reader_env, say) if settings.live and job.node == 0 else None
        environment.apply(
            environment.environment(os.environ, self.run, job.node, flags)
        )  # last: nothing fails after it

    def _make_run_file(self, job: Job, settings: Settings, host: str) -> rundir.JsonFile | None:
        file = rundir.run_json(
            self.run, command=job.command, script=job.script, cwd=os.getcwd(), nnodes=job.nnodes,
            nproc_per_node=job.nproc_per_node, max_restarts=job.max_restarts, host=host, user=_user(),
            versions={"tdbg": version(), "python": platform.python_version(), "torch": job.torch},
            settings={"watch_steps": settings.watch_steps, "budget": settings.budget,
                      "sample_seconds": settings.sample_seconds},
        )  # fmt: skip
        # Node 0 writes run.json. Where nodes have no index yet, whoever comes first does.
        return file if file.create() else None

    def _sampler(self, recorder: Recorder, node: int, settings: Settings, supervisor: Supervisor) -> Sampler:
        gpus, why_not = gpu.connect()
        if why_not:
            supervisor.note("gpu", why_not)
        if gpus is not None and gpus.events_unseen:
            supervisor.note(
                "gpu", f"errors (Xid) of device(s) {', '.join(map(str, gpus.events_unseen))} are not reported"
            )
        return Sampler(recorder, node, settings.sample_seconds, Host(self.run), Tree(), gpus)

    def end(self, status: str, exit_code: int) -> None:
        """Close the run and print its summary. `status`: finished, failed or killed (stopped by a signal)."""
        killed = status == "killed"
        programs.stop_watch(self.watch)
        ended: dict[str, Any] = {"status": status, "exit_code": exit_code, "end_ns": time.time_ns()}
        if killed:  # the next signal may be the last
            self._update(ended)
        if not self.supervisor.close(SEAL_SECONDS_AFTER_SIGNAL if killed else SEAL_SECONDS):
            say(f"{self.run}: sealing did not come to an end; what is left is read as it is")
        self._update(ended)
        if not any((self.run / "records").glob("rank-*")):
            say(f"nothing was recorded: no rank of this node imported torch. How its processes ended is in {self.run}")
            return
        if self.run_file is None:  # one summary a run: from the node that keeps run.json
            say(f"recorded in {self.run}")
            return
        seconds = programs.SUMMARY_SECONDS_AFTER_SIGNAL if killed else programs.SUMMARY_SECONDS
        programs.print_summary(self.run, self._reader_env, seconds, say)

    def discard(self) -> None:
        """The command could not even be started: leave no trace of the run."""
        programs.stop_watch(self.watch)
        self.supervisor.close(1.0)
        shutil.rmtree(self.run, ignore_errors=True)

    def _update(self, values: Mapping[str, Any]) -> None:
        if self.run_file is not None:
            file = self.run_file
            guarded(lambda text: say(f"run.json could not be closed: {text}"), lambda: file.update(**values))


def version() -> str:
    """Version of the installed tdbg."""
    try:
        return importlib.metadata.version("tdbg")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
