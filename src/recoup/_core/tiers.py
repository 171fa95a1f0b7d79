"""Tiers: the memory that tensors wait in while they are away, host memory or a folder.

NOTE [ Copies that are under way ]

Rule 1. A tier begins a copy and returns; the copy says when it has landed. Whoever began it holds
        the tensor until then, since the tier reads its memory. The copy in the tier is deleted with
        the object.
Rule 2. On an accelerator copies run on a stream of their own. It waits for the stream that made
        the tensor, and the stream that takes a tensor back waits for it; the host waits for
        neither.
Rule 3. The file of a folder has no name: it is unlinked as it is made, so the system deletes it
        whatever becomes of the process.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from recoup._core.devices import has_streams, pins_memory
from recoup.errors import OffloadError

_NUM_THREADS = 2
_MOST_AT_ONCE = 1 << 30  # a system call moves less than two gibibytes


# Waits until a copy is back, and returns its bytes, where the tensor was.
Arrival = Callable[[], Tensor]


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
    """Host memory, for tensors on an accelerator: pinned, where that is possible."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def takes(self, tensor: Tensor) -> bool:
        """Whether `tensor` is on a device that copies aside: others share the host's memory."""
        return has_streams(tensor.device)

    def send(self, tensor: Tensor) -> _HostCopy:
        """Begin to copy `tensor`, of bytes and one dimension (See Rules 1 and 2)."""
        device = tensor.device
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        return _HostCopy(tensor, self._streams[device])


class _HostCopy:
    def __init__(self, tensor: Tensor, stream: torch.Stream) -> None:
        self._device, self._stream = tensor.device, stream
        self._held = torch.empty_like(tensor, device="cpu", pin_memory=pins_memory())
        self._event = self._copied(tensor, self._held)

    def _copied(self, source: Tensor, target: Tensor) -> torch.Event:
        """Copy on the stream of copies, after what was queued before; return when it is done."""
        self._stream.wait_stream(self._current())
        with torch.get_device_module(self._device).stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def _current(self) -> torch.Stream:
        return torch.get_device_module(self._device).current_stream(self._device)

    def has_landed(self) -> bool:
        """Whether the tensor is no longer read."""
        return self._event.query()

    def land(self) -> None:
        """Let this stream wait until the tensor is no longer read."""
        # The memory is used again in the order of this stream, so the host need not wait.
        self._current().wait_event(self._event)

    def held(self) -> Tensor:
        """Return the bytes in host memory, when they are there."""
        self._event.synchronize()
        return self._held

    def fetch(self) -> Arrival:
        """Begin to copy it back."""
        # Its memory may be in use by what was queued before, and is freed after this copy.
        tensor = torch.empty_like(self._held, device=self._device)
        tensor.record_stream(self._stream)
        event = self._copied(self._held, tensor)

        def wait() -> Tensor:
            self._current().wait_event(event)
            return tensor

        return wait


# -- a folder --------------------------------------------------------------------------------------


class FolderTier:
    """A file in a folder that threads write and read; from accelerators by way of host memory.

    Args:
        folder: a folder that exists.
    """

    def __init__(self, folder: Path) -> None:
        if not hasattr(os, "pwritev"):
            raise OSError("this system has no os.pwritev, by which threads write to one file")
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - See Rule 3
        weakref.finalize(self, self._file.close)
        self.threads = ThreadPoolExecutor(_NUM_THREADS, "recoup-offload")
        self._end = 0  # of the file, once all of it is written
        self._host = HostTier()

    def takes(self, tensor: Tensor) -> bool:
        """Whether `tensor` is in memory that threads can read, or can be copied there."""
        return not tensor.is_meta

    def send(self, tensor: Tensor) -> _FolderCopy:
        """Begin to write `tensor`, of bytes and one dimension (See Rule 1)."""
        place, self._end = self._end, self._end + tensor.numel()
        source = self._host.send(tensor).held if self._host.takes(tensor) else tensor.cpu
        written = self.threads.submit(self.move, os.pwritev, place, [source])
        return _FolderCopy(self, tensor, place, written)

    def move(
        self, call: Callable[..., int], place: int, source: list[Callable[[], Tensor]]
    ) -> None:
        """Write a tensor to `place`, or read it from there, by a system call.

        Args:
            call: the system call.
            place: where in the file.
            source: returns the tensor, as the only item of a list. It is taken from there, or the
                thread would hold the tensor for a moment after its copy has landed.
        """
        tensor = source.pop()()
        memory = (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())  # needs no NumPy
        rest = memoryview(memory).cast("B")
        while rest:
            num_moved = call(self._file.fileno(), [rest[:_MOST_AT_ONCE]], place)
            if not num_moved:
                raise OSError("the file with offloaded tensors is shorter than what was written")
            rest, place = rest[num_moved:], place + num_moved


class _FolderCopy:
    def __init__(self, tier: FolderTier, tensor: Tensor, place: int, written: Future[None]) -> None:
        self._tier, self._place, self._written = tier, place, written
        self._num_bytes, self._device = tensor.numel(), tensor.device

    def has_landed(self) -> bool:
        """Whether the tensor is no longer read."""
        return self._written.done()

    def land(self) -> BaseException | None:
        """Wait until the tensor is no longer read; return why it could not be copied, if so."""
        return self._written.exception()

    def fetch(self) -> Arrival:
        """Begin to copy it back; it must have landed."""
        is_pinned = has_streams(self._device) and pins_memory()
        held = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        read = self._tier.threads.submit(self._tier.move, os.preadv, self._place, [lambda: held])

        def wait() -> Tensor:
            read.result()
            return held.to(self._device, non_blocking=True)

        return wait

    def __del__(self) -> None:
        self._written.cancel()


Tier = HostTier | FolderTier
Copy = _HostCopy | _FolderCopy
