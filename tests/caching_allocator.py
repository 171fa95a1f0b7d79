"""An allocator like CUDA's (c10/cuda/CUDACachingAllocator.cpp), without a device: bytes alone.

Sizes are rounded up to 512 bytes. Those up to 1 MiB share segments of 2 MiB, larger ones segments
of 20 MiB, and from 10 MiB on each has one of its own size. What is freed stays reserved, for the
smallest request that it serves. Where the device is full, free segments are given back to it, and
the request is tried again. Expandable segments grow and shrink at their ends instead, in pages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count
from math import inf

MIB = 2**20
ROUND, SMALL = 512, MIB
ENDLESS = 2**50  # the addresses of an expandable segment


def rounded(size, to):
    return -(-size // to) * to


class Block:
    """A part of a segment: free, taken, or, in an expandable segment, not mapped."""

    __slots__ = ("address", "after", "asked", "before", "is_free", "is_mapped", "pool", "size")

    def __init__(self, pool, address, size, *, is_mapped=True):
        self.pool, self.address, self.size, self.is_mapped = pool, address, size, is_mapped
        self.is_free, self.asked = True, 0
        self.before = self.after = None

    @property
    def key(self):
        return self.size, self.address, self

    @property
    def room(self):
        """Its size, or the one that it can grow to."""
        grows = self.after is not None and not self.after.is_mapped
        return self.size + (self.after.size if grows else 0)

    def split(self, size):
        """Cut it after so many bytes; return the rest, which is free."""
        rest = Block(self.pool, self.address + size, self.size - size, is_mapped=self.is_mapped)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after, self.size = rest, size
        return rest


class Pool(list):
    """The free blocks of segments for small or for large sizes, by size and address."""

    def __init__(self, page):
        super().__init__()
        self.page = page  # of its expandable segment
        self.unmapped = []

    def enter(self, block):
        """Enter a free block, and what is free beside it with it."""
        for other in (block.before, block.after):
            if other is not None and other.is_free and other.is_mapped is block.is_mapped:
                self.leave(other)
                first, second = sorted((block, other), key=lambda one: one.address)
                block.address, block.size = first.address, first.size + second.size
                block.before, block.after = first.before, second.after
                if block.before is not None:
                    block.before.after = block
                if block.after is not None:
                    block.after.before = block
        if block.is_mapped:
            insort(self, block.key)
        else:
            self.unmapped.append(block)

    def leave(self, block):
        if block.is_mapped:
            del self[bisect_left(self, block.key)]
        else:
            self.unmapped.remove(block)

    def best(self, size):
        """Take the smallest free block that serves a size; one that can grow is as large."""
        place = bisect_left(self, (size,))
        while place + 1 < len(self) and self[place + 1][2].room < self[place][2].room:
            place += 1
        return self.pop(place)[2] if place < len(self) else None


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
        self._small, self._large = Pool(2 * MIB), Pool(20 * MIB)
        self._addresses = count(0, ENDLESS)

    def allocate(self, num_bytes):
        """Return a block for so many bytes; None if there is no room."""
        size = rounded(max(num_bytes, 1), ROUND)
        pool = self._small if size <= SMALL else self._large
        block = pool.best(size) or self._new(pool, size)
        if block is None:
            self.num_retries += 1
            self.empty_cache()
            block = self._new(pool, size)
        if block is None:
            self.num_failures += 1
            return None
        block.is_free, block.asked = False, num_bytes
        splits_finely = pool is self._small or self.expandable
        if block.size - size >= (ROUND if splits_finely else SMALL + 1):
            pool.enter(block.split(size))
        self._add(requested=num_bytes, allocated=block.size)
        return block

    def free(self, block):
        self._add(requested=-block.asked, allocated=-block.size)
        block.is_free = True
        block.pool.enter(block)

    def reset_peaks(self):
        self.peak = dict(self.now)

    def empty_cache(self):
        """Give what is free back to the device: whole segments, or pages."""
        for pool in (self._small, self._large):
            for _, _, block in list(pool):
                if self.expandable:
                    self._unmap(block)
                elif block.before is block.after is None:
                    pool.leave(block)
                    self._add(reserved=-block.size)

    def _add(self, **sizes):
        for name, size in sizes.items():
            self.now[name] += size
            self.peak[name] = max(self.peak[name], self.now[name])

    def _new(self, pool, size):
        """Take a free block from the device; None if it has no room."""
        if self.expandable:
            return self._grown(pool, size)
        whole = 2 * MIB if size <= SMALL else 20 * MIB
        whole = whole if size < 10 * MIB else rounded(size, 2 * MIB)
        if self.now["reserved"] + whole > self.limit:
            return None
        self._add(reserved=whole)
        return Block(pool, next(self._addresses), whole)

    # -- expandable segments -------------------------------------------------------------------

    def _grown(self, pool, size):
        if not pool.unmapped:
            pool.enter(Block(pool, next(self._addresses), ENDLESS, is_mapped=False))
        for block in sorted(pool.unmapped, key=lambda one: one.address):
            first = block.before if block.before is not None and block.before.is_free else block
            room, last = 0, first
            while room < size and last is not None and last.is_free:
                room, last = room + last.size, last.after
            if room >= size:
                break
        while not (first.is_mapped and first.size >= size):
            block = first.after if first.is_mapped else first
            missing = size - (first.size if first.is_mapped else 0)
            mapped = min(rounded(missing, pool.page), block.size)
            if self.now["reserved"] + mapped > self.limit:
                return None
            self._add(reserved=mapped)
            pool.leave(block)
            rest = block.split(mapped) if mapped < block.size else None
            block.is_mapped = True
            if rest is not None:
                pool.enter(rest)
            pool.enter(block)
            first = block
        pool.leave(first)
        return first

    def _unmap(self, block):
        pool = block.pool
        begin = rounded(block.address, pool.page)
        end = (block.address + block.size) // pool.page * pool.page
        if begin >= end:
            return
        pool.leave(block)
        parts = [block]
        if begin > block.address:
            parts.append(block.split(begin - block.address))
        parts[-1].is_mapped = False
        if end < parts[-1].address + parts[-1].size:
            parts.append(parts[-1].split(end - parts[-1].address))
            parts[-1].is_mapped = True
        self._add(reserved=begin - end)
        for part in parts:
            pool.enter(part)
