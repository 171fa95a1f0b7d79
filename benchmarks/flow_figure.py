"""Draw docs/images/flows.png from benchmarks/results: curves on MNIST, and peaks against depth."""

import json
from pathlib import Path

from recoup.memory.figures import COLORS, INK, QUIET, finish, rendered

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PEAKS = {
    "normflows": (QUIET, "normflows"),
    "FrEIA": (QUIET, "FrEIA"),
    "nflows": (QUIET, "nflows"),
    "recoup linear": (COLORS["linear"], "recoup linear"),
    "recoup sqrt": (COLORS["sqrt"], "recoup sqrt"),
    "recoup constant": (COLORS["constant"], "recoup constant"),
}


def draw(path=ROOT / "docs" / "images" / "flows.png"):
    mnist = json.loads((RESULTS / "mnist_cpu.json").read_text())
    flows = json.loads((RESULTS / "flows_cpu.json").read_text())

    def panels(axes):
        _curves(axes[0], mnist["runs"])
        _peaks(axes[1], flows["glow"])

    path.write_bytes(rendered(panels, path.suffix, (11.0, 4.2), num_panels=2))


def _curves(axes, runs):
    names = {"realnvp": "RealNVP", "glow": "Glow"}
    for name, dashes in (("realnvp", "-"), ("glow", (0, (4, 1.5)))):
        for memory, width in (("linear", 4.5), ("constant", 1.6)):
            run = next(r for r in runs if (r["name"], r["memory"]) == (name, memory))
            points = [row for row in run["curve"] if row["part"] == "training"]
            points = [row for row in points if row["step"] >= 150]
            axes.plot(
                [row["step"] for row in points],
                [row["bits_per_dim"] for row in points],
                color=COLORS[memory],
                linestyle=dashes,
                linewidth=width,
                alpha=0.5 if memory == "linear" else 1.0,
                label=f"{names[name]}, {memory}: {run['test_bits_per_dim']:.3f} in test, "
                f"peak {run['peak_bytes'] / 2**20:.0f} MiB",
            )
    axes.set_ylim(1.7, 2.75)
    axes.set_xlim(0, None)
    axes.legend(loc="upper right", frameon=False, fontsize=9)
    finish(axes, "MNIST, training loss (bits per dimension)", "Steps of 128 pictures")


def _peaks(axes, rows):
    ends = []
    for name, (color, label) in PEAKS.items():
        points = [row for row in rows if row["name"] == name]
        depths = [row["num_steps"] for row in points]
        peaks = [row["peak_bytes"] / 2**20 for row in points]
        is_ours = name.startswith("recoup")
        axes.plot(
            depths, peaks, color=color, marker="o", markersize=4, linewidth=2.4 if is_ours else 1.2
        )
        ends.append((peaks[-1], label, color if is_ours else INK))
    for peak, label, color in ends:
        axes.annotate(
            label, (16, peak), xytext=(8, -3), textcoords="offset points", color=color,
            fontsize=9.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},  # over the grid
        )  # fmt: skip
    axes.set_ylim(0, 16)
    axes.set_xlim(0, 21.5)
    axes.set_xticks([2, 8, 16])
    finish(axes, "Peak of a training step (MiB)", "Steps of a Glow at each of two scales")


if __name__ == "__main__":
    draw()
