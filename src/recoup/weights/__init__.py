"""Reparametrized weights: dropout, noise and norm on any parameter of any module.

`weight_dropout`, `weight_noise` and `weight_norm` apply a reparametrization, of which only a seed
is kept where it is random. The other functions list and remove them, and control their draws.
"""

from __future__ import annotations

from recoup.weights.application import applied, remove, update
from recoup.weights.contexts import disabled, enabled, same_draw, step
from recoup.weights.dropout import weight_dropout
from recoup.weights.function import Draw, apply
from recoup.weights.noise import weight_noise
from recoup.weights.norm import weight_norm

__all__ = [
    "Draw",
    "applied",
    "apply",
    "disabled",
    "enabled",
    "remove",
    "same_draw",
    "step",
    "update",
    "weight_dropout",
    "weight_noise",
    "weight_norm",
]
