"""The tables of trainings that are compared step by step, and of bits per dimension on MNIST."""

from tables import page, table, where

_FFJORD = "[FFJORD](https://arxiv.org/abs/1810.01367), table 2"
_RESIDUAL = "[Chen et al.](https://arxiv.org/abs/1906.02735), table 2"
_UVA = "[UvA tutorial 11](https://uvadlc-notebooks.readthedocs.io)"
# Of MNIST with 256 levels, as others report them: parameters, epochs, test bits per dimension, and
# how and where.
PUBLISHED = (
    ("Real NVP", "", "", "1.06", f"margin 1e-6; {_FFJORD}"),
    ("Glow", "", "", "1.05", "the same table"),
    ("FFJORD", "", "", "0.99", "the same table"),
    ("Residual Flow", "", "", "0.97", f"margin 1e-6; {_RESIDUAL}"),
    ("8 couplings on checkerboards", "556,312", "200", "1.078", f"margin 5e-6, 8 draws; {_UVA}"),
    ("the same, learned noise", "628,388", "200", "1.043", "the same tutorial"),
    ("the same, three scales", "1,711,818", "200", "1.020", "the same tutorial"),
)
_SHOWN = {"realnvp": "RealNVP", "glow": "Glow", "flowpp": "Flow++"}
_FEW_STEPS = (30, 100)
_PRECISIONS = {"64-true": "float64", "32-true": "float32"}


def training_table(found: dict) -> str:
    """Return a row for each preset and precision."""

    def cells(row: dict) -> list[str]:
        ours, theirs = zip(*row["losses"], strict=True)
        perplexity, by_hand = row["perplexity"]
        return [
            row["preset"],
            _PRECISIONS[row["precision"]],
            str(row["num_steps"]),
            _distances(ours, theirs),
            _distances(row["nudged_losses"], theirs),
            f"{perplexity:.2f}, by hand {by_hand:.2f} and {row['nudged_perplexity']:.2f}",
        ]

    head = "preset | in | steps | example and by hand | rounding alone | perplexity"
    last = found["runs"][-1]
    sentence = (
        "The example beside the same training written out by hand "
        "(`benchmarks/awd_lstm_by_hand.py`: the cell by its gates, one step of time after the "
        "other), with the same first weights, "
        "lengths of windows and masks: the largest relative differences of a loss. Steps of a "
        "rate of 20 magnify rounding tenfold in ten to twenty steps: a third training, whose first "
        "weights are one rounding error off, parts from the one by hand in the same way."
    )
    conditions = (
        f"<sub>The first windows of WikiText-2, {last['vocab_size']:,} different words; validation "
        f"on {last['num_validation_words']:,} words. {where(found)}, "
        f"{found['num_threads']} thread; `python benchmarks/language_model_exact.py FOLDER`.</sub>"
    )
    picture = "![The loss of each step, and how far two programs are apart](images/exact.png)"
    return page(picture, table(head, map(cells, found["runs"])), sentence, conditions)


def _distances(ours: list[float], theirs: list[float]) -> str:
    apart = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    first = ", ".join(f"{max(apart[:steps]):.0e} in {steps}" for steps in _FEW_STEPS)
    return f"{first}, {max(apart):.0e} in all"


def bits_table(found: dict) -> str:
    """Return a row for each flow, and below those of others."""

    def cells(row: dict) -> list[str]:
        return [
            f"**recoup {_SHOWN[row['name']]}**",
            f"{row['num_parameters']:,}",
            str(row["epochs"]),
            f"{row['test_bits_per_dim']:.3f}",
            f"margin {row['alpha']:g}".replace("e-0", "e-")
            + (", learned noise" if row["name"] == "flowpp" else "")
            + f"; 8 draws of noise instead of one: {_several(row):+.3f}",
        ]

    order = list(_SHOWN)
    runs = sorted(found["runs"], key=lambda row: (order.index(row["name"]), -row["alpha"]))
    head = "MNIST, 28x28, 256 levels | parameters | epochs | test bits/dim | "
    minutes = sum(row["seconds"] for row in found["runs"]) / 60
    conditions = (
        "<sub>Batches of 128 of 54,000 pictures, Adamax at 0.004, cosine, networks of 16 or 32 "
        f"channels; all runs together {minutes:.0f} minutes of processor time on a machine that "
        f"had other work. {where(found)}; `python benchmarks/mnist_bits.py realnvp`, `glow`, "
        "`flowpp`, ten epochs unless `--epochs` says otherwise.</sub>"
    )
    picture = "![Bits per dimension in training](images/mnist_bits.png)"
    return page(picture, table(head, [*map(cells, runs), *PUBLISHED]), _DIFFERENCES, conditions)


def _several(row: dict) -> float:
    return row["bits_with_8_draws"] - row["bits_with_1_draws"]


_DIFFERENCES = (
    "Alike: 28 x 28 pixels as they are, 256 levels, a logit whose log-determinant counts, the "
    "10,000 pictures of the test part. What differs: size and epochs; 54,000 pictures instead of "
    "60,000; our log-scales are bounded by 2 (RealNVP, Glow) and 3 (Flow++); ActNorm stands where "
    "Real NVP has batch normalisation; the networks of Flow++ have neither gates nor attention, "
    "and its paper has no MNIST. The margin of the logit matters where four fifths of the pixels "
    "are black: the level of black is 0.07 wide after a logit of margin 0.05, and 8 with 1e-6."
)
