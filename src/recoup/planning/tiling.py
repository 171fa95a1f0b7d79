"""Kinds of blocks of which parts run in tiles, beside those of which none do."""

from __future__ import annotations

from dataclasses import replace

import torch

from recoup.errors import ChangedError, GradientError
from recoup.planning.priced_blocks import PricedBlocks, price_blocks
from recoup.planning.tiled_parts import TiledParts, find_parts

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
    kind = kind._replace(may_tile=True)
    kinds = [kind]
    if any(hasattr(type(module), "unshard") for module in kind.step.model.modules()):
        return kinds  # FSDP2 gathers weights for the calls that it knows
    parts = find_parts(kind.step, kind.blocks, None if tiles is True else tiles)
    head = parts.head
    if head is not None and head.num_bytes >= _WORTH * kind.points[0].peak_bytes:
        kinds += _tiled(kind, TiledParts(head), kind, device)
    if parts.mlps and not only_head:
        own = replace(parts, head=head if len(kinds) > 1 else None)
        kinds += _tiled(kind, own, kinds[-1], device)
    return kinds


def _tiled(
    kind: PricedBlocks, parts: TiledParts, than: PricedBlocks, device: torch.device
) -> list[PricedBlocks]:
    """Return the kind with parts in tiles; nothing if they cannot run so, or save nothing."""
    step = replace(kind.step, tiled=parts)
    if kind.measured.outcome is not None:  # of a step without tiles
        step.verification.expect(kind.measured.outcome, is_plain=False)
    try:
        found = price_blocks(step, kind.blocks, device)
    except (ChangedError, GradientError):
        return []  # other code does with them what only the whole can serve
    if found.points[0].peak_bytes > _LESS * than.points[0].peak_bytes:
        return []
    found.step.verification.allow_other_sums(parts.eps)  # known now
    return [found._replace(may_tile=True)]
