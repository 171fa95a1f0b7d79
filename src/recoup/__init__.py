"""recoup: training that remembers less.

The backward pass needs values that the forward pass made. Each is kept, recomputed, regenerated
from a seed, inverted from the output, or offloaded; recoup makes it one choice, with the same
gradients whichever is chosen.
"""

from __future__ import annotations

from recoup import errors, flows, invertible, schedules, weights
from recoup.flows.foreign import train_in
from recoup.gradients import GradStore, segments_backward, step
from recoup.memory import curve, measure, residuals
from recoup.planning.plan import applied_plans
from recoup.planning.search import largest, plan
from recoup.planning.step_bytes import estimate, timeline
from recoup.regions.blocks import offloading, recomputing
from recoup.regions.recompute import Recompute, checkpoint, recompute, recompute_
from recoup.regions.sequential import Sequential
from recoup.regions.tiled import tiled, tiled_loss
from recoup.weights import weight_dropout, weight_noise, weight_norm

__version__ = "0.1.0"

__all__ = [
    "GradStore",
    "Recompute",
    "Sequential",
    "__version__",
    "applied_plans",
    "checkpoint",
    "curve",
    "errors",
    "estimate",
    "flows",
    "invertible",
    "largest",
    "measure",
    "offloading",
    "plan",
    "recompute",
    "recompute_",
    "recomputing",
    "residuals",
    "schedules",
    "segments_backward",
    "step",
    "tiled",
    "tiled_loss",
    "timeline",
    "train_in",
    "weight_dropout",
    "weight_noise",
    "weight_norm",
    "weights",
]
