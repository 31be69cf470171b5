"""Where training is, in the state page, and the signal that gives its stack: both leave the process as it was."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from kit.agent import running
from tdbg.rankagent import contract, stacks
from tdbg.rankagent.readback import read_state
from tdbg.rankagent.record import POSITION_AT, STATE, Recorder


def test_the_state_page_says_where_training_is_and_how_far(tmp_path: Path) -> None:
    model, seen = nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with running(tmp_path) as agent:
        folder = Path(agent.recorder.folder)

        class Rows(list[torch.Tensor]):
            def __getitem__(self, i):  # type: ignore[no-untyped-def]
                seen.append(read_state(folder))
                return super().__getitem__(i)

        for x in DataLoader(Rows(torch.randn(8, 4)), batch_size=2):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.register_hook(lambda g: seen.append(read_state(folder)))
            loss.backward()
            optimizer.step()
        torch.save(model.state_dict(), tmp_path / "model.pt")
        last = read_state(folder)
    states = [s for s in seen if s is not None]
    assert {s.phase for s in states} == {"data", "backward"}
    assert [s.entered for s in states] == sorted(s.entered for s in states)
    assert last is not None
    assert (last.phase, last.step) == ("other", 4)
    assert last.entered >= 4 * 3 + 1  # data, backward, optimizer of each step, and the checkpoint
    assert last.phase_since_ns >= states[-1].phase_since_ns > 0


def test_a_page_of_an_older_writer_says_nothing_about_it(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "rank-00000.0.1", 0, 0)
    recorder.update_state(3, 1)
    page = (tmp_path / "rank-00000.0.1" / "state").read_bytes()
    assert page[STATE.size : POSITION_AT].strip(b"\0") == b""
    (tmp_path / "rank-00000.0.1" / "state").write_bytes(page[: STATE.size])
    state = read_state(tmp_path / "rank-00000.0.1")
    assert state is not None
    assert (state.step, state.phase, state.entered, state.signal) == (3, "", 0, 0)


def test_the_signal_is_free_before_and_after(tmp_path: Path) -> None:
    before, setter = stacks.free_signals(), signal.signal
    with running(tmp_path) as agent:
        state = read_state(Path(agent.recorder.folder))
        assert state is not None
        assert state.signal == before[0]
        assert os.path.samefile(f"/proc/self/fd/{state.stacks_fd}", Path(agent.recorder.folder) / contract.STACKS)
        os.kill(os.getpid(), state.signal)
        assert "test_stacks.py" in (Path(agent.recorder.folder) / contract.STACKS).read_text()
    assert stacks.free_signals() == before
    assert signal.getsignal(before[0]) is signal.SIG_DFL
    assert signal.signal is setter


def test_a_program_may_have_the_signal(tmp_path: Path) -> None:
    heard: list[int] = []
    with running(tmp_path) as agent:
        state = read_state(Path(agent.recorder.folder))
        assert state is not None
        signal.signal(state.signal, lambda number, frame: heard.append(number))
        os.kill(os.getpid(), state.signal)
        after = read_state(Path(agent.recorder.folder))
        assert after is not None
        assert (after.signal, after.stacks_fd) == (0, -1)
    assert heard == [state.signal]
    signal.signal(state.signal, signal.SIG_DFL)


def test_the_users_own_faulthandler_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "own").open("w") as own:
        faulthandler.register(signal.SIGUSR1, file=own, all_threads=False)
        with running(tmp_path):
            os.kill(os.getpid(), signal.SIGUSR1)
        faulthandler.unregister(signal.SIGUSR1)
    assert "test_stacks.py" in (tmp_path / "own").read_text()
