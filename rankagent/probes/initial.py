"""Weights of linear and convolutional layers as the first update finds them: how large, and whether drawn at all.

Writes    initial
Costs     one pass over these weights before the first update (1 ms per million elements on one core), nothing later
Blind to  weights behind a parametrization, grouped and transposed convolutions, layers of other classes; FSDP and ZeRO-3,
          where no rank holds a whole weight; models that begin to train after the first step
"""

from __future__ import annotations

from typing import Any

from ..agent import Emit
from ..catalogue import REPLICATED, Entry, clean
from ..patch import Undo
from ..tables import Column, Table

TABLE = Table("initial", (
    Column("generation", "int32", "", "tensor catalogue that the indices refer to"),
    Column("index", "int32", "", "catalogue index of the weight"),
    Column("model", "int32", "", "model of this process, see tensor"),
    Column("place", "int32", "", "position among its model's layers, in the order in which they were registered"),
    Column("units", "int64", "", "outputs of the layer"),
    Column("inputs", "int64", "", "units or channels that it takes"),
    Column("fan_in", "int64", "", "elements of the weight per output"),
    Column("sampled", "int32", "", "first elements of the weight that were compared with each other"),
    Column("different", "int32", "", "different values among them; of a draw nearly all are"),
    Column("rms", "float64", "", "root mean square of the weight"),
    Column("constant", "bool", "", "all its elements are equal"),
    Column("bias_constant", "bool", "", "so are those of its bias, or it has none"),
    Column("copied", "bool", "", "it lies in a stack whose layers torch itself makes by copying one (nn.TransformerEncoder)"),
    Column("trained", "bool", "", "an optimizer holds it"),
    Column("module", "text", "", "name of the layer within its model"),
    Column("module_type", "text", "", "its class"),
), "one row per layer before the first update of an attempt")  # fmt: skip

SAMPLED = 256


def install(emit: Emit) -> Undo:
    agent = emit.agent
    torch, nn, catalogue = agent.torch, agent.torch.nn, agent.catalogue
    done = [False]

    def before_update(optimizer: Any, number: int) -> None:
        if done[0]:
            return
        done[0] = True
        if agent.window.step != 1:
            return
        catalogue.refresh()
        layers = [layer for number, top in enumerate(catalogue.tops()) if top is not None for layer in of(number, top)]
        if not layers:
            return
        with torch.no_grad():
            device = layers[0][0].device
            numbers = torch.stack([n.to(device, non_blocking=True) for w, b, _, _ in layers for n in measured(w, b)])
        generation = catalogue.generation

        def landed(read: list[Any]) -> None:
            for k, (_, _, fixed, texts) in enumerate(layers):
                rms, different, constant, bias_constant = read[0][4 * k : 4 * k + 4]
                index, model, place, units, inputs, fan_in, sampled, copied, trained = fixed
                emit(TABLE, (generation, index, model, place, units, inputs, fan_in, sampled, int(different), rms,
                             bool(constant), bool(bias_constant), copied, trained), texts, step=1)  # fmt: skip

        agent.landing.land([numbers], landed)

    def of(number: int, top: Any) -> list[tuple[Any, Any, Any, Any]]:
        """The layers of a model: weight, bias, and what their rows say."""
        stacks = [clean(name) + "." for name, m in top.named_modules()
                  if isinstance(m, (nn.TransformerEncoder, nn.TransformerDecoder))]  # fmt: skip
        found: list[tuple[Any, Any, Any, Any]] = []
        seen = set()  # a tied weight is one
        for name, module in top.named_modules():
            sizes = sizes_of(module)
            weight = module._parameters.get("weight") if sizes else None
            entry = catalogue.entry(weight) if weight is not None else None
            if sizes is None or weight is None or entry is None or not whole(entry) or entry.index in seen:
                continue
            seen.add(entry.index)
            name = clean(name)
            copied = any(name.startswith(s) or s == "." for s in stacks)
            fixed = (entry.index, number, len(found), *sizes, weight.numel() // sizes[0], min(weight.numel(), SAMPLED),
                     copied, entry.optimizer >= 0 and weight.requires_grad)  # fmt: skip
            found.append((weight.detach(), module._parameters.get("bias"), fixed, (name, type(module).__name__)))
        return found

    def sizes_of(module: Any) -> tuple[int, int] | None:
        """(outputs, inputs) of a layer that mixes all its inputs."""
        if isinstance(module, nn.Linear):
            return module.out_features, module.in_features
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and module.groups == 1:
            return module.out_channels, module.in_channels
        return None

    def whole(entry: Entry) -> bool:
        weight = entry.tensor
        return bool((entry.sharing in (*REPLICATED, "plain")) and weight.is_floating_point() and weight.numel()
                    and weight.device.type != "meta" and weight.layout == torch.strided)  # fmt: skip

    def measured(weight: Any, bias: Any) -> list[Any]:
        flat = weight.reshape(-1)
        some = flat[:SAMPLED].sort().values
        rms = torch.linalg.vector_norm(flat, dtype=torch.promote_types(flat.dtype, torch.float32)) / flat.numel() ** 0.5
        different = 1 + (some[1:] != some[:-1]).sum()
        least, most = flat.aminmax()
        no_draw = torch.ones_like(rms) if bias is None else (bias == bias[:1]).all()
        return [n.double() for n in (rms, different, least == most, no_draw)]

    emit.on("before_update", before_update)
    return lambda: None
