"""The blocks' own code with each output nudged, which shows what rounding grows to in a step.

In some models (deep networks with batch norms, before training) two right codes of a block make
gradients that differ by percents, since all that follows amplifies what they round differently.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from recoup._core.pytree import flatten
from recoup._core.storage_tracking import storages_of
from recoup.planning.compiling import BlockCode, Forward

__all__ = ["NudgedCode"]

_GOLDEN = (math.sqrt(5) - 1) / 2
_PERIOD = 4099  # a prime number, so that rows of a tensor are nudged in different places


class NudgedCode(BlockCode):
    """The blocks' own code, whose outputs are off by one rounding error, up or down.

    Nothing is drawn: an output is nudged alike whenever its block runs again. What a block was
    given and passes on (a mask) is no result of it, and stays as it is.
    """

    name = "nudged"

    def of_call(self, module: nn.Module, forward: Forward) -> Forward:
        del module

        def nudged(*args: Any, **kwargs: Any) -> Any:
            given = set(storages_of(flatten((args, kwargs))[0]))

            def is_made(tensor: Tensor) -> bool:
                return given.isdisjoint(storages_of((tensor,)))

            output = forward(*args, **kwargs)
            return tree_map_only(Tensor, lambda t: _nudged(t) if is_made(t) else t, output)

        return nudged


def _nudged(tensor: Tensor) -> Tensor:
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    if not is_plain or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        return tensor
    eps = torch.finfo(tensor.dtype).eps
    places = torch.arange(_PERIOD, device=tensor.device, dtype=torch.float32)
    factors = torch.where((places * _GOLDEN).frac() < 0.5, 1 - eps, 1 + eps).to(tensor.dtype)
    num_periods = -(-tensor.numel() // _PERIOD)
    nudged = tensor * factors.repeat(num_periods)[: tensor.numel()].view(tensor.shape)
    return torch.where(nudged.isinf(), tensor, nudged)  # the largest number stays finite
