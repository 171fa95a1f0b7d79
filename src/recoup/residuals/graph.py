"""What a graph of autograd ends in, as far as it can be seen from its outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["Ends", "ends_of"]


class Ends(NamedTuple):
    """The ends of a graph.

    Args:
        leaves: the tensors that a plain backward would accumulate gradients in.
        hides_leaves: whether a checkpoint of the reentrant kind is in it, whose leaves cannot be
            seen, and which runs only in a plain backward.
    """

    leaves: list[Tensor]
    hides_leaves: bool


def ends_of(outputs: Iterable[Tensor]) -> Ends:
    """Walk the graph beneath `outputs`; a node takes about a microsecond."""
    leaves: list[Tensor] = []
    hides_leaves = False
    waiting: list[Any] = []
    for output in outputs:
        if output.grad_fn is not None:
            waiting.append(output.grad_fn)
        elif output.requires_grad:
            leaves.append(output)
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        kind: str = type(node).__name__
        if kind == "AccumulateGrad":
            leaves.append(node.variable)
        hides_leaves |= "CheckpointFunction" in kind
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return Ends(leaves, hides_leaves)
