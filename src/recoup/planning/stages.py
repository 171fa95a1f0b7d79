"""The blocks within stages.

NOTE [ Stages and blocks ]

Rule 1. A stage is a block whose forward hands the tensor that it is given from one module to the
        next and returns what the last one returned. All of these modules can be blocks in its place
        (the layers of a Swin stage and its downsampling), if several of them that have modules
        within are alike.
Rule 2. Only a forward shows that. Experts are alike in a list, too, but none is given what the one
        before returned; and what a residual connection adds to a list of layers belongs to none of
        them. Such a block stays one.
Rule 3. What a stage computes beside the chain, of which it returns more, is outside of blocks then.
Rule 4. Smaller blocks need fewer bytes at the least. A stage that keeps its products needs no input
        of each block within, and is faster at some budgets. So both are measured, and the plan is
        of those that are predicted to run less again in the budget; if no rehearsal of them keeps
        to it, of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from recoup._core.compile import is_compiled
from recoup._core.pytree import flatten
from recoup._core.restoring import Undoing
from recoup._core.snapshots import copied
from recoup.planning.blocks import Block, has_list_of_blocks, repeats
from recoup.planning.linking import Returned
from recoup.planning.measuring import MeasuredCall, Step, measure_blocks, plain_outcome
from recoup.planning.pricing import price
from recoup.planning.ranks import largest_among_ranks, largest_costs_among_ranks
from recoup.planning.seeing import blocks_of_any_forward, measure_most
from recoup.planning.verification import has_room
from recoup.schedules import Cost, Point, frontier

__all__ = [
    "PricedBlocks",
    "expect_again",
    "expect_plain",
    "fastest_first",
    "kinds_of_blocks",
    "price_blocks",
]


class PricedBlocks(NamedTuple):
    """Blocks, what they cost, and what can be done with them.

    Args:
        step: the step, with the seed under which it was measured.
        blocks: names and modules.
        calls: of the blocks that were seen, in order.
        costs: of them, and of what follows them.
        points: the plans that are best for some budget, from the least bytes to the most.
    """

    step: Step
    blocks: list[Block]
    calls: list[MeasuredCall]
    costs: list[Cost]
    points: list[Point]


def price_blocks(step: Step, blocks: list[Block], device: torch.device) -> PricedBlocks:
    """Measure blocks, and find what can be done with them.

    Args:
        step: the step.
        blocks: names and modules.
        device: where bytes are counted.

    Raises:
        ValueError: no forward calls them.
    """
    step, measured, sequences = measure_most(step, blocks, device)
    if not measured.calls:
        names = ", ".join(f"`{name}`" for name, _ in blocks[:3])
        raise ValueError(
            f"`blocks` are {names}, but forward calls none of them, or a checkpoint of the "
            "model runs them. Name others, or turn that off."
        )
    if measured.outcome is not None:
        step.verification.expect(measured.outcome, is_plain=False)
    costs = price(measured, device)
    calls, costs = blocks_of_any_forward(measured.calls, costs, sequences, blocks)
    costs = largest_costs_among_ranks(step.model, costs)
    return PricedBlocks(step, blocks, calls, costs, list(frontier(costs)))


def expect_plain(kind: PricedBlocks, device: torch.device) -> None:
    """Let plans be compared with the plain step, if there is room for it.

    Args:
        kind: blocks, and what they cost.
        device: where bytes are counted.
    """
    verification = kind.step.verification
    if not verification.is_plain:
        most_bytes = kind.points[-1].peak_bytes
        lacks_room = not has_room(device, most_bytes + most_bytes // 4)  # free bytes lie in pieces
        if not largest_among_ranks(kind.step.model, [float(lacks_room)])[0]:
            verification.expect(plain_outcome(kind.step), is_plain=True)


def expect_again(kind: PricedBlocks, device: torch.device) -> None:
    """Run what plans are compared with once more, for what it differs from itself by.

    Args:
        kind: blocks, and what they cost.
        device: where bytes are counted.
    """
    step = kind.step
    if step.verification.is_plain:
        step.verification.expect_again(plain_outcome(step))
    elif (outcome := measure_blocks(step, kind.blocks, device).outcome) is not None:
        step.verification.expect_again(outcome)


def fastest_first(kinds: Sequence[PricedBlocks], budget_bytes: int) -> list[PricedBlocks]:
    """Return kinds of blocks in the order of what their plans for a budget are predicted to cost.

    Args:
        kinds: some.
        budget_bytes: of a step.
    """

    def cost(kind: PricedBlocks) -> tuple[float, int]:
        fitting = [point for point in kind.points if point.peak_bytes <= budget_bytes]
        more = fitting[-1].seconds - kind.points[-1].seconds if fitting else math.inf
        return more, kind.points[0].peak_bytes

    return sorted(kinds, key=cost)


def kinds_of_blocks(step: Step, blocks: list[Block]) -> list[list[Block]]:
    """Return blocks, and before them those with the ones within stages in the place of the stages.

    One forward without gradients is run if a block has a list of alike modules within it.

    Args:
        step: the step.
        blocks: names and modules.
    """
    stages = [module for _, module in blocks if _may_be_a_stage(module)]
    if not stages:
        return [blocks]
    chains = _chains(step, stages)
    names = {id(module): name for name, module in _named(step.model)}
    found = [inner for _, module in blocks for inner in _expanded(module, chains)]
    if len(found) == len(blocks) or not _are_apart(found):
        return [blocks]
    return [[(names[id(module)], module) for module in found], blocks]


def _named(model: nn.Module) -> Iterator[Block]:
    return cast("Iterator[Block]", model.named_modules())


def _may_be_a_stage(module: nn.Module) -> bool:
    return has_list_of_blocks(module) and not any(map(is_compiled, module.modules()))


def _are_apart(modules: Sequence[nn.Module]) -> bool:
    """Whether none comes twice, and none is within another."""
    within = [id(each) for module in modules for each in module.modules() if each is not module]
    ids = {id(module) for module in modules}
    return len(ids) == len(modules) and ids.isdisjoint(within)


class _Call:
    """One call of a module within a stage."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.latest = Returned(given)
        self.is_chain = True
        self.modules: list[nn.Module] = []


_Chains = dict[int, list[_Call]]


class _Watch:
    """Sees what each module within stages calls, and with what."""

    def __init__(self) -> None:
        self.chains: _Chains = {}
        self._calls: list[_Call] = []

    def begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given, _ = flatten((args, kwargs))
        if self._calls:
            around = self._calls[-1]
            around.is_chain &= bool(around.latest.places_in(given, module)[0])
            around.modules.append(module)
        self._calls.append(_Call(given))

    def ended(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        del args, kwargs
        call, (outputs, _) = self._calls.pop(), flatten(output)
        call.is_chain &= bool(call.latest.places_in(outputs, module)[0])
        self.chains.setdefault(id(module), []).append(call)
        if self._calls:
            self._calls[-1].latest = Returned(outputs)


def _chains(step: Step, stages: Sequence[nn.Module]) -> _Chains:
    """Return the calls of all modules within stages in one forward."""
    watch = _Watch()
    modules = {id(each): each for stage in stages for each in stage.modules()}
    handles: list[Any] = []
    with step.rehearsed(), torch.no_grad(), Undoing() as undo:
        undo.later(_remove, handles)
        for module in modules.values():
            handles.append(module.register_forward_pre_hook(watch.begins, with_kwargs=True))
            handles.append(module.register_forward_hook(watch.ended, with_kwargs=True))
        args, kwargs = copied((step.args, step.kwargs))
        step.call(*args, **kwargs)
    return watch.chains


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _expanded(module: nn.Module, chains: _Chains) -> list[nn.Module]:
    """Return the blocks within a stage, also within stages of it; or the module itself."""
    calls = chains.get(id(module), [])
    if not calls or not all(call.is_chain for call in calls):
        return [module]
    called = [list(dict.fromkeys(call.modules)) for call in calls]
    if any(each != called[0] for each in called):
        return [module]
    found = [inner for part in called[0] for inner in _expanded(part, chains)]
    return found if repeats(found) else [module]
