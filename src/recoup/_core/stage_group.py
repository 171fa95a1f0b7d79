"""A group of stages that run as one, because their schedule treats all of them alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from recoup._core.region import Stage, State, is_marked_in_place
from recoup._core.saved_tensors import storage_address

__all__ = ["StageGroup", "grouped", "ungrouped"]


class StageGroup:
    """Several stages as one: they share a region, and the record for its second run.

    Args:
        stages: the stages.
    """

    __slots__ = ("_are_in_place", "_stages", "code", "compares", "modules", "name")

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self.name = f"{stages[0].name} to {stages[-1].name}"
        self.code = stages[0].code
        self.modules: list[nn.Module] = []
        self.compares, self._are_in_place = True, False
        for stage in stages:
            self.modules += stage.modules
            self.compares &= stage.compares
            self._are_in_place |= is_marked_in_place(stage)

    def forward(self, state: State) -> tuple[State, list[Any]]:
        """Return the state after the last stage, and the second outputs of all."""
        given = set(map(storage_address, state)) if self._are_in_place else set[int]()
        beside: list[Any] = []
        for stage in self._stages:
            # The stages before it may have returned their input, which the schedule may keep.
            is_meant = bool(beside and given) and is_marked_in_place(stage)
            if is_meant and not given.isdisjoint(map(storage_address, state)):
                state = tuple([value.clone() for value in state])
            state, value = stage.forward(state)
            beside.append(value)
        return state, beside

    def inverse(self, state: State) -> State:
        """Raise NotImplementedError: a schedule that inverts treats each stage by itself."""
        raise NotImplementedError


def grouped(stages: Sequence[Stage], groups: Sequence[range]) -> list[Stage]:
    """Return a stage for each group."""
    return [
        stages[group.start] if len(group) == 1 else StageGroup(stages[group.start : group.stop])
        for group in groups
    ]


def ungrouped(values: Sequence[Any], groups: Sequence[Stage]) -> list[Any]:
    """Return the second outputs of the stages, from those of the groups."""
    found: list[Any] = []
    for value, group in zip(values, groups, strict=True):
        found += value if isinstance(group, StageGroup) else (value,)
    return found
