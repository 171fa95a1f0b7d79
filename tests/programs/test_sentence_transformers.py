"""sentence-transformers within a byte budget: contrastive losses, whole and in mini-batches."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import recoup
from recoup.errors import BudgetError
from tests.planned_zoo import transformers_or_skip
from tests.programs.programs import (
    VOCABULARY,
    Trained,
    settings,
    text,
    tokenizer,
    watch,
    weights_of,
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
    torch.manual_seed(1)
    trainer = sentences.SentenceTransformerTrainer(
        model, train_dataset=datasets.Dataset.from_list(rows), loss=loss(model),
        args=sentences.SentenceTransformerTrainingArguments(
            per_device_train_batch_size=16, **settings(folder, num_steps)
        ),
        callbacks=[seen, *callbacks],
    )  # fmt: skip
    try:
        trainer.train()
    finally:
        seen.ends()
    return Trained(seen.losses, weights_of(model), seen.peaks)


@pytest.mark.parametrize(("loss", "num_forwards"), [(whole, 2), (cached, 1)])
def test_the_same_training_within_the_budget(tmp_path, loss, num_forwards):
    from recoup.integrations.transformers import MemoryBudget

    callback = MemoryBudget("1 GiB", num_forwards=num_forwards)
    train(tmp_path, loss, callback, num_steps=1)
    least, most = callback.plan.least_bytes, callback.plan.most_bytes
    wanted = train(tmp_path, loss)
    callback = MemoryBudget(least + (most - least) // 3, num_forwards=num_forwards)
    found = train(tmp_path, loss, callback)
    assert found.same(wanted)
    assert {row.way for row in callback.plan.blocks} != {"keep"}
    if loss is whole:
        assert max(found.peaks) <= callback.budget < max(wanted.peaks)
    else:  # one mini-batch is within the budget, and what the loss holds for all is beside it
        assert max(found.peaks) < max(wanted.peaks)


def test_columns_of_two_lengths_have_plans_of_their_own(tmp_path):
    from recoup.integrations.transformers import MemoryBudget

    lengths = {"num_words": (24, 32), "num_steps": 4}
    callback = MemoryBudget("1 GiB", num_forwards=2)
    train(tmp_path, whole, callback, num_steps=1, num_words=(32, 32))
    least, most = callback.plan.least_bytes, callback.plan.most_bytes
    callback = MemoryBudget((least + most) // 2, num_forwards=2, replan=True)
    found, wanted = (train(tmp_path, whole, *each, **lengths) for each in ([callback], []))
    assert found.same(wanted)
    assert max(found.peaks[1:]) <= callback.budget < max(wanted.peaks)


def test_two_forwards_in_a_plan_for_one_are_an_error(tmp_path):
    from recoup.integrations.transformers import MemoryBudget

    callback = MemoryBudget("1 GiB")
    train(tmp_path, whole, callback, num_steps=1)
    budget = callback.plan.most_bytes * 5 // 4
    with pytest.raises(BudgetError, match="num_forwards=2"):
        train(tmp_path, whole, MemoryBudget(budget))


def batch(num: int, seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, len(VOCABULARY), (num, 16), generator=draw)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def gradients(model: Any, loss: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("has_dropout", [False, True])
def test_embeddings_in_mini_batches(tmp_path, has_dropout):
    """Any loss of all embeddings, at the bytes of the cached one, which runs each as often."""
    model = embedding_model(tmp_path).train(has_dropout)
    columns = [batch(32, seed) for seed in (1, 2)]
    calls = []
    model[0].register_forward_pre_hook(lambda module, args: calls.append(1))

    def embed(ids: Any, mask: Any) -> Any:
        return model({"input_ids": ids, "attention_mask": mask})["sentence_embedding"]

    def loss_of(embed: Any) -> Any:
        return whole(model).compute_loss_from_embeddings(
            [embed(*c.values()) for c in columns], None
        )

    tiled = recoup.tiled(embed, dim=0, tiles=8)
    gradients(model, lambda: loss_of(tiled))  # what it looks at once
    calls.clear()
    found = gradients(model, lambda: loss_of(tiled))
    assert len(calls) == 2 * 2 * 8
    if not has_dropout:
        for got, want in zip(found, gradients(model, lambda: loss_of(embed)), strict=True):
            assert float((got - want).norm()) <= 1e-4 * float(want.norm())
        return
    theirs = cached(model)
    peaks = [
        recoup.measure(functools.partial(gradients, model, loss), repeats=0).peak_bytes
        for loss in (lambda: theirs([dict(c) for c in columns], None), lambda: loss_of(tiled))
    ]
    assert peaks[1] <= peaks[0]
