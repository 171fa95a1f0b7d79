"""Kinds of blocks of which parts run in tiles, beside those of which none do.

NOTE [ MLPs in tiles ]

Rule 1. An MLP is a module within a block, with parts of its own, that is called once in each call
        of the block with one tensor, and returns one with the same rows. Of nested ones the
        outermost is taken. Each tile is a region, as in `recoup.tiled`, so backward pays one run.
Rule 2. An MLP must treat rows independently (See NOTE [ Rows that do not know each other ]), also
        with other parameters, since one that begins at zero may hide that rows are mixed. It must
        draw nothing, since tiles would draw other numbers, and set no attributes: the last tile
        alone would say what they are. What that does not show, the comparison of rehearsals with
        the plain step does.
Rule 3. FSDP2 gathers a weight for the calls of one module. Where that is the head, the weight is
        gone when a cross entropy asks for its pieces; where it is the model, FSDP2 reads what the
        model returns, in its last hook. Neither is so if the head is one of the layers of a model
        that returns its loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._core.compile import is_compiled
from recoup._core.devices import own_generator
from recoup._core.module_marks import is_gathered
from recoup._core.row_check import Found, RowCheck, few_of
from recoup.errors import ChangedError, GradientError
from recoup.planning.blocks import Block, named_modules
from recoup.planning.priced_blocks import PricedBlocks, price_blocks
from recoup.planning.ranks import largest_among_ranks
from recoup.planning.step import Observer, Step
from recoup.planning.tiled_parts import ROW_DIM, Head, TiledParts, has_rows, is_linear

_WORTH = 1 / 32  # of the least bytes: smaller logits are left alone
_LESS = 0.97  # of the least bytes: parts that leave more are left alone
_LEAST_ROWS = 64  # of a tile: a product of fewer is slow
_MOST_ROWS = 1024
_MOST_TILES = 8  # of an MLP


def with_tiles(kind: PricedBlocks, tiles: int | bool, *, only_head: bool) -> list[PricedBlocks]:
    """Return the kind of blocks, and the same with parts in tiles that can take fewer bytes.

    Args:
        kind: blocks with their costs.
        tiles: how many tiles a head has; True to choose.
        only_head: whether parts of blocks are left alone.
    """
    parts = _parts_of(kind.step, kind.blocks, None if tiles is True else tiles)
    head, num_bytes = parts.head, 0 if parts.head is None else parts.head.num_bytes
    found = [bool(num_bytes), len(parts.mlps)]
    most = largest_among_ranks(kind.step.model, [num_bytes, *found, *(-each for each in found)])
    if most[1:] != [*found, *(-each for each in found)]:
        return [kind]  # another rank has others
    kinds = [kind]
    if head is not None and most[0] >= _WORTH * kind.points[0].peak_bytes:
        kinds += _tiled(kind, TiledParts(head), kind)
    if parts.mlps and not only_head:
        own = parts if len(kinds) > 1 else replace(parts, head=None)
        kinds += _tiled(kind, own, kinds[-1])
    return kinds


def _tiled(kind: PricedBlocks, parts: TiledParts, than: PricedBlocks) -> list[PricedBlocks]:
    """Return the kind with parts in tiles; nothing if they cannot run so, or save nothing."""
    step = replace(kind.step, tiled=parts)
    step.verification.expect(kind.measured.outcome, is_plain=False)  # of a step without tiles
    try:
        found = price_blocks(step, kind.blocks, kind.place)
    except (ChangedError, GradientError):
        return []  # other code does with them what only the whole can serve
    if found.points[0].peak_bytes > _LESS * than.points[0].peak_bytes:
        return []
    found.step.verification.allow_other_sums(parts.eps)  # known now
    return [found]


def _parts_of(step: Step, blocks: Iterable[Block], tiles: int | None) -> TiledParts:
    """Return the parts of a model that can run in tiles (See Rule 1).

    One forward is run, and modules within blocks on a few of their rows.

    Args:
        step: the step.
        blocks: the names and modules of the blocks.
        tiles: how many tiles the head has; None to choose.
    """
    blocks, parts = list(blocks), dict[nn.Module, str]()
    for name, block in blocks:
        for path, each in named_modules(block):
            has_parts = next(each.children(), None) is not None
            if each is not block and has_parts and not any(map(is_gathered, each.modules())):
                parts[each] = f"{name}.{path}"
    within = {each for _, block in blocks for each in block.modules()}
    heads: dict[nn.Module, str] = {
        module: name
        for name, module in named_modules(step.model)
        if isinstance(module, nn.Linear) and module not in within and not is_compiled(module)
    }
    if any(map(is_compiled, step.model.modules())):
        parts = {}
    with step.rehearsed():
        called = [*(block for _, block in blocks), *parts, *heads]
        found = step.observe_forward(called, partial(_Finder, heads, parts))
    modules = [each.module for each in found.calls]
    once = [each for each in found.calls if modules.count(each.module) == 1]
    head = max(once, key=lambda each: each.num_bytes, default=None)
    if head is not None and is_gathered(head.module):
        head = None  # See Rule 3
    if head is not None:
        # As large as the gradient of the weight, which is there at any time, are the logits of as
        # many rows as there are features; they are there up to four times.
        rows = min(max(head.num_features // 4, _LEAST_ROWS), _MOST_ROWS)
        rows = rows if tiles is None else math.ceil(head.num_rows / tiles)
        head = head._replace(tile_rows=rows) if head.num_rows > rows else None
    sizes = {part: size for part, size in found.sizes.items() if size is not None}
    inner = {each for part in sizes for each in part.modules() if each is not part}
    mlps = [(name, part) for part, name in parts.items() if part in sizes and part not in inner]
    num_rows, length = (min((size[i] for size in sizes.values()), default=0) for i in (0, 1))
    num_tiles = min(_MOST_TILES, num_rows // _LEAST_ROWS, length)
    return TiledParts(head, mlps if num_tiles > 1 else (), num_tiles)


class _Finder(Observer):
    """An observer of layers after the last block, and of parts of blocks, which it checks.

    Args:
        heads: the names of modules outside of blocks that may be the output layer.
        parts: the modules within blocks; others are blocks.
    """

    def __init__(self, heads: dict[nn.Module, str], parts: Iterable[nn.Module]) -> None:
        self._heads, self._parts, self._is_trying = heads, set(parts), False
        self.calls: list[Head] = []
        # The rows, and the length, of parts; None for those that do not qualify.
        self.sizes: dict[nn.Module, tuple[int, int] | None] = {}

    def ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note a call."""
        if self._is_trying:
            return
        is_plain = len(args) == 1 and not kwargs and isinstance(output, Tensor)
        x: Any = args[0] if is_plain else None
        is_of_rows = (
            isinstance(x, Tensor) and output.dim() > 1 and output.shape[:-1] == x.shape[:-1]
        )
        num_rows = math.prod(output.shape[:-1]) if is_of_rows else 0
        if module in self._heads:
            if is_of_rows and output.shape[-1] > x.shape[-1] and is_linear(module, module.forward):
                name, width = self._heads[module], x.shape[-1]
                self.calls.append(Head(name, module, num_rows, width, output.nbytes))
        elif module not in self._parts:
            self.calls.clear()  # a block: the head is after all of them
        else:
            may_be = is_of_rows and has_rows(x) and module not in self.sizes
            self._is_trying = True
            is_local = may_be and _is_row_local(module, x)
            self._is_trying = False
            self.sizes[module] = (num_rows, x.shape[ROW_DIM]) if is_local else None


def _is_row_local(module: nn.Module, x: Tensor) -> bool:
    """Whether a module treats rows independently, and leaves no trace (See Rule 2)."""
    dim, parameters = x.dim() + ROW_DIM, _without_zeros(module)
    before = [value for each in module.modules() for value in vars(each).values()]

    def run(rows: Sequence[int], own: dict[int, Tensor]) -> Found:
        twice = torch.cat([own[id(x)]] * 2, dim)  # a tile is a view, and not contiguous
        piece = twice.narrow(dim, 0, len(rows))
        return [("output", torch.func.functional_call(module, parameters, piece), False)]

    check = RowCheck(module, [x], dim, run, takes_gradients=True)
    try:
        mixes = check.mixes(few_of(range(x.shape[dim]), x.shape[dim]))
    except Exception:  # noqa: BLE001  # whatever it raises, it cannot run on fewer rows
        return False
    after = [value for each in module.modules() for value in vars(each).values()]
    is_same = len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))
    return mixes == "" and not check.draws and is_same


def _without_zeros(module: nn.Module) -> dict[str, Tensor]:
    """Return other values of the parameters of a module, none of which is zero (See Rule 2)."""
    others: dict[str, Tensor] = {}
    for name, parameter in cast("Iterator[tuple[str, Tensor]]", module.named_parameters()):
        if type(parameter) is nn.Parameter and parameter.is_floating_point():
            generator = own_generator(parameter.device, len(others))
            noise = torch.empty(parameter.shape, device=generator.device)
            noise.normal_(generator=generator).div_(max(1, *parameter.shape[-1:]) ** 0.5)
            others[name] = parameter.detach() + noise.to(parameter.device, parameter.dtype)
    return others
