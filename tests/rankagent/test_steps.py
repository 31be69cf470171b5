"""What counts as a step, with every way in which training loops take one."""

import warnings

import pytest
import torch
from torch import nn

from kit.agent import record, running

CLASSES = [
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
    *(["Adafactor"] if hasattr(torch.optim, "Adafactor") else []),  # from torch 2.5 on
]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_of(net, seed=0):
    g = torch.Generator().manual_seed(seed)
    return net(torch.randn(6, 4, generator=g)).square().mean()


def steps(rows):
    return [r["step"] for r in rows["step"]]


@pytest.mark.parametrize("name", CLASSES)
def test_every_optimizer_class_takes_one_step_per_call(tmp_path, name):
    def train():
        net = model()
        optimizer = getattr(torch.optim, name)(net.parameters())
        for k in range(3):
            optimizer.zero_grad()
            loss_of(net, k).backward()
            optimizer.step()

    rows = record(tmp_path, train)
    assert steps(rows) == [1, 2, 3]
    assert {r["optimizers"] for r in rows["step"]} == {1}
    assert [r["step"] for r in rows["param"] if r["stage"] == "end"] == [1, 2, 3]
    assert not any(r["state"] == "disabled" for r in rows["probe"])


def test_accumulation_counts_its_backwards_and_sums_their_losses(tmp_path):
    losses = []

    def train():
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for window in range(2):
            for k in range(4):
                loss = loss_of(net, 4 * window + k) / 4
                losses.append(loss.item())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    rows = record(tmp_path, train)
    assert [(r["step"], r["backwards"]) for r in rows["step"]] == [(1, 4), (2, 4)]
    assert [r["total"] for r in rows["loss"]] == pytest.approx([sum(losses[:4]), sum(losses[4:])])


def test_two_optimizers_of_one_iteration_are_one_step(tmp_path):
    def train():
        a, b = model(), model()
        first, second = torch.optim.SGD(a.parameters(), lr=0.1), torch.optim.Adam(b.parameters())
        for k in range(3):
            for net, optimizer in ((a, first), (b, second)):
                optimizer.zero_grad()
                loss_of(net, k).backward()
                optimizer.step()

    rows = record(tmp_path, train)
    assert [(r["step"], r["optimizers"], r["backwards"]) for r in rows["step"]] == [(1, 2, 2), (2, 2, 2), (3, 2, 2)]
    assert {r["model"] for r in rows["tensor"]} == {0, 1}


def test_lbfgs_computes_its_gradients_inside_the_step(tmp_path):
    def train():
        net = model()
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=4)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(net)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    rows = record(tmp_path, train)
    assert steps(rows) == [1, 2]
    reduced = [r for r in rows["grad"] if r["stage"] == "reduced"]
    assert [r["step"] for r in reduced] == [1, 2]
    assert all(reduced[0]["digest"])


def test_a_subclass_that_calls_its_parent_steps_once(tmp_path):
    class Wrapping(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    def train():
        net = model()
        optimizer = Wrapping(net.parameters(), lr=0.1)
        for k in range(3):
            loss_of(net, k).backward()
            optimizer.step()

    assert steps(record(tmp_path, train)) == [1, 2, 3]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_counts_and_is_marked(tmp_path, fused):
    def train():
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for k in range(4):
            optimizer.zero_grad()
            loss = loss_of(net, k) * (float("inf") if k == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    rows = record(tmp_path, train)
    assert [(r["step"], r["skipped"]) for r in rows["step"]] == [(1, False), (2, True), (3, False), (4, False)]
    assert [r["scale"] for r in rows["loss"]][:2] == [4.0, 4.0]


def test_the_loss_scale_is_taken_out_of_loss_and_local_norms(tmp_path):
    plain, scaled = [], []

    def train(into, scale):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        loss = loss_of(net)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        into.append(loss.item())

    a = record(tmp_path / "a", lambda: train(plain, 1.0))
    b = record(tmp_path / "b", lambda: train(scaled, 1024.0))
    assert b["loss"][0]["total"] == pytest.approx(plain[0])
    local = [next(r["l2"] for r in rows["grad"] if r["stage"] == "local") for rows in (a, b)]
    assert local[1] == pytest.approx(local[0], rel=1e-5)


def test_optimizers_that_step_in_backward_close_one_step_per_backward(tmp_path):
    def train():
        net = model()
        for p in net.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)

            def hook(parameter, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(hook)
        for k in range(3):
            loss_of(net, k).backward()

    rows = record(tmp_path, train)
    assert steps(rows) == [1, 2, 3]
    assert {r["optimizers"] for r in rows["step"]} == {4}


def test_without_a_torch_optimizer_the_step_is_inferred_and_says_so(tmp_path):
    def train():
        net = model()
        for k in range(3):
            net.zero_grad()
            loss_of(net, k).backward()
            with torch.no_grad():
                for p in net.parameters():
                    p -= 0.1 * p.grad

    rows = record(tmp_path, train)
    assert [(r["step"], r["inferred"]) for r in rows["step"]] == [(1, True), (2, True), (3, True)]


def test_reentrant_checkpointing_is_one_backward(tmp_path):
    def train():
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = torch.randn(3, 4, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=True)
        out.sum().backward()
        optimizer.step()

    assert [(r["step"], r["backwards"]) for r in record(tmp_path, train)["step"]] == [(1, 1)]


def test_a_rebuilt_optimizer_and_model_go_on_counting_and_get_a_new_catalogue(tmp_path):
    def train():
        for _ in range(2):
            net = model()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for k in range(2):
                loss_of(net, k).backward()
                optimizer.step()

    rows = record(tmp_path, train)
    assert steps(rows) == [1, 2, 3, 4]
    assert {r["generation"] for r in rows["tensor"]} == {1, 2}


def test_the_names_of_an_unwrapped_model_are_its_own(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            return self.frozen(self.body(x - self.mean))

    def train():
        net = Net()
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        loss_of(net).backward()
        optimizer.step()

    tensors = record(tmp_path, train)["tensor"]
    assert [(t["name"], t["kind"], t["trainable"], t["optimizer"]) for t in tensors] == [
        ("body.weight", "param", True, 0),
        ("body.bias", "param", True, 0),
        ("frozen.weight", "param", False, -1),
        ("frozen.bias", "param", False, -1),
        ("mean", "buffer", False, -1),
    ]
    assert {t["model_type"] for t in tensors} == {"Net"}


def test_nothing_is_recorded_of_another_threads_backward(tmp_path):
    import threading

    def train():
        net = model()
        thread = threading.Thread(target=lambda: loss_of(net).backward())
        thread.start()
        thread.join()

    assert "loss" not in record(tmp_path, train)


def trained(compile_step):
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    losses = []
    for k in range(30):
        optimizer.zero_grad()
        loss = loss_of(net, k)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in net.parameters()], torch.get_rng_state()


def test_training_is_bit_identical_with_and_without_the_agent(tmp_path):
    plain = trained(False)
    with running(tmp_path):
        watched = trained(False)
    assert plain[0] == watched[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], watched[1], strict=True))
    assert torch.equal(plain[2], watched[2])


def test_the_model_is_freed_as_ever(tmp_path):
    import gc
    import weakref

    with running(tmp_path):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loss_of(net).backward()
        optimizer.step()
        refs = [weakref.ref(net), weakref.ref(net[0].weight), weakref.ref(optimizer)]
        del net, optimizer
        gc.collect()
        assert [r() for r in refs] == [None, None, None]


def test_a_backward_left_over_when_the_optimizer_is_gone_is_no_step(tmp_path):
    def train():
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for k in range(3):
            loss_of(net, k).backward()
            if k < 2:
                optimizer.step()

    rows = record(tmp_path, train)["step"]
    assert [(r["step"], r["inferred"]) for r in rows] == [(1, False), (2, False)]
