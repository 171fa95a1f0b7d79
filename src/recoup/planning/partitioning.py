"""The compiler's partitioner, kept from drawing random numbers twice.

It is a module of its own, since it imports the compiler.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy


def partitioned(graph: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, Any]:
    """Return the graphs of forward and backward; what draws is kept."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and _draws(node, graph):
            # Of several outputs each is saved by itself: a tuple cannot be.
            parts = [user for user in node.users if user.target is operator.getitem]
            for saved in (node, *parts):
                saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return min_cut_rematerialization_partition(graph, inputs, **kwargs)


def _draws(node: Node, graph: GraphModule) -> bool:
    """Whether a node draws random numbers, or a graph within it does (that of a branch)."""
    if any(torch.Tag.nondeterministic_seeded in each.tags for each in _operators(node)):
        return True
    inner = (each for each in node.all_input_nodes if each.op == "get_attr")
    graphs = (getattr(graph, str(each.target), None) for each in inner)
    return any(
        each.op == "call_function" and _draws(each, found)
        for found in graphs
        if isinstance(found, GraphModule)
        for each in found.graph.nodes
    )


def _operators(node: Node) -> Iterator[OpOverload[..., Any]]:
    """Yield the operators that a node calls: its own, or one that another one wraps."""
    for each in (node.target, *node.args):
        if isinstance(each, OpOverload):
            yield each


class SavingDraws(CustomPartitionerFn):
    """`partitioned`, as inductor takes it."""

    def __call__(self, gm: Any, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, Any]:
        return partitioned(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "recoup, draws are kept, 4"  # the key of its results in the compiler's cache
