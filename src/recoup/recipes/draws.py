"""Seeds and generators for the random draws of commands."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["generator_for", "seed_at"]


def seed_at(*key: str | int) -> int:
    """Return the seed for a key: a step of a run, such as ``(seed, "train", epoch, batch)``.

    The seed is a digest, since sums of small numbers would give several keys the same seed.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def generator_for(seed: int) -> torch.Generator:
    """Return a generator on CPU with the seed given as ``--seed``.

    Raises:
        ValueError: When the seed does not fit into 64 bits.
    """
    try:
        return torch.Generator().manual_seed(seed)
    except (RuntimeError, ValueError) as error:  # torch raises either
        raise ValueError(f"`--seed` is {seed}, but must have at most 64 bits.") from error
