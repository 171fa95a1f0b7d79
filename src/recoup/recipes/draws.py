"""Seeds of what a training run draws: functions of the place where it draws."""

from __future__ import annotations

import hashlib

__all__ = ["seed_at"]


def seed_at(*place: str | int) -> int:
    """Return the seed that belongs to a place in a run, such as ``(seed, "train", epoch, batch)``.

    A digest, since sums of small numbers would give the same seed to several places.
    """
    digest = hashlib.blake2b(repr(place).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")
