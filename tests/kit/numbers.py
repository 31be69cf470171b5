"""A data set whose samples say which they are. Here and not in a test, so that spawned workers can import it."""

import torch
from torch.utils.data import Dataset


class Numbers(Dataset):
    """Sample i is the number i, so that a batch tells which samples it holds."""

    def __init__(self, n=37, fail=()):
        self.n, self.fail = n, fail

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i in self.fail:
            raise ValueError(f"sample {i} is broken")
        return torch.tensor(float(i))
