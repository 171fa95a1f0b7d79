"""Bits per dimension of RealNVP, Glow and Flow++ on MNIST, beside published ones.

    python benchmarks/mnist_bits.py realnvp              # ten epochs; then glow, flowpp
    python benchmarks/mnist_bits.py glow --epochs 3 --alpha 0.05 --data mnist.npz
    python benchmarks/mnist_bits.py --draw               # the picture again

28 x 28 pixels of 256 levels, nothing cropped or scaled; 54,000 pictures to train on, 6,000 to
validate, the 10,000 of the test part to report. Uniform dequantization (Flow++ learns it), and a
logit of margin 1e-6 as in FFJORD and Residual Flows, whose log-determinant counts. Each run adds
its row to the results; a second run of a row replaces it.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from mnist import MNIST, CurveRecord, trained
from run import conditions

from recoup.memory.figures import QUIET, finish, rendered

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "mnist_bits_cpu.json"
PICTURE = ROOT / "docs" / "images" / "mnist_bits.png"
# Sizes for which ten epochs take a quarter of an hour to half an hour of one core.
SIZES = {
    "realnvp": {"num_levels": 2, "num_steps": 2, "width": 16, "depth": 2},
    "glow": {"num_levels": 2, "num_steps": 6, "width": 32},
    "flowpp": {"num_levels": 2, "num_steps": 1, "width": 16, "depth": 1, "num_components": 4},
}
SHOWN = {"realnvp": "RealNVP", "glow": "Glow", "flowpp": "Flow++"}
COLORS = {"realnvp": "#d55e00", "glow": "#0072b2", "flowpp": "#009e73"}
ALPHA = 1e-6
NUM_EPOCHS = 10
NUM_STEPS = 422  # of an epoch
NUM_DRAWS, NUM_PICTURES = 8, 1000


def one(name, data, num_epochs, alpha, memory):
    """Train a flow, test it, and return what was found."""
    settings = {"memory": memory, "learning_rate": 4e-3, "num_warmup_steps": 100}
    settings["num_decay_steps"] = num_epochs * NUM_STEPS
    init_args = {**SIZES[name], "alpha": alpha}
    record = CurveRecord()
    run, metrics = trained(f"{name}-mnist", data, num_epochs, settings, init_args, record)
    return {
        "name": name,
        "alpha": alpha,
        "memory": memory,
        "settings": SIZES[name],
        "num_parameters": sum(p.numel() for p in run.model.flow.parameters()),
        "epochs": num_epochs,
        "num_steps": record.rows[-1]["step"],
        "test_bits_per_dim": metrics["test_bits_per_dim"],
        **_several_draws(run.model.flow, run.datamodule.parts["test"][:NUM_PICTURES]),
        "seconds": record.seconds,
        "curve": record.rows,
    }


@torch.no_grad()
def _several_draws(flow, pictures):
    """Return the bits of some pictures with one draw of noise, and with the mean over several.

    The mean is of densities, not of their logarithms: a tighter bound, and what some report.
    """
    torch.manual_seed(0)
    flow.eval()
    draws = [
        torch.cat([flow.log_prob(each) for each in pictures.split(250)]) for _ in range(NUM_DRAWS)
    ]
    densities = torch.stack(draws)
    nats = {1: densities[0], NUM_DRAWS: densities.logsumexp(0) - math.log(NUM_DRAWS)}
    to_bits = -1 / (flow.num_dims * math.log(2))
    return {f"bits_with_{n}_draws": to_bits * float(found.mean()) for n, found in nats.items()}


def draw(rows):
    """Draw bits per dimension in training, and those of the test part."""

    def panel(axes):
        for row in rows:
            points = [each for each in row["curve"] if each["part"] == "training"]
            epochs = f"{row['epochs']} epoch{'s' if row['epochs'] > 1 else ''}"
            label = f"{SHOWN[row['name']]}, {epochs}: {row['test_bits_per_dim']:.3f} in test"
            if row["alpha"] != ALPHA:
                label += f", margin {row['alpha']:g}"
            axes[0].plot(
                [each["step"] / NUM_STEPS for each in points],
                [each["bits_per_dim"] for each in points],
                color=COLORS[row["name"]],
                linestyle="-" if row["alpha"] < 0.01 else (0, (3, 2)),
                linewidth=1.6,
                label=label,
            )
        label = "published: Real NVP 1.06, Glow 1.05"
        axes[0].axhline(1.055, color=QUIET, linewidth=1.6, linestyle=(0, (1, 1)), label=label)
        axes[0].set_ylim(1.0, 3.0)
        axes[0].set_xlim(0, None)
        axes[0].legend(loc="upper right", frameon=False, fontsize=9)
        finish(axes[0], "MNIST, training loss (bits per dimension)", "Epoch")

    PICTURE.write_bytes(rendered(panel, PICTURE.suffix, (7.5, 4.4), num_panels=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=list(SIZES), help="of a flow")
    parser.add_argument("--data", type=Path, default=MNIST, help="an .npz file")
    parser.add_argument("--epochs", type=int, default=NUM_EPOCHS)
    parser.add_argument("--alpha", type=float, default=ALPHA, help="margin of the logit")
    parser.add_argument("--memory", default="linear")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    arguments = parser.parse_args()
    if not arguments.draw:
        if arguments.name is None:
            parser.error("the name of a flow is needed")
        given = (arguments.data, arguments.epochs, arguments.alpha, arguments.memory)
        row = one(arguments.name, *given)
        print(json.dumps({key: value for key, value in row.items() if key != "curve"}))
        result = {"suite": "mnist_bits", **conditions("cpu"), "runs": [*_others(row), row]}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    draw(json.loads(RESULT.read_text())["runs"])


def _others(row):
    """Return the other rows, as they are now: runs may take place beside each other."""
    rows = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []
    return [r for r in rows if (r["name"], r["alpha"]) != (row["name"], row["alpha"])]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
