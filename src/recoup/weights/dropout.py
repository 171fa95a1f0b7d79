"""Weight dropout: entries of a weight, or whole rows of it, are left out of a forward."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._core.saved_tensors import untransformed
from recoup.weights import draws
from recoup.weights.application import apply_to
from recoup.weights.reparametrization import (
    Application,
    Drawn,
    Magnitude,
    Operands,
    Reparametrization,
    is_schedule,
    shown,
    value_of,
)

__all__ = ["WeightDropout", "weight_dropout"]


def weight_dropout(
    module: nn.Module,
    pattern: str = "weight",
    p: Magnitude = 0.5,
    *,
    axes: tuple[int, ...] = (),
    mode: str = "training",
) -> nn.Module:
    """Drop entries of weights in each forward, and keep nothing for it but a seed.

    Kept: 8 bytes a weight; neither the mask nor the dropped weight, whichever operator saves it.
    Backward pays two draws a weight: one for the weight, one for the mask of its gradient. The
    parameters remain the same objects under the same names; evaluation uses the raw weight.

    Args:
        module: the module, or a tree of modules. One forward of it has one draw.
        pattern: a regular expression for the qualified names of its parameters (fullmatch).
        p: the probability that an entry is dropped, rounded to a multiple of 2^-16; the others are
            scaled by 1 / (1 - p). A number, a 0-dim tensor, or a function from the step (forwards
            in training so far) to a number.
        axes: the axes along which the mask is shared; ``axes=(1,)`` drops whole rows, which for an
            `nn.Embedding` is done on the rows that were looked up.
        mode: "training", or "always" to draw in evaluation too.

    Returns:
        `module` itself.

    Raises:
        ValueError: when no parameter matches, one has weight dropout already, or an argument is
            out of its range.
        ChangedError: in backward, when a raw weight has changed in place since forward.

    Example:
        >>> import recoup, torch
        >>> lstm = recoup.weight_dropout(torch.nn.LSTM(4, 8), r"weight_hh_l\\d+", p=0.5)
        >>> [name for name, _ in lstm.named_parameters()][:2]
        ['weight_ih_l0', 'weight_hh_l0']
        >>> output, _ = lstm(torch.randn(5, 2, 4))

    Source: Wan et al., "Regularization of neural networks using DropConnect" (2013); Merity et al.,
    "Regularizing and optimizing LSTM language models", https://arxiv.org/abs/1708.02182.
    """
    application = Application()
    return apply_to(module, pattern, lambda: WeightDropout(application, p, axes, mode))


class WeightDropout(Reparametrization):
    """Weight dropout: sets entries of a weight to zero, and scales up the others."""

    kind = "weight_dropout"
    order = 1

    def __init__(
        self, application: Application, p: Magnitude, axes: tuple[int, ...], mode: str
    ) -> None:
        super().__init__(application, mode)
        self.p = p
        given: Any = axes
        if type(given) not in (tuple, list) or any(type(axis) is not int for axis in given):
            raise ValueError(f"`axes` is {axes!r}, but must be a tuple of ints, such as (1,).")
        self.axes = tuple(axes)
        self.magnitude(application.step)

    def __repr__(self) -> str:
        axes = f", axes={self.axes}" if self.axes else ""
        mode = "" if self.mode == "training" else f', mode="{self.mode}"'
        return f"weight_dropout(p={shown(self.p)}{axes}{mode})"

    def fit(self, module: nn.Module, key: str, name: str) -> None:
        """Normalize `axes` for `draws`, or raise if the weight does not have them."""
        weight = cast("Tensor", module._parameters[key])
        for axis in self.axes:
            if not -weight.dim() <= axis < weight.dim():
                raise ValueError(
                    f"`axes` is {self.axes}, but `{name}` has shape {tuple(weight.shape)}: give "
                    f"axes from {-weight.dim()} to {weight.dim() - 1}."
                )
        self.axes = tuple(sorted({axis % weight.dim() for axis in self.axes}))
        self.drops_rows = self.axes == (1,) and weight.dim() == 2

    @property
    def has_schedule(self) -> bool:
        return is_schedule(self.p)

    def magnitude(self, step: int) -> float:
        return value_of(self.p, step, "p", least=0.0, most=1.0, needed="from 0 to 1")

    def apply(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        return _dropped(weight, drawn.seed, drawn.magnitude, self.axes)

    def apply_plainly(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        shape = tuple(1 if axis in self.axes else n for axis, n in enumerate(weight.shape))
        with untransformed():
            scales = draws.scales(
                shape, drawn.seed, drawn.magnitude, dtype=weight.dtype, device=weight.device
            )
        return weight * scales

    def apply_to_rows(self, rows: Tensor, ids: Tensor, num_rows: int, drawn: Drawn) -> Tensor:
        return _dropped_rows(rows, ids, num_rows, drawn.seed, drawn.magnitude)

    def transpose_(self, gradient: Tensor, drawn: Drawn) -> Tensor:
        return draws.dropped_(gradient, drawn.seed, drawn.magnitude, self.axes)

    def remake(self, weight: Tensor, operands: Operands, drawn: Drawn, *, is_own: bool) -> Tensor:
        # In forward the result is contiguous, whatever the weight before it was.
        drop = draws.dropped_ if is_own and weight.is_contiguous() else draws.dropped
        return drop(weight, drawn.seed, drawn.magnitude, self.axes)


class _Dropped(torch.autograd.Function):
    """Multiplication with a mask that is drawn: linear, and its own transpose."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seed: int, p: float, axes: tuple[int, ...]) -> Tensor:
        ctx.drawn = (seed, p, axes)
        return _dropped_now(weight, seed, p, axes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        drop = _dropped if torch.is_grad_enabled() else _dropped_now
        return drop(gradients[0], *ctx.drawn), None, None, None


def _dropped(weight: Tensor, seed: int, p: float, axes: tuple[int, ...]) -> Tensor:
    return cast("Tensor", _Dropped.apply(weight, seed, p, axes))


def _dropped_now(weight: Tensor, seed: int, p: float, axes: tuple[int, ...]) -> Tensor:
    if weight.layout is torch.sparse_coo:
        return _dropped_entries(weight, seed, p, axes)
    return draws.dropped(weight, seed, p, axes)


def _dropped_entries(gradient: Tensor, seed: int, p: float, axes: tuple[int, ...]) -> Tensor:
    """Drop the entries of a sparse gradient (of an embedding) that the mask drops."""
    gradient = gradient.coalesce()
    shape = tuple(1 if axis in axes else n for axis, n in enumerate(gradient.shape))
    scales = draws.scales(shape, seed, p, dtype=gradient.dtype, device=gradient.device)
    rows = scales.expand(gradient.shape)[tuple(gradient.indices())]
    return torch.sparse_coo_tensor(
        gradient.indices(),
        gradient.values() * rows,
        gradient.shape,
        is_coalesced=True,
        check_invariants=False,
    )


class _DroppedRows(torch.autograd.Function):
    """Multiplication of looked-up rows with the entries of a mask of all rows, which is drawn."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ids: Tensor, num_rows: int, seed: int, p: float) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.drawn = (num_rows, seed, p)
        scales = draws.scales((num_rows,), seed, p, dtype=rows.dtype, device=rows.device)
        return rows * scales[ids].unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (ids,) = ctx.saved_tensors
        return _dropped_rows(gradients[0], ids, *ctx.drawn), None, None, None, None


def _dropped_rows(rows: Tensor, ids: Tensor, num_rows: int, seed: int, p: float) -> Tensor:
    return cast("Tensor", _DroppedRows.apply(rows, ids, num_rows, seed, p))
