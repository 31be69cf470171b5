"""Where in the forward a loss that is NaN or Inf went wrong: the operation, and the parameters next to it.

Writes    birth
Costs     nothing until a loss is not finite; then, at most 4 times an attempt, one look at every tensor that the graph
          holds (half a second at most)
Blind to  losses on an accelerator, whose value is known only after their backward; programs that have ever used
          activation checkpointing or other hooks on saved tensors, behind which a look would compute anew; losses that
          a loss scale made Inf; compiled regions are one operation
"""

from __future__ import annotations

import math
from typing import Any

from .. import birth
from ..agent import Emit
from ..patch import Undo, replace
from ..tables import Column, Table

TABLE = Table("birth", (
    Column("micro", "int32", "", "backward calls of this step before this one"),
    Column("nodes", "int32", "", "operations of the graph that were looked at"),
    Column("whole", "bool", "", "all of them were"),
    Column("op", "text", "", "operation nearest to the inputs that shows NaN, e.g. log; empty: not looked for, see reason"),
    Column("shown", "text", "", "where: result, of the operation itself; input, what it got; root: only the loss shows it"),
    Column("fed_by", "text", "", "input: what gave it; root: the operations nearest to the loss whose values are finite"),
    Column("near", "text", "", "names of the nearest parameters below it, comma separated"),
    Column("reason", "text", "", "why it was not looked for; empty if it was"),
), "one row per backward from a loss that is not finite, the first 4 of an attempt")  # fmt: skip

MOST = 4  # once parameters are NaN all later ones are alike
BEHIND_HOOKS = "saved tensors may lie behind hooks"
TOO_LARGE = "the graph is too large to be looked at whole"


def install(emit: Emit) -> Undo:
    agent = emit.agent
    left = [MOST]
    hooked = [False]  # for good: a graph may outlive the step that it was built in, and a context many steps
    compiling = getattr(agent.torch.compiler, "is_compiling", lambda: False)

    def look(root: Any) -> None:
        if not left[0] or (agent.scale is not None and math.isinf(root.item())):
            return
        left[0] -= 1
        if hooked[0]:
            emit(TABLE, (agent.backwards, 0, False), ("", "", "", "", BEHIND_HOOKS))
            return
        agent.catalogue.refresh(in_backward=True)  # under FSDP2 as the forward left it
        with agent.torch.no_grad():
            found = birth.find(root)
        if found is not None:
            near = [e.name for p in found.near if (e := agent.catalogue.entry(p)) is not None]
            emit(TABLE, (agent.backwards, found.nodes, found.whole),
                 (found.op, found.shown, ", ".join(found.fed_by), ", ".join(near),
                  "" if found.whole else TOO_LARGE))  # fmt: skip
            if found.given is not None:
                agent.fire("given_nonfinite", found.op, found.given)

    def entering(original: Any) -> Any:
        def __enter__(hooks: Any) -> Any:
            if not compiling():
                hooked[0] = True
            return original(hooks)

        return __enter__

    emit.on("loss_nonfinite", look)
    return replace(agent.torch.autograd.graph.saved_tensors_hooks, "__enter__", entering)
