"""The command ``recoup lm evaluate``: how well a trained language model predicts text."""

from __future__ import annotations

import math

from recoup.recipes.checkpoints import Checkpoint
from recoup.recipes.checks import check_at_least
from recoup.recipes.language_model.cache import NeuralCache
from recoup.recipes.language_model.data import Texts
from recoup.recipes.language_model.trained import load_data, load_model
from recoup.recipes.mistakes import mistakes_reported
from recoup.recipes.quiet import evaluated_metrics, quiet_lightning, quiet_trainer
from recoup.recipes.tables import table

__all__ = ["evaluate"]


def evaluate(
    checkpoint: str,
    data: str | None = None,
    batch_size: int = 1,
    cache_window: int = 0,
    cache_theta: float | None = None,
    cache_weight: float | None = None,
    accelerator: str = "auto",
) -> int:
    """Print the perplexity of a text, from sums over its tokens.

    Without `data`, or with the text that the model was trained on, it is the part that training
    kept for the end. Of another text, its test file if it has one, else all of it. The state is
    carried through the whole text. Tokens that the model does not know are read as <unk>, and
    counted.

    Args:
        checkpoint: The .ckpt file of a trained model.
        data: A text file, or a folder.
        batch_size: Number of columns that are read side by side; only 1 reads every token.
        cache_window: Number of words of the neural cache; 0 for no cache. Published figures have
            2000 to 3785 for WikiText-2 and 500 for Penn Treebank.
        cache_theta: How sharply the cache tells outputs apart; 0.662 if None.
        cache_weight: Part of the cache in the probability; 0.1279 if None.
        accelerator: Where to run: auto, cpu or gpu.

    Returns:
        The exit code.
    """
    with mistakes_reported(), quiet_lightning():
        check_at_least(1, **{"--batch-size": batch_size})
        trained = Checkpoint(checkpoint)
        model = load_model(trained)
        model.cache = _cache(cache_window, theta=cache_theta, weight=cache_weight)
        texts = load_data(trained, data, eval_batch_size=batch_size)
        whole = trained.is_unseen(data, Texts, "a language model") and not texts.has_test_part
        if whole:
            texts.test_on_everything()
        windows = texts.test_dataloader()
        trainer = quiet_trainer(accelerator)
    metrics = evaluated_metrics(trainer, model, windows)
    num_unknown = texts.num_unknown["test"]
    print(
        f"{windows.num_tokens:,} tokens ({texts.token_kind}), {'all' if whole else 'the test part'}"
        f" of {texts.name}; {num_unknown:,} that the model does not know were read as <unk>"
    )
    rows = [
        [_NAMES[name], f"{value:.3f}", f"{math.log(value):.4f}", f"{math.log2(value):.4f}"]
        for name, value in sorted(metrics.items(), reverse=True)
    ]
    print(table(["", "perplexity", "nats/token", "bits/token"], rows))
    return 0


def _cache(window: int, **given: float | None) -> NeuralCache | None:
    options = {name: value for name, value in given.items() if value is not None}
    if window:
        return NeuralCache(window, **options)
    if options:
        raise ValueError(
            f"`--cache-{next(iter(options))}` is given, but there is no cache. Give the number of "
            "words that it remembers by `--cache-window`."
        )
    return None


_NAMES = {"test_perplexity": "network", "test_cache_perplexity": "with cache"}
