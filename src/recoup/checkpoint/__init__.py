"""Regions and chains that recompute: `checkpoint` and `Sequential`."""

from __future__ import annotations

from recoup.checkpoint.region import checkpoint
from recoup.checkpoint.sequential import Sequential

__all__ = ["Sequential", "checkpoint"]
