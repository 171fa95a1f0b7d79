"""Outputs of chosen operators, such as products, that a later run is given.

NOTE [ Kept products ]

Rule 1. Outputs of chosen operators are kept in the same way (a plan chooses some of the costly ones
        in a block). They go through the saved-tensor hooks around the region when its first run has
        ended. Each is given once, and all are freed with the next run, so that memory falls as
        backward proceeds; in a further backward the operators run again.
Rule 2. What is kept is a copy, made as soon as the operator has run: the output may be written to
        unseen (by numpy or Triton, or through a view with a version counter of its own, such as
        every batched `torch.matmul` returns). But if the output is a residual as it is, as the
        input of a batch norm is, then nobody may write to it, and it is kept itself. Writes that
        torch sees are found by its version, and others by the comparison of what is made of it.
Rule 3. Outputs are kept only if they are plain tensors that share no memory with the inputs of the
        operator or with each other, and only if the operator writes to none of its inputs.
Rule 4. Of an operator that fills a tensor with draws of 0 and 1 (the mask of a dropout), the draws
        are kept, one bit each; later writes to the tensor do not change them.
Rule 5. If an operator drew, a later run sets the generators to their states after it, so that later
        draws are the same.
Rule 6. Residuals may be held as autograd would hold them. The later run need not make these, so it
        may end before the operators that only they need.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from recoup._core.devices import States, set_generator_states
from recoup._core.operators import beneath, has_schema, map_instances, traits_of
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import Kept, Pair, storage_id
from recoup._core.tensors import PLAIN, geometry_of, laid_out


class Products(NamedTuple):
    """Operators of a call whose outputs are kept, and residuals that are."""

    funcs: frozenset[Any] = frozenset()  # the operators among which some are chosen
    chosen: Container[int] = ()  # those, by their numbers among all calls of these
    saved: Container[int] = ()  # those of them whose output is a residual as it is (See Rule 2)
    held: Container[int] = ()  # residuals, by their numbers among all of the call (See Rule 6)


class KeptProduct(NamedTuple):
    """What a chosen operator made."""

    output: Any  # with a `_KeptTensor` in place of each tensor; or the draws
    states: States | None  # of the generators after it, if it drew

    @classmethod
    def of(
        cls,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        result: Any,
        states: States | None,
        *,
        copies: bool = True,
    ) -> KeptProduct | None:
        """Return what is kept of what an operator made; None if it cannot be (See Rule 3)."""
        if is_mask(func):
            is_plain = type(result) in PLAIN and not result.is_sparse
            return cls(PackedMask(result), states) if is_plain else None
        if not _can_be_kept(func, result, tensors_in((args, kwargs))):
            return None
        keep = functools.partial(_KeptTensor, copies=copies)
        return cls(map_instances(result, Tensor, keep), states)

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing was written to it before it was handed over."""
        found: list[bool] = []
        map_instances(self.output, _KeptTensor, lambda each: found.append(each.is_unchanged))
        return all(found)

    def hand_over(self, name: str, pair: Pair | None) -> None:
        """Pass the tensors to the saved-tensor hooks `pair`."""
        keep = functools.partial(_KeptTensor.keep, name=name, pair=pair)
        map_instances(self.output, _KeptTensor, keep)

    def given(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return what a later run is given, with the history that the operator gives it."""
        if self.states is not None:
            set_generator_states(self.states)
        return beneath(func, args, kwargs, self._made)

    def _made(self, args: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(self.output, PackedMask):
            return args[0].copy_(self.output.unpacked())
        return map_instances(self.output, _KeptTensor, _KeptTensor.get)


class _KeptTensor:
    """A tensor that a chosen operator made: a copy, or where nobody may write to it, itself."""

    __slots__ = ("_geometry", "_kept", "_version")

    def __init__(self, tensor: Tensor, *, copies: bool) -> None:
        self._geometry = geometry_of(tensor)
        self._kept: Tensor | Kept = tensor.detach().clone() if copies else tensor.detach()
        self._version = self._kept._version

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing was written to it before it was handed over."""
        return isinstance(self._kept, Kept) or self._kept._version == self._version

    def keep(self, name: str, pair: Pair | None) -> None:
        """Pass the tensor to the saved-tensor hooks `pair`."""
        self._kept = Kept(cast("Tensor", self._kept), name, pair)

    def get(self) -> Tensor:
        """Return the tensor in its original layout, as hooks may return it in another one."""
        kept = self._kept  # not handed over yet, if code takes a gradient within the first run
        tensor = kept if isinstance(kept, Tensor) else kept.get()
        # Detached: the result gets its history later, and hooks may hold the tensor they returned.
        return laid_out(tensor, self._geometry).detach()


def is_mask(func: Any) -> bool:
    """Whether an operator fills a tensor with draws of 0 and 1."""
    return func is torch.ops.aten.bernoulli_.float or func is torch.ops.aten.bernoulli_.Tensor


def _can_be_kept(func: Any, result: Any, given: Sequence[Tensor]) -> bool:
    """Whether the outputs are plain, share no memory, and are all that `func` does."""
    if has_schema(func) and traits_of(func).writes:
        return False
    seen = {storage_id(tensor) for tensor in given if tensor.layout is torch.strided}
    for tensor in tensors_in(result):
        is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided
        if not is_plain or tensor.is_inference() or storage_id(tensor) in seen:
            return False
        seen.add(storage_id(tensor))
    return True


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
