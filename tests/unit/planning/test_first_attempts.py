"""What one types first: it works, or the error says what to type."""

from __future__ import annotations

import functools
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


class Trained(nn.Module):
    def training_step(self, batch):
        return batch.sum()


class PassedOn(Trained):
    """Has the forward of its class, as modules of Lightning do."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


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


def supplying(forward):
    """Give a forward an argument that its signature still asks for."""

    @functools.wraps(forward)
    def supplied(self, x, **options):
        options.pop("return_dict", None)
        return forward(self, x, 2.0, **options)

    return supplied


class Scaled(OfBatches):
    def forward(self, x, scale):
        return self.layers(x) * scale


class Supplied(OfBatches):
    @supplying
    def forward(self, x, scale):
        return self.layers(x) * scale


class Called(Scaled):
    def __call__(self, x):
        return super().__call__(x, 2.0)


class WithoutForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = OfBatches().layers

    def __call__(self, x):
        return self.layers(x)


class OfOneBatch(OfBatches):
    """Takes a dict, in which an entry has the name of one of its parameters."""

    def forward(self, batch, labels=None):
        return self.layers(batch["x"])


class OfEntries(OfBatches):
    def forward(self, input_ids=None, **others):
        return self.layers(input_ids["input_ids"])


def criterion(loss):
    @functools.wraps(loss)
    def of_output(output):
        return loss(output, 1.0)

    return of_output


@criterion
def loss_of_two(output, target):
    return (output - target).norm()


def scaled_by_hook(register):
    def planned():
        model = Scaled()

        def hook(module, args):
            return (*args, 2.0) if module is model else None

        handle = register(model)(hook)
        try:
            return recoup.plan(model, X, budget=BUDGET)
        finally:
            handle.remove()

    return planned


TAKEN = {
    "a decorator that gives more": lambda: recoup.plan(Supplied(), X, budget=BUDGET),
    "a decorator that takes more": lambda: recoup.plan(
        Supplied(), X, return_dict=True, budget=BUDGET
    ),
    "a call of its own": lambda: recoup.plan(Called(), X, budget=BUDGET),
    "a call alone": lambda: recoup.plan(WithoutForward(), X, budget=BUDGET),
    "a hook": scaled_by_hook(lambda model: model.register_forward_pre_hook),
    "a hook of all modules": scaled_by_hook(
        lambda model: nn.modules.module.register_module_forward_pre_hook
    ),
    "a dict with a name of a parameter": lambda: recoup.plan(
        OfOneBatch(), {"x": X, "labels": X}, budget=BUDGET
    ),
    "a dict with other keys than strings": lambda: recoup.plan(
        OfEntries(), {"input_ids": X, 3: X}, budget=BUDGET
    ),
    "a loss that gives more": lambda: recoup.plan(MODEL, X, budget=BUDGET, loss=loss_of_two),
}


@pytest.mark.parametrize("attempt", TAKEN)
def test_what_a_call_takes_is_taken_whatever_a_signature_says(attempt):
    assert len(TAKEN[attempt]().blocks) == 3


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
        lambda: recoup.plan(Trained(), X),
        "`model` is a Trained without a `forward`.*callback .*MemoryBudget",
    ),
    "a training step of Lightning": (
        lambda: recoup.plan(PassedOn(), X),
        "`model` is a PassedOn without a `forward`.*callback .*MemoryBudget",
    ),
    "a timeline of nothing": (lambda: recoup.timeline(MODEL), "but got nothing"),
    "an estimate of nothing": (lambda: recoup.estimate(lambda: (MODEL,)), "but got nothing"),
    "a traced model": (
        lambda: recoup.plan(torch.jit.trace(MODEL, X), X),
        "A Sequential that torch.jit has scripted or traced .* Plan the model as it was before",
    ),
    "scripted blocks": (
        lambda: recoup.plan(nn.Sequential(*map(torch.jit.script, MODEL)), X),
        "A Sequential that torch.jit has scripted or traced .* or name other `blocks`",
    ),
    "a half unit": (lambda: recoup.plan(MODEL, X, budget="40 G"), "`budget` is '40 G'"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_the_error_says_what_to_type(attempt):
    call, message = ATTEMPTS[attempt]
    with pytest.raises(ValueError, match=message):
        call()


def test_a_batch_that_does_not_fit_the_model_is_shown(caplog):
    for attempt in (
        lambda: recoup.largest(lambda size: torch.ones(size, 7), MODEL, budget=BUDGET, least=2),
        lambda: recoup.estimate(lambda: (MODEL, X), BUDGET, build_batch=lambda n: torch.ones(n, 7)),
    ):
        with pytest.raises(RuntimeError) as caught:
            attempt()
        assert "`build_batch` returned these arguments for size" in caught.value.__notes__[0]
        assert " x 7" in caught.value.__notes__[0]
    assert not caplog.records  # torch's log of an operator that runs without values


def test_a_planned_model_may_be_planned_again():
    with recoup.plan(MODEL, X, budget=BUDGET).applied():
        again = recoup.plan(MODEL, X, budget="40GB")
    assert again.budget_bytes == 40 * 10**9
    assert {row.way for row in again.blocks} == {"keep"}


def test_an_error_of_a_dict_that_was_not_taken_apart_says_so():
    class Strict(OfBatches):
        def forward(self, input_ids, labels=None):
            return self.layers(input_ids)

    with pytest.raises(TypeError) as caught:
        recoup.plan(Strict(), {**BATCH, "special_tokens_mask": X}, budget=BUDGET)
    (note,) = caught.value.__notes__
    assert "(it takes input_ids, labels)" in note


def test_a_function_may_build_one_dict_for_a_model_that_takes_it():
    def build(kind):
        return kind(), {"input_ids": torch.ones(8, 4), "labels": torch.zeros(8, 4)}

    wanted, found = (recoup.estimate(lambda k=kind: build(k)) for kind in (OfBatches, OfOneDict))
    assert found.plain_peak_bytes == wanted.plain_peak_bytes

    def batch(size):
        return {"input_ids": torch.ones(size, 4), "labels": torch.zeros(size, 4)}

    size = recoup.largest(batch, OfOneDict(), budget="64 KiB", most=512).size
    assert size == recoup.largest(batch, OfBatches(), budget="64 KiB", most=512).size
