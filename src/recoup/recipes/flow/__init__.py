"""The flow recipe: train a Glow on pictures in the memory you choose, then evaluate and sample."""

from __future__ import annotations
