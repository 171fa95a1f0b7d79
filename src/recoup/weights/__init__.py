"""Reparametrized weights: dropout, noise and norm on any parameter of any module.

`weight_dropout`, `weight_noise` and `weight_norm` apply a reparametrization, of which only a seed
is kept where it is random. The other functions list and remove them, control their draws, and keep
an optimizer from moving what was dropped; `to_plain_names` reads the files of other libraries.
"""

from __future__ import annotations

from recoup.weights.application import (
    applied,
    disabled,
    enabled,
    remove,
    same_draw,
    set_step,
    step,
    twin,
    update,
)
from recoup.weights.conversion import to_plain_names
from recoup.weights.dropout import freeze_dropped, weight_dropout
from recoup.weights.function import Draw, apply
from recoup.weights.noise import kl_divergence, weight_noise
from recoup.weights.norm import weight_norm

__all__ = [
    "Draw",
    "applied",
    "apply",
    "disabled",
    "enabled",
    "freeze_dropped",
    "kl_divergence",
    "remove",
    "same_draw",
    "set_step",
    "step",
    "to_plain_names",
    "twin",
    "update",
    "weight_dropout",
    "weight_noise",
    "weight_norm",
]
