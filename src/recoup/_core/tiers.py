"""Tiers: the memory that tensors wait in while they are away, host memory or a folder.

NOTE [ Copies that are under way ]

Rule 1. A tier begins a copy and returns; the copy says when it has landed. Whoever began it holds
        the tensor until then, since the tier reads its memory.
Rule 2. On CUDA copies run on a stream of their own. It waits for the stream that made the tensor,
        and the stream that takes a tensor back waits for it; the host waits for neither.
Rule 3. The file of a folder has no name: it is unlinked as it is made, so the system deletes it
        whatever becomes of the process.
Rule 4. The place of a copy in the file is free again when the copy is gone and no thread writes to
        it any more.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from recoup.errors import OffloadError

__all__ = [
    "Arrival",
    "Copy",
    "FolderTier",
    "HostTier",
    "Tier",
    "existing_folder",
    "flat",
    "tier_for",
]

_NUM_THREADS = 2
_MOST_AT_ONCE = 1 << 30  # a system call moves less than two gibibytes


class Arrival(Protocol):
    """A copy on its way back."""

    def wait(self) -> Tensor:
        """Return the bytes, where the tensor was, when they have arrived."""
        ...


class Copy(Protocol):
    """The copy of a tensor in a tier; it is deleted with this object."""

    def has_landed(self) -> bool:
        """Whether the tensor is no longer read."""
        ...

    def land(self) -> None:
        """Wait until the tensor is no longer read; raise `OSError` if it could not be copied."""
        ...

    def fetch(self) -> Arrival:
        """Begin to copy it back; it must have landed."""
        ...


class Tier(Protocol):
    """A place for tensors that are away."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether `tensor` is in another memory than that of this tier."""
        ...

    def send(self, tensor: Tensor) -> Copy:
        """Begin to copy a tensor of bytes, of one dimension (See Rule 1)."""
        ...


def flat(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as a tensor of bytes."""
    found = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return found.set_(storage)  # pyright: ignore[reportArgumentType, reportCallIssue]


def existing_folder(to: object) -> Path | None:
    """Return the folder that `to` names, or None if there is none."""
    if not isinstance(to, (str, os.PathLike)):
        return None
    folder = Path(cast("str | os.PathLike[str]", to)).expanduser().absolute()
    return folder if folder.is_dir() else None


def tier_for(to: str) -> Tier:
    """Return the tier "host", or that of a folder."""
    try:
        return HostTier() if to == "host" else FolderTier(Path(to))
    except OSError as error:
        raise OffloadError(
            f"No file can be made in {to!r}, where tensors should wait for backward: {error}. Name "
            'a folder that exists, that may be written to and that is not full, or "host".'
        ) from error


# -- host memory -----------------------------------------------------------------------------------


class HostTier:
    """Pinned host memory, for tensors on CUDA."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def takes(self, tensor: Tensor) -> bool:
        """Whether `tensor` is on CUDA: what is in host memory is there already."""
        return tensor.device.type == "cuda"

    def send(self, tensor: Tensor) -> _HostCopy:
        """Begin to copy `tensor` (See Rule 2)."""
        stream = self._streams.get(tensor.device)
        if stream is None:
            stream = self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        return _HostCopy(tensor, stream)


class _HostCopy:
    __slots__ = ("_device", "_event", "_held", "_stream")

    def __init__(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        self._device, self._stream = tensor.device, stream
        self._held = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._held.copy_(tensor, non_blocking=True)
        self._event = stream.record_event()

    def has_landed(self) -> bool:
        return self._event.query()

    def land(self) -> None:
        # The memory is used again in the order of this stream, so the host need not wait.
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def held(self) -> Tensor:
        """Return the bytes in host memory, when they are there."""
        self._event.synchronize()
        return self._held

    def fetch(self) -> Arrival:
        return _HostArrival(self._held, self._device, self._stream)


class _HostArrival:
    __slots__ = ("_event", "_tensor")

    def __init__(self, held: Tensor, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._tensor = torch.empty_like(held, device=device)
        # Its memory may be in use by what was queued before, and is freed after this copy.
        stream.wait_stream(torch.cuda.current_stream(device))
        self._tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            self._tensor.copy_(held, non_blocking=True)
        self._event = stream.record_event()

    def wait(self) -> Tensor:
        torch.cuda.current_stream(self._tensor.device).wait_event(self._event)
        return self._tensor


# -- a folder --------------------------------------------------------------------------------------


class FolderTier:
    """A file in a folder, written and read by threads; tensors on CUDA go through host memory.

    Args:
        folder: a folder that exists.
    """

    def __init__(self, folder: Path) -> None:
        if not hasattr(os, "pwrite"):
            raise OSError("this system has no os.pwrite, by which threads write to one file")
        self._file = _File(folder)
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "recoup-offload")
        self._free: dict[int, list[int]] = defaultdict(list)  # places in the file, by their length
        self._end = 0
        self._host = HostTier()
        # What waits in the queue is for nobody; what is written holds the file until it is done.
        weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)

    def takes(self, tensor: Tensor) -> bool:
        """Whether `tensor` is in memory that threads can read, or can be copied there."""
        return tensor.device.type in ("cpu", "cuda")

    def send(self, tensor: Tensor) -> Copy:
        """Begin to write `tensor`."""
        num_bytes = tensor.numel()
        free = self._free[num_bytes]
        place = free.pop() if free else self._end
        if place == self._end:
            self._end += num_bytes
        source = self._host.send(tensor) if self._host.takes(tensor) else tensor
        written = self._threads.submit(_write, self._file, place, source)
        return _FolderCopy(self, tensor, place, written)

    def read(self, num_bytes: int, place: int, device: torch.device) -> Arrival:
        """Begin to read what was written to `place`."""
        is_staged = device.type == "cuda"
        held = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_staged)
        return _FolderArrival(self._threads.submit(_read, self._file, place, held), device)

    def release(self, num_bytes: int, place: int, written: Future[None]) -> None:
        """Let others use `place`, now or when the thread that writes to it is done (Rule 4)."""
        free = self._free[num_bytes]
        written.cancel()
        written.add_done_callback(lambda _: free.append(place))


class _File:
    """A file without a name; it is closed when neither the tier nor a thread holds it (Rule 3)."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self.number = self._file.fileno()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


class _FolderCopy:
    __slots__ = ("_device", "_num_bytes", "_place", "_tier", "_written")

    def __init__(self, tier: FolderTier, tensor: Tensor, place: int, written: Future[None]) -> None:
        self._tier, self._place, self._written = tier, place, written
        self._num_bytes, self._device = tensor.numel(), tensor.device

    def has_landed(self) -> bool:
        return self._written.done()

    def land(self) -> None:
        self._written.result()

    def fetch(self) -> Arrival:
        return self._tier.read(self._num_bytes, self._place, self._device)

    def __del__(self) -> None:
        self._tier.release(self._num_bytes, self._place, self._written)


class _FolderArrival:
    __slots__ = ("_device", "_read")

    def __init__(self, read: Future[Tensor], device: torch.device) -> None:
        self._read, self._device = read, device

    def wait(self) -> Tensor:
        return self._read.result().to(self._device, non_blocking=True)


def _write(file: _File, place: int, source: Tensor | _HostCopy) -> None:
    tensor = source if isinstance(source, Tensor) else source.held()
    rest = _memory_of(tensor)
    while rest:
        num_written = os.pwrite(file.number, rest[:_MOST_AT_ONCE], place)
        rest, place = rest[num_written:], place + num_written


def _read(file: _File, place: int, tensor: Tensor) -> Tensor:
    rest = _memory_of(tensor)
    while rest:
        num_read = os.preadv(file.number, [rest[:_MOST_AT_ONCE]], place)
        if not num_read:
            raise OSError("the file with offloaded tensors is shorter than what was written to it")
        rest, place = rest[num_read:], place + num_read
    return tensor


def _memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor of bytes, which must outlive it; needs no NumPy."""
    return memoryview((ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())).cast("B")
