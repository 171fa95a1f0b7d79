"""Log-determinants of ``x + g(x)`` for a `g` that contracts: exact, as a series, and unbiased.

NOTE [ Derivatives within forward ]

Rule 1. The log-determinant consists of derivatives of the network, which are taken while forward
        runs and are differentiated themselves. So a graph is always recorded, on an alias of `x`
        that carries no hooks of the caller; if no gradient is needed it is freed after the call.
Rule 2. All draws follow from one seed a call. The length of a series is drawn first, from a
        generator of its own: probes drawn from the same numbers would depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from recoup._core.devices import own_generator
from recoup._core.rng import draw_seed
from recoup._core.saved_tensors import grad_mode
from recoup.invertible.gradients_in_forward import gradients_in_forward

__all__ = ["exact_log_det", "power_series", "probes_for", "roulette_weights", "series_weights"]

Network = Callable[[Tensor], Tensor]

_linalg: Any = torch.linalg  # torch does not type its functions


def exact_log_det(network: Network, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``g(x)`` and the exact log-determinant ``(N,)``, from one derivative per dimension."""
    wants_grad = torch.is_grad_enabled()
    with _differentiable(x) as alias:
        value = network(alias)
        columns = value.flatten(1).unbind(1)
        rows = [_pulled_back(column, alias, None, wants_grad).flatten(1) for column in columns]
        jacobian = torch.stack(rows, dim=1)
        unit = torch.eye(len(rows), device=x.device, dtype=x.dtype)
        log_det: Tensor = _linalg.slogdet(unit + jacobian)[1]
    return _given(value, log_det, wants_grad)


def power_series(
    network: Network, x: Tensor, probes: Tensor, weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return ``g(x)`` and ``sum_k weights[k - 1] * trace(J^k)``, of shape ``(N,)``, from probes.

    `probes` have the shape ``(P, *x.shape)``; each trace is the mean of P values ``v J^k v``.
    """
    wants_grad = torch.is_grad_enabled()
    num_probes, num_samples = probes.shape[:2]
    with _differentiable(x) as alias:
        copies = alias.expand_as(probes).flatten(0, 1)
        value = network(copies)
        probe = row = probes.flatten(0, 1)
        total = x.new_zeros(len(probe))
        for weight in weights:
            row = _pulled_back(value, copies, row, wants_grad)
            total = total + weight * (row * probe).flatten(1).sum(1)
        log_det = total.view(num_probes, num_samples).mean(0)
        value = value[:num_samples]
    return _given(value, log_det, wants_grad)


def series_weights(num_terms: int) -> list[float]:
    """Return the coefficients of ``log(1 + z)``: 1, -1/2, 1/3 and so on."""
    return [(-1) ** (k + 1) / k for k in range(1, num_terms + 1)]


def roulette_weights(num_terms: int, continuation: float, num_more: int) -> list[float]:
    """Return the coefficients of a series that continued for `num_more` terms after `num_terms`.

    Each of the further terms is divided by its probability, ``continuation ** j``.
    """
    weights = series_weights(num_terms + num_more)
    for j in range(1, num_more + 1):
        weights[num_terms + j - 1] /= continuation**j
    return weights


def probes_for(x: Tensor, num_probes: int, continuation: float | None) -> tuple[Tensor, int]:
    """Draw signs ``(num_probes, *x.shape)``, and the number of further terms (Rule 2)."""
    own = own_generator(torch.device("cpu"), draw_seed())
    num_more = 0
    if continuation is not None:
        # 1 - u lies in (0, 1], so that its logarithm is finite
        uniform = 1 - float(torch.rand((), generator=own, dtype=torch.float64))
        num_more = int(math.log(uniform) / math.log(continuation))
    seed = int(torch.randint(2**63 - 1, (), generator=own, dtype=torch.int64))
    generator = own_generator(x.device, seed)
    shape = num_probes, *x.shape
    bits = torch.randint(2, shape, generator=generator, device=generator.device)
    return bits.to(x.device, x.dtype).mul_(2).sub_(1), num_more


@contextmanager
def _differentiable(x: Tensor) -> Generator[Tensor]:
    """Yield an alias of `x` to take derivatives with respect to (See Rule 1)."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False), torch.enable_grad():
            yield x.clone().requires_grad_()
    elif torch.is_grad_enabled() and x.requires_grad:
        with gradients_in_forward():
            yield x.view_as(x)
    else:
        with grad_mode(True), gradients_in_forward():
            yield x.detach().requires_grad_()


def _pulled_back(value: Tensor, x: Tensor, row: Tensor | None, wants_grad: bool) -> Tensor:
    """Return ``row J`` for the Jacobian of `value` in `x`; the sum over the batch for None."""
    row = torch.ones_like(value) if row is None else row
    return torch.autograd.grad(
        value, x, row, retain_graph=True, create_graph=wants_grad, materialize_grads=True
    )[0]


def _given(value: Tensor, log_det: Tensor, wants_grad: bool) -> tuple[Tensor, Tensor]:
    return (value, log_det) if wants_grad else (value.detach(), log_det.detach())
