"""Stores with gradients of every layout and type, and their numbers in one long list."""

from __future__ import annotations

import torch
from torch import nn

import recoup

ROWS = torch.tensor([[0, 2, 0, 5]])


def dense(*shape, dtype=torch.float64):
    return lambda: torch.randn(shape, dtype=dtype)


def sparse(dtype=torch.float64, rows=ROWS):
    return lambda: torch.sparse_coo_tensor(
        rows, torch.randn(rows.shape[1], 3, dtype=dtype), (8, 3), check_invariants=True
    )


KINDS = {
    "one": [dense(4)],
    "shapes": [dense(4, 3), dense(), dense(2, 1, 5), dense(0, 3)],
    "types": [dense(4), dense(3, dtype=torch.float32), dense(5, dtype=torch.bfloat16)],
    "complex": [dense(4, dtype=torch.complex128), dense(3), dense(2, dtype=torch.complex64)],
    "sparse": [sparse(), dense(4, 3), sparse(rows=torch.zeros(1, 0, dtype=torch.long))],
    "sparse complex": [sparse(torch.complex128)],
    "empty": [],
}
# Where the type with the fewest digits sets what can be asked.
ROUGH = {"types": 1e-2, "complex": 1e-6}


def targets(kind):
    return [nn.Parameter(torch.zeros_like(make().to_dense())) for make in KINDS[kind]]


def store_of(kind, params):
    store = recoup.GradStore(params)
    for make, param in zip(KINDS[kind], params, strict=True):
        store.add_(param, make())
    store.weight = 1.0
    return store


def holding(params, *gradients, weight=1.0):
    store = recoup.GradStore(params)
    for param, gradient in zip(params, gradients, strict=True):
        if gradient is not None:
            store.add_(param, gradient)
    store.weight = weight
    return store


def flat(store, params):
    """All numbers as float64, complex ones as two; zeros for what is absent."""
    pieces = [torch.zeros(0, dtype=torch.float64)]
    for param in params:
        gradient = store.get(param)
        gradient = torch.zeros_like(param) if gradient is None else gradient.detach().to_dense()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        pieces.append(gradient.detach().double().reshape(-1))
    return torch.cat(pieces)


def close(got, want, kind="one"):
    torch.testing.assert_close(
        got.double(), torch.as_tensor(want).double(), rtol=ROUGH.get(kind, 1e-12), atol=1e-12
    )
