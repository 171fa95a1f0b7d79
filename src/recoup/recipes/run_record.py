"""The settings of a run, in its folder and in its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

__all__ = ["COMMAND", "CONFIG_FILE", "SETTINGS", "RunRecord"]

CONFIG_FILE = "config.yaml"
SETTINGS = "recoup_settings"  # key of the settings in a checkpoint
COMMAND = "recoup_command"  # key of the command that wrote it


def _there(noted: str, folder: Path) -> str | None:
    """Return the path of a checkpoint in a folder, if the folder has a file of that name."""
    path = folder / Path(noted).name
    return str(path) if path.suffix == ".ckpt" and path.is_file() else None


class RunRecord(SaveConfigCallback):
    """The record of a run's settings, in its folder and in its checkpoints."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the file."""
        path = Path(trainer.default_root_dir, CONFIG_FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._text())

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Write the settings into the checkpoint, so that a run can resume from it anywhere."""
        checkpoint[SETTINGS] = yaml.safe_load(self._text())
        checkpoint[COMMAND] = self.parser.prog

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Find the checkpoints of the run by their names, in the folder where they are now.

        Lightning removes files by the paths in a checkpoint, so only those are kept that are files
        in the folder to which this run saves.
        """
        callbacks: Any = trainer.checkpoint_callbacks
        for callback in callbacks:
            state, folder = checkpoint["callbacks"].get(callback.state_key), Path(callback.dirpath)
            if state is None:
                continue
            if _there(state["best_model_path"], folder) is None:
                del checkpoint["callbacks"][
                    callback.state_key
                ]  # this folder has no best checkpoint yet
                continue
            state["dirpath"] = str(folder)
            for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
                state[name] = _there(state[name], folder) or ""
            state["best_k_models"] = {
                path: value
                for noted, value in state["best_k_models"].items()
                if (path := _there(noted, folder)) is not None
            }

    def _text(self) -> str:
        return self.parser.dump(self.config, skip_none=False)
