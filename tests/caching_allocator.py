"""An allocator like CUDA's (c10/cuda/CUDACachingAllocator.cpp), without a device: bytes alone.

Sizes are rounded up to 512 bytes. Those up to 1 MiB share segments of 2 MiB, larger ones segments
of 20 MiB, and from 10 MiB on each has one of its own size. What is freed stays reserved, for the
smallest request that it serves. Where the device is full, free segments are given back to it, and
the request is tried again. Expandable segments grow and shrink at their ends instead, in pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf

MIB = 2**20
ROUND, SMALL = 512, MIB
ENDLESS = 2**50  # the addresses of an expandable segment


def rounded(size, to):
    return -(-size // to) * to


@dataclass(eq=False)
class Block:
    """A part of a segment: free, taken, or, in an expandable segment, not mapped."""

    segment: Segment
    size: int
    is_mapped: bool = True
    is_free: bool = True
    asked: int = 0


@dataclass(eq=False)
class Segment:
    """Blocks in the order of their addresses."""

    page: int  # by which it grows if it is expandable
    is_small: bool
    blocks: list[Block] = field(default_factory=list)

    def split(self, block, size):
        """Cut a block after so many bytes; the rest is free."""
        rest = Block(self, block.size - size, block.is_mapped)
        self.blocks.insert(self.blocks.index(block) + 1, rest)
        block.size = size

    def merge(self):
        """Make one block of free ones that are side by side."""
        for before, after in pairwise(list(self.blocks)):
            if before.is_free and after.is_free and before.is_mapped is after.is_mapped:
                after.size += before.size
                self.blocks.remove(before)

    def rooms(self):
        """Each free block that is mapped, and the size that it has or can grow to."""
        for block, after in pairwise([*self.blocks, None]):
            if block.is_free and block.is_mapped:
                grows = after is not None and not after.is_mapped
                yield block.size + (after.size if grows else 0), block


class CachingAllocator:
    """Bytes that are requested, allocated and reserved, and their peaks.

    Args:
        limit: the bytes of the device.
        expandable: whether segments can grow.
    """

    def __init__(self, limit=inf, *, expandable=False):
        self.limit, self.expandable = limit, expandable
        self.now = dict.fromkeys(("requested", "allocated", "reserved"), 0)
        self.peak = dict(self.now)
        self.num_retries = self.num_failures = 0
        self._segments = []
        if expandable:
            self._segments = [Segment(2 * MIB, True), Segment(20 * MIB, False)]
            for each in self._segments:
                each.blocks.append(Block(each, ENDLESS, is_mapped=False))

    def allocate(self, num_bytes):
        """Return a block for so many bytes; None if there is no room."""
        size = rounded(max(num_bytes, 1), ROUND)
        new = self._grown if self.expandable else self._new
        block = self._best(size) or new(size)
        if block is None:
            self.num_retries += 1
            self.empty_cache()
            block = new(size)
        if block is None:
            self.num_failures += 1
            return None
        splits_finely = size <= SMALL or self.expandable
        if block.size - size >= (ROUND if splits_finely else SMALL + 1):
            block.segment.split(block, size)
        block.is_free, block.asked = False, num_bytes
        self._add(requested=num_bytes, allocated=block.size)
        return block

    def free(self, block):
        self._add(requested=-block.asked, allocated=-block.size)
        block.is_free = True
        block.segment.merge()

    def reset_peaks(self):
        self.peak = dict(self.now)

    def empty_cache(self):
        """Give what is free back to the device: whole segments, or pages."""
        for segment in list(self._segments):
            if self.expandable:
                self._unmap(segment)
            elif len(segment.blocks) == 1 and segment.blocks[0].is_free:
                self._add(reserved=-segment.blocks[0].size)
                self._segments.remove(segment)

    def _add(self, **sizes):
        for name, size in sizes.items():
            self.now[name] += size
            self.peak[name] = max(self.peak[name], self.now[name])

    def _best(self, size):
        """The smallest free block that serves a size; one that can grow is as large."""
        segments = [each for each in self._segments if each.is_small == (size <= SMALL)]
        found = (room for segment in segments for room in segment.rooms() if room[1].size >= size)
        return min(found, key=lambda room: room[0], default=(0, None))[1]

    def _new(self, size):
        """A segment from the device; None if it has no room."""
        whole = 2 * MIB if size <= SMALL else 20 * MIB
        whole = whole if size < 10 * MIB else rounded(size, 2 * MIB)
        if self.now["reserved"] + whole > self.limit:
            return None
        self._add(reserved=whole)
        self._segments.append(segment := Segment(whole, size <= SMALL))
        segment.blocks.append(block := Block(segment, whole))
        return block

    def _grown(self, size):
        """The first free end that has room, with the pages that it lacks."""
        segment = self._segments[size > SMALL]
        for before, block in pairwise([None, *segment.blocks]):
            has_start = before is not None and before.is_free and before.is_mapped
            missing = rounded(size - (before.size if has_start else 0), segment.page)
            if block.is_mapped or missing > block.size:
                continue
            if self.now["reserved"] + missing > self.limit:
                return None
            self._add(reserved=missing)
            segment.split(block, missing)
            block.is_mapped = True
            segment.merge()
            return self._best(size)
        raise AssertionError("a segment has no end")

    def _unmap(self, segment):
        ends = list(accumulate(block.size for block in segment.blocks))
        for end, block in zip(ends, list(segment.blocks), strict=True):
            first = rounded(end - block.size, segment.page)
            last = end // segment.page * segment.page
            if block.is_free and block.is_mapped and first < last:
                start = first - (end - block.size)
                if start:
                    segment.split(block, start)
                    block = segment.blocks[segment.blocks.index(block) + 1]
                if last < end:
                    segment.split(block, last - first)
                block.is_mapped = False
                self._add(reserved=first - last)
        segment.merge()
