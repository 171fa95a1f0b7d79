"""Schedules as data: which states a chain keeps, which stages it recomputes or inverts, and when.

A `Schedule` is a list of actions for one executor; `simulate` computes its cost without running
it. Nothing in this package depends on tensors.
"""

from __future__ import annotations

from recoup.schedules._binomial import binomial
from recoup.schedules._constant import Way, constant
from recoup.schedules._frontier import Point, frontier
from recoup.schedules._linear import linear
from recoup.schedules._optimal import optimal
from recoup.schedules._revolve import revolve
from recoup.schedules._simulate import Simulation, simulate
from recoup.schedules._sqrt import sqrt
from recoup.schedules._trace import Moment, trace
from recoup.schedules.actions import (
    Action,
    Advance,
    Drop,
    Invert,
    Keep,
    Load,
    Offload,
    Reverse,
    Schedule,
    Tape,
)
from recoup.schedules.bounds import (
    beta,
    num_advances,
    num_sweeps,
)
from recoup.schedules.costs import Cost, Thin
from recoup.schedules.logarithmic import log

__all__ = [
    "Action",
    "Advance",
    "Cost",
    "Drop",
    "Invert",
    "Keep",
    "Load",
    "Moment",
    "Offload",
    "Point",
    "Reverse",
    "Schedule",
    "Simulation",
    "Tape",
    "Thin",
    "Way",
    "beta",
    "binomial",
    "constant",
    "frontier",
    "linear",
    "log",
    "num_advances",
    "num_sweeps",
    "optimal",
    "revolve",
    "simulate",
    "sqrt",
    "trace",
]
