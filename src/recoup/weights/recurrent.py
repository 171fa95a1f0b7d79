"""Recurrent layers: torch runs them on a list of their weights, made once.

The list that a forward runs on has the reparametrized weights in the places of the raw ones, so the
fused kernels are used. The list that the layer keeps has the parameters, as without recoup.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from recoup.weights.forwards import Forward, frames

__all__ = ["members_of_recurrent"]


def members_of_recurrent(base: type[nn.RNNBase]) -> dict[str, Any]:
    """Return the members besides `forward` of a class for reparametrized layers of class `base`."""

    def weights(self: nn.RNNBase) -> list[Tensor]:
        kept: list[Tensor] = self.__dict__["_flat_weights"]
        around = frames()
        if not around or not isinstance(around[-1], Forward) or around[-1].reads_raw:
            return kept
        if around[-1].owner is not self:
            return kept
        names: list[str] = self.__dict__["_flat_weights_names"]
        return [getattr(self, name) for name in names]

    def keep(self: nn.RNNBase, kept: list[Tensor]) -> None:
        self.__dict__["_flat_weights"] = kept

    def update(self: nn.RNNBase) -> None:
        around = frames()
        top = around[-1] if around else None
        if not isinstance(top, Forward) or top.owner is not self:
            base._update_flat_weights(self)
            return
        # torch checks here that its list holds the layer's parameters: it must read the raw ones.
        top.reads_raw = True
        try:
            base._update_flat_weights(self)
        finally:
            top.reads_raw = False

    return {"_flat_weights": property(weights, keep), "_update_flat_weights": update}
