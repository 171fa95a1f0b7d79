"""The tables of docs/benchmarks.md, from the results of each benchmark; of plans: plan_tables."""

from collections.abc import Iterable

NAMES = (
    "plain",
    "torch checkpoint, each block",
    "torch checkpoint_sequential, sqrt",
    "memcnn",
    "revtorch",
    "revlib",
    "recoup sqrt",
    "recoup constant",
)
WEIGHTS = (
    "by hand",
    "torch parametrize",
    "fastai-style",
    "torchnlp",
    "RETURNN scope",
    "recoup",
)


def couplings_table(couplings: dict, chains: dict) -> str:
    seconds = {row["name"]: row for row in couplings["seconds"]}
    memory = {(row["name"], row["dropout"]): row["peak_bytes"] for row in couplings["memory"]}

    def cells(name: str) -> tuple[str, ...]:
        peaks, dropped = memory[name, 0.0], memory.get((name, 0.1))
        with_dropout = mib(dropped["64"], 2) if dropped else "wrong gradient"
        time = f"{seconds[name]['median_over_plain']:.2f}"
        return bold(name), mib(peaks["8"], 2), mib(peaks["64"], 2), with_dropout, time

    head = "conv couplings, 8x16x32x32 | peak MiB, 8 blocks | 64 blocks | with dropout, 64 | time"
    sequential = {(row["name"], row["layers"]): row for row in chains["sequential"]}
    sqrt, slots = sequential["recoup sqrt", 100], sequential["recoup 44 slots", 1000]
    peer = torch_sequential(sequential)
    return page(
        table(head, map(cells, NAMES)),
        f"`sqrt` over 100 layers peaks at {sqrt['peak_units']:.0f} units with "
        f"{sqrt['num_forwards']} forwards (torch's `checkpoint_sequential`: "
        f"{peer['peak_units']:.0f} and {peer['num_forwards']}); 44 slots over 1000 layers take "
        f"{slots['num_forwards']} forwards, the optimum.",
        "<sub>Peaks by the allocator's events; time is processor time of one thread at 16 blocks "
        f"over plain, median of {seconds['plain']['rounds']} interleaved rounds. "
        f"{where(couplings, 'memcnn', 'revtorch', 'revlib')}; `make bench`.</sub>",
    )


def overhead_table(found: dict) -> str:
    def of(table: str, name: str, key: str = "over_plain") -> float:
        return next(row[key] for row in found[table] if row["name"].startswith(name))

    checkpoint, peer = "recoup.checkpoint", "torch checkpoint"
    small, layer = "20 blocks of `Linear(8, 8)` and tanh", "`Linear(64, 64)`, its weight with"
    rows = [
        ("a region of three operators", peer, of("region", checkpoint, "beyond_over_torchs")),
        (f"{small}, `sqrt`", "plain", of("sequential", "recoup")),
        (f"{small}, torch's `checkpoint_sequential`", "plain", of("sequential", "torch")),
        (f"{layer} noise", "plain", of("weights", "noise")),
        (f"{layer} dropout", "plain", of("weights", "dropout")),
        (f"{layer} both", "plain", of("weights", "dropout and noise")),
        ("`GradStore.backward` and `step`, 400 parameters", "plain", of("store", "recoup")),
        ("the demo's Glow, 16 steps, `sqrt`", "linear", of("glow", "sqrt", "over_linear")),
        ("the same, `constant`", "linear", of("glow", "constant", "over_linear")),
    ]
    rows += [
        (f"{row['model']} of transformers", peer, row[f"over_{peer}"])
        for row in found["transformers"]
        if row["name"] == checkpoint
    ]
    time = {row["name"]: row["microseconds"] for row in found["region"]}
    without = time["plain"] + time["second run"]
    flows = {row["name"]: row["over_recoup linear"] for row in found["glow_of_others"]}
    return page(
        table(
            "work | over | ratio", ((work, beside, f"{value:.2f}") for work, beside, value in rows)
        ),
        f"A region adds {time[checkpoint] - without:.0f} us to the second run itself (torch: "
        f"{time[peer] - without:.0f}). A training step of a small Glow takes FrEIA "
        f"{flows['FrEIA']:.2f} of recoup's; with rotations that are fixed, "
        f"{flows['FrEIA, fixed rotations']:.2f}, and recoup "
        f"{flows['recoup linear, fixed rotations']:.2f}.",
        "<sub>Networks so small that Python takes the time. Processor time of one thread, short "
        "turns, the median of the ratios of the rounds. "
        f"{where(found, 'transformers', 'FrEIA')}; `make bench ARGS=overhead`.</sub>",
    )


def weights_table(weights: dict) -> str:
    alone = weights["alone"] if isinstance(weights["alone"], dict) else {}
    memory = {(row["layer"], row["dtype"]): dict(row) for row in weights["memory"]}
    for row in alone.get("memory", ()):
        memory[row["layer"], row["dtype"]]["RETURNN scope"] = row["RETURNN scope"]
    seconds = _over_plain(weights["seconds"]) | _over_plain(alone.get("seconds", ()))
    linear, lstm = "Linear 4096x4096", "LSTM 400, 1150"
    columns = ((linear, "float32"), (linear, "bfloat16 autocast"), (lstm, "float32"))

    def cells(name: str) -> tuple[str, ...]:
        kept = (memory[column].get(name, "-") for column in columns)
        times = (seconds.get((layer, "dropout", name)) for layer in (linear, lstm))
        return (
            bold(name),
            *(value if isinstance(value, str) else mib(value, 2) for value in kept),
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in times),
        )

    head = f"weight dropout | MiB kept, {linear} | in bf16 autocast | {lstm} | its time | LSTM's"
    noise = {name: seconds[linear, "noise", name] for name in ("by hand", "recoup")}
    small = {(row["kind"], row["name"]): row["microseconds_beyond"] for row in weights["overhead"]}
    return page(
        table(head, map(cells, WEIGHTS)),
        f"With weight noise the step takes {noise['recoup']:.2f} of plain (drawn and kept: "
        f"{noise['by hand']:.2f}). A weight of 64x64 costs {small['dropout', 'recoup']:.0f} us "
        f"with dropout, {small['noise', 'recoup']:.0f} us with noise.",
        "<sub>Kept beyond the plain layer; time of a step over plain, wall time on "
        f"{num_threads(weights)}, median of 9 interleaved rounds. "
        f"{where(weights, 'returnn', 'pytorch-nlp')}.</sub>",
    )


def gradients_table(gradients: dict) -> str:
    peaks = {row["name"]: row["peak_bytes"] for row in gradients["sums"]}
    loops = {(row["name"], row["num_segments"]): row for row in gradients["loops"]}
    plain, ours = loops["one backward", 256], loops["recoup, inputs", 256]
    sqrt = loops["recoup, sqrt", 256]
    return page(
        "Sixteen backwards over 128 MiB of shared weights peak at "
        f"{mib(peaks['recoup'])} MiB in a `GradStore` (a list of gradients "
        f"{mib(peaks['list of stores'])}, candle's merge "
        f"{mib(peaks['merged out of place (candle)'])}). A recurrent chain of 256 segments "
        f"trains in {mib(ours['peak_bytes'])} MiB with their inputs kept, in "
        f"{mib(sqrt['peak_bytes'])} with `sqrt` (plain {mib(plain['peak_bytes'])}), at "
        f"{ours['seconds'] / plain['seconds']:.2f} and "
        f"{sqrt['seconds'] / plain['seconds']:.2f} of the plain time.",
        "<sub>Peaks by the allocator's events, processor time of one thread; a cell of two layers "
        f"of 128 units, 1024 rows. {where(gradients)}.</sub>",
    )


def language_model_table(found: dict, curve: dict) -> str:
    shown = {"plain": "plain nn.LSTM, no dropout", "parametrize": "torch parametrize"}
    rows = (
        (
            shown.get(row["name"], f"**{row['name']}**"),
            f"{row['speed_over_plain']:.2f}",
            mib(row["peak_bytes"]),
        )
        for row in found["speeds"]
    )
    short, whole, _, bounded = found["long_windows"]
    validated = [row for row in curve["curve"] if row["part"] == "validation"]
    perplexities = ", ".join(f"{row['perplexity']:.0f}" for row in validated)
    speed = bounded["tokens_per_second"] / whole["tokens_per_second"]
    return page(
        table("AWD-LSTM, 600 units, WikiText-2 | speed over plain | peak MiB", rows),
        f"A window of {whole['bptt']} steps trains in {mib(bounded['peak_bytes'])} MiB, where "
        f"one of {short['bptt']} takes {mib(short['peak_bytes'])} and torch "
        f"{mib(whole['peak_bytes'])}, at {speed:.2f} of the speed. Perplexity in validation "
        f"after each epoch of 1.84 million words: {perplexities} (published: 80.1, after 750 "
        "epochs of all 2.09 million).",
        "<sub>Batches of 80, windows of 70 (10 and 2000); forward and backward, wall time on "
        f"{num_threads(found)}, the fastest of 8 rounds in turn; peaks by the "
        f"allocator's events. {where(found)}.</sub>",
    )


def drift_table(found: dict) -> str:
    rows = (
        (
            f"initial scale x{row['scale']:.0f}, {row['depth']} blocks",
            f"{row['unguarded_error']:.1e}",
            f"{row['guarded_error']:.1e}",
            str(row["num_kept"]),
        )
        for row in found["stiff"]
    )
    cost = found["overhead"][0]
    best = max(0.0, cost["guarded_over_unguarded"] - 1)
    return page(
        table("additive couplings, float32 | unguarded | guarded | states kept", rows),
        "<sub>Error of the gradient in constant memory, relative to linear memory, the worst of "
        "three steps; networks of 32, 64 and 32 units with tanh, batches of 64. The guard costs "
        f"{best:.1%} of a step of 16 conv couplings (the fastest of {cost['rounds']} rounds; of "
        f"medians {cost['median_over_unguarded'] - 1:.1%}). {where(found)}.</sub>",
    )


def mnist_table(found: dict) -> str:
    """Return a row for each run, and the time of a step."""
    shown = {"realnvp": "RealNVP", "glow": "Glow", "nice": "NICE", "nice-exact": "NICE, exact"}
    rows = (
        (
            f"{shown[row['name']]}, {row['memory']}",
            f"{row['num_parameters']:,}",
            f"{row['test_bits_per_dim']:.3f}",
            mib(row["peak_bytes"], 1),
        )
        for row in found["runs"]
    )
    ratios = ", ".join(
        f"{shown[row['name']]} {row['constant_over_linear']:.2f}" for row in found["seconds"]
    )
    minutes = sum(row["seconds"] for row in found["runs"]) / 60
    return page(
        "![MNIST in linear and constant memory, and peaks against depth](images/flows.png)",
        table("MNIST, 28x28, 256 levels | parameters | test bits/dim | peak MiB of a step", rows),
        f"A step in constant memory takes, of one in linear memory: {ratios} (the fastest of 8 "
        "each, in turn). The networks are small, so regions cost much. Published, with other "
        "conventions and far larger models: NICE 4.36, i-ResNet 1.06, Residual Flow 0.97.",
        f"<sub>{found['runs'][0]['epochs']} epochs in batches of 128 images (54,000), Adamax "
        "or Adam, cosine; uniform dequantization, a logit of margin 0.05 whose log-determinant "
        "counts (NICE: none), 10,000 test pictures with one draw of noise. All runs together "
        f"{minutes:.0f} minutes of processor time, on a machine that had other work. "
        f"{where(found)}.</sub>",
    )


def tiles_table(found: dict) -> str:
    shape = found["shape"]
    parts = {"head": f"head and loss, {shape['vocabulary']} tokens", "mlp": "MLP"}
    rows = (
        (
            f"{title}: {bold(row['name'])}",
            str(row["tiles"]),
            mib(row["peak_bytes"]),
            f"{row['bytes_over_plain']:.3f}",
            f"{row['over_plain']:.2f}",
        )
        for part, title in parts.items()
        for row in found[part]
    )
    num_tokens = shape["batch"] * shape["length"]
    head = f"{num_tokens} tokens, {shape['units']} units | tiles | peak MiB | of plain | time"
    return page(
        table(head, rows),
        "<sub>Forward and backward, gradients with them; float32, a tenth of the targets ignored. "
        "Other libraries' ways are written down in `benchmarks/tiles.py` in torch's operators. "
        f"Wall time on {num_threads(found)}, the fastest round of each. "
        f"{where(found)}; `make bench ARGS=tiles`.</sub>",
    )


def programs_table(found: dict) -> str:
    def cells(row: dict, *first: str, time: float) -> tuple[str, ...]:
        return *first, mib(row["peak_bytes"]), f"{time:.2f}"

    programs = (
        (
            *cells(row, row["program"], bold(row["way"]), time=row["time"]),
            "yes" if row["is_equal"] else "no",
        )
        for row in found["programs"]
    )
    contrastive = (cells(row, bold(row["way"]), time=row["time"]) for row in found["contrastive"])
    most = max(row["tokens"] for row in found["long_sequences"])
    plain = next(row for row in found["long_sequences"] if row["tokens"] == most)
    long = (
        cells(row, bold(row["way"]), str(row["tokens"]), time=row["seconds"] / plain["seconds"])
        for row in found["long_sequences"]
    )
    return page(
        table("program | | peak MiB | time, plain = 1 | same losses", programs),
        table("contrastive loss, 2 x 128 sequences | peak MiB | time, CachedMNRL = 1", contrastive),
        table(f"Llama of 12 layers | tokens | peak MiB | time, plain at {most} = 1", long),
        "<sub>Steps of whole trainers; recoup at the peak of the program's own checkpointing. "
        "Mini-batches of 16 sequences. 192 units; float32, processor time of one thread on a "
        f"machine that had other work. {where(found)}; "
        "`python benchmarks/run.py programs --threads 1`.</sub>",
    )


def foreign_flows_table(found: dict) -> str:
    depths: dict[str, list[dict]] = {}
    for row in found["depths"]:
        depths.setdefault(row["flow"], []).append(row)

    def of_depths(name: str) -> tuple[str, ...]:
        def each(key: str, form: str, unit: int = 1) -> str:
            return " / ".join(format(row[key] / unit, form) for row in depths[name])

        largest = max(row["error64"] for row in depths[name])
        peaks = each("own_bytes", ".0f", 2**10), each("peak_bytes", ".0f", 2**10)
        return name, *peaks, each("error", ".0e"), each("own_error", ".0e"), f"{largest:.0e}"

    layers = " / ".join(str(row["depth"]) for row in next(iter(depths.values())))
    times = (
        (
            f"{row['flow']}, {row['data']}",
            str(row["width"]),
            f"{row['own_seconds'] * 1e3:.1f}",
            f"{row['time']:.2f}",
            f"{row['bytes']:.2f}",
        )
        for row in found["times"]
    )
    trainings = (
        (
            f"{row['flow']}, {row['data']}",
            f"{row['last_loss']:.4f}",
            f"{row['last_loss_ours']:.4f}",
            f"{row['difference']:.0e}",
            f"{row['difference_of_a_rounding']:.0e}",
        )
        for row in found["trainings"]
    )
    estimators = [
        (
            row["estimator"],
            mib(row["own_bytes"], 2),
            mib(row["peak_bytes"], 2),
            f"{row['difference']:.0e}",
        )
        for row in found["estimators"]
    ]
    return page(
        table(
            f"flow | peak KiB, {layers} layers | **recoup.train_in** | error in float32 | its own "
            "rounding | error in float64",
            map(of_depths, depths),
        ),
        table("step of 8 layers | width | its own ms | time, its own = 1 | bytes", times),
        table("200 steps | loss after | **recoup** | furthest apart | by a rounding", trainings),
        estimators
        and table("sbi, NPE with | peak MiB | **recoup** | furthest apart in 5 epochs", estimators),
        "<sub>Batches of 64. Vectors of 6 numbers with a context of 3 and networks of two hidden "
        "layers; images 4x8x8 and networks of three convolutions. Errors are the largest of a "
        "gradient's entry, of its largest or a thousandth of the largest of all; its own rounding "
        "is that of the library's own gradients in float32. A rounding: the same training by the "
        "library alone, with data that differ by 1e-7. Processor time of one thread, medians of "
        "ratios in turn, on a machine that had other work. "
        f"{where(found, 'zuko', 'nflows', 'normflows', 'FrEIA', 'sbi')}; "
        "`python benchmarks/run.py foreign_flows`.</sub>",
    )


def offload_table(found: dict) -> str:
    shape, file = found["shape"], found["file"]

    def cells(row: dict) -> tuple[str, ...]:
        simulated = row["simulated_bytes"]
        return (
            bold(row["name"]),
            mib(row["peak_bytes"]),
            "" if simulated is None else mib(simulated),
            f"{row['over_states_in_memory']:.2f}",
            f"{row['over_all_in_memory']:.2f}",
        )

    size = f"{shape['blocks']} blocks, {shape['rows']} rows of {shape['units']}"
    head = f"{size} | peak MiB | simulated | time, states in memory = 1 | all in memory = 1"
    speeds = [file[f"{way}_bytes_per_second"] / 1e9 for way in ("written", "read")]
    return page(
        table(head, map(cells, found["chain"])),
        "<sub>The state before each block is 4 MiB; simulated with twice that in flight. The file "
        f"takes {speeds[0]:.2f} GB/s and gives {speeds[1]:.2f}, through the system's cache. Wall "
        f"time on {num_threads(found)}, medians of ratios in turn. "
        f"{where(found)}; `make bench ARGS=offload`.</sub>",
    )


def budgets_table(found: dict) -> str:
    """Return a row for each budget, one for each way beside plans, and the time of sketches."""
    plain = {row["model"]: row for row in found["speeds"] if row["name"] == "plain"}

    def cells(row: dict, *first: str) -> tuple[str, ...]:
        sizes = [row[f"{kind}_bytes"] for kind in ("requested", "allocated", "reserved")]
        shown = ["-" if size is None else mib(size) for size in sizes]
        over = plain[row["model"]]["speed"] / row["speed"]
        return row["model"], *first, *shown, f"{row['speed']:.4g} {row['unit']}/s", f"{over:.2f}"

    def planned(row: dict) -> tuple[str, ...]:
        retries = row.get("num_retries", "-")  # of devices that can be limited
        sizes = mib(row["budget_bytes"]), mib(row["predicted_bytes"])
        found = cells(row, *sizes, "no room" if retries is None else str(retries))
        time = row.get("predicted_time")  # which older rows do not have
        return *found, "-" if time is None else f"{time:.2f}"

    ways = [cells(row, row["name"]) for row in found["speeds"]]
    ways += [cells(row, f"each block: {row['name']}") for row in found.get("sketches", ())]
    beside = "requested MiB | allocated | reserved | speed | time over plain"
    budgets = map(planned, found.get("budgets", ()))
    return page(
        table(f"model | budget MiB | predicted MiB | retries | {beside} | predicted time", budgets),
        table(f"model | way | {beside}", ways),
        "<sub>Forward, loss and backward, of the Llama with the step of a fused AdamW; peaks "
        "beyond what is alive before, from an empty cache; the fastest of a few steps; `retries` "
        "of the allocator in as many, where the device has the budget beside what is there before. "
        f"{found.get('remark', '')} Allocator: {found.get('allocator') or 'default'}. "
        f"{where(found)}; `make accelerator`.</sub>",
    )


def flows_table(found: dict) -> str:
    """Return a row for each library: its times over ours, and its peak at two depths."""
    glow = {(row["name"], row["num_steps"]): row for row in found["glow"]}
    moons = {row["name"]: row for row in found["moons"]}

    def cells(name: str) -> tuple[str, ...]:
        point, image = moons.get(name), glow.get((name, 8))
        tasks = ("training", "log_prob", "sampling")
        return (
            bold(name),
            *(f"{point[f'{task}_median_over_ours']:.2f}" if point else "-" for task in tasks),
            f"{image['training_median_over_ours']:.2f}" if image else "-",
            *(mib(glow[name, k]["peak_bytes"], 2) if image else "-" for k in (2, 16)),
        )

    names = dict.fromkeys([*moons, *(row["name"] for row in found["glow"])])
    head = "flows | RealNVP: training | log_prob | sampling | Glow: training | MiB, 2 steps | 16"
    return page(
        table(head, map(cells, names)),
        "<sub>Time of a step over `recoup linear`: 8 couplings on 2-D moons, and a Glow of two "
        "scales with 8 steps each on 3x16x16; processor time of one thread, median of interleaved "
        f"rounds. {where(found, 'nflows', 'normflows', 'FrEIA', 'zuko')}.</sub>",
    )


# -- what tables have in common --------------------------------------------------------------------


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown.

    Args:
        head: the names of the columns, with bars between them.
        rows: the cells of each row.
    """
    line = "---|" * (head.count("|") + 1)
    return "\n".join([f"| {head} |", f"|{line}", *(f"| {' | '.join(row)} |" for row in rows)])


def page(*parts: str | list) -> str:
    """Return paragraphs and tables as one text, without those that are empty."""
    return "\n\n".join(part for part in parts if part)


def bold(name: str) -> str:
    """Return the name of a way, which stands out if it is ours."""
    return f"**{name}**" if name.startswith(("recoup", "plan,")) or name == "plan" else name


def where(found: dict, *packages: str) -> str:
    """Return the machine, the day, and the versions of torch and of packages that were there."""
    versions = found["versions"]
    known = (f"{each} {versions[each]}" for each in ("torch", *packages) if versions.get(each))
    remark = [found["remark"]] if "remark" in found and "allocator" not in found else []
    return ", ".join((found["device_name"], found["date"], *known, *remark))


def num_threads(found: dict) -> str:
    return "one thread" if found["num_threads"] == 1 else f"{found['num_threads']} threads"


def mib(num_bytes: int, digits: int = 0) -> str:
    """Return bytes as a number of MiB."""
    return f"{num_bytes / 2**20:.{digits}f}"


def _over_plain(rows) -> dict:
    plain = {(r["layer"], r["kind"]): r["seconds"] for r in rows if r["name"] == "plain"}
    return {
        (row["layer"], row["kind"], row["name"]): row["seconds"] / plain[row["layer"], row["kind"]]
        for row in rows
    }


def torch_sequential(sequential: dict) -> dict:
    """Return the result of torch's `checkpoint_sequential` over 100 layers."""
    return next(
        row
        for (name, layers), row in sequential.items()
        if layers == 100 and "checkpoint_sequential" in name
    )
