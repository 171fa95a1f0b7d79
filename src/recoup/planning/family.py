"""A member of a family of plans: a plan, and the shapes that it serves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn

from recoup.planning.following import PlanFollower, PlannedModel
from recoup.planning.shapes import ArgumentShapes
from recoup.planning.sizes import ArgumentSizes
from recoup.schedules import Schedule

__all__ = ["MOST_LOST", "Member", "PlanMaker", "PlanOfShapes"]

MOST_LOST = 0.04  # of the time of a step, before a shape gets a plan of its own
_NEAR = 0.97  # of the entries: such a shape loses nothing that is worth a plan
_MOST_SHAPES = 64  # that are remembered


class PlanOfShapes(Protocol):
    """The attributes of a plan that a family of plans uses."""

    planned: PlannedModel
    sizes: ArgumentSizes
    budget_bytes: int
    standing_bytes: int

    @property
    def schedule(self) -> Schedule:
        """The schedule of its blocks."""
        ...

    @property
    def rehearsed_peak_bytes(self) -> int:
        """The peak of a step that followed it."""
        ...

    def follower(self) -> PlanFollower:
        """Return a follower of the plan."""
        ...

    def most_lost(self, share: float) -> float:
        """Return the most time lost, relative to the best plan if all took `share` of the bytes."""
        ...


class PlanMaker(Protocol):
    """The interface of what makes the plans of a family, and tries them."""

    def plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, has_room: bool
    ) -> PlanOfShapes:
        """Return a plan for these arguments, which leaves bytes free if asked to."""
        ...

    def peak_under(
        self, plan: PlanOfShapes, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> float:
        """Return the peak of a step with these arguments that follows a plan."""
        ...


class _Tried(NamedTuple):
    """Shapes with which a step has kept to the budget, and its bytes relative to the first."""

    shapes: ArgumentShapes
    share: float


class Member:
    """A plan of the family, with the shapes that it was made for and those that it was tried on."""

    def __init__(self, shapes: ArgumentShapes, plan: PlanOfShapes) -> None:
        modules: Sequence[nn.Module] = plan.planned.followed_modules
        self.plan = plan
        self.follower = plan.follower()
        self.modules = frozenset(map(id, modules))
        self.tried = [_Tried(shapes, 1.0)]

    @property
    def shapes(self) -> ArgumentShapes:
        """The shapes that it was made for."""
        return self.tried[0].shapes

    def lost(self, shapes: ArgumentShapes) -> float:
        """Return a bound on the time lost for `shapes`; infinite if they are not served."""
        return min(self._lost(tried, shapes) for tried in self.tried)

    def _lost(self, tried: _Tried, shapes: ArgumentShapes) -> float:
        if not tried.shapes.cover(shapes):
            return math.inf
        if _is_near(tried.shapes, shapes):
            return 0.0
        share = tried.shapes.share_of(shapes)
        return self.plan.most_lost(tried.share * share * share)

    def growth_to(self, shapes: ArgumentShapes) -> tuple[float, float]:
        """Return how unlike these shapes are those that were tried, and the budgets they may take.

        Both are infinite for a call of another family.
        """
        used = self.plan.rehearsed_peak_bytes / max(self.plan.budget_bytes, 1)
        found: list[tuple[float, float]] = []
        for tried in self.tried:
            growth = tried.shapes.growth_to(shapes)
            unlike = abs(math.log(growth)) if growth else math.inf
            found.append((unlike, used * tried.share * growth))
        return min(found)

    def may_serve(self, peak_bytes: float) -> bool:
        """Whether a step that took so many bytes is within the budget, and not too slow."""
        if peak_bytes > self.plan.budget_bytes:
            return False
        return self.plan.most_lost(self._share(peak_bytes)) <= MOST_LOST

    def serve(self, shapes: ArgumentShapes, peak_bytes: float) -> None:
        """Serve these shapes, too, whose step took so many bytes."""
        *before, last = self.tried
        if before and _is_near(shapes, before[-1].shapes) and _is_near(shapes, last.shapes):
            self.tried = before  # the last ones say all that it says
        latest = [*self.tried[1:], _Tried(shapes, self._share(peak_bytes))]
        self.tried = [self.tried[0], *latest[-_MOST_SHAPES:]]

    def _share(self, peak_bytes: float) -> float:
        return peak_bytes / max(self.plan.rehearsed_peak_bytes, 1)


def _is_near(shapes: ArgumentShapes, other: ArgumentShapes) -> bool:
    """Whether `shapes` cover others that are hardly smaller."""
    return shapes.cover(other) and shapes.share_of(other) >= _NEAR
