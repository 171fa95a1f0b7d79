"""A group of stages that run as one, because their schedule treats all of them alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recoup._core.saved_tensors import storage_address
from recoup._core.stage import Stage, State, is_marked_in_place

__all__ = ["StageGroup", "grouped", "ungrouped"]


class StageGroup:
    """Several stages as one: they share a region, and the records for its second run.

    Args:
        stages: the stages, none of which has a closure guard.
    """

    __slots__ = (
        "_stages",
        "closure_guard",
        "code",
        "modules",
        "name",
        "part_names",
    )

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self.name = f"{stages[0].name} to {stages[-1].name}"
        self.modules = tuple([module for stage in stages for module in stage.modules])
        self.part_names = [stage.name for stage in stages for _ in stage.modules]
        self.closure_guard = None
        self.code = stages[0].code  # a module, as those of the others, which are in `modules`

    def forward(self, state: State) -> tuple[State, list[Any]]:
        """Return the state after the last stage, and the second outputs of all."""
        given = set(map(storage_address, state))
        beside: list[Any] = []
        is_first = True
        for stage in self._stages:
            # The stages before it may have returned their input, which the schedule may keep.
            is_given = not is_first and not given.isdisjoint(map(storage_address, state))
            if is_given and is_marked_in_place(stage):
                state = tuple([value.clone() for value in state])
            state, value = stage.forward(state)
            beside.append(value)
            is_first = False
        return state, beside

    def inverse(self, state: State) -> State:
        """Raise NotImplementedError: a schedule that inverts treats each stage by itself."""
        raise NotImplementedError


def grouped(stages: Sequence[Stage], groups: Sequence[range]) -> list[Stage] | None:
    """Return a stage for each group; None if one of them has a closure guard."""
    for stage in stages:
        if stage.closure_guard is not None:
            return None
    return [
        stages[group.start] if len(group) == 1 else StageGroup(stages[group.start : group.stop])
        for group in groups
    ]


def ungrouped(values: Sequence[Any], groups: Sequence[Stage]) -> list[Any]:
    """Return the second outputs of the stages, from those of the groups."""
    each = (
        value if isinstance(group, StageGroup) else (value,)
        for value, group in zip(values, groups, strict=True)
    )
    return [value for of_group in each for value in of_group]
