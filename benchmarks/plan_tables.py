"""The tables of docs/benchmarks.md about plans."""

from tables import mib, page, table

__all__ = ["compiled_table", "plans_table"]

SIZES = {
    "GPT-2, 12 layers": (
        "GPT-2 has 12 layers of 256 units, a vocabulary of 2048, dropout 0.1, and batches of 6 "
        "times 256 tokens"
    ),
    "ResNet-50": "the ResNet-50 has half the width, and batches of 64 images of 128 x 128",
    "Llama, 32,000 words": (
        "the Llama has 6 layers of 256 units, the 32,000 words of Llama 2, and batches of 2 times "
        "1024 tokens, so that its logits are most of a step; its plans may run them in 16 tiles"
    ),
}
WAYS = (
    "Each way runs the code of its library, but these: Unsloth needs a GPU, so a checkpoint in "
    "its style was written anew; ALST's and Liger's losses are those of [the tiles](#tiles), in "
    "16 pieces, in torch's operators; TRL's kernel cuts the vocabulary into tiles of 2048 words, "
    "since its own 32,768 would be all of them, and `loss in checkpoints` is what it had before, "
    "and torchtune has: a checkpoint for each of 16 pieces. `, transformers` is a loss in pieces "
    "with each layer a checkpoint of transformers. On a CPU, host memory is the memory that is "
    "counted: what offloads gains nothing here. `OffloadActivations` of TRL is not in the table, "
    "since it moves nothing but tensors of an accelerator, nor is torch.compile of the ResNet-50, "
    "which took too long. Hollow marks are gradients that are wrong."
)


def plans_table(found: dict) -> str:
    """Return a figure, the number of ways that a plan beats, and a row for each way."""
    gains, least = _split(found["gains"])
    num_won = sum(gain["is_won"] for gain in gains)
    names = dict.fromkeys(gain["model"] for gain in gains)
    models = [name.partition(",")[0] for name in names]
    sizes = "; ".join(SIZES[name] for name in names)
    sentence = (
        f"`recoup.plan` beside {len(gains)} ways to train {' and '.join(models)} in fewer bytes: "
        f"in as many bytes it is as fast as or faster than {num_won} of them (within 2 percent). "
        f"Least peak, beside the least of the others: {least}."
    )
    packages = ("transformers", "accelerate", "trl", "torch_remat")
    conditions = (
        "<sub>Forward, loss and backward; peaks by the allocator's events, beyond what is alive "
        "before; the fastest of 4 rounds in turn, "
        f"{_conditions(found, 'plans', packages)}</sub>"
    )
    return page(
        "![Time of a step against its peak](images/plans.png)",
        sentence,
        f"{sizes}. Bold means that the plan is at least as fast, within 2 percent.",
        *_of_models(found["plans"], gains, has_errors=False),
        WAYS,
        "\n".join(_left_out(found.get("left_out", []))),
        conditions,
    )


def _of_models(rows: list[dict], gains: list[dict], *, has_errors: bool) -> list[str]:
    """Return a table for each model: each other way, and the fastest plan in as many bytes."""
    found = {(row["model"], row["name"]): row for row in rows}

    def cells(gain: dict) -> list[str]:
        over, rival = gain["ours_over_rival"], found[gain["model"], gain["name"]]
        ours = "does not fit" if over is None else f"{over * rival['ratio']:.2f}"
        ours = f"**{ours}**" if gain["is_won"] else ours
        if has_errors:
            ours = f"{rival['gradient_error']:.0e} | {ours}"
        elif "compiled" in (gain["ours"] or ""):
            ours += " compiled"
        return [gain["name"], mib(gain["peak_bytes"]), f"{rival['ratio']:.2f}", ours]

    ours = "error | `compile=True` in as many" if has_errors else "`recoup.plan` in as many"
    return [
        table(
            f"{model} | peak MiB | over plain | {ours} bytes",
            (cells(gain) for gain in gains if gain["model"] == model),
        )
        for model in dict.fromkeys(gain["model"] for gain in gains)
    ]


def _left_out(rows: list[dict]) -> list[str]:
    """Return a line for each reason why ways are left out."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        model = row["model"].partition(",")[0]
        reasons.setdefault((row["reason"], model), []).append(row["name"])
    return [
        f"- Left out with {model}: {'; '.join(names)}. {reason}"
        for (reason, model), names in reasons.items()
    ]


def compiled_table(found: dict) -> str:
    """Return a row for each other way, and the fastest plan that takes no more bytes."""
    gains, least = _split(found["gains"])
    rounding, moved = max((row.get("rounding", 0.0), row["model"]) for row in found["compiled"])
    sentence = (
        "`recoup.plan(model, compile=True)` beside the ways of the table above, and the compiler "
        "with `activation_memory_budget` as given (the model compiled whole; of the ResNet each "
        "block, since the whole took too long). The error is the distance of the gradients, under "
        "one seed, from those of the way's own first row: dropout masks are drawn alike at all "
        "budgets of the compiler, so a large one means that backward used other masks than "
        f"forward (hollow marks). Ours are at most {max(_own_errors(found)):.0e}; an input that is "
        f"off by one rounding error moves gradients by up to {rounding:.0e} (those of {moved}). "
        f"Least peak, beside the least of the others: {least}."
    )
    conditions = (
        "<sub>Forward, loss and backward; peaks by the allocator's events; the fastest of 5 rounds "
        "in turn, "
        f"{_conditions(found, 'compiled', ('transformers',))}</sub>"
    )
    return page(
        "![Time of a step against its peak, compiled](images/compiled.png)",
        sentence,
        *_of_models(found["compiled"], gains, has_errors=True),
        conditions,
    )


def _own_errors(found: dict) -> list[float]:
    return [row["gradient_error"] for row in found["compiled"] if row["name"] == "recoup"]


def _split(gains: list[dict]) -> tuple[list[dict], str]:
    """Return the gains beside each way, and the least peaks in words."""
    least = [gain for gain in gains if gain["name"].startswith("least peak")]
    words = (
        f"{gain['model'].partition(',')[0]} "
        f"{mib(gain['ours_bytes']) if gain['ours_bytes'] else 'no plan of'} MiB beside "
        f"{mib(gain['peak_bytes'])}"
        for gain in least
    )
    return [gain for gain in gains if gain not in least], ", ".join(words)


def _conditions(found: dict, table: str, packages: tuple[str, ...]) -> str:
    """Return the machine, the versions and the clock of each model, where they differ."""
    groups: dict[str, list[str]] = {}
    for model in dict.fromkeys(row["model"] for row in found[table]):
        of_model = found.get("conditions_of", {}).get(model, found)
        versions = of_model["versions"]
        threads = of_model["num_threads"]
        words = [
            "processor time of one thread" if threads == 1 else f"wall time on {threads} threads",
            of_model["device_name"],
            of_model["date"],
            *(f"{each} {versions[each]}" for each in ("torch", *packages) if versions.get(each)),
            *filter(None, [of_model.get("remark", "").rstrip(".")]),
        ]
        groups.setdefault(", ".join(words), []).append(model.partition(",")[0])
    if len(groups) == 1:
        return f"{next(iter(groups))}."
    listed = lambda models: " and ".join(filter(None, [", ".join(models[:-1]), models[-1]]))  # noqa: E731
    return "; ".join(f"{listed(models)}: {words}" for words, models in groups.items()) + "."
