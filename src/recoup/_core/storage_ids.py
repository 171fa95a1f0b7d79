"""Identities of storages: ids among those alive, and tokens that are never used again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["Tokens", "parts_of", "storage_id"]


def storage_id(tensor: Tensor) -> int:
    """Return a number that is unique among the storages alive, and never 0."""
    return tensor.untyped_storage()._cdata


class Tokens:
    """Unique tokens of storages; a later storage at the same address has another token."""

    def __init__(self) -> None:
        self._tokens: dict[int, tuple[weakref.ref[torch.UntypedStorage], object]] = {}

    def of(self, tensor: Tensor) -> list[tuple[object, int]]:
        """Return a token and the bytes of each storage of `tensor`."""
        return [
            (self._token(part.untyped_storage()), part.untyped_storage().nbytes())
            for part in parts_of(tensor)
        ]

    def _token(self, storage: torch.UntypedStorage) -> object:
        found = self._tokens.get(storage._cdata)
        if found is None or found[0]() is None:
            found = self._tokens[storage._cdata] = weakref.ref(storage), object()
        return found[1]


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with their own memory that `tensor` consists of."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # a DTensor names its mesh, too
                yield from parts_of(part)
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
