"""Whether gradients were still scaled when they were clipped."""

import math

import pytest
import torch
from torch import nn

from kit.agent import record


def train(unscale=False, limit=1.0, enabled=True, by_value=False, steps=3):
    torch.manual_seed(5)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=enabled)
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2, 3)).pow(2).mean()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        if by_value:
            nn.utils.clip_grad_value_(net.parameters(), limit)
        else:
            nn.utils.clip_grad_norm_(net.parameters(), limit)
        scaler.step(optimizer)
        scaler.update()


def scaled(folder, **how):
    return [(r["calls"], r["scaled"]) for r in record(folder, lambda: train(**how))["clip"]]


def test_clipping_before_unscaling_is_seen_at_every_step(tmp_path):
    assert scaled(tmp_path) == [(1, 1)] * 3
    assert scaled(tmp_path / "value", by_value=True) == [(1, 1)] * 3


@pytest.mark.parametrize("how", [{"unscale": True}, {"limit": math.inf}, {"enabled": False}])
def test_clipping_that_meets_gradients_of_their_own_size_or_only_asks_for_the_norm_is_not(tmp_path, how):
    assert scaled(tmp_path, **how) == [(1, 0)] * 3
