"""Data sets that hide broken records, each in another of the usual ways. Sample i is the number i."""

import random

import numpy
import torch
from torch.utils.data import Dataset, default_collate


class Records(Dataset):
    """`load` raises ValueError for a broken record."""

    def __init__(self, n, broken=()):
        self.n, self.broken = n, broken

    def __len__(self):
        return self.n

    def load(self, i):
        if i in self.broken:
            raise ValueError(f"record {i} is broken")
        return torch.tensor(float(i))


class Neighbour(Records):
    """Asks itself for the next one."""

    def __getitem__(self, i):
        try:
            return self.load(i)
        except ValueError:
            return self[(i + 1) % self.n]


class Inline(Records):
    """Tries one after the other."""

    def __getitem__(self, i):
        while True:
            try:
                return self.load(i)
            except ValueError:
                i = (i + 1) % self.n


class Nothing(Records):
    """Gives None, which the collate function leaves out."""

    def __getitem__(self, i):
        try:
            return self.load(i)
        except ValueError:
            return None


def without_none(samples):
    return default_collate([s for s in samples if s is not None])


class Zeros(Records):
    """Gives a dummy."""

    def __getitem__(self, i):
        try:
            return self.load(i)
        except ValueError:
            return torch.tensor(-1.0)


class Retry(Records):
    """Healthy: the second try works."""

    def __init__(self, n, broken=()):
        super().__init__(n, broken)
        self.tried = set()

    def __getitem__(self, i):
        for _ in range(3):
            try:
                if i in self.broken and i not in self.tried:
                    self.tried.add(i)
                    raise ValueError("busy")
                return torch.tensor(float(i))
            except ValueError:
                continue
        return None


class FirstTry(Records):
    """Healthy: another way to read the same record."""

    def __getitem__(self, i):
        try:
            return self.load(i)
        except ValueError:
            return torch.tensor(float(i))


class OwnFallback(Records):
    """Healthy: a cache that is filled by what it lacks."""

    def __init__(self, n):
        super().__init__(n)
        self.cache = {}

    def __getitem__(self, i):
        try:
            return self.cache[i]
        except KeyError:
            return torch.tensor(float(i))


class Noisy(Records):
    """Adds noise from a generator of its own, if it has one."""

    def __init__(self, n, rng=None):
        super().__init__(n)
        self.rng = rng

    def noise(self):
        if self.rng is None:
            return 0.0
        if isinstance(self.rng, torch.Generator):
            return torch.rand((), generator=self.rng).item()
        if isinstance(self.rng, random.Random):
            return self.rng.random()
        return float(numpy.asarray(self.rng.normal()))

    def __getitem__(self, i):
        return torch.tensor(i + self.noise())
