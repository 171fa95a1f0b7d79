"""The compiler's partitioner, kept from drawing random numbers twice.

It is a module of its own, since it imports the compiler.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy

__all__ = ["SavingDraws", "partitioned"]


def partitioned(graph: Any, inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, Any]:
    """Return the graphs of forward and backward; what draws is kept."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            # Of several outputs each is saved by itself: a tuple cannot be.
            parts = [user for user in node.users if user.target is operator.getitem]
            for saved in (node, *parts):
                saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return min_cut_rematerialization_partition(graph, inputs, **kwargs)


class SavingDraws(CustomPartitionerFn):
    """`partitioned`, as inductor takes it."""

    def __call__(self, gm: Any, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[Any, Any]:
        return partitioned(gm, joint_inputs, **kwargs)

    def uuid(self) -> str:
        return "recoup, draws are kept, 1"  # the key of its results in the compiler's cache
