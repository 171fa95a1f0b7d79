"""What is called by hand: checkpoint, recompute, recomputing, and chains with a memory mode."""

from __future__ import annotations
