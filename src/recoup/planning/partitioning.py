"""The compiler's partitioner, kept from drawing random numbers twice.

It is a module of its own, since it imports the compiler.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

TINY_SHARE = 1e-6
_PLAIN_NAMESPACES = ("aten", "prims", "recoup")


def partitioned(graph: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, Any]:
    """Return the graphs of forward and backward; what draws is kept.

    A tiny budget stands for 0 (Rule 2 of NOTE [ Compiled blocks ]), and is 0 where nothing has to
    be kept.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    for node in nodes:
        if _draws(node, graph):
            # Of several outputs each is saved by itself: a tuple cannot be.
            parts = [user for user in node.users if user.target is operator.getitem]
            for saved in (node, *parts):
                saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    share = config.activation_memory_budget
    is_none = share <= TINY_SHARE and all(map(_may_run_again, nodes))
    with config.patch(activation_memory_budget=0.0 if is_none else share):
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


def _may_run_again(node: Node) -> bool:
    """Whether nothing says that a node must not run twice: it draws, writes, sends and so on."""
    target: Any = node.target
    if "recompute" in node.meta:
        return False
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return target.namespace in _PLAIN_NAMESPACES and not schema.is_mutable
    return getattr(target, "__module__", None) in ("_operator", "builtins", "math")


class SavingDraws(CustomPartitionerFn):
    """`partitioned`, as inductor takes it."""

    def __call__(self, gm: Any, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, Any]:
        return partitioned(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "recoup, draws are kept, 3"  # the key of its results in the compiler's cache
