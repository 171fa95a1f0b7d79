"""An allocator like CUDA's (c10/cuda/CUDACachingAllocator.cpp), without a device: bytes alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf

MIB = 2**20
ROUND, SMALL = 512, MIB


def rounded(size, to):
    return -(-size // to) * to


@dataclass(eq=False)
class Block:
    """A part of a segment, which is a list of blocks in the order of their addresses."""

    segment: list[Block]
    size: int
    is_free: bool = True
    asked: int = 0


class CachingAllocator:
    """Bytes that are requested, allocated and reserved, and their peaks, within a `limit`."""

    def __init__(self):
        self.limit = inf
        self.now = dict.fromkeys(("requested", "allocated", "reserved"), 0)
        self.peak = dict(self.now)
        self.num_retries = 0
        self._segments = {True: [], False: []}  # those of small blocks, and others

    def allocate(self, num_bytes):
        """Return a block for so many bytes; None if there is no room."""
        size = rounded(max(num_bytes, 1), ROUND)
        block = self._best(size) or self._new(size)
        if block is None:
            self.num_retries += 1
            self.empty_cache()
            block = self._new(size)
        if block is None:
            return None
        if block.size - size >= (ROUND if size <= SMALL else SMALL + 1):
            rest = Block(block.segment, block.size - size)
            block.segment.insert(block.segment.index(block) + 1, rest)
            block.size = size
        block.is_free, block.asked = False, num_bytes
        self._add(requested=num_bytes, allocated=block.size)
        return block

    def free(self, block):
        self._add(requested=-block.asked, allocated=-block.size)
        block.is_free = True
        for before, after in pairwise(list(block.segment)):
            if before.is_free and after.is_free:
                after.size += before.size
                block.segment.remove(before)

    def reset_peaks(self):
        self.peak = dict(self.now)

    def empty_cache(self):
        for segments in self._segments.values():
            for segment in [each for each in segments if len(each) == 1 and each[0].is_free]:
                self._add(reserved=-segment[0].size)
                segments.remove(segment)

    def _add(self, **sizes):
        for name, size in sizes.items():
            self.now[name] += size
            self.peak[name] = max(self.peak[name], self.now[name])

    def _best(self, size):
        blocks = (block for segment in self._segments[size <= SMALL] for block in segment)
        found = (block for block in blocks if block.is_free and block.size >= size)
        return min(found, key=lambda block: block.size, default=None)

    def _new(self, size):
        """A segment from the device; None if it has no room."""
        whole = 2 * MIB if size <= SMALL else 20 * MIB
        whole = whole if size < 10 * MIB else rounded(size, 2 * MIB)
        if self.now["reserved"] + whole > self.limit:
            return None
        self._add(reserved=whole)
        self._segments[size <= SMALL].append(segment := [])
        segment.append(block := Block(segment, whole))
        return block
