"""Seeds and generators of what commands draw."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["generator_for", "seed_at"]


def seed_at(*place: str | int) -> int:
    """Return the seed that belongs to a place in a run, such as ``(seed, "train", epoch, batch)``.

    A digest, since sums of small numbers would give the same seed to several places.
    """
    digest = hashlib.blake2b(repr(place).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def generator_for(seed: int) -> torch.Generator:
    """Return a generator on CPU that begins with what was given as ``--seed``.

    Raises:
        ValueError: The seed is too long.
    """
    try:
        return torch.Generator().manual_seed(seed)
    except (RuntimeError, ValueError) as error:  # torch says so in either way
        raise ValueError(f"`--seed` is {seed}, but must have at most 64 bits.") from error
