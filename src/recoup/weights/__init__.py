"""Reparametrized weights: noise that is a seed, on any parameter of any module.

`weight_dropout`, `weight_noise` and `weight_norm` apply; the rest of this package says what is
applied, takes it away, and controls what is drawn.
"""

from __future__ import annotations

from recoup.weights.application import Applied, applied, remove
from recoup.weights.contexts import disabled, enabled, same_draw
from recoup.weights.dropout import WeightDropout, weight_dropout
from recoup.weights.noise import WeightNoise, weight_noise
from recoup.weights.norm import WeightNorm, weight_norm

__all__ = [
    "Applied",
    "WeightDropout",
    "WeightNoise",
    "WeightNorm",
    "applied",
    "disabled",
    "enabled",
    "remove",
    "same_draw",
    "weight_dropout",
    "weight_noise",
    "weight_norm",
]
