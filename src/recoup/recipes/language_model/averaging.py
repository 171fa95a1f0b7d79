"""Averaging the parameters once validation no longer improves: NT-ASGD, outside the optimizer.

Rule 1: the optimizer is ``torch.optim.SGD``, which uses the learning rate of the present step.
``torch.optim.ASGD`` uses that of the step before, so that a rate scaled by the length of a window
would apply to another window; its average leaves out the first step.

Rule 2: the average is over the raw parameters. Forward applies weight dropout and noise, and no
parameter ever holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging

__all__ = ["AveragingKind", "TriggeredAveraging", "is_triggered"]

AveragingKind = Literal["triggered", "always", "never"]


def is_triggered(losses: Sequence[float], num_patient: int) -> bool:
    """Return whether the last loss is worse than the best, not counting those just before it.

    Args:
        losses: validation losses, including the last one.
        num_patient: number of losses just before the last that do not count.

    Example:
        >>> is_triggered([4.0, 3.0, 2.9, 2.8, 3.1], num_patient=3)
        False
        >>> is_triggered([3.0, 4.0, 2.9, 2.8, 3.1], num_patient=3)
        True

    Source: Merity, Keskar and Socher, https://arxiv.org/abs/1708.02182, algorithm 1. A popular
    implementation compared with the best of the latest losses, which gluon-nlp fixed in
    https://github.com/dmlc/gluon-nlp/pull/1277.
    """
    *before, last = losses
    counted = before[: max(0, len(before) - num_patient)]
    return bool(counted) and last > min(counted)


class TriggeredAveraging(WeightAveraging):
    """A callback that averages parameters once validation no longer improves. See Rules 1 and 2.

    From then on validation uses the average, and the weights of a checkpoint are the average;
    training continues from the last parameters, which the checkpoint holds too.

    Args:
        monitor: the metric to watch.
        num_patient: number of validations just before the last that do not count.
        from_start: whether to average from the first step; the trigger then stops training
            (finetuning).
    """

    def __init__(self, monitor: str, num_patient: int, *, from_start: bool = False) -> None:
        super().__init__(use_buffers=False)
        self.monitor = monitor
        self.num_patient = num_patient
        self.from_start = from_start
        self.losses: list[float] = []
        self.is_averaging = from_start
        self._is_in_model = False  # the average, in place of the last parameters

    @property
    def num_averaged(self) -> int:
        """Number of steps in the average; 0 before there is one."""
        model = self._average_model
        return 0 if model is None or not self.is_averaging else int(model.n_averaged)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Allocate the average, which is as large as the model, only once it is needed."""
        if self.is_averaging:
            super().setup(trainer, pl_module, stage)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether the average takes in this step."""
        return self.is_averaging and step_idx is not None

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validate the average, if there is one."""
        pl_module.log("averaged", float(self.num_averaged), sync_dist=True)
        if self.num_averaged:
            super().on_validation_epoch_start(trainer, pl_module)
            self._is_in_model = True

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the last parameters."""
        if self._is_in_model:
            self._is_in_model = False
            super().on_validation_epoch_end(trainer, pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore the last parameters if validation was cut off."""
        self.on_validation_epoch_end(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin averaging, or stop finetuning, if the trigger is met."""
        if trainer.sanity_checking:
            return
        self.losses.append(float(trainer.callback_metrics[self.monitor]))
        if not is_triggered(self.losses, self.num_patient):
            return
        if self.is_averaging:
            trainer.should_stop = trainer.should_stop or self.from_start
            return
        self.is_averaging = True
        self.setup(trainer, pl_module, "fit")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the average in the model, if there is one."""
        if self.num_averaged:
            super().on_train_end(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the average as the weights of the checkpoint, if there is or will be one."""
        if self.is_averaging:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Resume from the last parameters, and with the average."""
        if "averaging_state" in checkpoint:
            super().setup(trainer, pl_module, "fit")
            super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {
            **super().state_dict(),
            "losses": list(self.losses),
            "is_averaging": self.is_averaging,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a run."""
        super().load_state_dict(state_dict)
        self.losses = list(state_dict["losses"])
        self.is_averaging = state_dict["is_averaging"]
