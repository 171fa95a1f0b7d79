"""What training costs: a meter for one call, and curves of memory and time against depth."""

from __future__ import annotations

from recoup.memory.curve import Curve, curve
from recoup.memory.meter import Measurement, measure
from recoup.memory.points import Point
from recoup.memory.size import format_bytes, parse_bytes

__all__ = ["Curve", "Measurement", "Point", "curve", "format_bytes", "measure", "parse_bytes"]
