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

    def __init__(self) -> None:
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
Called = type("Called", (Scaled,), {"__call__": lambda self, x: nn.Module.__call__(self, x, 2.0)})
Supplied = taking(functools.wraps(Scaled.forward)(
    lambda self, x, return_dict: Scaled.forward(self, x, 2.0)
))  # fmt: skip


def scaled_by_hook():
    model = Scaled()
    model.register_forward_pre_hook(lambda module, args: (*args, 2.0))
    return model


@functools.wraps(lambda output, target: None)
def loss_of_two(output):
    """A loss whose signature asks for more than it takes."""
    return output.norm()


def planned_for(build, *args, **kwargs):
    return lambda: recoup.plan(build(), *args, budget=BUDGET, **kwargs)


FOUR = dense(4, 4)
TAKEN = {
    "a decorator that takes more": planned_for(Supplied, X, return_dict=True),
    "a call of its own": planned_for(Called, X),
    "a hook": planned_for(scaled_by_hook, X),
    "a dict with a name of a parameter": planned_for(
        taking(lambda self, batch, labels=None: self.layers(batch["x"])), {"x": X, "labels": X}
    ),
    "a loss that gives more": planned_for(lambda: dense(3, 4), X, loss=loss_of_two),
    **{
        f"blocks as {kind}": planned_for(lambda: FOUR, X, loss=loss_of, blocks=blocks)
        for kind, blocks in {
            "an iterator": iter("012"),
            "a pattern": "[012]",
            "names": ["0", "1", "2"],
            "modules": [*FOUR[:3]],
        }.items()
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

    of_entries, of_one = (
        (
            recoup.estimate(lambda kind=kind: (kind(), batch(8))).plain_peak_bytes,
            recoup.largest(batch, kind(), budget="16 KiB", most=128).size,
        )
        for kind in (OfBatches, OfOneDict)
    )
    assert of_entries == of_one


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


MODEL = dense(3, 4)


def of(*args, model=MODEL, **kwargs):
    return lambda: recoup.plan(model, *args, **kwargs)


def largest(build=lambda size: torch.ones(size, 4), **options):
    return lambda: recoup.largest(build, MODEL, **{"budget": BUDGET, "least": 2} | options)


ATTEMPTS = {
    "no arguments": (of(budget=BUDGET), r"Sequential was given: nothing\. Give its arguments as i"),
    "memory": (of(X, memory=BUDGET), "given: Tensor, memory.* the bytes of a plan are `budget`"),
    "a class": (of(X, model=nn.Linear), "`model` is the class Linear"),
    "frozen": (
        of(X, model=dense(2, 4).requires_grad_(False)), "returned nothing that requires a gradient"
    ),
    "data parallel": (of(X, model=nn.DataParallel(MODEL)), "Plan for `model.module`"),
    "a block that is not there": (of(X, blocks=["7"]), "`blocks` has '7', which is no module of S"),
    "blocks of no name": (
        of(X, blocks="h\\.[0-9]"), r"`blocks` is 'h\\\\\.\[0-9\]', which matches the name of no mod"
    ),
    "blocks of others": (of(X, blocks=[nn.Linear(2, 2)]), "`blocks` has Linear, which is no modu"),
    "blocks that nothing calls": (
        of(X, model=taking(lambda self, x: self.layers[0](x))(), blocks=["layers"]),
        "calls none of them",
    ),
    "a model that returns None": (of(X, model=taking(lambda self, x: None)()), "returned None"),
    "a model that is not initialized": (
        of(X, model=nn.Sequential(nn.LazyLinear(8))), r"not initialized.*torch\.no_grad\(\)"
    ),
    "a chain that is not initialized": (
        lambda: recoup.Sequential(nn.LazyLinear(8), memory=BUDGET)(X), "not initialized"
    ),
    "a step in inference": (
        torch.inference_mode()(of(X)), r"outside of `torch\.inference_mode`"
    ),
    "no blocks": (of(X, blocks=[]), "`blocks` is empty"),
    "blocks in blocks": (of(X, blocks=["0", "0.0"]), "contains `0` and `0.0`, which is part of it"),
    "a module of criteria": (
        of(X, loss=nn.MSELoss()),
        r"`loss` was called with what the model returned \(1 arguments\).*lambda",
    ),
    "a loss of one output for two": (
        of(X, loss=lambda output: output.sum(), num_forwards=2),
        r"`loss` was called with what the model returned \(2 arguments\)",
    ),
    "a loss that is no number": (of(X, loss=lambda y: y), r"returned a tensor of shape \(8, 4\)"),
    "a training step of Lightning": (
        of(X, model=PassedOn()),
        "The forward of PassedOn was given.*callback .*MemoryBudget",
    ),
    "scripted blocks": (
        lambda: of(X, model=nn.Sequential(*map(torch.jit.script, MODEL)))(),
        "A Sequential that torch.jit has scripted or traced .* or name other `blocks`",
    ),
    "an optimizer of a step": (
        of(X, budget=BUDGET, optimizer=torch.optim.SGD(MODEL.parameters())),
        'counts only with budget_of="total"',
    ),
    "replan without a budget": (of(X, replan=True), "`replan` is True without a `budget`"),
    "offload to a host": (of(X, offload_to="host"), 'is "host", but the model is on the cpu'),
    "one tile": (of(X, budget=BUDGET, tiles=1), "`tiles`"),
    **{
        f"a policy with {options}": (of(X, **{"policy": "full"} | options), message)
        for options, message in (
            ({"budget": "1 GiB"}, "`budget` is '1 GiB', and .* Choose one"),
            ({"tiles": True}, "`tiles` is True, but .* Leave `tiles` out"),
            ({"replan": True}, "`replan` is True without a `budget`"),
            ({"policy": "save attention"}, "'save attention', but no block was seen to call a ker"),
        )
    },
    "least and most": (largest(least=3, most=2), "`least` is 3 and `most` is 2"),
    "a batch of nothing": (largest(lambda size: None), "`build_batch` returned None for size 2"),
    "a batch that does not grow": (
        largest(lambda size: torch.ones(20, 4)[:size]), "must return larger arguments"
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_the_error_says_what_to_type(attempt):
    call, message = ATTEMPTS[attempt]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        call()


def test_a_size_that_fits_neither_the_budget_nor_the_model_is_shown():
    with pytest.raises(BudgetError, match="a step of size 2 takes at least"):
        largest(budget=100)()
    with pytest.raises(RuntimeError) as caught:
        largest(lambda size: torch.ones(size, 7))()
    (note,) = caught.value.__notes__
    assert "`build_batch` returned these arguments for size" in note
    assert "give `least`" in note
    assert " x 7" in note


def test_an_error_of_a_dict_that_was_not_taken_apart_says_so():
    strict = taking(lambda self, input_ids, labels=None: self.layers(input_ids))
    with pytest.raises(TypeError) as caught:
        recoup.plan(strict(), {**BATCH, "special_tokens_mask": X}, budget=BUDGET)
    (note,) = caught.value.__notes__
    assert "given: dict. Give its arguments" in note
