"""Plans: what each block of a model does with its residuals, chosen for a byte budget."""

from __future__ import annotations
