"""Regions that users mark: checkpoint, recompute, recomputing, and chains with a memory mode."""

from __future__ import annotations
