"""Schedules as data: which states a chain keeps, which stages it recomputes or inverts, and when.

A `Schedule` is a list of actions for one executor; `simulate` computes its cost without running
it. Nothing in this package depends on tensors.
"""

from __future__ import annotations

from recoup.schedules._binomial import beta, binomial, log, num_advances, num_sweeps, revolve
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
from recoup.schedules.costs import Cost, Results, SelectiveTape
from recoup.schedules.memory import Way, constant, linear, offloaded, sqrt
from recoup.schedules.search import Point, frontier, optimal

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
