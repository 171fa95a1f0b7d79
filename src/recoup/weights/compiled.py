"""Reparametrized weights in a graph of torch.compile.

NOTE [ A weight in a graph ]

Rule 1. A graph cannot hold seeds, or every call would draw the same. So it holds an operator that
        decides when the graph runs, as any eager read does, and returns a tensor of seeds.
Rule 2. Another operator makes the weight from the raw one and these seeds, and depends on nothing
        else. Backward gets the seeds that forward saved, and computes the rest of a weight again:
        the composite operator that consists of both says so (NOTE [ Three passes ]).
Rule 3. A forward that is traced begins with an operator, too, which returns a number. It stands for
        a `Forward` of this run of the graph, which is in force while reads that it covers draw; so
        these have one draw and one step, as in eager code. The number's tensor owns the `Forward`.
Rule 4. While it is traced, the first read in a forward makes the weight, and other reads with the
        same coverage get the same one, unless a checkpoint of torch or its end is in between.
Rule 5. The coverage of a read is known when it is traced: an application is covered where a forward
        of it is traced, too. A norm that is not covered depends on the contexts in force around the
        graph, so the graph breaks there.
Rule 6. Operators are registered when something is first applied, not on import.
Rule 7. The graph breaks where a weight is computed by a function of the user's, or where its noise
        has a deviation that is a parameter: the operators take a weight and seeds.
Rule 8. The compiler stores what it compiled on disk, by the names and the arguments of operators.
        So what a composite operator consists of depends on its arguments alone, and one that comes
        to mean something else gets another name.
Rule 9. The compiler takes two calls with the same arguments for one. Each forward that begins is
        another one, so it is numbered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recoup._core.compile import break_graph, is_traced, uncompiled
from recoup._core.compiled_graphs import is_in_checkpoint, unchecked
from recoup.weights.forwards import is_overridden
from recoup.weights.normed import product_of
from recoup.weights.outside_forward import warn_of_read
from recoup.weights.reparametrization import Application, Covering, Reparametrized

__all__ = ["NOT_IN_GRAPH", "forward_in_graph", "read_in_graph"]

NOT_IN_GRAPH = (
    "Outside of graphs run recurrent layers with reparametrized weights, modules with weights that "
    'are tied by `tied="same"`, and what reads a weight '
    "that a function computes (recoup.weights.apply) or whose noise has a deviation that is a "
    "parameter. Leave `fullgraph` out."
)
_UNCOVERED_NORM = (
    "A weight with a norm is read outside of a forward, so what it is depends on the contexts "
    "around the graph. Compile the module whose forward reads it, or leave `fullgraph` out."
)


class Traced(NamedTuple):
    """A forward that is traced: what it covers, its number if it draws, and the weights made."""

    applications: tuple[Application, ...]
    number: Tensor | None
    made: dict[tuple[Any, bool, int], Tensor]


_traced: list[Traced] = []


def forward_in_graph(
    run: Callable[..., Any],
    module: nn.Module,
    covering: Covering,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Trace a forward whose reads share their draws (See Rule 3)."""
    if all(_around(application) >= 0 for application in covering.applications):
        return run(module, *args, **kwargs)
    number = None
    if covering.draws and (
        covering.draws_always or is_overridden() or any(part.training for part in module.modules())
    ):
        number = torch.ops.recoup.forward_begins(covering.handle)
    unchecked(_push, Traced(covering.applications, number, {}))
    try:
        return run(module, *args, **kwargs)
    finally:
        unchecked(_pop)


def _push(traced: Traced) -> None:
    _traced.append(traced)


def _pop() -> None:
    _traced.pop()


def read_in_graph(parametrized: Reparametrized, module: nn.Module, raw: Tensor) -> Tensor:
    """Trace a read of a weight (See Rule 4)."""
    covered, innermost = 0, -1
    forwards: list[int] = []
    for number, step in enumerate(parametrized.steps):
        around = _around(step.application)
        if around >= 0:
            covered |= 1 << number
            innermost = max(innermost, around)
            if around not in forwards:
                forwards.append(around)
        elif not step.is_random:
            break_graph(_UNCOVERED_NORM)  # See Rule 5
            return uncompiled(_read_uncompiled)(parametrized, module, raw)
        if step.breaks_graph:
            break_graph(NOT_IN_GRAPH)  # See Rule 7
            return uncompiled(_read_uncompiled)(parametrized, module, raw)
    begun = [_traced[place].number for place in sorted(forwards)]
    numbers = [number for number in begun if number is not None]
    if innermost < 0:
        return _made(parametrized, module, raw, numbers)
    made = _traced[innermost].made
    key = (parametrized, torch.is_grad_enabled(), covered)
    if key in made:
        return made[key]
    weight = _made(parametrized, module, raw, numbers)
    if not is_in_checkpoint():
        made[key] = weight
    return weight


def _made(
    parametrized: Reparametrized, module: nn.Module, raw: Tensor, numbers: list[Tensor]
) -> Tensor:
    is_on = is_overridden()
    norms: list[Tensor] = []
    axes: list[int] = []
    for step in parametrized.steps:
        if step.is_random:
            is_on = is_on or module.training or step.mode == "always"
        else:
            norms += step.operands(module, parametrized.key)
            axes.append(step.axis)
    if not is_on and (not norms or not torch.is_grad_enabled() or is_traced()):
        for norm, axis in zip(norms, axes, strict=True):
            raw = product_of(raw, norm, axis)
        return raw
    num_steps = len(parametrized.steps) if is_on else 0
    return torch.ops.recoup.reparametrized(
        raw, norms, axes, parametrized.handle, numbers, num_steps, module.training
    )


def _around(application: Application) -> int:
    """Return the index of the outermost traced forward that covers `application`, or -1."""
    for number, traced in enumerate(_traced):
        if application in traced.applications:
            return number
    return -1


def _read_uncompiled(parametrized: Reparametrized, module: nn.Module, raw: Tensor) -> Tensor:
    warn_of_read(parametrized, is_training=module.training)
    return parametrized.read(module, raw)
