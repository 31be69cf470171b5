"""What goes wrong in a job, when and where: read from the recipe, asked by everything that can go wrong."""

from typing import Any, cast

import torch
from torch import Tensor, nn

Recipe = dict[str, Any]


class Fault:
    """What goes wrong, and when. Without one, `kind` is empty and nothing below ever acts."""

    def __init__(self, recipe: Recipe, rank: int) -> None:
        self.about: Recipe = recipe.get("fault") or {"kind": ""}
        self.kind: str = self.about["kind"]
        self.step: int = self.about.get("step", 0)
        self.mine = self.about.get("rank", rank) == rank
        self.amount: float = self.about.get("amount", 0.0)

    def here(self, kind: str) -> bool:
        """Of this kind and on this rank; no step in it."""
        return self.mine and self.kind == kind

    def now(self, kind: str, step: int) -> bool:
        return self.here(kind) and step == self.step

    def since(self, kind: str, step: int) -> bool:
        return self.here(kind) and step >= self.step

    def tensor(self, model: nn.Module) -> Tensor:
        """The parameter or buffer that the recipe names."""
        name = self.about["tensor"]
        found = {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]
        return local(found)

    def spoil(self, values: Tensor) -> None:
        """Change the tensor as the recipe says: one bit, one element or all of it."""
        how = self.about.get("how", "noise")
        with torch.no_grad():
            if how == "noise":
                values.add_(torch.randn(values.shape, generator=torch.Generator().manual_seed(5)) * self.amount)
            elif how == "scale":
                values.mul_(1.0 + self.amount)
            else:
                flat = values.view(-1)
                at = self.about.get("element", 0) % flat.numel()
                bits = flat[at : at + 1].view(torch.int32)
                bits ^= 1 << self.about.get("bit", 12)


class Scaled(torch.autograd.Function):
    """Identity whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, any other as it is."""
    return cast("Tensor", tensor.to_local()) if hasattr(tensor, "to_local") else tensor
