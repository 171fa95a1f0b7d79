"""The folder of a run while the run goes on: one process writes there, and files whole.

Rule 1: the lock is one of the operating system, which releases it when the process ends, however
that ends. The file that it is on may stay behind, and means nothing then.

Rule 2: a process that is forked shares the lock, and might outlive this one: it closes its copy.
"""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from recoup.memory.whole_files import write_whole

try:
    import fcntl
except ImportError:  # Windows has no such locks; there nothing is locked
    fcntl = None

__all__ = ["WholeCheckpoints", "folder_locked"]

LOCK_FILE = ".lock"
_held: set[int] = set()


@contextmanager
def folder_locked(folder: Path, option: str) -> Generator[None]:
    """Let no other run write into a folder. See Rules 1 and 2.

    A folder that is made for this, and is empty afterwards, is removed.

    Args:
        folder: The folder; it is made if it is not there.
        option: The option that names it, for the message.

    Raises:
        ValueError: Another process is writing there.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    descriptor = _locked(path, f"`{option}` is {folder}")
    _held.add(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        _held.discard(descriptor)
        os.close(descriptor)
        if is_new:
            with suppress(OSError):
                folder.rmdir()


def _locked(path: Path, given: str) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if fcntl is None:
            return descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 200).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise ValueError(
                f"{given}, where {owner} is training. Wait for it, or give another folder."
            ) from None
        except OSError:  # a file system without locks
            return descriptor
        # The one before may have removed the file after it was opened here.
        with suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        os.close(descriptor)


def _close_all() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint beside the one before, and puts it in its place when it is whole.

    Lightning writes it to the folder for temporary files first: from another disk it is copied, and
    where that fails the one before is lost as well.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint."""
        content = io.BytesIO()
        torch.save(checkpoint, content)
        write_whole(Path(path), content.getvalue())
