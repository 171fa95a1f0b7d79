"""AWD-LSTM's training beside the same written out by hand, on a text of yours.

    python benchmarks/language_model_exact.py wikitext-2/ --precision 64-true --vocab-size 10000
    python benchmarks/language_model_exact.py wikitext-2/ --vocab-size 10000   # float32, 300 steps
    python benchmarks/language_model_exact.py --draw      # the picture again

The folder has a text for training and one for validation, tokenized before (`train.txt`,
`valid.txt`). Both trainings have the same first weights and the same draws, so they differ by
rounding alone. A third one, by hand, begins from weights that are off by one rounding error, to
show what rounding alone grows to. Each run adds its rows to the results.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from awd_lstm_by_hand import Beside, numbers_of  # noqa: E402
from run import conditions  # noqa: E402

from examples.language_model import main as example  # noqa: E402
from recoup.memory.figures import COLORS, QUIET, finish, rendered  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "language_model_exact_cpu.json"
PICTURE = ROOT / "docs" / "images" / "exact.png"
PRESETS = ("tiny", "standard-lstm-200")
ROUNDINGS = {"32-true": 1 + 2.0**-23, "64-true": 1 + 2.0**-52}
NAMES = {"32-true": "float32", "64-true": "float64"}


def one(preset, folder, precision, num_steps, num_windows, vocab_size):
    """Train for some steps of the first epoch, validate, and return what differs."""
    config = ROOT / "examples" / "configs" / "language_model" / f"{preset}.yaml"
    args = ["-c", str(config), "--data.path", str(folder), "--data.tokens", "whitespace"]
    args += ["--trainer.precision", precision, "--trainer.max_epochs", "1"]
    args += ["--trainer.enable_progress_bar", "false"]
    args += ["--trainer.limit_train_batches", str(num_steps)]
    if vocab_size:
        args += ["--data.max_vocab_size", str(vocab_size)]
    args += ["--trainer.limit_val_batches", str(num_windows)]
    with tempfile.TemporaryDirectory() as out:
        run = example([*args, f"--trainer.logger.init_args.save_dir={out}"], run=False)
        data = run.datamodule
        number = {token: n for n, token in enumerate(data.vocabulary)}
        train, validation = (_text(folder, part, number) for part in ("train", "valid"))
        num_columns = data.eval_batch_size
        num_rows = len(validation) // num_columns
        parts = validation[: num_rows * num_columns].view(num_columns, num_rows)
        validation = parts[:, : num_windows * data.bptt + 1].flatten()
        columns = (data.batch_size, num_columns)
        by_hand = Beside(train, validation, columns)
        nudged = Beside(train, validation, columns, nudge=ROUNDINGS[precision])
        start = time.perf_counter()
        run.trainer.callbacks += [by_hand, nudged]
        run.trainer.fit(run.model, data)
    return {
        "preset": preset,
        "precision": precision,
        "vocab_size": data.vocab_size,
        "num_words": sum(len(window) - 1 for window in _first(data, num_steps)) * columns[0],
        "num_validation_words": (min(num_rows, num_windows * data.bptt + 1) - 1) * num_columns,
        "num_steps": len(by_hand.losses),
        "loss_error": by_hand.loss_error,
        "gradient_error": by_hand.gradient_error,
        "perplexity": by_hand.perplexities[0],
        "perplexity_error": by_hand.perplexity_error,
        "seconds": time.perf_counter() - start,
        "losses": by_hand.losses,
        "nudged_losses": [theirs for _, theirs in nudged.losses],
        "nudged_perplexity": nudged.perplexities[0][1],
    }


def _text(folder, part, number):
    (path,) = (file for file in folder.iterdir() if part in file.name)
    return numbers_of(path, number)


def _first(data, num_steps):
    for window, _ in zip(data.train_dataloader(), range(num_steps), strict=False):
        yield window


def draw(rows):
    """Draw the curves of the loss, and in each precision how far they are apart."""

    def panels(axes):
        for precision, panel in zip(ROUNDINGS, reversed(axes[1:]), strict=True):
            least = (ROUNDINGS[precision] - 1) / 10
            of_precision = [row for row in rows if row["precision"] == precision]
            for row, color in zip(of_precision, (COLORS["linear"], COLORS["sqrt"]), strict=True):
                ours, theirs = zip(*row["losses"], strict=True)
                steps = range(1, len(ours) + 1)
                if precision == "64-true":
                    label = f"{row['preset']}, by hand"
                    axes[0].plot(steps, theirs, color, alpha=0.35, linewidth=4.5, label=label)
                    label = f"{row['preset']}, example"
                    axes[0].plot(steps, ours, color, linewidth=0.9, label=label)
                label = f"{row['preset']}: example and by hand"
                panel.plot(steps, _apart(ours, theirs, least), color, linewidth=1.2, label=label)
                apart = _apart(row["nudged_losses"], theirs, least)
                label = f"{row['preset']}: by hand, and a rounding error off"
                style = "-" if row is of_precision[0] else (0, (3, 2))
                panel.plot(steps, apart, QUIET, linestyle=style, linewidth=1.0, label=label)
            panel.set_yscale("log")
            panel.set_ylim(1e-17, 1.0)
            finish(panel, f"Difference of the losses, relative, {NAMES[precision]}", "Step")
        axes[0].legend(loc="upper right", frameon=False, fontsize=9)
        finish(axes[0], "Loss of a training step in float64, in nats", "Step")
        axes[2].legend(loc="lower right", frameon=False, fontsize=8)

    PICTURE.write_bytes(rendered(panels, PICTURE.suffix, (16.0, 4.2), num_panels=3))


def _apart(ours, theirs, least):
    # A difference of 0 has no logarithm.
    return [max(least, abs(a - b) / abs(b)) for a, b in zip(ours, theirs, strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="a folder with a text")
    parser.add_argument("--precision", choices=["32-true", "64-true"], default="32-true")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--windows", type=int, default=100, help="of validation")
    parser.add_argument("--vocab-size", type=int, help="at most; that of the preset if left out")
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    arguments = parser.parse_args()
    if arguments.folder is None and not arguments.draw:
        parser.error("the folder of a text is needed")
    for preset in () if arguments.draw else arguments.presets:
        lengths = (arguments.steps, arguments.windows, arguments.vocab_size)
        row = one(preset, arguments.folder, arguments.precision, *lengths)
        print(json.dumps({k: v for k, v in row.items() if not k.endswith("losses")}), flush=True)
        result = {"suite": "language_model_exact", **conditions("cpu"), "runs": _with(row)}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    draw(json.loads(RESULT.read_text())["runs"])


def _with(row):
    """Return all rows, the new one in place of an older one of its kind."""
    rows = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []
    others = [r for r in rows if (r["preset"], r["precision"]) != (row["preset"], row["precision"])]
    return sorted(
        [*others, row], key=lambda r: (r["precision"] == "32-true", r["preset"] != "tiny")
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
