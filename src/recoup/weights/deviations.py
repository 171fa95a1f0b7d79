"""The deviations of weight noise: which are parameters, of what shape, and who shares one."""

from __future__ import annotations

from numbers import Real
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recoup.weights.reparametrization import Magnitude

__all__ = ["Deviations"]

_LEARNED = ("tensor", "row", "weight", "model")


class Deviations:
    """The deviations of the weights that one call chooses: a magnitude for all, or parameters.

    A parameter with several names has one deviation, so that its noise has one divergence.

    Args:
        std: as for `weight_noise`.
        learned: as for `weight_noise`.
    """

    def __init__(self, std: Magnitude | nn.Parameter, learned: str | None) -> None:
        self.std = std
        self.is_learned = learned is not None or isinstance(std, nn.Parameter)
        self._learned = learned
        self._made: dict[int, nn.Parameter] = {}
        self._first: Tensor | None = None
        if learned is None:
            return
        if learned not in _LEARNED:
            raise ValueError(
                f'`learned` is {learned!r}, but must be "tensor", "row", "weight" or "model" (what '
                "has a deviation of its own that is trained), or None for one that is not."
            )
        if not isinstance(std, Real):
            got = "a Parameter, which is trained as it is" if isinstance(std, nn.Parameter) else std
            raise ValueError(
                f"`std` is {got}, but with `learned` it must be a number, from which the training "
                "of it begins. Give a number, or leave `learned` out."
            )

    def check(self, weight: Tensor, name: str) -> None:
        """Raise if a weight cannot have one of them."""
        if is_traceable_wrapper_subclass(weight):
            raise ValueError(
                f"`{name}` is a {type(weight).__name__} already, and noise whose deviation is "
                "learned adds a parameter that must be sharded with it. Apply it before "
                "fully_shard."
            )
        if isinstance(self.std, nn.Parameter):
            _check_given(self.std, weight, name)
        self._first = weight if self._first is None else self._first
        if self._learned == "model" and weight.device != self._first.device:
            raise ValueError(
                f"`{name}` is on {weight.device} and other weights are on {self._first.device}, so "
                'they cannot have one deviation. Choose those of one device, or `learned="tensor"`.'
            )

    def parameter_for(self, weight: Tensor) -> nn.Parameter:
        """Return the deviation of a weight, a new one if nobody shares it."""
        if isinstance(self.std, nn.Parameter):
            return self.std
        key = 0 if self._learned == "model" else id(weight)
        if key not in self._made:
            shape = tuple(weight.shape) if self._learned == "weight" else ()
            if self._learned == "row" and weight.dim():
                shape = (weight.shape[0], *(1 for _ in weight.shape[1:]))
            number = float(cast("float", self.std))
            made = torch.full(shape, number, dtype=weight.dtype, device=weight.device)
            self._made[key] = nn.Parameter(made)
        return self._made[key]


def _check_given(std: nn.Parameter, weight: Tensor, name: str) -> None:
    if is_lazy(std) or not std.is_floating_point():
        raise ValueError(
            f"`std` is an {type(std).__name__} of {std.dtype}, but a parameter as `std` must have "
            "a shape and floating-point numbers."
        )
    sizes = zip(reversed(std.shape), reversed(weight.shape), strict=False)
    if std.dim() > weight.dim() or any(mine not in (1, theirs) for mine, theirs in sizes):
        raise ValueError(
            f"`std` has shape {tuple(std.shape)}, which cannot be broadcast to that of `{name}`, "
            f"{tuple(weight.shape)}. Give one that can, or let `pattern` leave this weight out."
        )
