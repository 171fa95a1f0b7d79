"""Invertible layers: modules whose input can be computed from their output."""

from __future__ import annotations

from recoup.invertible.actnorm import ActNorm
from recoup.invertible.chain import Chain
from recoup.invertible.check import Finding, InvertibleReport, check_invertible
from recoup.invertible.contract import InvertibleModule
from recoup.invertible.conv1x1 import InvertibleConv1x1, InvertibleConv1x1LU
from recoup.invertible.coupling import AdditiveCoupling, AffineCoupling
from recoup.invertible.dequantize import Dequantize
from recoup.invertible.permute import Flip, Permute
from recoup.invertible.preprocess import Logit, Normalize
from recoup.invertible.split import Split
from recoup.invertible.squeeze import Squeeze

__all__ = [
    "ActNorm",
    "AdditiveCoupling",
    "AffineCoupling",
    "Chain",
    "Dequantize",
    "Finding",
    "Flip",
    "InvertibleConv1x1",
    "InvertibleConv1x1LU",
    "InvertibleModule",
    "InvertibleReport",
    "Logit",
    "Normalize",
    "Permute",
    "Split",
    "Squeeze",
    "check_invertible",
]
