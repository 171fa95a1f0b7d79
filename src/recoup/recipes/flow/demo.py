"""The command ``recoup flow demo``: one flow trained in three memory modes, compared."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import recoup
from recoup.flows import Flow, Glow
from recoup.memory import Curve
from recoup.recipes.tables import table

if TYPE_CHECKING:
    from recoup.recipes.training import TrainingCLI

__all__ = ["MEMORIES", "build_step", "demo"]

# Lightning and matplotlib are imported where they are used: the processes that measure the curve
# import this file for `build_step` alone, and need neither.

MEMORIES = ("linear", "sqrt", "constant")
_DEPTHS = (4, 8, 16)
_STEPS_OF_AN_EPOCH = 12  # 1437 digits in batches of 128
_NUM_DRAWS = 5


@dataclass(slots=True)
class _Trained:
    """The results of training in one memory mode."""

    run: TrainingCLI
    seconds: float
    losses: Tensor
    bits_per_dim: float
    peak_bytes: int = 0
    step_seconds: float = 0.0
    gradients: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])


def build_step(depth: int, memory: str) -> tuple[torch.nn.Module, Tensor]:
    """Build a model for `recoup.curve`: a Glow of `depth` steps in each scale, and a batch.

    To measure it from a shell, run ``recoup curve recoup.recipes.flow.demo:build_step``.
    """
    flow = Glow((1, 8, 8), levels=17, num_steps=depth, width=64, memory=memory)  # pyright: ignore[reportArgumentType]
    return _Loss(flow), torch.randint(17, (64, 1, 8, 8), dtype=torch.uint8)


class _Loss(torch.nn.Module):
    """The loss of a flow alone, without the latents that `Flow.forward` returns."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: Tensor) -> Tensor:
        return self.flow.bits_per_dim(x)


def demo(out: str | None = None, epochs: int = 10) -> int:
    """Train a Glow on the digits in linear, sqrt and constant memory, and compare the three.

    Prints a table and the curve of memory and time against depth, and draws pictures: samples,
    reconstructions, the curve.

    Args:
        out: Folder for checkpoints and pictures; runs/flow/demo-1, or the next number, if None.
        epochs: Number of epochs; the configuration glow-digits, which is trained, has 45.

    Returns:
        The exit code.
    """
    from recoup.recipes.mistakes import mistakes_reported

    with mistakes_reported():
        _check_imports()
    from recoup.recipes.run_folder import free_folder

    folder = free_folder(Path("runs", "flow"), "demo") if out is None else Path(out)
    start = time.perf_counter()
    num_threads = torch.get_num_threads()
    # The tensors are too small for a second thread to pay off.
    torch.set_num_threads(1)
    try:
        with mistakes_reported():
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise ValueError(f"`--out` is {folder}, which is not empty. Give a new folder.")
        trained = {memory: _train(memory, folder / memory, epochs) for memory in MEMORIES}
        _compare(trained)
        print(f"\n{_table(trained)}\n")
        print(_verdict(trained))
        flow = trained["constant"].run.model.flow
        pictures = _draw(flow, trained["constant"].run.datamodule.parts["test"], folder)
        curve = _curve()
        print(f"\n{curve.table()}\n")
        pictures["memory and time against depth"] = curve.figure(folder / "curve.png")
        curve.to_csv(folder / "curve.csv")
    finally:
        torch.set_num_threads(num_threads)
    for name, path in pictures.items():
        print(f"{name}: {path}")
    print(f"all of it took {time.perf_counter() - start:.0f} s")
    return 0


def _check_imports() -> None:
    """Raise before training, not after it, if a package is not installed."""
    for module in ("flow.pictures", "flow.train", "progress"):
        importlib.import_module(f"recoup.recipes.{module}")
    importlib.import_module("matplotlib")


def _train(memory: str, out: Path, epochs: int) -> _Trained:
    """Train as ``recoup flow fit`` does, with a learning rate that falls to 0 at the end."""
    from recoup.recipes.flow.steps import MONITOR
    from recoup.recipes.flow.train import prepare
    from recoup.recipes.progress import LossRecord, Progress

    args = ["--config", "glow-digits", "--memory", memory, "--out", str(out)]
    length = ["--epochs", str(epochs), "--model.num_decay_steps", str(epochs * _STEPS_OF_AN_EPOCH)]
    run = prepare([*args, *length])
    record = LossRecord()
    start = time.perf_counter()
    run.fit(record, progress=Progress(MONITOR, title=memory, lines=False))
    seconds = time.perf_counter() - start
    bits_per_dim = float(run.trainer.callback_metrics[MONITOR])
    return _Trained(run, seconds, torch.tensor(record.losses, dtype=torch.float64), bits_per_dim)


def _compare(trained: dict[str, _Trained]) -> None:
    """Measure a step of each mode, with the weights of "linear" and one batch for all.

    Gradients are taken for several draws of the noise, since a ReLU whose input is 0 but for
    rounding may fall on the other side, and its gradient with it.
    """
    first = trained["linear"]
    weights = {name: value.clone() for name, value in first.run.model.flow.state_dict().items()}
    batch = first.run.datamodule.parts["train"][: first.run.datamodule.batch_size]
    for result in trained.values():
        flow: Flow = result.run.model.flow
        flow.load_state_dict(weights) if result is not first else None
        flow.train()
        for seed in range(_NUM_DRAWS):
            _step(flow, batch, seed)()
            found = ((name, parameter.grad) for name, parameter in flow.named_parameters())
            result.gradients.append({name: g.clone() for name, g in found if g is not None})
        measured = recoup.measure(_step(flow, batch, 0), device="cpu", repeats=5)
        result.peak_bytes = measured.peak_bytes
        # CPU time, which other programs on the machine disturb less than wall time.
        result.step_seconds = measured.cpu_seconds or 0.0
        flow.eval()


def _step(flow: Flow, batch: Tensor, seed: int) -> Callable[[], None]:
    def step() -> None:
        torch.manual_seed(seed)  # the same noise and dropout in each mode
        flow.zero_grad(set_to_none=False)
        flow.bits_per_dim(batch).mean().backward()

    return step


def _loss_difference(result: _Trained, other: _Trained) -> float:
    return float(((result.losses - other.losses) / other.losses).abs().max())


def _gradient_difference(result: _Trained, other: _Trained) -> float:
    """Return the largest error of a parameter's gradient, relative to its largest entry.

    It is the median of several draws.
    """
    pairs = list(zip(result.gradients, other.gradients, strict=True))
    if any(set(ours) != set(theirs) for ours, theirs in pairs):
        return float("nan")
    return statistics.median(
        max(
            float((ours[name] - gradient).abs().max() / gradient.abs().max().clamp_min(1e-30))
            for name, gradient in theirs.items()
        )
        for ours, theirs in pairs
    )


def _table(trained: dict[str, _Trained]) -> str:
    first = trained["linear"]
    rows: list[list[str]] = []
    for memory, result in trained.items():
        differences = _loss_difference(result, first), _gradient_difference(result, first)
        rows.append(
            [
                memory,
                f"{result.peak_bytes / 2**20:.2f}",
                f"{1e3 * result.step_seconds:.1f}",
                f"{result.seconds:.1f}",
                f"{result.bits_per_dim:.4f}",
                *("-" if result is first else f"{it:.1e}" if it else "0" for it in differences),
            ]
        )
    header = "memory, peak MiB, step ms, seconds, bits/dim, loss differs by, gradients by"
    return table(header.split(", "), rows)


def _verdict(trained: dict[str, _Trained]) -> str:
    linear, constant = trained["linear"], trained["constant"]
    num_steps = len(linear.losses)
    return (
        f"Each was trained for {num_steps} steps in float32. Peak MiB and ms of the processor are "
        "those of one\ntraining step. Differences to linear are relative: the largest of the loss "
        f"in {num_steps} steps, and the\nlargest of the gradient of any parameter, with the same "
        f"weights (the median of {_NUM_DRAWS} draws of noise).\n"
        f"Constant memory takes {constant.peak_bytes / linear.peak_bytes:.0%} of the bytes, and "
        f"{constant.step_seconds / linear.step_seconds:.2f} times the time."
    )


def _draw(flow: Flow, test: Tensor, folder: Path) -> dict[str, Path]:
    """Draw samples and reconstructions."""
    from recoup.recipes.flow.pictures import grid, rows_with_titles, save

    levels = flow.levels or 256

    def ink(images: Tensor) -> Any:
        return grid(levels - 1 - images, levels, 16)  # dark on white, as digits are written

    samples = flow.sample(64, temperature=0.7, generator=torch.Generator().manual_seed(1))
    frames = flow.interpolate(test[:3], test[3:6], 16).transpose(0, 1).flatten(0, 1)
    rows = [
        ("Digits that people wrote", ink(test[:32])),
        ("Digits that the flow made of noise, at temperature 0.7", ink(samples)),
        ("The way from one digit to another, straight through the latents", ink(frames)),
    ]
    title = "A Glow in constant memory"
    first = save(rows_with_titles(rows, title), folder / "samples.png")
    originals = test[:16]
    back = flow.reconstruct(originals)
    wrong = float((back - originals).abs().max())
    rows = [("Digits", ink(originals)), ("The same, back from their latents", ink(back))]
    title = f"To the latents and back: largest error {wrong:.0f} of {levels} grey levels"
    note = f"{_rounding(flow, originals):.0e} before rounding to grey levels"
    path = save(rows_with_titles(rows, title, note), folder / "reconstructions.png")
    return {"samples": first, "reconstructions": path}


@torch.no_grad()
def _rounding(flow: Flow, images: Tensor) -> float:
    """Return the largest error of the round trip to the latents, in grey levels, unrounded."""
    if flow.dequantize is None:
        return 0.0
    y, _ = flow.dequantize(images)
    back, _ = flow.chain.inverse(flow.chain(y)[0])
    return float((back - y).abs().max()) * flow.dequantize.levels


def _curve() -> Curve:
    """Measure memory and time against depth, each point in a fresh process."""
    from recoup.recipes.progress import progress_bar

    with progress_bar() as bar:
        task = bar.add_task("curve", total=len(_DEPTHS) * len(MEMORIES), note="")
        return recoup.curve(
            "recoup.recipes.flow.demo:build_step",
            _DEPTHS,
            MEMORIES,
            repeats=3,
            progress=lambda point: bar.update(
                task, advance=1, note=f"depth {point.depth}, {point.memory}"
            ),
        )
