"""What the compiler is told about code of ours that becomes a part of its graph.

NOTE [ Three passes ]

Rule 1. The compiler first follows the code and writes down the operators that it calls. Then it
        runs these operators once to record the graph of forward and backward, in which a composite
        operator consists of those that its Python code calls. Then the partitioner decides what
        forward saves, and what backward computes again.
Rule 2. The partitioner reads policies of torch's checkpoint off the nodes of the graph. Nodes that
        exist are given one, since a checkpoint around them gives its own to those it sees made.
Rule 3. With a budget of 0 the partitioner saves nothing but the inputs, whatever the policies are.
        So nodes to save bring a budget along that is a little more than 0.
Rule 4. A checkpoint in the code is a graph of its own within the first pass. Code in there may
        change nothing from before, and no tensor made in there may be used outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import CheckpointPolicy

__all__ = ["computed_again", "is_in_checkpoint", "num_recorded", "saved", "unchecked"]

T = TypeVar("T")
_LEAST_BUDGET = 1e-6


def saved(run: Callable[[], T]) -> T:
    """Call `run`; if a graph is recorded, forward saves what it makes for backward."""
    return _with_policy(run, CheckpointPolicy.MUST_SAVE)


def computed_again(run: Callable[[], T]) -> T:
    """Call `run`; if a graph is recorded, backward computes again what it makes."""
    return _with_policy(run, CheckpointPolicy.MUST_RECOMPUTE)


def num_recorded() -> int:
    """Return the number of nodes in the graph that is recorded; 0 if there is none."""
    graph = _recorded()
    return 0 if graph is None else len(graph.nodes)


def _with_policy(run: Callable[[], T], policy: CheckpointPolicy) -> T:
    graph = _recorded()
    if graph is None:
        return run()
    before = next(iter(reversed(graph.nodes)), None)
    result = run()
    for node in reversed(graph.nodes):
        if node is before:
            break
        node.meta["recompute"] = policy  # See Rule 2
        if policy is CheckpointPolicy.MUST_SAVE and _budget() == 0:
            node.meta["memory_budget"] = _LEAST_BUDGET  # See Rule 3
    return result


def _recorded() -> Any:
    from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode  # it takes long

    mode = get_innermost_proxy_mode()
    return None if mode is None else mode.tracer.graph


def _budget() -> float:
    from torch._functorch import config

    return config.activation_memory_budget


def is_in_checkpoint() -> bool:
    """Whether the compiler follows code within a checkpoint (See Rule 4)."""
    from torch._dynamo.current_scope_id import current_scope_id

    return current_scope_id() > 1


# What `torch.compiler.assume_constant_result` does, without importing the compiler.
is_in_checkpoint._dynamo_marked_constant = True  # type: ignore[attr-defined]


def unchecked(run: Callable[..., T], *args: Any) -> T:
    """Call `run`, which the compiler lets change objects from before a checkpoint (See Rule 4)."""
    dynamo: Any = torch._dynamo
    return dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer(run, *args)
