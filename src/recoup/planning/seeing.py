"""Blocks that some forwards call and others leave out (LayerDrop).

NOTE [ Blocks that are left out ]

Rule 1. A plan is for the forward that calls the most blocks. If the step that was measured left
        some out, a few forwards without gradients are run under other draws; the one that calls
        the most of them is measured in its place, and rehearsed.
Rule 2. A block that one of these forwards called, but not the one that was measured, is a stage of
        the plan all the same: it takes its place in the order, and costs what the nearest block of
        its class does.
        No rehearsal calls it either: then a plan must be predicted to fit, too.
Rule 3. A block that none of them called is no stage. If it comes, it is run again from its
        arguments (See NOTE [ Following a plan ]).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from recoup._core.restoring import Undoing
from recoup._core.snapshots import copied
from recoup.planning.blocks import Block, find_leaves, repeated_calls
from recoup.planning.measuring import (
    Measured,
    MeasuredCall,
    Step,
    measure_blocks,
    seed_all,
)
from recoup.schedules import Cost

__all__ = ["blocks_of_any_forward", "blocks_that_are_called", "measure_most", "sequences_of"]

Sequences = list[list[nn.Module]]
_MOST_TRIES = 32
_ENOUGH_ALIKE = 3


def measure_most(
    step: Step, blocks: Sequence[Block], device: torch.device
) -> tuple[Step, Measured, Sequences]:
    """Measure the step that calls the most blocks (See Rule 1).

    Args:
        step: the step.
        blocks: names and modules.
        device: where bytes are counted.

    Returns:
        The step with the seed under which it was measured, what was measured, and the blocks that
        the forwards that were tried called, in order.
    """
    measured = measure_blocks(step, blocks, device)
    modules = [module for _, module in blocks]
    called = [call.module for call in measured.calls]
    if not called or len(_distinct(called)) == len(modules):
        return step, measured, [called]
    sequences = sequences_of(step, modules)
    best = max(range(len(sequences)), key=lambda seed: len(_distinct(sequences[seed])))
    if len(_distinct(sequences[best])) > len(_distinct(called)):
        other = replace(step, seed=best)
        again = measure_blocks(other, blocks, device)
        if len(again.calls) > len(called):
            step, measured = other, again
    return step, measured, [called, *sequences]


def blocks_that_are_called(step: Step) -> list[Block]:
    """Return blocks of a model in whose tree no blocks repeat.

    Those are the modules that one forward calls more than once (one block for all layers), or else
    modules in lists that have none within.
    """
    named: list[Block] = list(cast("Iterator[Block]", step.model.named_modules()))[1:]
    modules = [module for _, module in named]
    with step.rehearsed(), torch.no_grad():
        called = _sequence(step, modules, None)
    return repeated_calls(step.model, called) or find_leaves(step.model)


def sequences_of(step: Step, modules: Sequence[nn.Module]) -> Sequences:
    """Return which of `modules` forwards call, in order, under one seed after another.

    It ends with a forward that calls all that were called before, or when the first few are alike.
    """
    sequences: Sequences = []
    with step.rehearsed(), torch.no_grad():
        for seed in range(_MOST_TRIES):
            sequences.append(_sequence(step, modules, seed))
            alike = all(each == sequences[0] for each in sequences)
            found = _distinct([module for each in sequences for module in each])
            if len(sequences) >= _ENOUGH_ALIKE and (
                alike or len(_distinct(sequences[-1])) == len(found) == len(modules)
            ):
                break
    return sequences


def _distinct(modules: Sequence[nn.Module]) -> set[int]:
    return set(map(id, modules))


def _sequence(step: Step, modules: Sequence[nn.Module], seed: int | None) -> list[nn.Module]:
    called: list[nn.Module] = []

    def note(module: nn.Module, args: Any) -> None:
        del args
        called.append(module)

    with Undoing() as undo:
        for module in modules:
            undo.later(_remove_hook, module, note)
            module.register_forward_pre_hook(note)
        args, kwargs = copied((step.args, step.kwargs))
        if seed is not None:
            seed_all(seed)
        step.call(*args, **kwargs)
    return called


def _remove_hook(module: nn.Module, hook: Any) -> None:
    hooks: dict[int, Any] = getattr(module, "_forward_pre_hooks")  # noqa: B009 - it is private
    for key in [key for key, each in hooks.items() if each is hook]:
        del hooks[key]


def blocks_of_any_forward(
    measured: Sequence[MeasuredCall],
    costs: Sequence[Cost],
    sequences: Sequences,
    blocks: Sequence[Block],
) -> tuple[list[MeasuredCall], list[Cost]]:
    """Return the calls and costs of a forward that calls all blocks that any did (See Rule 2).

    Args:
        measured: the calls of the one that was measured.
        costs: of them, and of what follows them.
        sequences: the blocks that the forwards called, in order.
        blocks: names and modules.
    """
    names = {id(module): name for name, module in blocks}
    pairs = list(zip(measured, costs, strict=False))
    before: dict[int, set[int]] = {}
    for sequence in sequences:
        for place, module in enumerate(sequence):
            before.setdefault(id(module), set()).update(map(id, sequence[:place]))
    for module in {id(module): module for each in sequences for module in each}.values():
        if all(call.module is not module for call, _ in pairs):
            earlier = before[id(module)]
            places = [at for at, (call, _) in enumerate(pairs) if id(call.module) in earlier]
            _insert(pairs, places[-1] + 1 if places else 0, names[id(module)], module)
    return [call for call, _ in pairs], [*(cost for _, cost in pairs), costs[-1]]


def _insert(
    pairs: list[tuple[MeasuredCall, Cost]], place: int, name: str, module: nn.Module
) -> None:
    def distance(at: int) -> tuple[bool, bool, int]:
        call = pairs[at][0]
        return type(call.module) is not type(module), not call.is_linked, abs(at - place)

    call, cost = pairs[min(range(len(pairs)), key=distance)]
    if place and (call.is_linked or not pairs[place - 1][0].is_linked):
        made = replace(call, name=name, module=module, is_estimated=True)
        pairs.insert(place, (made, cost))
        return
    # The first of a chain: it is given what the one after it was, which then follows it.
    place = min(place, len(pairs) - 1)
    first, its_cost = pairs[place]
    pairs[place] = (replace(call, name=first.name, module=first.module), cost)
    made = replace(first, name=name, module=module, is_estimated=True)
    pairs.insert(place, (made, its_cost))
