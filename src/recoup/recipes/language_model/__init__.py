"""The language model recipe: train an AWD-LSTM on text, then evaluate it and let it write."""

from __future__ import annotations
