"""Write the tables of the README and the documentation from benchmarks/results."""

import json
from pathlib import Path

import exact_tables
import tables
from tables import mib, torch_sequential

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"


def write() -> None:
    """Put the tables between the marks, or leave all files alone if a result is missing."""
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
        "Plans": tables.plans_table(found["plans"]),
        "Compiled plans": tables.compiled_table(found["compiled"]),
        "Drift": tables.drift_table(found["drift"]),
        "Flows beside other libraries": tables.flows_table(found["flows"]),
        "Flows on MNIST": tables.mnist_table(found["mnist"]),
    }
    tiles = results / "tiles_cpu.json"
    if tiles.exists():
        parts["Tiles"] = tables.tiles_table(json.loads(tiles.read_text()))
    offload = results / "offload_cpu.json"
    if offload.exists():
        parts["Offloading"] = tables.offload_table(json.loads(offload.read_text()))
    for name, title, table in (
        ("language_model_exact", "A training, step by step", exact_tables.training_table),
        ("mnist_bits", "Bits per dimension on MNIST", exact_tables.bits_table),
    ):
        path = results / f"{name}_cpu.json"
        if path.exists():
            parts[title] = table(json.loads(path.read_text()))
    _put(ROOT / "README.md", _summary(found))
    _put(
        ROOT / "docs" / "benchmarks.md",
        "\n\n".join(f"## {title}\n\n{part}" for title, part in parts.items()),
    )


def _summary(found: dict) -> str:
    """Return the table of the README: a row for each claim, beside the best other library."""
    memory = {
        (r["name"], r["dropout"]): r["peak_bytes"]["64"] for r in found["couplings"]["memory"]
    }
    seconds = {r["name"]: r["median_over_plain"] for r in found["couplings"]["seconds"]}
    sequential = {(r["name"], r["layers"]): r for r in found["chains"]["sequential"]}
    sqrt, peer = sequential["recoup sqrt", 100], torch_sequential(sequential)
    sums = {r["name"]: r["peak_bytes"] for r in found["gradients"]["sums"]}
    long_windows = found["language_model"]["long_windows"]
    glow = {(r["name"], r["num_steps"]): r for r in found["flows"]["glow"]}
    runs = {(r["name"], r["memory"]): r for r in found["mnist"]["runs"]}
    linear, constant = runs["realnvp", "linear"], runs["realnvp", "constant"]
    gains = [g for g in found["plans"]["gains"] if not g["name"].startswith("least peak")]
    compiled = [g for g in found["compiled"]["gains"] if not g["name"].startswith("least peak")]
    models = " and ".join(dict.fromkeys(g["model"].partition(",")[0] for g in compiled))
    overs = [g["ours_over_rival"] for g in compiled if g["ours_over_rival"] is not None]
    weights = {
        name: dict(row)[name]
        for row in found["weights"]["memory"]
        if (row["layer"], row["dtype"]) == ("Linear 4096x4096", "float32")
        for name in ("torch parametrize", "recoup")
    }
    rows = [
        (
            "peak of a step of 64 invertible conv blocks",
            (
                f"plain {mib(memory['plain', 0.0])} MiB, revtorch "
                f"{memory['revtorch', 0.0] / 2**20:.1f}"
            ),
            (
                f"{memory['recoup constant', 0.0] / 2**20:.1f} MiB "
                f"({memory['recoup constant', 0.1] / 2**20:.1f} with dropout), "
                f"{seconds['recoup constant']:.2f} of the plain time"
            ),
        ),
        (
            "peak of a training step of a Glow of 32 steps",
            (
                f"nflows {glow['nflows', 16]['peak_bytes'] / 2**20:.1f} MiB, FrEIA "
                f"{glow['FrEIA', 16]['peak_bytes'] / 2**20:.1f}"
            ),
            f"{glow['recoup constant', 16]['peak_bytes'] / 2**20:.1f} MiB at any depth",
        ),
        (
            "RealNVP on MNIST, 5 epochs: test bits/dim, peak",
            f"linear {linear['test_bits_per_dim']:.3f}, {mib(linear['peak_bytes'])} MiB",
            f"constant {constant['test_bits_per_dim']:.3f}, {mib(constant['peak_bytes'])} MiB",
        ),
        (
            "100 layers, `sqrt`: peak in states and tapes, forwards",
            f"torch {peer['peak_units']:.0f}, {peer['num_forwards']}",
            f"{sqrt['peak_units']:.0f}, {sqrt['num_forwards']}",
        ),
        (
            "training GPT-2 and ResNet-50 in fewer bytes",
            f"{len(gains)} other ways",
            f"a plan in the same bytes is as fast as {sum(g['is_won'] for g in gains)} of them",
        ),
        (
            f"the same for {models}, with `compile=True`",
            f"{len(compiled)} other ways, torch.compile at 7 budgets among them",
            (
                f"in the same bytes {min(overs):.2f} to {max(overs):.2f} of the time of "
                f"{sum(g['is_won'] for g in compiled)} of them"
            ),
        ),
        (
            "kept by weight dropout, Linear 4096x4096",
            f"torch parametrize {mib(weights['torch parametrize'])} MiB",
            f"{mib(weights['recoup'])} MiB",
        ),
        (
            "peak of 16 summed backwards over 128 MiB of weights",
            f"candle's merge {mib(sums['merged out of place (candle)'])} MiB",
            f"{mib(sums['recoup'])} MiB",
        ),
        (
            "peak of AWD-LSTM, windows of 2000 steps",
            f"torch {mib(long_windows[1]['peak_bytes'])} MiB",
            f"{mib(long_windows[3]['peak_bytes'])} MiB",
        ),
    ]
    lines = ["| | others | recoup |", "|---|---|---|", *(f"| {' | '.join(r)} |" for r in rows)]
    couplings = found["couplings"]
    conditions = (
        f"<sub>{couplings['device_name']}, two cores, torch {couplings['versions']['torch']}, "
        "peaks by the allocator's events. `make bench` measures again; [all tables and their "
        "conditions](docs/benchmarks.md) also show where others are faster.</sub>"
    )
    return "\n".join([*lines, "", conditions])


def _put(path: Path, table: str) -> None:
    text = path.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    path.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}")
