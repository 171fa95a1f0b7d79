"""Kinds of blocks of which parts run in tiles: the output layer with its loss, and MLPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from recoup.errors import ChangedError, GradientError
from recoup.planning.forwards import PartsFollower
from recoup.planning.priced_blocks import PricedBlocks, price_blocks
from recoup.planning.tiled_head import find_head
from recoup.planning.tiled_mlps import find_mlps

__all__ = ["checked_tiles", "with_tiles"]

_WORTH = 1 / 32  # of the least bytes: smaller logits are left alone
_LESS = 0.97  # of the least bytes: parts that leave more are left alone


def checked_tiles(tiles: object) -> int | bool:
    """Return `tiles`; raise ValueError if it is no bool and no number of tiles."""
    if isinstance(tiles, bool) or (isinstance(tiles, int) and tiles > 1):
        return tiles
    raise ValueError(
        f"`tiles` is {tiles!r}, but must be True, False, or how many tiles the output layer runs "
        "in with its loss: an int of at least 2."
    )


def with_tiles(
    kind: PricedBlocks, device: torch.device, tiles: int | bool, *, only_head: bool
) -> list[PricedBlocks]:
    """Return the kind of blocks, and the same with parts in tiles that can take fewer bytes.

    Args:
        kind: blocks with their costs.
        device: the device whose bytes are counted.
        tiles: how many tiles a head has; True to choose.
        only_head: whether parts of blocks are left alone.
    """
    kinds = [kind]
    if any(hasattr(type(module), "unshard") for module in kind.step.model.modules()):
        return kinds  # FSDP2 gathers weights for the calls that it knows
    head = find_head(kind.step, kind.blocks, None if tiles is True else tiles)
    if head is not None and head.logits_bytes >= _WORTH * kind.points[0].peak_bytes:
        found = _tiled(kind, head, device)
        if found is not None:
            kinds.append(found)
    mlps = None if only_head else find_mlps(kind.step, kind.blocks)
    if mlps is not None:
        before = kinds[-1]
        both = mlps if before is kind else _Parts([before.step.tiled, mlps])
        found = _tiled(kind, both, device)
        if found is not None and found.points[0].peak_bytes <= _LESS * before.points[0].peak_bytes:
            kinds.append(found)
    return kinds


def _tiled(kind: PricedBlocks, parts: PartsFollower, device: torch.device) -> PricedBlocks | None:
    """Return the kind with parts in tiles, or None if they cannot run so or save nothing."""
    step = replace(kind.step, tiled=parts)
    if kind.measured.outcome is not None:  # of a step without tiles
        step.verification.expect(kind.measured.outcome, is_plain=False)
    try:
        found = price_blocks(step, kind.blocks, device)
    except (ChangedError, GradientError):
        return None  # other code does with them what only the whole can serve
    if found.points[0].peak_bytes > _LESS * kind.points[0].peak_bytes:
        return None
    found.step.verification.allow_other_sums(parts.eps)  # known now
    return found


class _Parts:
    """Several followers of parts of a model as one."""

    def __init__(self, followers: Sequence[Any]) -> None:
        self._followers: list[PartsFollower] = list(followers)
        self._of = {id(module): each for each in self._followers for module in each.modules}
        self.modules = [module for each in self._followers for module in each.modules]

    @property
    def described(self) -> str:
        """Their lines."""
        return "\n".join(each.described for each in self._followers)

    @property
    def eps(self) -> float:
        """The largest of theirs."""
        return max(each.eps for each in self._followers)

    def called(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a part."""
        return self._of[id(module)].called(module, forward, args, kwargs)
