"""Schedules as data: what a chain of stages keeps, runs again or inverts, and in which order.

A `Schedule` is a list of actions for one executor; `simulate` says what it costs without running
it. Nothing here knows of tensors.
"""

from __future__ import annotations

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
from recoup.schedules.binomial import binomial
from recoup.schedules.bounds import (
    beta,
    least_advances,
    num_advances,
    num_sweeps,
    persistent_schedules,
)
from recoup.schedules.constant import Way, constant
from recoup.schedules.costs import Cost, Thin
from recoup.schedules.frontier import Point, frontier
from recoup.schedules.linear import linear
from recoup.schedules.logarithmic import log
from recoup.schedules.optimal import optimal
from recoup.schedules.revolve import revolve
from recoup.schedules.simulate import Simulation, simulate
from recoup.schedules.sqrt import sqrt
from recoup.schedules.trace import Moment, trace

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
    "least_advances",
    "linear",
    "log",
    "num_advances",
    "num_sweeps",
    "optimal",
    "persistent_schedules",
    "revolve",
    "simulate",
    "sqrt",
    "trace",
]
