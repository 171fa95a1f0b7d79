"""Tensors of zeros and ones, kept as one bit each."""

from __future__ import annotations

import torch
from torch import Tensor

# Eight bytes of 0 or 1, read as one number and multiplied by this, have their bits in the highest
# byte of the product.
_GATHER = 0x0102040810204080
# A byte multiplied by this is repeated eight times; `_ONE_EACH` takes another bit of each.
_SPREAD = 0x0101010101010101
_ONE_EACH = 0x8040201008040201 - 2**64
# The sign bit is shifted out.
_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PackedMask:
    """A tensor of zeros and ones, eight to a byte.

    Args:
        tensor: a tensor of any type; nonzero entries count as one.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._shape = tensor.shape
        self._num_values = tensor.numel()
        if tensor.is_floating_point():  # a comparison of its numbers would be a decision to keep
            tensor = tensor.view(_OF_SIZE[tensor.itemsize]) << 1
        ones = (tensor != 0).flatten()
        missing = -self._num_values % 8
        if missing:
            ones = torch.cat([ones, ones.new_zeros(missing)])
        eights = ones.view(torch.int64)
        self.packed = ((eights * _GATHER) >> 56).to(torch.uint8)

    def unpacked(self) -> Tensor:
        """Return the zeros and ones as a tensor of bool."""
        eights = (self.packed.to(torch.int64) * _SPREAD) & _ONE_EACH
        return (eights.view(torch.uint8) != 0)[: self._num_values].view(self._shape)
