"""What a store is given that it cannot use: an error that says what to give."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import recoup

MODEL, X = nn.Linear(3, 2), torch.ones(1, 3)


def full():
    return recoup.GradStore.from_backward(MODEL(X).sum(), MODEL.parameters())


def never(x):
    raise AssertionError("a segment ran before the arguments were looked at")


WRONG = {
    "outputs, a number": (lambda s: s.backward(3.0), "`outputs` is, or holds, a float"),
    "outputs, numbers": (lambda s: s.backward([3.0]), "`outputs` is, or holds, a float"),
    "weight": (lambda s: s.backward(MODEL(X).sum(), weight=0), "`weight` is 0"),
    "weight, a string": (lambda s: s.backward(MODEL(X).sum(), weight="x"), "`weight` is 'x'"),
    "weight, a vector": (lambda s: s.backward(MODEL(X), weight=2), "`grad_outputs` is missing"),
    "grad_outputs": (lambda s: s.backward([MODEL(X)], []), "`grad_outputs` has 0"),
    "mode": (lambda s: s.backward(MODEL(X).sum(), mode="x"), "`mode` is 'x'"),
    "mode, of old": (
        lambda s: s.backward(MODEL(X).sum(), mode="accumulate"),
        r"`mode` is 'accumulate', .*Leave it out: \"auto\" sums",
    ),
    "mode, of old, elsewhere": (
        lambda s: s.backward(MODEL(X).sum(), mode="stream"),
        r"`mode` is 'stream', .*GradStore\(params, device=\"cpu\"\)",
    ),
    "inputs": (lambda s: s.backward(MODEL(X).sum(), inputs=X), "`inputs` has a tensor of shape"),
    "inputs, again": (
        lambda s: s.backward(MODEL(X).sum(), inputs=MODEL.weight),
        "is in `params` and in `inputs`",
    ),
    "other": (lambda s: s.dot(3), "`other` contains a int"),
    "others": (lambda s: s.extend_(3), "`others` contains a int"),
    "max_norm": (lambda s: s.clip_norm_(-1.0), "`max_norm` is -1.0"),
    "max_norm, not a number": (lambda s: s.clip_norm_(math.nan), "`max_norm` is nan"),
    "max_norm, a tensor": (lambda s: s.clip_norm_(torch.tensor(-1.0)), "`max_norm` is tensor"),
    "norm_type": (lambda s: s.clip_norm_(1.0, 0), "`norm_type` is 0"),
    "norm_type, not a number": (lambda s: s.norm(math.nan), "`norm_type` is nan"),
    "clip_value": (lambda s: s.clip_value_(-1), "`clip_value` is -1"),  # N7
    "clip_value, not a number": (lambda s: s.clip_value_(math.nan), "`clip_value` is nan"),
    "clip_value, a tensor": (lambda s: s.clip_value_(torch.tensor(-1.0)), "`clip_value` is tensor"),
    "clip_value, text": (lambda s: s.clip_value_("1"), "`clip_value` is '1'"),
    "weight of a merge": (lambda s: s.extend_(full(), weight=-2), "`weight` is -2"),
    "weight and alpha": (lambda s: s.extend_(full(), weight=2, alpha=2), "Leave one of them out"),
    "max_norm, text": (lambda s: s.clip_norm_("1"), "`max_norm` is '1'"),
    "param": (lambda s: s.add_(3, X), "`param` has a int"),
    "grad": (lambda s: s.add_(MODEL.weight, 3), "`grad` has a int"),
    "grad, its shape": (lambda s: s.add_(MODEL.weight, X), r"has shape \(1, 3\)"),
    "store": (
        lambda s: recoup.segments_backward([MODEL], X, torch.sum, MODEL),
        "`store` is a Linear",
    ),
    "loss_fn": (
        lambda s: recoup.segments_backward([MODEL], X, lambda y: 3.0, s),
        "`loss_fn` returned a float",
    ),
    "loss_fn, a loss and more": (
        lambda s: recoup.segments_backward([MODEL], X, lambda y: (y.sum(), y.mean()), s),
        "`loss_fn` returned a tuple of 2 values.*has_aux=True",
    ),
    "loss_fn, several losses": (
        lambda s: recoup.segments_backward([MODEL], X, lambda y: y, s),
        r"`loss_fn` returned a tensor of shape \(1, 2\).*Sum it",
    ),
    "loss_fn, nothing beside the loss": (
        lambda s: recoup.segments_backward([MODEL], X, torch.sum, s, has_aux=True),
        r"`has_aux` is True, but `loss_fn` returned a tensor",
    ),
    "mode of segments": (
        lambda s: recoup.segments_backward([never], X, torch.sum, s, mode="x"),
        "`mode` is 'x'",
    ),
    "weight of segments": (
        lambda s: recoup.segments_backward([never], X, torch.sum, s, weight=-1.0),
        "`weight` is -1.0",
    ),
    "params of segments": (
        lambda s: recoup.segments_backward([never], X, torch.sum, s, params=[3]),
        "`params` has a int",
    ),
    "stores": (lambda s: recoup.step(torch.optim.SGD(MODEL.parameters(), lr=0.1)), "`stores` is"),
    "op": (lambda s: s.all_reduce_(op="max"), "`op` is 'max'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_used_is_named_and_changes_nothing(name):
    call, words = WRONG[name]
    store = full()
    before = {each: store[each].clone() for each in store}
    with pytest.raises(ValueError, match=words):
        call(store)
    assert all(torch.equal(store[each], value) for each, value in before.items())
    assert len(store) == len(before)


def test_a_gradient_that_is_not_there():
    store, words = full(), r"no gradient of a tensor of shape \(1, 3\)"
    for look in (lambda: store[X], lambda: store.pop(X)):
        with pytest.raises(KeyError, match=words):
            look()
    assert store.get(X) is None
    assert store.pop(X, None) is None
    with pytest.raises(ValueError, match="`params` is missing"):
        recoup.GradStore().backward(MODEL(X).sum())
