"""The folder of a run: while the run lasts, one process writes there, and only whole files.

Rule 1: the operating system holds the lock, and releases it when the process ends in any way. The
lock file may stay behind, and has no effect then.

Rule 2: a forked process shares the lock and might outlive this one, so it closes its copy.
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
except ImportError:  # Windows has no such locks, so folders are not locked there
    fcntl = None

__all__ = ["WholeCheckpoints", "folder_locked"]

LOCK_FILE = ".lock"
_held: set[int] = set()


@contextmanager
def folder_locked(folder: Path, option: str) -> Generator[None]:
    """Keep other runs from writing into a folder. See Rules 1 and 2.

    A folder that was created for this, and is empty afterwards, is removed.

    Args:
        folder: The folder; it is created if it does not exist.
        option: The option that names it, for the message.

    Raises:
        ValueError: When another process is writing there.
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
        # The previous owner may have removed the file after it was opened here.
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
    """Checkpoint files that are whole: each replaces the one before when it is complete.

    Lightning writes to the folder for temporary files first: if that is on another disk it copies
    the file, and when the copy fails the previous checkpoint is lost as well.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint."""
        content = io.BytesIO()
        torch.save(checkpoint, content)
        write_whole(Path(path), content.getvalue())
