"""Where a loss that is not finite went wrong, from the graph of its backward, without computing anything anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kit.agent import read, record, running
from tdbg.rankagent import birth, torchprivate


def train(loss_of, steps=1, model=None):
    """A loop over `loss_of(model, x)`; the model has layers `first` and `last`."""
    torch.manual_seed(3)
    net = model or nn.ModuleDict({"first": nn.Linear(3, 4), "last": nn.Linear(4, 1)})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(net, torch.ones(2, 3)).backward()
        optimizer.step()


def births(folder, loss_of, **more):
    return record(folder, lambda: train(loss_of, **more)).get("birth", [])


def test_nothing_is_looked_at_while_losses_are_finite(tmp_path):
    assert births(tmp_path, lambda net, x: net["last"](net["first"](x)).mean(), steps=3) == []


def test_the_operation_and_the_parameters_next_to_it(tmp_path):
    def loss(net, x):
        hidden = net["first"](x)
        return net["last"](torch.log(-hidden.abs()).exp()).mean()

    (row,) = births(tmp_path, loss)
    assert (row["op"], row["shown"], row["whole"]) == ("exp", "result", True)
    assert set(row["near"].split(", ")) == {"first.weight", "first.bias"}


def test_what_fed_an_operation_that_only_kept_its_input(tmp_path):
    def loss(net, x):
        hidden = net["first"](x)
        return net["last"]((hidden - hidden) / (hidden - hidden)).mean()

    (row,) = births(tmp_path, loss)
    assert (row["op"], row["shown"], row["fed_by"]) == ("addmm", "input", "div")


def test_born_after_everything_that_was_saved(tmp_path):
    (row,) = births(tmp_path, lambda net, x: torch.log(net["last"](net["first"](x)).mean() * 0))
    assert (row["op"], row["shown"], row["fed_by"]) == ("log", "root", "log")


def test_a_mask_of_minus_infinity_is_no_birth(tmp_path):
    def loss(net, x):
        hidden = net["first"](x).masked_fill(torch.tensor([True, False, False, True]), -torch.inf)
        return torch.logsumexp(hidden, 1).mean() + torch.sqrt(net["last"](torch.zeros(2, 4)) - 9).mean()

    (row,) = births(tmp_path, loss)
    assert (row["op"], row["shown"]) == ("sqrt", "result")


def test_checkpointed_activations_are_not_computed_again(tmp_path):
    calls = []

    def inner(net, x):
        calls.append(1)
        return torch.log(-net["first"](x).abs())

    def loss(net, x):
        return net["last"](checkpoint(inner, net, x, use_reentrant=False)).mean()

    (row,) = births(tmp_path, loss)
    assert (row["op"], row["reason"]) == ("", "saved tensors may lie behind hooks")
    assert len(calls) == 2  # the forward and the backward's own


def test_hooks_that_lie_around_many_steps_are_never_called_by_a_look(tmp_path):
    unpacked = []

    def unpack(x):
        unpacked.append(1)
        return x

    def loss(net, x):
        return net["last"](net["first"](x)).exp().mean() * torch.nan

    def program():
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            train(loss, steps=3)

    program()
    without, unpacked[:] = len(unpacked), []
    rows = record(tmp_path, program)["birth"]
    assert {row["reason"] for row in rows} == {"saved tensors may lie behind hooks"}
    assert len(unpacked) == without


def test_a_look_ends_when_its_time_is_up():
    ticks = iter(range(0, 10**12, birth.MOST_NS // 3))
    x = torch.ones(2, requires_grad=True)
    found = birth.find((((x * 2).exp() * torch.nan).log()).sum(), lambda: next(ticks))
    assert not found.whole


def test_statistics_of_a_normalisation_are_results_not_inputs(tmp_path):
    def loss(net, x):
        hidden = net["first"](x) * 1e30 * 1e30  # Inf, not NaN: the deviation is what is NaN first
        return net["last"](nn.functional.layer_norm(hidden, (4,))).mean()

    (row,) = births(tmp_path, loss)
    assert (row["shown"], row["fed_by"]) == ("result", "")


def test_a_loss_that_its_scale_made_infinite_is_left_alone(tmp_path):
    def program():
        net = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
        for _ in range(2):
            scaler.scale((net(torch.ones(2, 3)) * 1e10).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()

    assert "birth" not in record(tmp_path, program)


def test_a_tensor_changed_in_place_since_is_passed_over(tmp_path):
    def loss(net, x):
        hidden = torch.exp(net["first"](x)).detach_()
        root = (net["last"](hidden) * torch.nan).mean()
        hidden.zero_()
        return root

    with pytest.raises(RuntimeError, match="inplace operation"):  # torch's own complaint about the program
        births(tmp_path, loss)
    (row,) = read(tmp_path)["birth"]
    assert (row["op"], row["shown"], row["fed_by"]) == ("mul", "input", birth.CONSTANT)
    assert not any(row["state"] == "disabled" for row in read(tmp_path)["probe"])


def test_only_the_first_losses_of_an_attempt_are_looked_at(tmp_path):
    assert len(births(tmp_path, lambda net, x: net["first"](x).mean() * torch.nan, steps=9)) == 4


def test_the_hook_on_saved_tensors_is_put_back(tmp_path):
    before = torch.autograd.graph.saved_tensors_hooks.__enter__
    with running(tmp_path):
        assert torch.autograd.graph.saved_tensors_hooks.__enter__ is not before
    assert torch.autograd.graph.saved_tensors_hooks.__enter__ is before


def test_an_input_of_a_model_without_a_wrapper_shows_in_what_an_operation_got(tmp_path):
    def program():
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        rows = torch.utils.data.TensorDataset(torch.randn(12, 3))
        for step, (x,) in enumerate(torch.utils.data.DataLoader(rows, batch_size=4)):
            if step == 1:
                x = x.clone()
                x[2, 0] = torch.inf
            optimizer.zero_grad()
            (net(x) - net(x)).mean().backward()
            optimizer.step()

    rows = [r for r in record(tmp_path, program)["input"] if r["source"] == "graph"]
    assert [(r["step"], r["path"], r["positions"], r["rows"]) for r in rows[:1]] == [(2, "what addmm got", [2], 4)]


def test_a_constant_of_the_program_is_no_input(tmp_path):
    rows = record(tmp_path, lambda: train(lambda net, x: (net["first"](x) * torch.tensor([torch.nan] * 4)).mean()))
    assert [r["fed_by"] for r in rows["birth"]] == [birth.CONSTANT]
    assert [r for r in rows.get("input", []) if r["source"] == "graph"] == []


def test_memory_that_was_freed_since_is_not_read():
    """As FSDP frees gathered parameters after the forward: to read them would end the process."""
    weight = nn.Parameter(torch.randn(64, 256))
    x = torch.randn(4, 256, requires_grad=True)
    loss = torch.log((x @ weight.t()).sum() * 0 - 1)
    weight.untyped_storage().resize_(0)
    found = birth.find(loss)
    assert found is not None
    assert (found.op, found.shown, found.whole) == ("log", "root", True)


def test_of_a_dtensor_the_local_part_is_read_and_other_subclasses_are_left_alone():
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args, **kwargs):
            raise AssertionError("an operation of the program's own tensor")

    part = torch.ones(3)
    assert torchprivate.held_here(part).data_ptr() == part.data_ptr()
    assert torchprivate.held_here(torch.ones(3).as_subclass(Own)) is None
    assert torchprivate.held_here(torch.eye(3).to_sparse()) is None
    assert torchprivate.held_here(torch.ones(2, device="meta")) is None
    assert torchprivate.held_here(torch.ones(8)[2::3]).tolist() == [1.0, 1.0]
