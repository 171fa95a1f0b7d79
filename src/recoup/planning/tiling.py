"""Kinds of blocks of which parts run in tiles."""

from __future__ import annotations

from dataclasses import replace

import torch

from recoup.errors import ChangedError, GradientError
from recoup.planning.stages import PricedBlocks, price_blocks
from recoup.planning.tiled_head import find_head

__all__ = ["checked_tiles", "with_tiles"]

_WORTH = 1 / 32  # of the least bytes: smaller logits are left alone
_MORE = 0.02  # of the time of a step, for a head in tiles


def checked_tiles(tiles: object) -> int | bool:
    """Return `tiles`; raise ValueError if it is no bool and no number of tiles."""
    if isinstance(tiles, bool) or (isinstance(tiles, int) and tiles > 1):
        return tiles
    raise ValueError(
        f"`tiles` is {tiles!r}, but must be True, False, or how many tiles the output layer runs "
        "in with its loss: an int of at least 2."
    )


def with_tiles(kind: PricedBlocks, device: torch.device, tiles: int | bool) -> list[PricedBlocks]:
    """Return the kind of blocks, and the same with a head in tiles if that can take fewer bytes.

    Args:
        kind: blocks with their costs.
        device: the device whose bytes are counted.
        tiles: how many tiles there are; True to choose.
    """
    head = find_head(kind.step, kind.blocks, None if tiles is True else tiles)
    if head is None or head.logits_bytes < _WORTH * kind.points[0].peak_bytes:
        return [kind]
    step = replace(kind.step, tiled=head)
    if kind.measured.outcome is not None:  # of a step without tiles
        step.verification.expect(kind.measured.outcome, is_plain=False)
    try:
        tiled = price_blocks(step, kind.blocks, device)
    except (ChangedError, GradientError):
        return [kind]  # other code does with its output what only the whole can serve
    if not head.num_losses or tiled.points[0].peak_bytes >= kind.points[0].peak_bytes:
        return [kind]
    return [kind, tiled._replace(more=_MORE)]
