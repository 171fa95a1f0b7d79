"""Modules within blocks that treat rows independently, and run in tiles: MLPs, mostly.

NOTE [ MLPs in tiles ]

Rule 1. A module qualifies that is within a block, has parts of its own, is called once in each call
        of the block with one tensor, and returns one tensor with the same rows. Of nested ones the
        outermost is taken.
Rule 2. It must treat rows independently, and draw nothing, since tiles would draw other numbers.
        Both are tried: it is run on the first and on the second half of the rows that it was given,
        as it is and with other parameters, since a parameter that begins at zero may hide that rows
        depend on each other. Nor may it change attributes or buffers: the last tile alone would
        say what they are. What that cannot show, the comparison of rehearsals with the plain step
        does.
Rule 3. Each tile is a region, as in `recoup.tiled`, so backward pays one more run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._core.call import Call, run_again
from recoup._core.compile import is_compiled, is_watched
from recoup._core.generators import (
    generator_states,
    generators_restored,
    own_generator,
    same_states,
)
from recoup._core.saved_tensors import version_of
from recoup.planning.blocks import Block
from recoup.planning.step import Observer, Step

__all__ = ["TiledModules", "find_mlps"]

_MOST_TILES = 8
_LEAST_ROWS = 64  # of a tile: a product of fewer is slow
_DIM = -2  # of the rows: the one before the features


class TiledModules:
    """Modules of blocks, which a follower calls in place of their forwards.

    Args:
        modules: the names and modules.
        tiles: how many tiles each has.
    """

    def __init__(self, modules: Sequence[Block], tiles: int) -> None:
        self._names = {id(module): name for name, module in modules}
        self.modules = [module for _, module in modules]
        self.num_tiles = tiles
        self.eps = 0.0

    @property
    def described(self) -> str:
        """A line that says in how many tiles they run."""
        names = list(self._names.values())
        shown = f"`{names[0]}`" + (f" ... `{names[-1]}`" if len(names) > 1 else "")
        return f"tile: {shown}, {self.num_tiles} tiles, which run once more in backward"

    def called(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a module, each tile as a region."""
        if len(args) != 1 or kwargs or not _has_rows(args[0]) or is_watched():
            return forward(*args, **kwargs)
        name = self._names[id(module)]
        outputs = [
            run_again(Call(f"tile {place} of `{name}`", forward, (piece,), {}, module))
            for place, piece in enumerate(args[0].tensor_split(self.num_tiles, _DIM))
            if piece.shape[_DIM]
        ]
        self.eps = max(self.eps, *(torch.finfo(output.dtype).eps for output in outputs))
        return torch.cat(outputs, _DIM)


def find_mlps(step: Step, blocks: Iterable[Block]) -> TiledModules | None:
    """Return the modules within blocks that can run in tiles, if there are any (See Rule 1).

    One forward is run, and those modules on halves of their rows without gradients.

    Args:
        step: the step.
        blocks: the names and modules of the blocks.
    """
    parts: dict[int, Block] = {}
    blocks = list(blocks)
    for name, block in blocks:
        for path, module in cast("Iterator[Block]", block.named_modules()):
            if module is not block and next(module.children(), None) is not None:
                parts[id(module)] = (f"{name}.{path}", module)
    modules = [module for _, module in parts.values()]
    if any(map(is_compiled, step.model.modules())):
        return None
    with step.rehearsed():
        called = [*(block for _, block in blocks), *modules]
        found = step.observe_forward(called, _Finder)
    chosen = [part for key, part in parts.items() if key in found.num_rows]
    within = {id(each) for _, module in chosen for each in module.modules() if each is not module}
    chosen = [part for part in chosen if id(part[1]) not in within]
    if not chosen:
        return None
    num_rows, length = (min(s[i] for s in found.num_rows.values()) for i in (0, 1))
    tiles = min(_MOST_TILES, num_rows // _LEAST_ROWS, length)
    return TiledModules(chosen, tiles) if tiles > 1 else None


class _Finder(Observer):
    """An observer that tries modules on halves of their rows (See Rule 2)."""

    def __init__(self) -> None:
        self.num_rows: dict[int, tuple[int, int]] = {}  # of modules that qualify, and their length
        self._refused: set[int] = set()
        self._is_trying = False

    def ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Try the module."""
        if self._is_trying:
            return
        key = id(module)
        if key in self.num_rows:  # it is called twice
            self._refused.add(key)
            del self.num_rows[key]
        if key in self._refused or len(args) != 1 or kwargs or not _has_rows(args[0]):
            return
        self._is_trying = True
        try:
            if not _is_row_local(module, args[0], output):
                self._refused.add(key)
                return
        finally:
            self._is_trying = False
        x: Tensor = args[0]
        self.num_rows[key] = (x.numel() // x.shape[-1], x.shape[_DIM])


def _has_rows(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dim() > 1
        and value.is_floating_point()
        and value.shape[_DIM] > 1
    )


def _is_row_local(module: nn.Module, x: Tensor, output: Any) -> bool:
    """Whether `module` returns for halves of its rows what it returned for all of them."""
    if not isinstance(output, Tensor) or output.shape[:-1] != x.shape[:-1]:
        return False
    states, before = generator_states(), _state_of(module)
    others = _other_parameters(module)
    with generators_restored():
        try:
            pairs = [(output, _in_halves(module, x))]
            if others:
                call = partial(torch.func.functional_call, module, others)
                pairs.append((call(x), _in_halves(call, x)))
        except Exception:  # noqa: BLE001  # whatever it raises, it cannot run on fewer rows
            return False
        if not same_states(generator_states(), states) or not _is_same(_state_of(module), before):
            return False
    return all(_is_alike(whole, of_halves) for whole, of_halves in pairs)


def _in_halves(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    middle = x.shape[_DIM] // 2
    return torch.cat([call(x[..., :middle, :]), call(x[..., middle:, :])], _DIM)


def _is_alike(output: Tensor, other: Tensor) -> bool:
    if other.shape != output.shape or other.dtype != output.dtype:
        return False
    allowed = torch.finfo(output.dtype).eps ** 0.5 * float(output.abs().max())
    return float((other - output).abs().max()) <= allowed


def _other_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters none of which is zero (See Rule 2); none if they are not plain."""
    found: dict[str, Tensor] = {}
    for name, parameter in cast("Iterator[tuple[str, Tensor]]", module.named_parameters()):
        if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
            return {}
        generator = own_generator(parameter.device, len(found))
        noise = torch.empty(parameter.shape, device=parameter.device)
        noise.normal_(generator=generator).div_(max(1, *parameter.shape[-1:]) ** 0.5)
        found[name] = parameter.detach() + noise.to(parameter.dtype)
    return found


_State = list[tuple[str, Any, int]]


def _state_of(module: nn.Module) -> _State:
    """Return the attributes of a module and of those within, and its buffers."""
    found: _State = []
    for path, each in cast("Iterator[Block]", module.named_modules()):
        found += [(f"{path}.{key}", value, 0) for key, value in vars(each).items()]
        found += [(key, value, version_of(value)) for key, value in each.named_buffers(path, False)]
    return found


def _is_same(state: _State, before: _State) -> bool:
    return len(state) == len(before) and all(
        name == other and value is own and version == its
        for (name, value, version), (other, own, its) in zip(state, before, strict=True)
    )
