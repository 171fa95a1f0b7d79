"""What one types first: it works, or the error says what to type."""

from __future__ import annotations

import functools
import inspect
from collections import UserDict
from dataclasses import fields

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import BudgetError
from recoup.planning.options import PlanKeywords, PlanOptions
from tests.neighbours.planned import loss_of
from tests.plan_oracle import dense

BUDGET = "1 MiB"
X = torch.ones(8, 4)
BATCH = {"input_ids": X, "labels": torch.zeros(8, 4)}
OPTIONS = {field.name: field.default for field in fields(PlanOptions)}


class OfBatches(nn.Module):
    """Takes the entries of a batch, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layers = dense(3, 4)

    def forward(self, input_ids, labels=None):
        output = self.layers(input_ids)
        return {"output": output, "loss": None if labels is None else (output - labels).norm()}


class OfOneDict(OfBatches):
    """Takes the batch itself, as models of sentence-transformers do."""

    def forward(self, features, **options):
        return super().forward(features["input_ids"], features["labels"])


def taking(forward, kind=OfBatches):
    return type("Taking", (kind,), {"forward": forward})


Scaled = taking(lambda self, x, scale: self.layers(x) * scale)
Supplied = taking(functools.wraps(Scaled.forward)(lambda self, x, more: self.layers(x) * more))


loss_of_two = functools.wraps(lambda output, target: None)(lambda output: output.norm())


def planned_for(build, *args, **kwargs):
    return lambda: recoup.plan(build(), *args, budget=BUDGET, **kwargs)


FOUR = dense(4, 4)
TAKEN = {
    "a decorator that takes more": planned_for(Supplied, X, more=2.0),
    "a dict with a name of a parameter": planned_for(
        taking(lambda self, batch, labels=None: self.layers(batch["x"])), {"x": X, "labels": X}
    ),
    "a loss that gives more": planned_for(lambda: dense(3, 4), X, loss=loss_of_two),
    **{
        f"blocks as {type(blocks)}": planned_for(lambda: FOUR, X, loss=loss_of, blocks=blocks)
        for blocks in (iter("012"), "[012]", ("0", "1", "2"), [*FOUR[:3]])
    },
}


@pytest.mark.parametrize("attempt", TAKEN)
def test_what_a_call_takes_is_taken_whatever_a_signature_says(attempt):
    assert [row.name[-1] for row in TAKEN[attempt]().blocks] == ["0", "1", "2"]


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_dict_alone_is_the_batch(kind):
    wanted = recoup.plan(OfBatches(), **BATCH, budget=BUDGET)
    for model in (OfBatches(), OfOneDict()):
        found = recoup.plan(model, kind(BATCH), budget=BUDGET)
        assert len(found.blocks) == len(wanted.blocks)
        assert found.most_bytes == wanted.most_bytes
        assert recoup.timeline(model, kind(BATCH), plan=found).planned is not None


def test_a_function_may_build_one_dict_for_a_model_that_takes_it():
    def batch(size):
        return {"input_ids": torch.ones(size, 4), "labels": torch.zeros(size, 4)}

    for call in (
        lambda kind: recoup.estimate(lambda: (kind(), batch(8))).plain_peak_bytes,
        lambda kind: recoup.largest(batch, kind(), budget="16 KiB", most=128).size,
    ):
        assert call(OfBatches) == call(OfOneDict)


def test_a_model_that_writes_into_its_batch_is_given_a_new_one_at_each_call():
    model = taking(lambda self, x: (x.update(made=self.layers(x["input_ids"])), x)[1])()
    kept = [
        sum(row.keeps_bytes for row in recoup.plan(model, dict(BATCH), budget=BUDGET, **of).blocks)
        for of in ({}, {"num_forwards": 2})
    ]
    assert kept[1] >= 2 * kept[0] > 0


def test_every_option_of_a_plan_has_its_default():
    parameters = inspect.signature(recoup.plan).parameters.values()
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert {name: own.pop(name) for name in OPTIONS} == OPTIONS
    assert own == {"budget": None, "policy": None, "replan": False}
    assert PlanKeywords.__annotations__.keys() == OPTIONS.keys()  # those of `largest`


class PassedOn(nn.Module):
    """Has the forward of its class, as modules of Lightning do."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


Within = taking(lambda self, x: self.layers[0](x))
MODEL = dense(3, 4)


def of(*args, model=MODEL, **kwargs):
    return lambda: recoup.plan(model, *args, **kwargs)


def largest(build=lambda size: torch.ones(size, 4), **options):
    return lambda: recoup.largest(build, MODEL, **{"budget": BUDGET, "least": 2} | options)


REFUSED = [
    (of(budget=BUDGET), r"Sequential was given: nothing\. Give its arguments"),
    (of(X, memory=BUDGET), "given: Tensor, memory.* the bytes of a plan are `budget`"),
    (of(X, model=nn.Linear), "`model` is the class Linear"),
    (of(X, model=dense(2, 4).requires_grad_(False)), "nothing that requires a gradient"),
    (of(X, model=nn.DataParallel(MODEL)), "Plan for `model.module`"),
    (of(X, blocks=["7"]), "`blocks` has '7', which is no module of S"),
    (of(X, blocks="h.[0-9]"), r"`blocks` is 'h.\[0-9\]', which matches the name of no mod"),
    (of(X, blocks=[nn.Linear(2, 2)]), "`blocks` has Linear, which is no modu"),
    (of(X, model=Within(), blocks=["layers"]), "calls none of them"),
    (of(X, model=taking(lambda self, x: None)()), "returned None"),
    (of(X, model=nn.Sequential(nn.LazyLinear(8))), r"not initialized.*torch\.no_grad\(\)"),
    (lambda: recoup.Sequential(nn.LazyLinear(8), memory=BUDGET)(X), "not initialized"),
    (torch.inference_mode()(of(X)), r"outside of `torch\.inference_mode`"),
    (of(X, blocks=[]), "`blocks` is empty"),
    (of(X, blocks=["0", "0.0"]), "contains `0` and `0.0`, which is part of it"),
    (of(X, loss=nn.MSELoss()), r"`loss` was called with .* \(1 arguments\).*lambda"),
    (of(X, loss=lambda y: y.sum(), num_forwards=2), r"`loss` was called with .* \(2 arguments\)"),
    (of(X, loss=lambda y: y), r"returned a tensor of shape \(8, 4\)"),
    (of(X, model=PassedOn()), "The forward of PassedOn was given.*callback .*MemoryBudget"),
    (lambda: of(X, model=nn.Sequential(*map(torch.jit.script, MODEL)))(),
     "A Sequential that torch.jit has scripted or traced .* or name other `blocks`"),
    (of(X, budget=BUDGET, optimizer=torch.optim.SGD(MODEL.parameters())), 'budget_of="total"'),
    (of(X, replan=True), "`replan` is True without a `budget`"),
    (of(X, offload_to="host"), 'is "host", but the model is on the cpu'),
    (of(X, budget=BUDGET, tiles=1), "`tiles`"),
    (of(X, policy="full", budget="1 GiB"), "`budget` is '1 GiB', and .* Choose one"),
    (of(X, policy="full", tiles=True), "`tiles` is True, but .* Leave `tiles` out"),
    (of(X, policy="full", replan=True), "`replan` is True without a `budget`"),
    (of(X, policy="save attention"), "'save attention', but no block was seen to call a ker"),
    (largest(least=3, most=2), "`least` is 3 and `most` is 2"),
    (largest(lambda size: None), "`build_batch` returned None for size 2"),
    (largest(lambda size: torch.ones(20, 4)[:size]), "must return larger arguments"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_the_error_says_what_to_type(call, words):
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=words):
        call()


def test_errors_of_models_are_given_a_note_of_what_they_were_given():
    with pytest.raises(BudgetError, match="a step of size 2 takes at least"):
        largest(budget=100)()
    with pytest.raises(RuntimeError) as caught:
        largest(lambda size: torch.ones(size, 7))()
    assert "these arguments for size" in "".join(caught.value.__notes__)
    strict = taking(lambda self, input_ids, labels=None: self.layers(input_ids))
    with pytest.raises(TypeError) as caught:
        recoup.plan(strict(), {**BATCH, "special_tokens_mask": X}, budget=BUDGET)
    assert "given: dict. Give its arguments" in "".join(caught.value.__notes__)
