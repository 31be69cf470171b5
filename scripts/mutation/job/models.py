"""The models: each small enough that a job is over in seconds, together what people train."""

from collections.abc import Callable
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from .fault import Recipe

FEATURES, WORDS, LENGTH = 12, 40, 8


class Regression(nn.Module):
    """Vector in, one number out."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.center: Tensor
        self.register_buffer("center", torch.full((FEATURES,), 0.1))
        self.body = nn.Sequential(
            nn.Linear(FEATURES, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width), nn.Tanh()
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.head(self.body(x - self.center)))


class Branches(nn.Module):
    """Two branches of which a step uses one; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 16)
        self.left, self.right, self.idle = nn.Linear(16, 1), nn.Linear(16, 1), nn.Linear(16, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.stem(x))
        return cast("Tensor", self.left(h) if self.calls % 2 else self.right(h))


class Images(nn.Module):
    """A small convolution with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
            nn.Linear(6 * FEATURES, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.layers(x.view(-1, 1, 3, FEATURES // 3)))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        a = nn.functional.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal=True)
        x = x + self.drop(self.out(a.squeeze(1)))
        return cast("Tensor", x + self.drop(self.mlp(self.norm2(x))))


class Language(nn.Module):
    """A causal transformer; the head may share the embedding's weight."""

    def __init__(self, width: int, depth: int, dropout: float, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.register_buffer("position", torch.randn(LENGTH, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return cast("Tensor", self.head(self.norm(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 12), nn.Linear(16, WORDS)
        self.lstm = nn.LSTM(12, 16, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return cast("Tensor", self.head(self.lstm(self.embed(tokens))[0]))


class Bag(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(WORDS, 12, mode="mean", sparse=sparse), nn.Linear(12, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return cast("Tensor", self.head(self.bag(tokens)).unsqueeze(1).expand(-1, tokens.shape[1], -1))


class Deep(nn.Module):
    """Sigmoids in a row, with nothing that carries a gradient past them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        widths = [FEATURES, *[16] * depth]
        parts = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Sigmoid())]
        self.layers = nn.Sequential(*parts, nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.layers(x))


def build(recipe: Recipe) -> nn.Module:
    name, dropout = recipe["model"], recipe.get("dropout", 0.0)
    if name in ("mlp", "wide", "frozen"):
        made: nn.Module = Regression(80 if name == "wide" else 20, dropout)
        if name == "frozen":
            made.get_submodule("body.0").requires_grad_(False)
        return made
    if name in ("transformer", "untied"):
        return Language(16, 2, dropout, tied=name == "transformer")
    makers: dict[str, Callable[[], nn.Module]] = {
        "conv": Images, "branches": Branches, "lstm": Recurrent, "bag": lambda: Bag(False),
        "sparse_bag": lambda: Bag(True), "deep": lambda: Deep(recipe["depth"]),
    }  # fmt: skip
    return makers[name]()


def of_tokens(recipe: Recipe) -> bool:
    return recipe["model"] in ("transformer", "untied", "lstm", "bag", "sparse_bag")


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    if out.dim() == 3:
        return nn.functional.cross_entropy(out.float().reshape(-1, WORDS), y.reshape(-1))
    return nn.functional.mse_loss(out.float(), y)
