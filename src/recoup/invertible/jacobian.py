"""The log-determinant of a module at one sample, and its gradients, from autograd's Jacobian.

NOTE [ Gradients of the log-determinant of an inverse ]

An inverse may round (`Dequantize`) or iterate, so that its own Jacobian is of no use. Its
log-determinant follows from forward: ``L(y) = -log|det J(x(y))|``, J the Jacobian of forward.
By the implicit function theorem, with ``v = J^-T dlog|det J|/dx``, its gradients are ``-v`` for y,
and ``v dF/dw - dlog|det J|/dw`` for anything else (w) that forward F reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Gradients", "Point", "flat"]

Gradients = dict[str, tuple[Tensor | None, Tensor]]  # stated (None: no gradient), true

_linalg: Any = torch.linalg  # torch does not type its functions


class _Linearized(NamedTuple):
    values: Tensor
    jacobian: Tensor
    stated: Tensor
    true: Tensor


class Point:
    """A module at one sample, with the log-determinants and gradients to compare.

    Args:
        forward: maps the sample to the value and its log-determinant.
        inverse: maps the value to the sample and its log-determinant.
        x: the sample, of shape ``(1, ...)``, a leaf that requires grad.
        others: other tensors that the module reads and differentiates, by name.
    """

    def __init__(
        self,
        forward: Callable[[Tensor], tuple[Any, Tensor]],
        inverse: Callable[[Any], tuple[Tensor, Tensor]],
        x: Tensor,
        others: dict[str, Tensor],
    ) -> None:
        self._forward = forward
        self._inverse = inverse
        self._x = x
        self._others = others

    def log_dets(self) -> tuple[Tensor, Tensor]:
        """Return the log-determinant that the module states, and the true one, each ``(1,)``."""
        found = self._linearized(self._forward(self._x), has_graph=False)
        return found.stated.detach(), found.true.detach().reshape(1)

    def gradients(self) -> Gradients:
        """Return the gradients of the log-determinant of forward, by name."""
        found = self._linearized(self._forward(self._x), has_graph=True)
        wanted = {"the input": self._x, **self._others}
        stated = _gradients_of(found.stated, list(wanted.values()))
        true = _or_zeros(_gradients_of(found.true, list(wanted.values())), wanted.values())
        return dict(zip(wanted, zip(stated, true, strict=True), strict=True))

    def gradients_of_inverse(self) -> Gradients:
        """Return the gradients of the log-determinant of inverse, by name."""
        y, log_det = self._forward(self._x)
        found = self._linearized((y, log_det), has_graph=True)
        others = list(self._others.values())
        at_x, *at_others = _or_zeros(
            _gradients_of(found.true, [self._x, *others]), [self._x, *others]
        )
        pulled: Tensor = _linalg.solve(found.jacobian.detach().T, at_x.flatten())
        through = _or_zeros(_gradients_of(found.values, others, pulled), others)
        given = [part.detach().requires_grad_() for part in _parts(y)]
        _, stated = self._inverse(tuple(given) if isinstance(y, tuple) else given[0])
        at_y = _or_none(_gradients_of(stated, given), given)
        gradients: Gradients = {"the input": (at_y, -pulled)}
        for name, actual, one, two in zip(
            self._others, _gradients_of(stated, others), through, at_others, strict=True
        ):
            gradients[name] = (actual, one - two)
        return gradients

    def _linearized(self, pair: tuple[Any, Tensor], *, has_graph: bool) -> _Linearized:
        y, stated = pair
        values = flat(y)[0]
        if values.numel() != self._x.numel():
            raise ValueError(
                f"`forward` maps {self._x.numel()} numbers a sample to {values.numel()}; an "
                "invertible layer keeps their number."
            )
        rows = [
            torch.autograd.grad(
                value, self._x, retain_graph=True, create_graph=has_graph, materialize_grads=True
            )[0].flatten()
            for value in values.unbind()
        ]
        jacobian = torch.stack(rows)
        return _Linearized(values, jacobian, stated, _linalg.slogdet(jacobian).logabsdet)


def flat(y: Any) -> Tensor:
    """Join an output, or a tuple of them, into one tensor of shape ``(N, D)``."""
    return torch.cat([part.flatten(1) for part in _parts(y)], dim=1)


def _parts(y: Any) -> tuple[Tensor, ...]:
    return (y,) if isinstance(y, Tensor) else tuple(y)


def _gradients_of(
    output: Tensor, inputs: Sequence[Tensor], seed: Tensor | None = None
) -> list[Tensor | None]:
    if not output.requires_grad or not inputs:
        return [None] * len(inputs)
    seed = torch.ones_like(output) if seed is None else seed
    return list(torch.autograd.grad(output, inputs, seed, retain_graph=True, allow_unused=True))


def _or_zeros(gradients: Sequence[Tensor | None], like: Any) -> list[Tensor]:
    return [
        torch.zeros_like(each) if gradient is None else gradient
        for gradient, each in zip(gradients, like, strict=True)
    ]


def _or_none(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor | None:
    """Join the gradients of the parts of a value; None if none has one."""
    if all(gradient is None for gradient in gradients):
        return None
    return flat(tuple(_or_zeros(gradients, like))).flatten()
