"""sentence-transformers within a byte budget: contrastive losses, whole and in mini-batches."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.planned_zoo import transformers_or_skip
from tests.programs.programs import (
    VOCABULARY,
    Trained,
    assert_same_training,
    bytes_of,
    run,
    settings,
    text,
    tokenizer,
    watch,
)

sentences = pytest.importorskip("sentence_transformers", reason="it is not installed")
losses = pytest.importorskip("sentence_transformers.losses")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@functools.cache
def saved(folder: Any) -> str:
    """The folder of a BERT of 32 units with its tokenizer, as they come from a hub."""
    transformers = transformers_or_skip()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 4}
    config = transformers.BertConfig(
        **sizes, num_attention_heads=4, vocab_size=len(VOCABULARY), max_position_embeddings=128
    )
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def embedding_model(folder: Any) -> Any:
    return sentences.SentenceTransformer(saved(folder / "model"), device="cpu")


def whole(model: Any) -> Any:
    return losses.MultipleNegativesRankingLoss(model)


def cached(model: Any) -> Any:
    return losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)


def train(
    folder: Any,
    loss: Any,
    *callbacks: Any,
    num_steps: int = 3,
    num_words: tuple[int, int] = (24, 24),
) -> Trained:
    anchors, positives = num_words
    rows = [{"anchor": text(anchors, i), "positive": text(positives, i + 100)} for i in range(64)]
    model, seen = embedding_model(folder), watch()
    args = sentences.SentenceTransformerTrainingArguments(
        per_device_train_batch_size=16, **settings(folder, num_steps)
    )
    torch.manual_seed(1)
    trainer = sentences.SentenceTransformerTrainer(
        model, args=args, train_dataset=datasets.Dataset.from_list(rows), loss=loss(model),
        callbacks=[seen, *callbacks],
    )  # fmt: skip
    return run(trainer, seen)


@pytest.mark.parametrize(("loss", "num_forwards"), [(whole, 2), (cached, 1)])
def test_the_same_training_within_the_budget(tmp_path, loss, num_forwards):
    of_loss, options = functools.partial(train, tmp_path, loss), {"num_forwards": num_forwards}
    least, most = bytes_of(of_loss, **options)
    num_bytes = least + (most - least) // 3
    found = assert_same_training(of_loss, of_loss(), num_bytes, **options)
    # One mini-batch is within the budget, and what the cached loss holds for all is beside it.
    assert loss is cached or max(found.peaks) <= num_bytes


def test_columns_of_two_lengths_have_plans_of_their_own(tmp_path):
    least, most = bytes_of(
        functools.partial(train, tmp_path, whole, num_words=(32, 32)), num_forwards=2
    )
    of_two = functools.partial(train, tmp_path, whole, num_words=(24, 32), num_steps=4)
    options = {"num_forwards": 2, "replan": True, "skips": 1}
    found = assert_same_training(of_two, of_two(), (least + most) // 2, **options)
    assert max(found.peaks[1:]) <= (least + most) // 2
