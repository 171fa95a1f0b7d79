"""recoup: training that remembers less.

The backward pass needs values that the forward pass made. Each is kept, recomputed, regenerated
from a seed, inverted from the output, or offloaded; recoup makes it one choice, with the same
gradients whichever is chosen.
"""

from __future__ import annotations

from recoup import errors, flows, invertible, schedules
from recoup.checkpoint import Sequential, checkpoint
from recoup.memory import curve, measure

__version__ = "0.1.0"

__all__ = [
    "Sequential",
    "__version__",
    "checkpoint",
    "curve",
    "errors",
    "flows",
    "invertible",
    "measure",
    "schedules",
]
