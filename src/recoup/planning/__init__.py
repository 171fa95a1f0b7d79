"""Plans: what each block of a model does with its residuals, chosen by a number of bytes."""

from __future__ import annotations
