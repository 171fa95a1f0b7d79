"""Reparametrized weights: noise that is a seed, on any parameter of any module.

`weight_dropout`, `weight_noise` and `weight_norm` apply; the rest of this package says what is
applied, takes it away, and controls what is drawn.
"""

from __future__ import annotations

from recoup.weights.application import applied, remove
from recoup.weights.contexts import disabled, enabled, same_draw, step
from recoup.weights.dropout import weight_dropout
from recoup.weights.noise import weight_noise
from recoup.weights.norm import weight_norm

__all__ = [
    "applied",
    "disabled",
    "enabled",
    "remove",
    "same_draw",
    "step",
    "weight_dropout",
    "weight_noise",
    "weight_norm",
]
