"""Blocks as forwards call them: those that are called, left out or stages; and the output layer.

NOTE [ Blocks that are left out ]

Rule 1. A plan is for the forward that calls the most blocks. A step has a seed, so each run of it
        calls the same ones. If the measured step skipped some, a few forwards are run with other
        seeds, and the one that calls the most blocks is measured and rehearsed instead.
Rule 2. A block that this one does not call is not a stage. If it is called later, it is recomputed
        from its arguments (See NOTE [ Following a plan ]).

NOTE [ Stages ]

Rule 3. A stage is a block whose forward passes its input from one submodule to the next and returns
        the output of the last one. If several of these that have submodules are of one class (the
        layers of a Swin stage), all of them can be blocks in its place.
Rule 4. Only a forward can show that a block is a stage. Experts in a list are of one class, too,
        but none receives the output of the one before; and a residual connection around a list of
        layers belongs to none of the layers. Such a block is not divided.
Rule 5. If a stage is divided, its other computations, such as further outputs, are outside blocks.

NOTE [ Modules between blocks ]

Rule 6. What runs before the first block (the convolution and pooling of a ResNet) or between two
        (the pooling of a GoogLeNet), and holds much, is blocks of its own, in a second kind of
        plans beside those without it. Modules that are called once are taken, from the first that
        has parameters on: nothing before it has a gradient.
Rule 7. It is not where it cannot run again, nor of a model of which ranks hold parts, since they
        must find the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import dropwhile
from typing import Any, NamedTuple

from torch import Tensor, nn

from recoup._core.compile import is_compiled
from recoup._core.modules import is_gathered
from recoup._core.pytree import flatten
from recoup.planning.blocks import (
    Block,
    ModuleGroup,
    has_forward,
    has_list_of_blocks,
    has_weights,
    modules_of,
    named_modules,
    outermost_called,
    outermost_of,
    repeated_calls,
    repeats,
)
from recoup.planning.forwards import CallOutputs
from recoup.planning.measuring import measure_blocks
from recoup.planning.pricing import Measured, MeasuredCall
from recoup.planning.step import Observer, Step
from recoup.planning.tiled_head import TiledHead, is_linear

_LEAST_ROWS, _MOST_ROWS = 64, 1024  # of a tile: a product of fewer is slow
_MOST_TRIES = 64
_ENOUGH_ALIKE = 3


def measure_most(step: Step, blocks: Sequence[Block]) -> tuple[Step, Measured]:
    """Return the step with the seed that calls the most blocks, measured (See Rule 1)."""
    measured, modules = measure_blocks(step, blocks), [module for _, module in blocks]
    called = {call.module for call in measured.calls}
    if len(called) == len(modules):
        return step, measured
    found: list[set[nn.Module]] = []
    with step.rehearsed():
        while len(found) < _MOST_TRIES and all(len(each) < len(modules) for each in found):
            found.append(set(_sequence(replace(step, seed=len(found)), modules)))
            if len(found) == _ENOUGH_ALIKE and all(each == found[0] for each in found):
                break
    seed = max(range(len(found)), key=lambda seed: len(found[seed]))
    if len(found[seed]) > len(called):
        step = replace(step, seed=seed)
        measured = measure_blocks(step, blocks)
    return step, measured


def blocks_that_are_called(step: Step) -> tuple[list[Block], list[Block]]:
    """Return the blocks of a model whose module tree shows none, and what to take if none repeats.

    Those are the modules that one forward calls more than once (one block for all layers). To take
    are the outermost modules that it calls.
    """
    named: list[Block] = list(named_modules(step.model))[1:]
    modules = [module for _, module in named]
    with step.rehearsed():
        called = _sequence(replace(step, num_forwards=1), modules)
    found = repeated_calls(step.model, called)
    return found, [] if found else outermost_called(step.model, called)


def with_called_parts(step: Step, blocks: list[Block]) -> list[Block]:
    """Return blocks with modules within them in place of those that no forward calls.

    Those are lists and dicts of modules, and groups whose sequence is not called (Rule 4 of
    NOTE [ Groups of modules ]). One forward is run if there may be any, to see what it calls within
    them. Where that is nothing (LayerDrop), what has a forward is taken.
    """
    called_as = {id(block): _called_as(block) for _, block in blocks}
    within = [block for _, block in blocks if called_as[id(block)] not in (block, step.root)]
    if not within:
        return blocks
    sequences = [each for block in within if (each := called_as[id(block)]) is not None]
    parts = [part for block in within for part in block.modules() if has_forward(part)]
    observed = {id(each): each for each in (*sequences, *parts)}
    with step.rehearsed():
        called = _sequence(step, list(observed.values()))
    replaced = [block for block in within if called_as[id(block)] not in called]
    taken = {
        id(part)
        for block in replaced
        for _, part in outermost_of(called, block) or outermost_of(parts, block)
    }
    left_out = set(map(id, replaced))
    alone = [(name, module) for name, module in named_modules(step.model) if id(module) in taken]
    return [each for each in blocks if id(each[1]) not in left_out] + alone


def _called_as(block: nn.Module) -> nn.Module | None:
    """Return what a forward calls for a block: the sequence of a group; None if nothing can be."""
    if isinstance(block, ModuleGroup):
        return block.sequence
    return block if has_forward(block) else None


def with_modules_between(
    step: Step, blocks: list[Block], calls: Sequence[MeasuredCall]
) -> list[Block]:
    """Return blocks with the modules before and between them, if any (See Rules 6 and 7)."""
    taken = {id(part) for _, block in blocks for part in block.modules()}
    others = [
        module
        for module in step.model.modules()
        if taken.isdisjoint(map(id, module.modules())) and not is_compiled(module)
    ]
    # Nothing sees a call of a group.
    first, last = (modules_of(call.module)[0] for call in (calls[0], calls[-1]))
    try:
        with step.rehearsed():
            called = _sequence(step, [*others, first, last])
    except Exception:  # noqa: BLE001 - of the model, or a module takes no hooks
        return []
    if last not in called:
        return []
    until_last = called[: len(called) - 1 - called[::-1].index(last)]
    between = list(dropwhile(lambda each: each is not first and not has_weights(each), until_last))
    found = outermost_of([each for each in between if each not in (first, last)], step.model)
    once = [block for block in found if between.count(block[1]) == called.count(block[1]) == 1]
    return [*once, *blocks] if once else []


def _sequence(step: Step, modules: Sequence[nn.Module]) -> list[nn.Module]:
    return step.observe_forward(modules, _CallObserver).called


def kinds_of_blocks(step: Step, blocks: list[Block]) -> list[list[Block]]:
    """Return the kinds of blocks to choose from: those with divided stages (if any), and `blocks`.

    One forward is run if a block contains a list of modules of one class.
    """
    parts: dict[int, nn.Module] = {}
    for _, block in blocks:
        if has_list_of_blocks(block) and not any(map(is_compiled, block.modules())):
            parts.update((id(each), each) for each in block.modules())
    if not parts:
        return [blocks]
    with step.rehearsed():
        chains = step.observe_forward(parts.values(), _CallObserver).chains
    names = {id(module): name for name, module in named_modules(step.model)}
    found = [inner for _, module in blocks for inner in _expanded(module, chains)]
    if len(found) == len(blocks) or not _are_apart(found):
        return [blocks]
    return [[(names[id(module)], module) for module in found], blocks]


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


class _CallObserver(Observer):
    """An observer of the modules that a forward calls, in order, and of what each calls itself."""

    def __init__(self) -> None:
        self.called: list[nn.Module] = []
        self.chains: _Chains = {}
        self._calls: list[_Call] = []

    def begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.called.append(module)
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


def output_layer_of(step: Step, blocks: Iterable[Block], tiles: int | None) -> TiledHead | None:
    """Return the output layer of a model if it can run in tiles (Rule 1 of `tiled_head`).

    One forward is run. `tiles` is how many it has; None to choose.
    """
    named = [block for _, block in blocks]
    within = {each for block in named for each in block.modules()}
    heads: dict[nn.Module, str] = {
        module: name
        for name, module in named_modules(step.model)
        if isinstance(module, nn.Linear) and module not in within and not is_compiled(module)
    }
    with step.rehearsed():
        calls = step.observe_forward([*named, *heads], lambda: _HeadObserver(heads)).calls
    modules = [each.module for each in calls]
    once = [each for each in calls if modules.count(each.module) == 1]
    head = max(once, key=lambda each: each.num_bytes, default=None)
    # FSDP2 gathers a weight for the calls of one module. Where that is the head, the weight is gone
    # when a cross entropy asks for its pieces; where it is the model, FSDP2 reads what the model
    # returns, in its last hook. Neither is so if the head is one of the layers of a model that
    # returns its loss.
    if head is None or is_gathered(head.module):
        return None
    # As large as the gradient of the weight, which is there at any time, are the logits of as
    # many rows as there are features; they are there up to four times.
    rows = min(max(head.num_features // 4, _LEAST_ROWS), _MOST_ROWS)
    rows = rows if tiles is None else math.ceil(head.num_rows / tiles)
    made = TiledHead(heads[head.module], head.module, head.num_rows, head.num_bytes, rows)
    return made if head.num_rows > rows else None


class _HeadCall(NamedTuple):
    module: nn.Module
    num_rows: int
    num_features: int
    num_bytes: int  # of its output


class _HeadObserver(Observer):
    """An observer of calls of the modules that may be the output layer, after the last block."""

    def __init__(self, heads: Iterable[nn.Module]) -> None:
        self._heads = set(heads)
        self.calls: list[_HeadCall] = []

    def ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note a call."""
        if module not in self._heads:
            self.calls.clear()
            return
        x = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(x, Tensor) and isinstance(output, Tensor) and output.dim() > 1:
            *rows, num_features = x.shape
            is_by_row = [*output.shape[:-1]] == rows and output.shape[-1] > num_features
            if is_by_row and is_linear(module, module.forward):
                self.calls.append(_HeadCall(module, math.prod(rows), num_features, output.nbytes))
