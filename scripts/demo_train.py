"""A training script with a fault that no error message tells: the job of scripts/demo.

It learns a little regression with two DDP ranks. The loss is computed through the module inside the wrapper
(`model.module`), so DDP never prepares a reduction: each rank trains a model of its own on its own half of the data.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 4


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(512, 16)
    data = TensorDataset(x, (x @ torch.randn(16, 1)).tanh())
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=32, sampler=sampler)

    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for features, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model.module(features), target)  # the planted fault: model(features) is right
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
