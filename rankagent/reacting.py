"""Modules whose output depends on their mode, and the parts of a model that hold such modules.

Attributes are read from the modules' own dictionaries, so that no code of the user's runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .catalogue import clean

# Attributes in which modules keep a rate of their own: recurrent layers and torch's attention, those of transformers,
# stochastic depth, and `p` where the class is named after dropping.
RATES = ("dropout", "dropout_p", "attention_dropout", "drop_prob")


def reaction(module: Any) -> str:
    """`norm` or `dropout`: why the module computes something else in eval mode; empty where it does not."""
    own = module.__dict__
    if own.get("track_running_stats") is True and own.get("_buffers", {}).get("running_mean") is not None:
        return "norm"
    if own.get("num_layers") == 1 and "bidirectional" in own:
        return ""  # a recurrent layer drops between its layers only
    names = (*RATES, "p") if "drop" in type(module).__name__.lower() else RATES
    rates = (own.get(n) for n in names)
    return "dropout" if any(isinstance(r, int | float) and r is not True and 0 < r <= 1 for r in rates) else ""


def collects(module: Any) -> bool:
    """Whether a normalisation mixes what it sees into statistics that training goes on with.

    Momentum None or 1 is how programs tell it to estimate them anew (torch.optim.swa_utils.update_bn)."""
    momentum = module.__dict__.get("momentum")
    return isinstance(momentum, float) and 0 < momentum < 1


@dataclass(frozen=True)
class Module:
    """A module below a model, or the model itself, where its name is the class's."""

    name: str
    kind: str  # see reaction
    ref: weakref.ReferenceType[Any]

    @property
    def evaluating(self) -> bool:
        """It lives and is in eval mode."""
        module = self.ref()
        return module is not None and not module.training


def reacting(model: Any, within: str = "") -> list[Module]:
    """The modules of a model, or of its part of that name, that compute something else in eval mode."""
    found = []
    for name, module in model.named_modules():
        kind = reaction(module)
        if kind and (not within or name == within or name.startswith(within + ".")):
            found.append(Module(clean(name) or type(module).__name__, kind, weakref.ref(module)))
    return found


def parts(model: Any) -> dict[str, Module]:
    """What lies below the model and holds both a reacting module and parameters, by name, outer before inner.

    A normalisation alone is none: to freeze its statistics while its weights are trained is a method of its own.
    """
    named = dict(model.named_modules())
    react = _above(n for n, m in named.items() if reaction(m))
    learn = _above(n for n, m in named.items() if any(p is not None for p in m._parameters.values()))
    return {
        name: Module(clean(name), kind, weakref.ref(module))
        for name, module in named.items()
        if name and name in react and name in learn and (kind := reaction(module)) != "norm"
    }


def _above(names: Iterable[str]) -> set[str]:
    """The names and those of all that holds them."""
    return {above for name in names for above in _upwards(name)}


def _upwards(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def topmost(names: Iterable[str]) -> list[str]:
    """Those that lie in none of the others."""
    all_of = set(names)
    return [n for n in names if not any(above in all_of for above in _upwards(n.rpartition(".")[0]))]
