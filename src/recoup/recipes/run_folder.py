"""The folder of a run: its place, its lock while the run lasts, and whole files in it.

Rule 1: the operating system holds the lock, and releases it when the process ends in any way. The
lock file may stay behind, and has no effect then.

Rule 2: a forked process shares the lock and might outlive this one, so it closes its copy.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from recoup.memory.whole_files import write_whole
from recoup.recipes.settings import CONFIG_FILE

try:
    import fcntl
except ImportError:  # Windows has no such locks, so folders are not locked there
    fcntl = None

__all__ = [
    "WholeCheckpoints",
    "WholeEpochs",
    "check_no_run",
    "checkpoint_folder",
    "folder_locked",
    "free_folder",
    "relative",
    "run_folder",
]

LOCK_FILE = ".lock"
_lock_descriptors: set[int] = set()


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
    _lock_descriptors.add(descriptor)
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        _lock_descriptors.discard(descriptor)
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
    for descriptor in _lock_descriptors:
        os.close(descriptor)
    _lock_descriptors.clear()


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


class WholeEpochs(ModelCheckpoint):
    """A callback that saves at the end of each epoch that was not cut short.

    A run cannot resume from an epoch that was, and its checkpoint would replace one that can.

    Attributes:
        num_epochs: Number of epochs before the last checkpoint; 0 before the first.
    """

    num_epochs = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save, if the run trained on the whole epoch."""
        is_whole = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        if is_whole or not self.best_model_path:  # A run shorter than an epoch gets one too.
            super().on_train_epoch_end(trainer, pl_module)
        if is_whole and Path(self.best_model_path).is_file():
            self.num_epochs = trainer.current_epoch + 1


def free_folder(parent: Path, name: str) -> Path:
    """Return the first of ``name-1``, ``name-2``, ... in `parent` that does not exist."""
    return next(
        folder for n in itertools.count(1) if not (folder := parent / f"{name}-{n}").exists()
    )


def checkpoint_folder(folder: str | Path) -> Path:
    """Return the folder to which a run saves checkpoints by default."""
    return Path(folder, "checkpoints")


def run_folder(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint is part of."""
    folder = checkpoint.parent
    return folder.parent if folder == checkpoint_folder(folder.parent) else folder


def check_no_run(folder: Path) -> None:
    """Raise a ValueError if the folder given as ``--out`` is a file, or holds a run."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`--out` is {folder}, which is a file. Give a folder.")
    last = checkpoint_folder(folder) / "last.ckpt"
    if last.exists() or (folder / CONFIG_FILE).exists():
        go_on = f"Go on with it by `--resume {last}`, or give" if last.exists() else "Give"
        raise ValueError(f"`--out` is {folder}, which holds a run already. {go_on} another folder.")


def relative(path: Path) -> Path:
    """Return a path relative to the working directory, if it lies there."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
