"""The nodes of an autograd graph, and its ends: the leaves that can be found from its outputs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from recoup._core.pytree import flatten

_ACCUMULATES = "AccumulateGrad"


class Ends(NamedTuple):
    """The ends of a graph."""

    leaves: list[Tensor]  # in which a plain backward would accumulate gradients
    # Nodes of checkpoints of the reentrant kind, whose leaves cannot be seen before they run, and
    # which run only in a plain backward.
    checkpoints: list[Any]


def ends_of(outputs: Sequence[Tensor]) -> Ends:
    """Return the ends of the graph of `outputs`; a node takes about a microsecond."""
    leaves = [each for each in outputs if each.grad_fn is None and each.requires_grad]
    checkpoints: list[Any] = []
    for node in nodes_of(outputs):
        kind: str = type(node).__name__
        if kind == _ACCUMULATES:
            leaves.append(node.variable)
        elif "CheckpointFunction" in kind:
            checkpoints.append(node)
    return Ends(leaves, checkpoints)


def nodes_of(outputs: Iterable[Tensor]) -> list[Any]:
    """Return the nodes of the graph of `outputs`, each once."""
    nodes: list[Any] = list(dict.fromkeys(e.grad_fn for e in outputs if e.grad_fn is not None))
    seen = set(nodes)
    for node in nodes:  # which grows
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return nodes


def when_node_runs(node: Any, call: Callable[[int], None]) -> None:
    """Call `call` whenever a backward comes to a node, with the number of nodes made before it.

    Nodes that accumulate gradients have no such number, and call nothing.
    """
    if type(node).__name__ == _ACCUMULATES:
        return
    num_before: int = node._sequence_nr()

    def begins(gradients: object) -> None:
        del gradients
        call(num_before)

    node.register_prehook(begins)


@contextmanager
def hidden_leaves(
    checkpoints: Iterable[Any], found: Callable[[list[Tensor]], None]
) -> Generator[None]:
    """Return a context that calls `found` with the leaves of each reentrant checkpoint that reruns.

    That is before gradients are accumulated in them. The nodes are restored at the end.
    """
    nodes = [node for node in checkpoints if hasattr(node, "run_function")]
    functions = [node.run_function for node in nodes]
    try:
        _listen(nodes, found)
        yield
    finally:
        for node, function in zip(nodes, functions, strict=True):
            node.run_function = function


def _listen(nodes: Iterable[Any], found: Callable[[list[Tensor]], None]) -> None:
    for node in nodes:
        if hasattr(node, "run_function"):
            node.run_function = _telling(node.run_function, found)


def _telling(run: Callable[..., Any], found: Callable[[list[Tensor]], None]) -> Callable[..., Any]:
    def run_and_tell(*args: Any) -> Any:
        outputs = run(*args)
        ends = ends_of(flatten(outputs)[0])
        given = {each for each in args if isinstance(each, Tensor)}  # it reads `.grad` of these
        found([each for each in ends.leaves if each not in given])
        _listen(ends.checkpoints, found)  # of a graph that is freed when its backward ends
        return outputs

    return run_and_tell
