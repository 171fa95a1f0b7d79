"""Weight dropout: entries of a weight, or whole rows of it, are left out of a forward."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from recoup._core.saved_tensors import is_transformed, pop_pair, push_pair, unpack
from recoup.weights import draws
from recoup.weights.application import apply_to
from recoup.weights.choosing import ANY_WEIGHT, Where
from recoup.weights.reparametrization import (
    Application,
    Drawn,
    Magnitude,
    Operands,
    Reparametrization,
    is_table,
)


def weight_dropout(
    module: nn.Module,
    pattern: Where = ANY_WEIGHT,
    p: Magnitude = 0.5,
    *,
    axes: tuple[int, ...] = (),
    mode: str = "training",
    tied: str = "own",
) -> nn.Module:
    """Drop entries of weights in each forward, and keep nothing for it but a seed.

    Kept: 8 bytes a weight; neither the mask nor the dropped weight, whichever operator saves it.
    Backward pays two draws a weight: one for the weight, one for the mask of its gradient. The
    parameters remain the same objects under the same names; evaluation uses the raw weight.

    Args:
        module: the module, or a tree of modules. A forward of it is a step, which has one draw.
        pattern: chooses parameters: a regular expression for the whole of their qualified names, a
            type of modules (its weights), a function ``(name, parameter, module) -> bool``, or a
            list of these. Frozen parameters, and those without floating-point numbers, are chosen
            by a function or by their name in full only. By default, all weights: names in which
            "weight" is a word.
        p: the probability that an entry is dropped, rounded to a multiple of 2^-16; the others are
            scaled by 1 / (1 - p). A number, a 0-dim tensor, or a function from the number of steps
            in training so far (see `set_step`) to a number.
        axes: the axes along which the mask is shared; ``axes=(1,)`` drops whole rows, which for an
            `nn.Embedding` is done on the rows that were looked up.
        mode: "training", or "always" to draw in evaluation too.
        tied: "own" gives each name of a tied parameter a draw of its own; with "same" they share
            one, also with names to which another call with "same" applies.

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
    return apply_to(module, pattern, lambda: WeightDropout(application, p, axes, mode), tied=tied)


class WeightDropout(Reparametrization):
    """Weight dropout: sets entries of a weight to zero, and scales up the others."""

    kind = "weight_dropout"
    order = 1
    argument = "p"
    most = 1.0

    def __init__(
        self, application: Application, p: Magnitude, axes: tuple[int, ...], mode: str
    ) -> None:
        super().__init__(application, mode)
        if type(axes) not in (tuple, list) or not {*map(type, axes)} <= {int}:
            raise ValueError(f"`axes` is {axes!r}, but must be a tuple of ints, such as (1,).")
        self.axes = tuple(axes)
        self.rate = self.checked(p)

    def shown(self) -> str:
        return super().shown() + (f", axes={self.axes}" if self.axes else "")

    def fit(self, module: nn.Module, key: str, name: str) -> None:
        """Normalize `axes` for `draws`, or raise if the weight does not have them."""
        weight = cast("Tensor", module._parameters[key])
        for axis in self.axes:
            if not -weight.dim() <= axis < weight.dim():
                raise ValueError(
                    f"`axes` is {self.axes}, but `{name}` has shape {tuple(weight.shape)}, so "
                    f"axes must be from {-weight.dim()} to {weight.dim() - 1}."
                )
        self.axes = tuple(sorted({axis % weight.dim() for axis in self.axes}))
        self.draws_by_row = is_table(module, key)
        self.draws_rows_whole = 1 in self.axes

    def apply(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        mask: draws.Mask | None = None
        if weight.is_contiguous() and not (self.draws_by_row or is_transformed()):
            mask = draws.mask_beside(weight, drawn.seed, drawn.magnitude, self.axes)
        if mask is None:
            return super().apply(weight, operands, drawn)
        # The product's own backward takes less time than a function of ours.
        push_pair(mask.pack, unpack)
        try:
            return weight * mask.get()
        finally:
            pop_pair()

    def compute(self, weight: Tensor, own: Operands, drawn: Drawn, is_new: bool = False) -> Tensor:
        if weight.layout is torch.sparse_coo:  # a gradient, which an embedding may have
            ones = torch.ones(weight.shape, dtype=weight.dtype, device=weight.device)
            return weight * self.compute(ones, (), drawn, is_new=True)
        _, seed, p, rows = drawn
        if self.draws_by_row:
            return draws.dropped_rows(weight, seed, p, rows, axes=self.axes, in_place=is_new)
        return draws.dropped(weight, seed, p, self.axes, in_place=is_new)
