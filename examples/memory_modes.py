"""Train one flow in three memory modes, and compare them: ``make demo``, two minutes on two cores.

    python examples/memory_modes.py --epochs 10 --out runs/demo

Prints a table of bytes, times and differences, and the curve of memory and time against depth;
draws samples, reconstructions and the curve.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import recoup
from recoup.flows import Flow, Glow

MEMORIES = ("linear", "sqrt", "constant")
DEPTHS = (4, 8, 16)
NUM_DRAWS = 5
CONFIG = Path(__file__).parent / "configs" / "flow" / "glow-digits.yaml"


class Loss(torch.nn.Module):
    """The loss of a flow, without the latents that its forward returns."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: Tensor) -> Tensor:
        return self.flow.bits_per_dim(x).mean()


def build_step(depth: int, memory: Any) -> tuple[torch.nn.Module, Tensor]:
    """Build what `recoup.curve` measures: a Glow of `depth` steps in each scale, and a batch."""
    flow = Glow((1, 8, 8), levels=17, num_steps=depth, width=64, memory=memory)
    return Loss(flow), torch.randint(17, (64, 1, 8, 8), dtype=torch.uint8)


def train(memory: str, epochs: int, out: Path) -> dict[str, Any]:
    """Train in a memory mode; return the run, the loss of each step, and the seconds."""
    # Here, since the processes that measure the curve need neither Lightning nor matplotlib.
    from flow import main
    from lightning.pytorch.callbacks import Callback

    for part in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{part}").setLevel(logging.WARNING)

    class LossRecord(Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, *_: Any, **__: Any
        ) -> None:
            losses.append(float(outputs["loss"]))

    losses: list[float] = []
    args = ["-c", str(CONFIG), "--model.memory", memory, "--trainer.max_epochs", str(epochs)]
    args += ["--model.num_decay_steps", str(12 * epochs)]  # 1437 digits in batches of 128
    args += [
        f"--trainer.logger.init_args.save_dir={out}",
        "--trainer.logger.init_args.name",
        memory,
    ]
    run: Any = main(args, run=False)
    run.trainer.callbacks.append(LossRecord())
    start = time.perf_counter()
    run.trainer.fit(run.model, run.datamodule)
    seconds = time.perf_counter() - start
    bits = float(run.trainer.callback_metrics["val_bits_per_dim"])
    return {"run": run, "losses": torch.tensor(losses), "seconds": seconds, "bits": bits}


def compare(results: dict[str, dict[str, Any]]) -> None:
    """Measure a step of each mode, with the weights of "linear" and one batch for all.

    Gradients are taken for several draws of the noise, since a ReLU whose input is 0 but for
    rounding may fall on the other side, and its gradient with it.
    """
    linear = results["linear"]["run"]
    weights = {name: value.clone() for name, value in linear.model.flow.state_dict().items()}
    batch = linear.datamodule.parts["train"][: linear.datamodule.batch_size]
    for result in results.values():
        flow = result["run"].model.flow
        flow.load_state_dict(weights)
        flow.train()
        result["gradients"] = []
        for seed in range(NUM_DRAWS):
            _step(flow, batch, seed)()
            result["gradients"].append([p.grad.clone() for p in flow.parameters()])
        result["step"] = recoup.measure(_step(flow, batch, 0), device="cpu", repeats=5)
        flow.eval()


def _step(flow: Flow, batch: Tensor, seed: int) -> Callable[[], None]:
    def step() -> None:
        torch.manual_seed(seed)  # the same noise and dropout in each mode
        flow.zero_grad(set_to_none=False)
        flow.bits_per_dim(batch).mean().backward()

    return step


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return a line for each mode, and what the columns say."""
    linear = results["linear"]
    names = ("memory", "peak MiB", "step ms", "seconds", "bits/dim", "loss differs", "gradients")
    lines = ["".join(f"{name:>{len(name) + 2}}" for name in names)]
    for memory, result in results.items():
        loss = float(((result["losses"] - linear["losses"]) / linear["losses"]).abs().max())
        gradients = statistics.median(  # of the draws: the largest of a parameter, over its largest
            max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)
            for pairs in map(zip, result["gradients"], linear["gradients"])
        )
        step = result["step"]
        lines.append(
            f"{memory:>8}{step.peak_bytes / 2**20:10.2f}{1e3 * step.cpu_seconds:9.1f}"
            f"{result['seconds']:9.1f}{result['bits']:10.4f}{loss:14.1e}{gradients:11.1e}"
        )
    constant = results["constant"]["step"]
    share = constant.peak_bytes / linear["step"].peak_bytes
    times = constant.cpu_seconds / linear["step"].cpu_seconds
    lines.append(
        f"\nEach was trained for {len(linear['losses'])} steps. Peak and time are those of one.\n"
        "Differences to linear are relative: the largest of the loss in all steps, and of the\n"
        "gradient of any parameter with the same weights. Constant memory takes "
        f"{share:.0%} of the\nbytes, and {times:.2f} times the time."
    )
    return "\n".join(lines)


def draw(flow: Flow, digits: Tensor, out: Path) -> None:
    """Draw samples, ways between digits, and digits back from their latents."""
    from pictures import grid, rows_with_titles

    def ink(images: Tensor) -> Any:
        return grid(16 - images, 17, 16)  # dark on white, as digits are written

    samples = flow.sample(64, temperature=0.7, generator=torch.Generator().manual_seed(1))
    ways = flow.interpolate(digits[:3], digits[3:6], 16).transpose(0, 1).flatten(0, 1)
    back = flow.reconstruct(digits[:16])
    wrong = float((back - digits[:16]).abs().max())
    rows = [
        ("Digits that people wrote", ink(digits[:32])),
        ("Digits that the flow made of noise, at temperature 0.7", ink(samples)),
        ("The way from one digit to another, straight through the latents", ink(ways)),
        (f"To the latents and back: largest error {wrong:.0f} of 17 grey levels", ink(back)),
    ]
    rows_with_titles(rows, "A Glow in constant memory").save(out / "samples.png")


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description="Train one flow in three memory modes.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    arguments = parser.parse_args()
    start = time.perf_counter()
    results = {each: train(each, arguments.epochs, arguments.out) for each in MEMORIES}
    compare(results)
    print(f"\n{table(results)}\n", flush=True)
    constant = results["constant"]["run"]
    draw(constant.model.flow, constant.datamodule.parts["test"], arguments.out)
    curve = recoup.curve(f"{__file__}:build_step", DEPTHS, MEMORIES, repeats=3)
    print(curve)
    curve.figure(arguments.out / "curve.png")
    print(f"\npictures: {arguments.out}/samples.png, {arguments.out}/curve.png")
    print(f"all of it took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
