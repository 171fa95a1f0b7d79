"""Blocks that a plan finds by itself, in whatever tree of modules (F10)."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import recoup
from tests import plan_oracle
from tests.neighbours.planned import result_of
from tests.oracle import assert_same_tensors
from tests.plan_oracle import Made, Residual, assert_as_plain, in_a_row, square, step_of
from tests.planned_zoo import is_plain


def convolutions(*, inplace):
    """A chain whose neighbours keep the same tensors (VGG)."""
    modules = []
    for width, out in ((3, 8), (8, 8), (8, 16), (16, 16)):
        modules += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU(inplace=inplace)]
        modules += [nn.MaxPool2d(2)] if width == out else []
    return nn.Sequential(*modules)


def stage(width, made, then=lambda x, y: y):
    """Blocks in a list, then a module that makes their result smaller; and something beside."""

    def forward(model, x):
        return then(x, model.downsample(in_a_row(model.blocks, x))), x.mean()

    blocks = [Residual(width) for _ in range(3)]
    return Made(forward, blocks=blocks, downsample=nn.Linear(width, made))


def first_of_each(model, x):
    for layer in model.layers:
        x, _ = layer(x)
    return x


def stages(*sizes, **options):
    return Made(first_of_each, layers=[stage(*size, **options) for size in sizes])


def layer_by_layer():
    """Takes the layers of a sequence without calling it (features of an image)."""

    def forward(model, x):
        return model.head(in_a_row(model.features, x).mean((2, 3)))

    head = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    return Made(forward, features=convolutions(inplace=False), head=head)


def stemmed(*before_pool, width=32, num_layers=8):
    """A network of images, whose first layers have the largest activations."""
    conv, norm, act = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
    pool = nn.Sequential(*before_pool, nn.AvgPool2d(2)) if before_pool else nn.AvgPool2d(2)
    layers = [
        nn.Sequential(nn.Conv2d(16, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 16, 1))
        for _ in range(num_layers)
    ]

    def forward(model, x):
        x = in_a_row([model.conv, model.norm, model.act, model.pool], x)
        for layer in model.layers:
            x = x + layer(x)
        return model.head(x.mean((2, 3)))

    head = nn.Linear(16, 5)
    return Made(forward, conv=conv, norm=norm, act=act, pool=pool, layers=layers, head=head)


def row_of_branches():
    """With a pooling in it (a GoogLeNet)."""

    def unit(num, size):
        return nn.Sequential(nn.Conv2d(num, 8, size, padding=size // 2), nn.ReLU())

    def branched():
        left, right = nn.Sequential(unit(16, 1), unit(8, 3)), unit(16, 1)
        return Made(lambda m, x: torch.cat([m.left(x), m.right(x)], 1), left=left, right=right)

    modules = {"stem": nn.Conv2d(3, 16, 3, padding=1), "one": branched(), "two": branched()}
    modules |= {"pool": nn.MaxPool2d(2), "three": branched()}
    return Made(lambda model, x: in_a_row(map(model.get_submodule, modules), x), **modules)


def pairs(kind, *, skips=False):
    """Layers that are lists or dicts of an attention and an MLP (vit-pytorch, rtdl)."""
    layers = []
    for _ in range(4):
        mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        pair = {"a": Residual(16), "m": mlp, "unused": nn.Linear(16, 16)}
        layer = nn.ModuleDict(pair) if kind == "dict" else nn.ModuleList(pair.values())
        layers.append(nn.ModuleList([layer]) if kind == "nested" else layer)

    def forward(model, x):
        for layer in model.layers:
            if not skips or random.random() >= 0.5:
                inner = layer[0] if kind == "nested" else layer
                attention, mlp, _ = inner.values() if kind == "dict" else inner
                x = mlp(attention(x))
        return x

    return Made(forward, layers=layers)


def numbered(name, num):
    return [f"{name}.{place}" for place in range(num)]


IMAGES = (4, 3, 32, 32)
GROUPS = ["0-1", "2-4", "5-6", "7-9"]
INNER = ["blocks.0", "blocks.1", "blocks.2", "downsample"]
STEM = ["conv", "norm", "act", "pool"]
# A model, the size of its input, the blocks that are found, blocks that might be named instead,
# and the share of the least bytes with these.
MODELS = {
    "layers without modules within": (
        lambda: Made(first_of_each, layers=[nn.LSTM(16, 16) for _ in range(4)]), (32, 8, 16),
        numbered("layers", 4),
    ),
    "one block for all": (
        lambda: Made(lambda model, x: in_a_row([model.block] * 3, x), block=Residual()), (64, 32),
        ["block"] * 3,
    ),
    # Each with what lies between the lists, so that less is needed than by stages.
    "stages": (
        lambda: stages((32, 16), (16, 16)), (512, 32),
        [f"layers.{place}.{name}" for place in range(2) for name in INNER], r"layers\.\d", 0.8,
    ),
    # What they do with the result of their list is their own, so they stay one block.
    "stages that add what they were given": (
        lambda: stages((16, 16), (16, 16), then=lambda x, y: x + y), (64, 16),
        numbered("layers", 2),
    ),
    "convolutions": (lambda: convolutions(inplace=False), IMAGES, GROUPS),
    "layer by layer": (layer_by_layer, IMAGES, numbered("features", 10) + numbered("head", 4)),
    "a module twice": (
        lambda: nn.Sequential(*[nn.Linear(8, 8), nn.Linear(8, 8), nn.Tanh()] * 2), (64, 8), []
    ),
    "a stem": (stemmed, IMAGES, STEM + numbered("layers", 8), r"layers\.\d", 0.85),
    "light stem": (lambda: stemmed(width=256, num_layers=20), (4, 3, 8, 8), numbered("layers", 20)),
    "branches": (
        row_of_branches, IMAGES, ["stem", "one", "two", "pool", "three"],
        r"\w+\.left\.\d", 0.95,
    ),
    # Nothing calls them, so blocks are what a forward calls within them.
    **{
        f"layers that are {kind}": (
            functools.partial(pairs, kind), (4, 8, 16),
            [f"layers.{place}.{name}" for place in range(4) for name in names],
            rf"layers\.\d\.({'|'.join(names)})", 1.0,
        )
        for kind, names in {"list": "01", "dict": "am", "nested": ["0.0", "0.1"]}.items()
    },
}  # fmt: skip


# Whose peak is that of a loss or of one layer.
AT_THE_LOSS = "convolutions", "layer by layer", "light stem"


def built(name):
    torch.manual_seed(0)
    build, size, *_ = MODELS[name]
    return build(), torch.randn(size)


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_found_and_a_step_of_the_least_bytes_is_the_plain_one(name):
    model, x = built(name)
    frontier = recoup.plan(model, x, loss=square)
    _, _, names, *others = MODELS[name]
    plan = frontier.plan(frontier.least_bytes)
    if names:
        assert plan_oracle.names_of(plan) == names
    if others:
        alone = recoup.plan(model, x, loss=square, blocks=others[0]).least_bytes
        assert frontier.least_bytes <= others[1] * alone
    if name not in AT_THE_LOSS:
        assert frontier.least_bytes < frontier.points[-1].peak_bytes
    assert_as_plain(plan, step_of(model, x))
    assert is_plain(model)


def test_an_estimate_and_a_policy_find_the_same_blocks():
    model, x = built("layers that are nested")
    assert recoup.estimate(lambda: (model, x)).points[-1].num_forwards == 8
    assert len(recoup.plan(model, x, policy="full", loss=square).blocks) == 8


def test_a_stem_that_cannot_run_again_is_no_block():
    def counting(module, x):
        module.num_runs = vars(module).get("num_runs", 0) + 1
        return x * module.num_runs

    plans = recoup.plan(stemmed(Made(counting)), torch.randn(IMAGES), loss=square)
    assert plan_oracle.names_of(plans.plan(plans.least_bytes)) == numbered("layers", 8)


def test_layers_that_are_lists_may_be_left_out():
    """LayerDrop: a list within which this forward calls nothing has blocks for the next."""
    random.seed(0)
    model, x = pairs("list", skips=True), torch.randn(4, 8, 16)
    plan = recoup.plan(model, x, loss=square, budget="1 GiB")
    assert {*plan_oracle.names_of(plan)} >= {f"layers.{i}.{j}" for i in "0123" for j in "01"}


@pytest.mark.parametrize("inplace", [False, True])
def test_groups_take_what_is_predicted(inplace):
    model, x = convolutions(inplace=inplace), torch.randn(IMAGES)
    step = lambda: square(model(x)).backward()  # noqa: E731
    frontier = recoup.plan(model, x, loss=square, holds_output=False)
    assert frontier.points[-1].peak_bytes == plan_oracle.peak_of(model, step)
    wanted = result_of(model, step)
    calls = []
    model[3].register_forward_hook(lambda *_: calls.append("hook"))
    for point in frontier.points:
        plan = frontier.plan(point.peak_bytes)
        assert plan.blocks[1].kind == "Conv2d, ReLU, MaxPool2d"
        with plan.applied():
            assert recoup.applied_plans(model) == [plan]
            peak = assert_as_plain(plan, step, wanted)
        assert peak == plan.rehearsed_peak_bytes == plan.predicted_peak_bytes
    assert calls


def test_a_sequence_that_has_other_modules_since_runs_as_it_is():
    model, x = convolutions(inplace=False), torch.randn(IMAGES)
    frontier = recoup.plan(model, x, loss=square)
    plan = frontier.plan(frontier.least_bytes).apply()
    model[2] = nn.Conv2d(8, 8, 3, padding=1)
    with pytest.warns(UserWarning, match="other modules than when the plan was made"):
        found = result_of(model, step_of(model, x))
    plan.remove()
    assert_same_tensors(found, result_of(model, step_of(model, x)))


def test_a_plan_says_what_others_hold():
    def forward(model, x):
        model.aux = torch.tanh(model.up(x))
        return x + model.down(model.aux)

    def plan():
        return recoup.plan(model, torch.randn(64, 32), budget="1 GiB", loss=square)

    parts = [{"up": nn.Linear(32, 128), "down": nn.Linear(128, 32)} for _ in range(2)]
    model = nn.Sequential(*(Made(forward, **each) for each in parts))
    assert "held by others: 64 KiB of the residuals of 2 blocks (`0` first)" in str(plan())
    assert "held by attributes: `0.aux` and 1 more" in str(plan())
    model.config = SimpleNamespace(use_cache=True)
    assert "pass use_cache=False" in str(plan())
    model = nn.Sequential(Residual(), Residual())
    assert plan().held_by_others == ()
