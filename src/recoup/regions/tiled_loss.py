"""`recoup.tiled_loss`: a loss in pieces, whose gradients are taken while forward runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec

import torch
from torch import Tensor

from recoup._core.captured import captured_by
from recoup._core.saved_tensors import check_hooks_work, without_pairs
from recoup._core.summed_gradients import SummedGradients
from recoup.regions.tiled import Tiled
from recoup.regions.tiles import Cut, Reduction, Tiles, tile_value

__all__ = ["TiledLoss", "tiled_loss"]

P = ParamSpec("P")


def tiled_loss(
    fn: Callable[P, Tensor],
    dim: int = 1,
    tiles: int = 8,
    *,
    split: Sequence[int | str] | None = None,
    reduction: Reduction = "mean",
    target: int | str | None = None,
    ignore_index: int = -100,
) -> TiledLoss[P]:
    """Return a callable that computes the loss `fn`, and its gradients, on a piece at a time.

    Kept: the gradients themselves, as large as the arguments and parameters that they belong to;
    what `fn` makes (the logits) is alive for one tile only. Each tile runs forward and backward in
    forward; backward only multiplies the gradients by that of the result. So nothing runs twice, as
    with `tiled(fn, reduction="mean")`, but gradients are paid for whenever grad mode is on, there
    is no double backward, and parameters' gradients are held from forward on. The weight of a
    linear layer takes the bytes of one gradient at any time, other weights, and all of them under
    autocast, up to three.

    What is checked is the same as for `tiled`. A graph of torch.compile breaks at it.

    Args:
        fn: a function or module that returns a loss, a tensor without dimensions, and treats rows
            independently: the head of a language model with its cross entropy.
        dim: the dimension of the rows: 1 for tokens of shape (N, L, D).
        tiles: how many pieces there are. Logits of all rows divided by `tiles` are alive, about
            three times (in forward and in backward of a cross entropy).
        split: the arguments that are split, as in `tiled`.
        reduction: "mean" or "sum": which of the two `fn` returns. A mean is over targets, each of
            the same weight: with class weights, let `fn` return a sum.
        target: with "mean", the argument with the targets, as in `tiled`.
        ignore_index: the target that a mean does not count; the one that `fn` ignores.

    Returns:
        A callable that takes the same arguments as `fn` and returns the same loss. The loss may be
        scaled, added to others, and reversed again with `retain_graph`.

    Raises:
        ValueError: as for `tiled`.
        GradientError: in forward, when `fn` uses a tensor that is not among its arguments and was
            computed before; in backward, with `create_graph=True`.

    Example:
        >>> import recoup, torch
        >>> head = torch.nn.Linear(8, 1000)
        >>> def head_and_loss(hidden, labels):
        ...     return torch.nn.functional.cross_entropy(
        ...         head(hidden).flatten(0, 1), labels.flatten()
        ...     )
        >>> hidden = torch.ones(2, 100, 8, requires_grad=True)
        >>> labels = torch.zeros(2, 100, dtype=torch.long)
        >>> loss = recoup.tiled_loss(head_and_loss, dim=1, tiles=10)(hidden, labels)
        >>> loss.backward()
        >>> hidden.grad.shape, head.weight.grad.shape
        (torch.Size([2, 100, 8]), torch.Size([1000, 8]))

    Source: Hsu et al., "Liger Kernel", https://arxiv.org/abs/2410.10989 (its fused linear cross
    entropy).
    """
    if reduction == "none":
        raise ValueError(
            '`reduction` is "none", but gradients can be taken in forward for a loss alone. Give '
            '"mean" or "sum", or use recoup.tiled.'
        )
    return TiledLoss(fn, Cut(dim, tiles, split, reduction, target, ignore_index))


class TiledLoss(Tiled[P, Tensor]):
    """A loss that runs in tiles, as `tiled_loss` returns it."""

    def _loss(self, tiles: Tiles) -> Tensor:
        if not torch.is_grad_enabled():
            return super()._loss(tiles)
        check_hooks_work()
        weights, divisor = self._weights(tiles)
        outside = [t for t in (*captured_by(self._fn), *tiles.tensors) if isinstance(t, Tensor)]
        sums = SummedGradients(f"the loss of {self._name} in tiles", outside)
        # The graph of a tile ends at leaves of its own: in place of a split argument that requires
        # a gradient it is given a leaf with its rows.
        asked = {id(tensor): tensor for tensor in tiles.split if tensor.requires_grad}
        totals: dict[int, Tensor] = {}
        pairs = zip(tiles.tensors, tiles.is_split, strict=True)
        pieces = tiles.pieces([t.detach() if is_split else t for t, is_split in pairs])
        for index, weight in enumerate(weights):
            if not weight:
                continue
            own: dict[int, Tensor] = {}  # a tensor that is there twice is one leaf
            given = [
                own.setdefault(id(tensor), piece.detach().requires_grad_())
                if id(tensor) in asked
                else piece
                for tensor, piece in zip(tiles.tensors, pieces[index], strict=True)
            ]
            args, kwargs = tiles.given(given)
            with without_pairs():  # nobody else is given what a summand saves
                value = tile_value(self._fn(*args, **kwargs), self._name, self._cut.reduction)
                found = sums.add(value, weight, list(own.values()))
            for key, gradient in zip(own, found, strict=True):
                if gradient is not None:
                    if key not in totals:
                        totals[key] = torch.zeros_like(asked[key].detach())
                    start = sum(tiles.sizes[:index])
                    totals[key].narrow(tiles.dim, start, tiles.sizes[index]).copy_(gradient)
            del args, kwargs, value, given, own, found
        return sums.of(divisor, [(asked[key], total) for key, total in totals.items()])
