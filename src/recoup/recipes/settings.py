"""The settings of a run: recorded in its folder and its checkpoints, and read back.

Rule 1: a checkpoint is a file of unknown origin. Its settings go to a parser that imports classes
by name, so only listed options pass, with plain values; all others are refused by name.

Rule 2: a checkpoint does not decide where files are written. Folders come from the command line, or
from the place of the checkpoint itself.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

__all__ = [
    "COMMAND",
    "CONFIG_FILE",
    "SETTINGS",
    "RunRecord",
    "is_plain",
    "plain_settings",
    "recorded_folders",
]

CONFIG_FILE = "config.yaml"
SETTINGS = "recoup_settings"  # key of the settings in a checkpoint
COMMAND = "recoup_command"  # key of the command that wrote it

# Options that take an object may hold none in a file: its class would be imported and called.
_OBJECTS = {"callbacks", "logger", "model_registry", "plugins", "profiler"}
# These name a part of Lightning, or the class of such a part.
_CHOICES = {
    "accelerator": {"auto", "cpu", "cuda", "gpu", "mps"},
    "strategy": {"auto", "ddp", "ddp_fork", "ddp_notebook", "ddp_spawn"},
}
_NUMBERS_OF_THE_TRAINER = {
    *("accumulate_grad_batches", "barebones", "benchmark", "check_val_every_n_epoch"),
    *("detect_anomaly", "deterministic", "devices", "enable_autolog_hparams"),
    *("enable_checkpointing", "enable_model_summary", "enable_progress_bar", "fast_dev_run"),
    *("gradient_clip_algorithm", "gradient_clip_val", "inference_mode", "limit_predict_batches"),
    *("limit_test_batches", "limit_train_batches", "limit_val_batches", "log_every_n_steps"),
    *("max_epochs", "max_steps", "max_time", "min_epochs", "min_steps", "num_nodes"),
    *("num_sanity_val_steps", "overfit_batches", "precision"),
    *("reload_dataloaders_every_n_epochs", "sync_batchnorm", "use_distributed_sampler"),
    "val_check_interval",
}
_SAVING = {
    *("auto_insert_metric_name", "enable_version_counter", "every_n_epochs"),
    *("every_n_train_steps", "mode", "monitor", "save_last", "save_on_exception"),
    *("save_on_train_epoch_end", "save_top_k", "save_weights_only", "train_time_interval"),
    "verbose",
}
_STOPPING = {
    *("check_finite", "check_on_train_epoch_end", "divergence_threshold", "log_rank_zero_only"),
    *("min_delta", "mode", "monitor", "patience", "stopping_threshold", "strict", "verbose"),
}
_OF_THE_RUN = {"num_threads", "seed_everything"}
_FOLDERS = {("trainer", "default_root_dir"), ("checkpoint", "dirpath")}
_FILE_NAME = re.compile(r"[\w{}:.=+ -]*\w[\w{}:.=+ -]*")  # matches no path with folders


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
            if _file_in(folder, state["best_model_path"]) is None:
                del checkpoint["callbacks"][callback.state_key]  # no best one is here yet
                continue
            state["dirpath"] = str(folder)
            for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
                state[name] = _file_in(folder, state[name]) or ""
            state["best_k_models"] = {
                path: value
                for recorded, value in state["best_k_models"].items()
                if (path := _file_in(folder, recorded)) is not None
            }

    def _text(self) -> str:
        return self.parser.dump(self.config, skip_none=False)


def _file_in(folder: Path, recorded: str) -> str | None:
    """Return the path of the checkpoint in a folder that has the name of a recorded one, if any."""
    path = folder / Path(recorded).name
    return str(path) if path.suffix == ".ckpt" and path.is_file() else None


def plain_settings(
    settings: object,
    *,
    owners: Mapping[str, type],
    source: str,
    is_given: Callable[[str], bool],
) -> dict[str, Any]:
    """Return the settings of a run that its checkpoint may decide. See Rules 1 and 2.

    Args:
        settings: The settings in the checkpoint: values by name, by section.
        owners: Classes whose arguments are the options of a section, such as "model".
        source: Name of the file in messages.
        is_given: Returns whether the command line gives an option, such as ``trainer.devices``;
            the setting of the checkpoint is then left out.

    Raises:
        ValueError: When a setting is not listed or not plain; the message names it.
    """
    sections = {
        **{section: set(inspect.signature(owner).parameters) for section, owner in owners.items()},
        "trainer": _NUMBERS_OF_THE_TRAINER,
        "checkpoint": _SAVING,
        "early_stopping": _STOPPING,
    }
    plain: dict[str, Any] = {}
    for section, values in _named(settings, source).items():
        if section in _OF_THE_RUN:
            plain[section] = _checked(section, values, source)
        elif section not in sections:
            raise _refusal(section, source)
        else:
            plain[section] = {}
            for name, value in _named(values, source, section).items():
                setting = f"{section}.{name}"
                if (section, name) in _FOLDERS or is_given(setting):
                    continue
                if name not in sections[section] and not _is_harmless(section, name, value):
                    raise _refusal(setting, source)
                plain[section][name] = _checked(setting, value, source)
    return plain


def is_plain(value: object) -> bool:
    """Return whether a value is a number, string, bool or None, or a list or tuple of those."""
    if isinstance(value, (list, tuple)):
        return all(_is_scalar(entry) for entry in cast("list[object]", value))
    return _is_scalar(value)


def _is_scalar(value: object) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _is_harmless(section: str, name: str, value: object) -> bool:
    """Return whether a setting that could name a class or a file has a value that does not."""
    if section == "trainer" and name in _OBJECTS:
        return value is None or value is False or value == []
    if section == "trainer" and name in _CHOICES:
        return isinstance(value, str) and value in _CHOICES[name]
    if section == "checkpoint" and name == "filename":
        return value is None or (isinstance(value, str) and bool(_FILE_NAME.fullmatch(value)))
    return False


def _named(values: object, source: str, section: str = "") -> Mapping[str, object]:
    """Return `values` if it is a dict with names as keys; else raise."""
    if not isinstance(values, dict):
        raise _refusal(section or "settings", source)
    for name in cast("dict[object, object]", values):
        if not isinstance(name, str):
            raise _refusal(f"{section}.{name!r}", source)
    return cast("dict[str, object]", values)


def _checked(setting: str, value: object, source: str) -> object:
    if not is_plain(value):
        raise _refusal(setting, source)
    return value


def _refusal(setting: str, source: str) -> ValueError:
    section, _, name = setting.partition(".")
    is_object = section == "trainer" and name in {*_OBJECTS, *_CHOICES}
    way_out = f"If you set it, give it again by `--{setting}`. Else do" if is_object else "Do"
    return ValueError(
        f"{source} has a setting `{setting}` that is not taken from a checkpoint, which may come "
        "from anywhere: only plain values of the model, the data and training are. "
        f"{way_out} not trust the file."
    )


def recorded_folders(settings: Mapping[str, Any]) -> tuple[Path, Path] | None:
    """Return the folders of a run and of its checkpoints, as stored; None if there are none.

    They serve for comparison only, not for writing. See Rule 2.
    """
    trainer, saving = settings.get("trainer"), settings.get("checkpoint")
    if not isinstance(trainer, dict) or not isinstance(saving, dict):
        return None
    folder: object = cast("dict[str, object]", trainer).get("default_root_dir")
    saved_to: object = cast("dict[str, object]", saving).get("dirpath")
    if not isinstance(folder, str) or not isinstance(saved_to, str):
        return None
    return Path(folder), Path(saved_to)
