"""Write the tables of the README and the documentation, and the pictures of plans, from
benchmarks/results; this does not measure.
"""

import json
from pathlib import Path

import exact_tables
import plan_figure
import plan_tables
import tables
from tables import mib

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"


def write() -> None:
    """Put the tables between the marks and draw, or leave all alone if a result is missing."""
    names = (
        "couplings",
        "chains",
        "overhead",
        "weights",
        "gradients",
        "language_model",
        "language_model_curve",
        "plans",
        "compiled",
        "drift",
        "flows",
        "mnist",
        "tiles",
    )
    results = ROOT / "benchmarks" / "results"
    paths = {name: results / f"{name}_cpu.json" for name in names}
    if not all(path.exists() for path in paths.values()):
        return
    found = {name: json.loads(path.read_text()) for name, path in paths.items()}
    parts = {
        "Invertible couplings, chains": tables.couplings_table(found["couplings"], found["chains"]),
        "Small networks": tables.overhead_table(found["overhead"]),
        "Weights": tables.weights_table(found["weights"]),
        "Gradients": tables.gradients_table(found["gradients"]),
        "A language model": tables.language_model_table(
            found["language_model"], found["language_model_curve"]
        ),
        "Plans": plan_tables.plans_table(found["plans"]),
        "Compiled plans": plan_tables.compiled_table(found["compiled"]),
        "Drift": tables.drift_table(found["drift"]),
        "Flows beside other libraries": tables.flows_table(found["flows"]),
        "Flows on MNIST": tables.mnist_table(found["mnist"]),
        "Tiles": tables.tiles_table(found["tiles"]),
    }
    for name, title, table in (
        ("offload", "Offloading", tables.offload_table),
        ("programs", "Programs", tables.programs_table),
        ("foreign_flows", "Flows of other libraries", tables.foreign_flows_table),
        ("language_model_exact", "A training, step by step", exact_tables.training_table),
        ("mnist_bits", "Bits per dimension on MNIST", exact_tables.bits_table),
    ):
        path = results / f"{name}_cpu.json"
        if path.exists():
            parts[title] = table(json.loads(path.read_text()))
    for path in sorted(results.glob("budgets_*.json")):
        title = f"On {json.loads(path.read_text())['device_name']}"
        parts[title] = tables.budgets_table(json.loads(path.read_text()))
    _put(ROOT / "README.md", _summary(found))
    _put(
        ROOT / "docs" / "benchmarks.md",
        "\n\n".join(f"## {title}\n\n{part}" for title, part in parts.items()),
    )

    plan_figure.write(found["plans"], "plans")
    plan_figure.write(found["compiled"], "compiled", plan_figure.PATH.with_name("compiled.png"))


def _summary(found: dict) -> str:
    """Return the figures of the README in words, each with what others take."""
    long_windows = found["language_model"]["long_windows"]
    glow = {(r["name"], r["num_steps"]): r for r in found["flows"]["glow"]}
    compiled = [g for g in found["compiled"]["gains"] if not g["name"].startswith("least peak")]
    models = [*dict.fromkeys(g["model"].partition(",")[0] for g in compiled)]
    overs = [g["ours_over_rival"] for g in compiled if g["ours_over_rival"] is not None]
    heads = {r["name"]: r for r in found["tiles"]["head"]}
    head = heads["recoup.tiled_loss"]
    weights = {
        name: dict(row)[name]
        for row in found["weights"]["memory"]
        if (row["layer"], row["dtype"]) == ("Linear 4096x4096", "float32")
        for name in ("torch parametrize", "recoup")
    }
    num_won = sum(g["is_won"] for g in compiled)
    won = "all of them" if num_won == len(compiled) else str(num_won)
    figures = {
        "In the same memory, faster": (
            f"in the bytes that each of {len(compiled)} other ways to train "
            f"{', '.join(models[:-1])} and {models[-1]} takes (`torch.compile` at 7 budgets among "
            f"them), `recoup.plan(compile=True)` was at least as fast as {won}, in "
            f"{min(overs):.2f} to {max(overs):.2f} of their time."
        ),
        "A tenth of a loss": (
            f"GPT-2's output layer and loss over 4096 tokens take {mib(head['peak_bytes'])} MiB "
            f"in place of {mib(heads['plain']['peak_bytes'])}, at {head['over_plain']:.2f} of the "
            "time."
        ),
        "Any depth": (
            f"a normalizing flow of 32 steps trains in {size(glow['recoup constant', 16])} MiB, "
            f"and so does a deeper one; nflows takes {size(glow['nflows', 16])}, FrEIA "
            f"{size(glow['FrEIA', 16])}."
        ),
        "Noise for nothing": (
            f"dropout on the weight of a `Linear(4096, 4096)` keeps {mib(weights['recoup'])} MiB "
            f"for backward; torch's parametrization keeps {mib(weights['torch parametrize'])}."
        ),
        "Long windows": (
            f"an AWD-LSTM over windows of 2000 steps trains in "
            f"{mib(long_windows[3]['peak_bytes'])} MiB in place of "
            f"{mib(long_windows[1]['peak_bytes'])}."
        ),
    }
    names = dict.fromkeys(
        found[suite]["device_name"]
        for suite in ("compiled", "tiles", "flows", "weights", "language_model")
    )
    conditions = (
        f"<sub>{' and '.join(names)}, two cores, torch {found['flows']['versions']['torch']}, "
        "peaks by the allocator's events; no figure here is from a GPU. `make bench` measures "
        "again; [all tables and their conditions](docs/benchmarks.md), [those of an H200]"
        "(docs/benchmarks.md#on-nvidia-h200) too.</sub>"
    )
    lines = [f"- **{title}**: {text}" for title, text in figures.items()]
    return "\n".join([*lines, "", conditions])


def size(row: dict) -> str:
    return f"{row['peak_bytes'] / 2**20:.1f}"


def _put(path: Path, table: str) -> None:
    text = path.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    path.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}")


if __name__ == "__main__":
    write()
