"""Kinds of blocks whose output layer runs in tiles, beside those in which it does not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from recoup._core.compile import is_compiled
from recoup._core.modules import is_gathered
from recoup.errors import ChangedError, GradientError
from recoup.planning.blocks import Block, named_modules
from recoup.planning.priced_blocks import PricedBlocks, price_blocks
from recoup.planning.ranks import largest_among_ranks
from recoup.planning.step import Observer, Step
from recoup.planning.tiled_head import TiledHead, is_linear

_WORTH = 1 / 32  # of the least bytes: smaller logits are left alone
_LESS = 0.97  # of the least bytes: a head that leaves more is left alone
_LEAST_ROWS = 64  # of a tile: a product of fewer is slow
_MOST_ROWS = 1024


def with_tiles(kind: PricedBlocks, tiles: int | bool) -> list[PricedBlocks]:
    """Return the kind of blocks, and the same with its head in tiles if that can take fewer bytes.

    Args:
        kind: blocks with their costs.
        tiles: how many tiles a head has; True to choose.
    """
    head = _head_of(kind.step, kind.blocks, None if tiles is True else tiles)
    num_bytes = 0 if head is None else head.num_bytes
    most, is_missing = largest_among_ranks(kind.step.model, [num_bytes, head is None])
    if head is None or is_missing or most < _WORTH * kind.points[0].peak_bytes:
        return [kind]
    step = replace(kind.step, tiled=head)
    step.verification.expect(kind.measured.outcome, is_plain=False)  # of a step without tiles
    try:
        found = price_blocks(step, kind.blocks, kind.place)
    except (ChangedError, GradientError):
        return [kind]  # other code does with the output what only the whole can serve
    if found.points[0].peak_bytes > _LESS * kind.points[0].peak_bytes:
        return [kind]
    found.step.verification.allow_other_sums(head.eps)  # known now
    return [kind, found._replace(plain_seconds=kind.plain_seconds)]


def _head_of(step: Step, blocks: Iterable[Block], tiles: int | None) -> TiledHead | None:
    """Return the output layer of a model if it can run in tiles (Rule 1 of `tiled_head`).

    One forward is run.

    Args:
        step: the step.
        blocks: the names and modules of the blocks.
        tiles: how many tiles it has; None to choose.
    """
    named = [block for _, block in blocks]
    within = {each for block in named for each in block.modules()}
    heads: dict[nn.Module, str] = {
        module: name
        for name, module in named_modules(step.model)
        if isinstance(module, nn.Linear) and module not in within and not is_compiled(module)
    }
    with step.rehearsed():
        calls = step.observe_forward([*named, *heads], lambda: _Finder(heads)).calls
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


class _Call(NamedTuple):
    module: nn.Module
    num_rows: int
    num_features: int
    num_bytes: int  # of its output


class _Finder(Observer):
    """An observer of calls of layers after the last block.

    Args:
        heads: the modules outside of blocks that may be the output layer; others are blocks.
    """

    def __init__(self, heads: Iterable[nn.Module]) -> None:
        self._heads = set(heads)
        self.calls: list[_Call] = []

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
                self.calls.append(_Call(module, math.prod(rows), num_features, output.nbytes))
