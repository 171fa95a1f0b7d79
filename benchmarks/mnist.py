"""Flows on MNIST: RealNVP and Glow in linear and in constant memory, NICE with exact couplings.

    python benchmarks/mnist.py realnvp constant    # one run, printed as JSON

Bits per dimension of 28 x 28 pixels with 256 levels: uniform dequantization, a logit of margin
0.05 whose log-determinant counts, mean over the test part of one draw of noise.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from couplings import peak_and_held
from lightning.pytorch.callbacks import Callback
from timing import clock_of, in_turn

from recoup.flows import Glow, RealNVP

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "examples")]

from examples.flow import main  # noqa: E402

MNIST = Path(__file__).parents[2] / "shared" / "data" / "mnist.npz"
BATCH_SIZE = 128
# What trains within an hour of one core; on a GPU the configurations as they are.
SMALL = {
    "realnvp": {"num_levels": 2, "num_steps": 2, "width": 16, "depth": 2},
    "glow": {"num_levels": 2, "num_steps": 6, "width": 32},
    "nice": {},
    "nice-exact": {},
}
EPOCHS = {"cpu": 5, "cuda": 20}
RUNS = (
    ("realnvp", "linear"),
    ("realnvp", "constant"),
    ("glow", "linear"),
    ("glow", "constant"),
    ("nice", "constant"),
    ("nice-exact", "constant"),
)


def _now():
    # Of one thread on CPU, whatever else the machine does.
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


class CurveRecord(Callback):
    """Record the training loss, averaged over 50 steps, and the validation loss of each epoch."""

    def __init__(self):
        self.rows = []
        self.seconds = 0.0
        self._losses = []
        self._start = 0.0

    def on_train_epoch_start(self, trainer, pl_module):
        self._start = _now()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._losses.append(float(outputs["loss"]))
        if len(self._losses) == 50:
            self._add(trainer, "training", sum(self._losses) / 50)
            self._losses = []

    def on_validation_start(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.seconds += _now() - self._start

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            bits = float(trainer.callback_metrics["val_bits_per_dim"])
            self._add(trainer, "validation", bits)

    def _add(self, trainer, part, bits):
        self.rows.append({"step": trainer.global_step, "part": part, "bits_per_dim": bits})
        print(self.rows[-1], file=sys.stderr, flush=True)


def trained(config, data, epochs, settings, init_args, record, device="cpu"):
    """Train a flow by the example; return its run, and the metrics of the test part.

    The metrics are those of the weights after the last epoch.
    """
    path = ROOT / "examples" / "configs" / "flow" / f"{config}.yaml"
    args = ["-c", str(path), f"--data.path={data}", f"--trainer.max_epochs={epochs}"]
    args += [f"--model.{key}={value}" for key, value in settings.items()]
    args += [f"--model.flow.init_args.{key}={value}" for key, value in init_args.items()]
    args += ["--trainer.accelerator", "gpu" if device == "cuda" else device]
    args += ["--trainer.enable_progress_bar", "false"]
    with tempfile.TemporaryDirectory() as folder:
        run = main([*args, f"--trainer.logger.init_args.save_dir={folder}"], run=False)
        run.trainer.callbacks.append(record)
        run.trainer.fit(run.model, run.datamodule)
        metrics = run.trainer.test(run.model, run.datamodule, verbose=False)[0]
    return run, metrics


def one(name, memory, device="cpu"):
    """Train a flow, test it, and measure the peak of a step."""
    epochs = EPOCHS[device]
    settings = {"memory": memory, "num_decay_steps": epochs * 422, "num_warmup_steps": 100}
    init_args = {}
    if name in ("realnvp", "glow"):
        settings["learning_rate"], init_args["alpha"] = 4e-3, 0.05
    if name == "nice-exact":
        init_args["exact"] = "true"
    if device == "cpu":
        init_args |= SMALL[name]
    record = CurveRecord()
    config = f"{name.removesuffix('-exact')}-mnist"
    run, metrics = trained(config, MNIST, epochs, settings, init_args, record, device)
    flow = run.model.flow.train().to(device)
    batch = run.datamodule.parts["train"][:BATCH_SIZE].to(device)

    def step():
        flow.bits_per_dim(batch).mean().backward()
        flow.zero_grad(set_to_none=False)  # gradients are alive before a step

    step()
    return {
        "name": name,
        "memory": memory,
        "num_parameters": sum(p.numel() for p in flow.parameters()),
        "epochs": epochs,
        "num_steps": record.rows[-1]["step"],
        "test_bits_per_dim": metrics["test_bits_per_dim"],
        "seconds": record.seconds,
        "peak_bytes": peak_and_held(step, device)[0],
        "drift": max(flow.chain.drift.errors.values(), default=0.0),
        "curve": record.rows,
    }


def seconds(device, rounds=8):
    """Measure the time of a training step in constant over linear memory, the two in turn."""
    rows = []
    for name in ("realnvp", "glow"):
        steps = {memory: _step(name, memory, device) for memory in ("linear", "constant")}
        times = in_turn(steps, rounds, device, clock_of(device))
        best = {memory: min(found) for memory, found in times.items()}
        rows.append(
            {
                "name": name,
                "linear_seconds": best["linear"],
                "constant_over_linear": best["constant"] / best["linear"],
                "median_over_linear": statistics.median(times["constant"])
                / statistics.median(times["linear"]),
            }
        )
    return rows


def _step(name, memory, device):
    torch.manual_seed(0)
    build = {"realnvp": RealNVP, "glow": Glow}[name]
    flow = build((1, 28, 28), levels=256, memory=memory, **SMALL[name]).to(device)
    batch = torch.randint(256, (BATCH_SIZE, 1, 28, 28), device=device)

    def step():
        flow.bits_per_dim(batch).mean().backward()

    step()
    return step


def suite(device):
    """Yield the tables: all runs, one after the other, each in a process of its own."""
    rows = []
    for name, memory in RUNS:
        command = [sys.executable, __file__, name, memory, device]
        found = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        rows.append(json.loads(found.stdout.splitlines()[-1]))
        yield "runs", rows
    yield "seconds", seconds(device)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(one(*sys.argv[1:])))
