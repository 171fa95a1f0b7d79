"""Ending a run by a signal: after a step, with the last whole epoch on the disk.

Rule 1: the first signal is noted, and the run ends after the current step. So no step is half
done, and several processes all end after the same step.

Rule 2: the second signal ends the run at once. Checkpoints are written whole or not at all, so the
previous one survives if another is being written.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

__all__ = ["StopRun", "Stopping"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRun(Exception):  # noqa: N818  # not an error
    """Raised after the step in which a signal arrived."""


class Stopping(Callback):
    """A callback that ends a run after the step in which SIGINT or SIGTERM arrived. See Rules 1, 2.

    Attributes:
        signum: The signal that arrived; None before the first.
        has_begun: Whether training has begun.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.has_begun = False

    @contextmanager
    def listening(self) -> Generator[None]:
        """Note signals within the context; outside the main thread, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.getsignal(each) for each in _SIGNALS}
        try:
            self._listen()
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, signal.SIG_DFL if handler is None else handler)

    def _listen(self) -> None:
        for each in _SIGNALS:
            signal.signal(each, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Listen again, since Lightning's own handler of SIGTERM ends each process alone."""
        self.has_begun = True
        is_ours = signal.getsignal(signal.SIGINT) == self._note
        if is_ours and not _is_requeued(trainer):
            self._listen()

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """End the run, if a signal arrived."""
        self._end(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """End a run of one process; several may validate different numbers of batches."""
        if trainer.world_size == 1:
            self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        is_asked = self.signum is not None
        if trainer.world_size > 1:
            is_asked = trainer.strategy.reduce_boolean_decision(is_asked, all=False)
        if is_asked:
            self.signum = self.signum or signal.SIGTERM  # another process received it
            raise StopRun


def _is_requeued(trainer: Trainer) -> bool:
    """Return whether SLURM restarts the run, by means of Lightning's handler."""
    connector: Any = trainer._accelerator_connector  # pyright: ignore[reportPrivateUsage]
    return bool(getattr(connector.cluster_environment, "auto_requeue", False))
