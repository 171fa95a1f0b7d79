"""Outputs of chosen operators, such as products, that a later run is given.

NOTE [ Kept products ]

Rule 1. Outputs of chosen operators are kept in the same way (a plan chooses some of the costly ones
        in a block). They go through the saved-tensor hooks that are in force around the region when
        its first run has ended. Each is given once, and all are freed with the next run, so that
        memory falls as backward proceeds; in a further backward the operators run again.
Rule 2. What is kept is a copy, made as soon as the operator has run. The output itself may be
        written to, in the region or after it, by a kernel that torch does not see (numpy, Triton)
        or through a view with a version counter of its own (`_unsafe_view`, which every batched
        `torch.matmul` returns). No check would detect all of these writes.
Rule 3. Outputs are kept only if they are plain tensors that share no memory with the inputs of the
        operator or with each other, and only if the operator writes to none of its inputs.
Rule 4. Of an operator that fills a tensor with draws of 0 and 1 (the mask of a dropout), the draws
        are kept, one bit each; later writes to the tensor do not change them.
Rule 5. If an operator drew, a later run sets the generators to their states after it, so that later
        draws are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from recoup._core.devices import States, set_generator_states
from recoup._core.fake_values import PLAIN
from recoup._core.interception import beneath
from recoup._core.memory_layout import geometry_of, laid_out
from recoup._core.operators import has_schema, map_instances, traits_of
from recoup._core.packed_masks import PackedMask
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import Kept, Pair, storage_id


class Products(NamedTuple):
    """Operators of a call whose outputs are kept.

    Args:
        funcs: the operators among which some are chosen.
        chosen: the chosen ones, by their numbers among all calls of these.
    """

    funcs: frozenset[Any] = frozenset()
    chosen: Container[int] = ()


class KeptProduct(NamedTuple):
    """What a chosen operator made.

    Args:
        output: a copy of its output, with a `_KeptTensor` in place of each tensor; or the draws.
        states: the states of the generators after it, if it drew.
    """

    output: Any
    states: States | None

    @classmethod
    def of(
        cls, func: Any, args: Any, kwargs: dict[str, Any], result: Any, states: States | None
    ) -> KeptProduct | None:
        """Return a copy of what an operator made; None if that cannot be kept (See Rule 3)."""
        if is_mask(func):
            is_plain = type(result) in PLAIN and not result.is_sparse
            return cls(PackedMask(result), states) if is_plain else None
        if not _can_be_kept(func, result, tensors_in((args, kwargs))):
            return None
        return cls(map_instances(result, Tensor, _KeptTensor), states)

    def hand_over(self, name: str, pair: Pair | None) -> None:
        """Pass the copies to the saved-tensor hooks `pair`."""
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
    """A copy of a tensor that a chosen operator made."""

    __slots__ = ("_geometry", "_kept")

    def __init__(self, tensor: Tensor) -> None:
        self._geometry = geometry_of(tensor)
        self._kept: Tensor | Kept = tensor.detach().clone()

    def keep(self, name: str, pair: Pair | None) -> None:
        """Pass the copy to the saved-tensor hooks `pair`."""
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
