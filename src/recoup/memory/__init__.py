"""Memory and time of training: a meter, a census of residuals, and curves against depth."""

from __future__ import annotations

from recoup._core.devices import Peaks
from recoup.memory.census import Residual, Residuals, residuals
from recoup.memory.curves import Curve, Point, curve, load_builder
from recoup.memory.meter import Measurement, measure
from recoup.memory.size import format_bytes, parse_bytes
from recoup.memory.step_recorder import Peak, StepLine, Stretch

__all__ = [
    "Curve",
    "Measurement",
    "Peak",
    "Peaks",
    "Point",
    "Residual",
    "Residuals",
    "StepLine",
    "Stretch",
    "curve",
    "format_bytes",
    "load_builder",
    "measure",
    "parse_bytes",
    "residuals",
]
