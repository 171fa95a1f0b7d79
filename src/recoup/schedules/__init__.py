"""Schedules as data: which states a chain keeps, which stages it recomputes or inverts, and when.

A `Schedule` is a list of actions for one executor; `simulate` computes its cost without running
it. Nothing in this package depends on tensors.
"""

from __future__ import annotations

from recoup.schedules._binomial import binomial, log, revolve
from recoup.schedules._constant import Way, constant
from recoup.schedules._simulate import Moment, Simulation, simulate, trace
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
from recoup.schedules.bounds import beta, num_advances, num_sweeps
from recoup.schedules.costs import Cost, Results, SelectiveTape
from recoup.schedules.search.frontier import Point, frontier, optimal
from recoup.schedules.segmented import linear, sqrt
from recoup.schedules.two_tiers import offloaded

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
    "Results",
    "Reverse",
    "Schedule",
    "SelectiveTape",
    "Simulation",
    "Tape",
    "Way",
    "beta",
    "binomial",
    "constant",
    "frontier",
    "linear",
    "log",
    "num_advances",
    "num_sweeps",
    "offloaded",
    "optimal",
    "revolve",
    "simulate",
    "sqrt",
    "trace",
]
