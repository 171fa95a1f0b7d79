"""A training step that leaves no trace.

NOTE [ A rehearsal ]

Rule 1. Backward runs as it does in training, into `.grad` that is empty, so that gradients take
        the room that they take then. What was in `.grad` is put back.
Rule 2. Hooks of parameters do not run: one that steps an optimizer would train.
Rule 3. Buffers, numbers on modules and the random stream are put back. A parameter that a forward
        changes is an error, since a copy of all parameters may not fit.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from recoup.errors import ReplayError
from recoup.residuals.hooks import version_of
from recoup.residuals.seeds import generators_restored

__all__ = ["rehearsal"]

_NUMBERS = (bool, int, float, complex, str)


@contextmanager
def rehearsal(module: nn.Module) -> Generator[None]:
    """Around steps of `module`, which leave no trace on it."""
    parameters = {id(p): p for p in module.parameters()}
    versions = [(name, p, version_of(p)) for name, p in module.named_parameters()]
    gradients = [(p, p.grad) for p in parameters.values()]
    hooks = [(hooks, dict(hooks)) for p in parameters.values() for hooks in _hooks_of(p)]
    buffers = [(m, m._buffers.copy()) for m in module.modules()]
    contents = [(b, b.clone()) for b in {id(b): b for b in module.buffers()}.values()]
    numbers = [(vars(m), _numbers(m)) for m in module.modules()]
    with generators_restored():
        try:
            for parameter in parameters.values():
                parameter.grad = None
            for own, _ in hooks:
                own.clear()
            yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for own, found in hooks:
                own.update(found)
            with torch.no_grad():
                for buffer, content in contents:
                    buffer.copy_(content)
            for owner, found in buffers:
                owner._buffers.clear()
                owner._buffers.update(found)
            for own, found in numbers:
                own.update(found)
    for name, parameter, version in versions:
        if version_of(parameter) != version:
            raise ReplayError(
                f"Parameter `{name}` of {type(module).__name__} was changed by a forward (a start "
                "that depends on data?), which a measurement may not do. Run a forward of your own "
                "before."
            )


def _hooks_of(parameter: Tensor) -> list[dict[int, Any]]:
    hooks: Any = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return [found for found in hooks if found]


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(module).items() if type(value) in _NUMBERS}
