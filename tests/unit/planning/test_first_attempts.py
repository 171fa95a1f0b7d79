"""What one types first: it works, or the error says what to type."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch import nn

import recoup

BUDGET = "1 MiB"
BATCH = {"input_ids": torch.ones(8, 4), "labels": torch.zeros(8, 4)}


class OfBatches(nn.Module):
    """Takes the entries of a batch, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)))

    def forward(self, input_ids, labels=None):
        output = self.layers(input_ids)
        return {"output": output, "loss": None if labels is None else (output - labels).norm()}


class OfOneDict(OfBatches):
    """Takes the batch itself, as models of sentence-transformers do."""

    def forward(self, features, **options):
        return super().forward(features["input_ids"], features["labels"])


class Wrapper(nn.Module):
    """Passes on what it gets, as models of peft do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = OfBatches()

    def forward(self, *args, **kwargs):
        return self.base(*args, **kwargs)


class WithoutForward(nn.Module):
    def training_step(self, batch):
        return batch.sum()


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_dict_alone_is_the_batch(kind):
    wanted = recoup.plan(OfBatches(), **BATCH, budget=BUDGET)
    for model in (OfBatches(), OfOneDict(), Wrapper()):
        found = recoup.plan(model, kind(BATCH), budget=BUDGET)
        assert len(found.blocks) == len(wanted.blocks)
        assert found.most_bytes == wanted.most_bytes
        assert recoup.timeline(model, kind(BATCH), plan=found).planned is not None


def test_a_model_that_writes_into_its_batch_is_given_a_new_one_at_each_call():
    class Writes(OfBatches):
        def forward(self, features, **options):
            features["embedding"] = self.layers(features["input_ids"])
            return features

    model = Writes()
    once, twice = (
        recoup.plan(model, dict(BATCH), budget=BUDGET, num_forwards=num) for num in (1, 2)
    )
    kept = sum(row.keeps_bytes for row in once.blocks)
    assert sum(row.keeps_bytes for row in twice.blocks) >= 2 * kept > 0


MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)))
X = torch.ones(8, 4)

ATTEMPTS = {
    "no arguments": (
        lambda: recoup.plan(MODEL, budget=BUDGET),
        r"forward of Sequential takes \(input\), but got nothing: .* Give its arguments",
    ),
    "too many": (lambda: recoup.plan(MODEL, X, X, budget=BUDGET), "but got 2 arguments: too many"),
    "memory": (
        lambda: recoup.plan(MODEL, X, memory=BUDGET),
        "`memory` is no option of",
    ),
    "a class": (lambda: recoup.plan(nn.Linear, X), "`model` is the class Linear"),
    "a function": (lambda: recoup.plan(torch.sin, X), "`model` is a builtin_function_or_method"),
    "a module of criteria": (
        lambda: recoup.plan(MODEL, X, loss=nn.MSELoss()),
        r"`loss` takes \(input: torch.Tensor, .*\), but got 1 argument: .*lambda",
    ),
    "a loss of one output for two": (
        lambda: recoup.plan(MODEL, X, loss=lambda output: output.sum(), num_forwards=2),
        r"`loss` takes \(output\), but got 2 arguments",
    ),
    "a training step": (
        lambda: recoup.plan(WithoutForward(), X),
        "`model` is a WithoutForward without a `forward`.*callback .*MemoryBudget",
    ),
    "a timeline of nothing": (lambda: recoup.timeline(MODEL), "but got nothing"),
    "an estimate of nothing": (lambda: recoup.estimate(lambda: (MODEL,)), "but got nothing"),
    "a half unit": (lambda: recoup.plan(MODEL, X, budget="40 G"), "`budget` is '40 G'"),
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_the_error_says_what_to_type(attempt):
    call, message = ATTEMPTS[attempt]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_planned_model_may_be_planned_again():
    with recoup.plan(MODEL, X, budget=BUDGET).applied():
        again = recoup.plan(MODEL, X, budget="40GB")
    assert again.budget_bytes == 40 * 10**9
    assert {row.way for row in again.blocks} == {"keep"}
