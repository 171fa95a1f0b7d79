"""The blocks within stages.

NOTE [ Stages ]

Rule 1. A stage is a block whose forward passes its input from one submodule to the next and
        returns the output of the last one. All of these submodules can be blocks in its place (the
        layers of a Swin stage and its downsampling), if several of them that have submodules are
        of one class.
Rule 2. Only a forward can show that a block is a stage. Experts in a list are of one class, too,
        but none receives the output of the one before; and a residual connection around a list of
        layers belongs to none of the layers. Such a block is not divided.
Rule 3. If a stage is divided, its other computations, such as further outputs, are outside blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

from torch import Tensor, nn

from recoup._core.compile import is_compiled
from recoup._core.pytree import flatten
from recoup.planning.blocks import Block, has_list_of_blocks, repeats
from recoup.planning.forwards import CallOutputs
from recoup.planning.step import Observer, Step

__all__ = ["kinds_of_blocks"]


def kinds_of_blocks(step: Step, blocks: list[Block]) -> list[list[Block]]:
    """Return the kinds of blocks to choose from: those with divided stages (if any), and `blocks`.

    One forward is run if a block contains a list of modules of one class.

    Args:
        step: the step.
        blocks: the names and modules of the blocks.
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
    """Whether no module occurs twice, and none is within another."""
    within = [id(each) for module in modules for each in module.modules() if each is not module]
    ids = {id(module) for module in modules}
    return len(ids) == len(modules) and ids.isdisjoint(within)


class _Call:
    """One call of a module within a stage."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self.latest = CallOutputs(given)
        self.is_chain = True
        self.modules: list[nn.Module] = []


_Chains = dict[int, list[_Call]]


class _ChainObserver(Observer):
    """An observer of the modules that each module within stages calls, and of their inputs."""

    def __init__(self) -> None:
        self.chains: _Chains = {}
        self._calls: list[_Call] = []

    def begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given, _ = flatten((args, kwargs))
        if self._calls:
            around = self._calls[-1]
            around.is_chain &= bool(around.latest.indices_in(given, module)[0])
            around.modules.append(module)
        self._calls.append(_Call(given))

    def ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        del args, kwargs
        call, (outputs, _) = self._calls.pop(), flatten(output)
        call.is_chain &= bool(call.latest.indices_in(outputs, module)[0])
        self.chains.setdefault(id(module), []).append(call)
        if self._calls:
            self._calls[-1].latest = CallOutputs(outputs)


def _chains(step: Step, stages: Sequence[nn.Module]) -> _Chains:
    """Return the calls of all modules within stages in one forward."""
    modules = {id(each): each for stage in stages for each in stage.modules()}
    with step.rehearsed():
        return step.observe_forward(modules.values(), _ChainObserver).chains


def _expanded(module: nn.Module, chains: _Chains) -> list[nn.Module]:
    """Return the blocks within a stage, recursively; if `module` is no stage, the module itself."""
    calls = chains.get(id(module), [])
    if not calls or not all(call.is_chain for call in calls):
        return [module]
    called = [list(dict.fromkeys(call.modules)) for call in calls]
    if any(each != called[0] for each in called):
        return [module]
    found = [inner for part in called[0] for inner in _expanded(part, chains)]
    return found if repeats(found) else [module]
