"""What a plan may be told, all that makes plans may be told."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import torch

import recoup
from recoup.planning.options import PlanOptions
from tests.neighbours.planned import Net

OPTIONS = {field.name: field.default for field in fields(PlanOptions)}


def parameters_of(function):
    own = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in own if p.kind is p.KEYWORD_ONLY}


def test_every_option_of_a_plan_has_its_default():
    own = parameters_of(recoup.plan)
    assert {name: own.pop(name) for name in OPTIONS} == OPTIONS
    assert own == {"budget": None, "policy": None, "replan": False}


def test_largest_takes_every_option():
    own = parameters_of(recoup.largest)
    assert {name: own[name] for name in OPTIONS} == OPTIONS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("budget_of", "all"),
        ("compile", "fast"),
        ("exact", 1),
        ("holds_output", "x"),
        ("tiles", 1),
        ("headroom", 1),
        ("loss", "mean"),
        ("optimizer", "adam"),
    ],
)
def test_what_is_no_option_is_refused_before_anything_runs(name, value):
    net = Net(16, 3)
    with pytest.raises(ValueError, match=f"`{name}` is {value!r}"):
        recoup.plan(net, budget="1 MiB", **{name: value})
    with pytest.raises(ValueError, match=f"`{name}` is {value!r}"):
        recoup.largest(lambda _: pytest.fail("it ran"), net, budget="1 MiB", **{name: value})


def test_blocks_that_can_be_read_once_serve_every_plan():
    options = PlanOptions(blocks=iter(["blocks.0", "blocks.1"]))
    assert options.blocks == ["blocks.0", "blocks.1"]


def test_a_keyword_that_nobody_takes_is_named():
    with pytest.raises(
        ValueError, match=r"`memory` is no option of recoup.plan, and the forward of"
    ):
        recoup.plan(Net(), torch.randn(4, 32), memory="1 MiB")
