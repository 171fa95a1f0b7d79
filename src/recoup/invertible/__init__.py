"""Invertible layers: modules whose input can be computed from their output."""

from __future__ import annotations

from recoup._core.drift_guard import DriftGuard
from recoup.invertible.adapters import adapt
from recoup.invertible.chain import Chain
from recoup.invertible.channels import ActNorm, InvertibleConv1x1, InvertibleConv1x1LU
from recoup.invertible.check import Finding, InvertibleReport, check_invertible
from recoup.invertible.contract import InvertibleModule
from recoup.invertible.coupling import AdditiveCoupling, AffineCoupling
from recoup.invertible.lipschitz import LipschitzConv2d, LipschitzLinear, LipSwish
from recoup.invertible.mixture import MixtureCoupling
from recoup.invertible.preprocess import Dequantize, Logit, Normalize, VariationalDequantize
from recoup.invertible.rearrange import Flatten, Flip, Permute, Split, Squeeze
from recoup.invertible.residual import InvertibleResidual

__all__ = [
    "ActNorm",
    "AdditiveCoupling",
    "AffineCoupling",
    "Chain",
    "Dequantize",
    "DriftGuard",
    "Finding",
    "Flatten",
    "Flip",
    "InvertibleConv1x1",
    "InvertibleConv1x1LU",
    "InvertibleModule",
    "InvertibleReport",
    "InvertibleResidual",
    "LipSwish",
    "LipschitzConv2d",
    "LipschitzLinear",
    "Logit",
    "MixtureCoupling",
    "Normalize",
    "Permute",
    "Split",
    "Squeeze",
    "VariationalDequantize",
    "adapt",
    "check_invertible",
]
