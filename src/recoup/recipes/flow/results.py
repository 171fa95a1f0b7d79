"""The results of a run, for comparison with other runs: ``run.json`` in its folder."""

from __future__ import annotations

import csv
import json
from typing import Any

import torch

import recoup
from recoup.memory.whole_files import write_whole
from recoup.recipes.checkpoints import Checkpoint
from recoup.recipes.quiet import evaluated_metrics
from recoup.recipes.training import TrainingCLI

__all__ = ["RESULTS_FILE", "write_results"]

RESULTS_FILE = "run.json"


def write_results(run: TrainingCLI) -> None:
    """Test the best checkpoint of a finished run, measure a step, and write the results.

    The file holds the flow and its number of parameters, the memory mode, epochs, steps and seconds
    of training, metrics of the test part of the data with the weights that were best in validation,
    and bytes and seconds of one training step.
    """
    if not (run.out / "metrics.csv").is_file():
        return  # there was no epoch
    trainer: Any = run.trainer
    model, data = run.model, run.datamodule
    has_test = bool(len(data.parts["test"]))
    if run.best is not None:
        model.load_state_dict(Checkpoint(run.best[0], "best").contents["state_dict"])
    metrics = evaluated_metrics(trainer, model, data) if has_test else {}
    if not trainer.is_global_zero:
        return
    with (run.out / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    with run.threads():
        step = _measured_step(run)
    results = {
        "flow": model.hparams["flow"],
        "data": data.name,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "memory": str(model.hparams["memory"]),
        "batch_size": data.batch_size,
        "num_epochs": len(rows),
        "num_steps": trainer.global_step,
        "seconds": float(rows[-1]["seconds"]),
        "best_validation_bits_per_dim": None if run.best is None else run.best[1],
        **{name: float(value) for name, value in sorted(metrics.items())},
        "step": step,
        "device": str(trainer.strategy.root_device),
        "num_threads": run.config.num_threads or torch.get_num_threads(),
        "torch": torch.__version__,
        "recoup": recoup.__version__,
    }
    path = run.out / RESULTS_FILE
    write_whole(path, (json.dumps(results, indent=2) + "\n").encode())
    if has_test:
        print(f"test: {metrics['test_bits_per_dim']:.3f} bits/dim; results: {path}")


def _measured_step(run: TrainingCLI) -> dict[str, float | int | None]:
    """Measure a training step on the first batch, without the optimizer."""
    trainer: Any = run.trainer
    device = trainer.strategy.root_device
    flow = run.model.flow.to(device).train()
    data = run.datamodule
    count = data.batch_size
    x = data.parts["train"][:count].to(device)
    x = x.to(flow.base.like.dtype) if x.is_floating_point() else x
    labels = data.labels["train"][:count].to(device) if data.labels else None

    def step() -> None:
        flow.zero_grad(set_to_none=False)
        flow.bits_per_dim(x, labels).mean().backward()

    step()
    measured = recoup.measure(step, device=device, repeats=3)
    flow.eval()
    return {
        "peak_bytes": measured.peak_bytes,
        "held_bytes": measured.held_bytes,
        "seconds": measured.seconds,
        "cpu_seconds": measured.cpu_seconds,
    }
