"""The results of a run, with the same keys in all recipes: ``run.json`` in its folder."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import recoup
from recoup.memory.whole_files import write_whole
from recoup.recipes.quiet import evaluated_metrics
from recoup.recipes.training_run import TrainingRun

__all__ = ["RESULTS_FILE", "Step", "results_of", "write_results"]

RESULTS_FILE = "run.json"

Step = Callable[[Any, Any, torch.device], Callable[[], object]]
"""From a model, its data and a device to a training step without the optimizer."""


def results_of(run: TrainingRun, step: Step, **about: Any) -> dict[str, Any] | None:
    """Test the best weights of a finished run, measure a step, and return the results.

    The model is left with the weights that were best in validation.

    Args:
        run: The run.
        step: Makes the step to measure.
        about: What is trained, to come first in the results.

    Returns:
        What is trained and on how much, epochs, steps and seconds of training, the best validation,
        the metrics of the test part (none, if it is too small for a batch), and bytes and seconds
        of one training step. None if there was no epoch, and on all ranks but the first.
    """
    if not (run.out / "metrics.csv").is_file():
        return None
    trainer, model, data = run.trainer, run.model, run.datamodule
    if run.best is not None:
        best = torch.load(run.best[0], map_location="cpu", weights_only=True)
        model.load_state_dict(best["state_dict"])
    metrics = evaluated_metrics(trainer, model, data) if data.can_test else {}
    if not trainer.is_global_zero:
        return None
    with (run.out / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    score = run.monitor.removeprefix("val_")
    return {
        **about,
        "data": data.name,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "batch_size": data.batch_size,
        "num_epochs": len(rows),
        "num_steps": trainer.global_step,
        "seconds": float(rows[-1]["seconds"]),
        f"best_validation_{score}": None if run.best is None else run.best[1],
        **{name: float(value) for name, value in sorted(metrics.items())},
        "step": _measured(run, step),
        "device": str(trainer.strategy.root_device),
        "num_threads": run.num_threads or torch.get_num_threads(),
        "torch": torch.__version__,
        "recoup": recoup.__version__,
    }


def write_results(run: TrainingRun, results: dict[str, Any]) -> Path:
    """Write results into the folder of the run; return the path of the file."""
    path = run.out / RESULTS_FILE
    write_whole(path, (json.dumps(results, indent=2) + "\n").encode())
    return path


def _measured(run: TrainingRun, step: Step) -> dict[str, float | int | None]:
    """Measure a training step on a first batch, without the optimizer."""
    device = run.trainer.strategy.root_device
    model = run.model.to(device).train()
    with run.threads(), run.trainer.precision_plugin.forward_context():
        one = step(model, run.datamodule, device)
        one()
        measured = recoup.measure(one, device=device, repeats=3)
    model.zero_grad()
    model.eval()
    return {
        "peak_bytes": measured.peak_bytes,
        "held_bytes": measured.held_bytes,
        "seconds": measured.seconds,
        "cpu_seconds": measured.cpu_seconds,
    }
