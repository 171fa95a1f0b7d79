"""A stage that is reversed in one call, which returns its input and its gradients.

NOTE [ One node ]

Rule 1. Such a stage is one node of the graph, which saves the input of the stage, and in a region a
        slot in its place. In backward the node leaves the gradients that it was given with the
        stage and unpacks the slot. The executor then comes to this stage through its schedule, and
        the call that finds the input computes the gradients as well.
Rule 2. So the input is compared with that of forward before the node returns its gradients. If it
        is refused, and in a second backward, the gradients are computed from the right input.
Rule 3. What a node computes has no graph: a gradient of a gradient is an error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, cast

import torch
from torch import Tensor

from recoup._core.compile import never_compiled
from recoup._core.saved_tensors import detached
from recoup.errors import RecoupError

__all__ = ["OneCallStage"]

Tensors = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]


class OneCallStage(ABC):
    """The base of stages that are reversed in one call; a stage is used in one forward.

    Attributes:
        name: The name of the stage in error messages.
        num_inputs: Number of tensors at the start of a state that the stage computes from.
        is_one_call: Whether the last run of the stage made a node.
    """

    name: str
    num_inputs = 1
    is_one_call = False

    def __init__(self) -> None:
        self._given: Tensors | None = None  # the gradients that the node was given
        self._found: Gradients | None = None  # the gradients that it returns

    def as_node(self, inputs: Tensors, parameters: Tensors) -> Tensors:
        """Return what `compute` returns, as one node of the graph (See Rule 1)."""
        self.is_one_call = True
        return cast("Tensors", _Node.apply(self, len(inputs), *inputs, *parameters))

    @property
    def is_asked(self) -> bool:
        """Whether the node waits for gradients."""
        return self._given is not None

    def reverse(self, outputs: Tensors) -> Tensors:
        """Return the inputs for `outputs`, and compute gradients if the node waits for them."""
        if self._given is None:
            return self.compute_inputs(outputs)
        inputs, self._found = self.compute_both(outputs, self._given)
        return inputs

    def differentiate(self, inputs: Tensors) -> None:
        """Compute the gradients that the node waits for from the right inputs (See Rule 2)."""
        if self._given is not None:
            self._found = self.compute_gradients(inputs, self._given)

    @abstractmethod
    def compute(self, inputs: Tensors) -> Tensors:
        """Return the outputs."""

    @abstractmethod
    def compute_inputs(self, outputs: Tensors) -> Tensors:
        """Return the inputs for `outputs`."""

    @abstractmethod
    def compute_both(self, outputs: Tensors, gradients: Tensors) -> tuple[Tensors, Gradients]:
        """Return the inputs, and the gradients of inputs and parameters."""

    @abstractmethod
    def compute_gradients(self, inputs: Tensors, gradients: Tensors) -> Gradients:
        """Return the gradients of inputs and parameters."""

    def _gradients(self, node: Any, given: Tensors) -> Gradients:
        self._given, self._found = given, None
        try:
            inputs: Tensors = node.saved_tensors
            if self._found is None:  # there is no region around that ran the stage again
                self.differentiate(inputs)
            return cast("Gradients", self._found)
        finally:
            self._given = self._found = None


class _Node(torch.autograd.Function):
    @staticmethod
    @never_compiled
    def forward(ctx: Any, stage: OneCallStage, num_inputs: int, *tensors: Tensor) -> Tensors:
        ctx.stage = stage
        ctx.save_for_backward(*tensors[:num_inputs])
        return stage.compute(detached(tensors[:num_inputs]))

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        stage: OneCallStage = ctx.stage
        if torch.is_grad_enabled():  # See Rule 3
            raise RecoupError(
                f"`create_graph` is true, but {stage.name} is compiled, and its gradients have no "
                "graph. Turn compiling off with `compile(disable=True)`."
            )
        return None, None, *stage._gradients(ctx, grad_outputs)
