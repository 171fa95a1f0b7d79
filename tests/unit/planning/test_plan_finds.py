"""Blocks that a plan finds by itself where nothing repeats in the tree of modules (F10)."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import recoup
from tests.planned_zoo import is_plain, transformers_or_skip
from tests.unit.planning.test_plan import Residual


class Recurrent(nn.Module):
    """A list of modules that have none within."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(16, 16) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x, _ = layer(x)
        return x


class OneForAll(nn.Module):
    """One block that is called many times."""

    def __init__(self, num_calls: int = 3) -> None:
        super().__init__()
        self.block = Residual(32)
        self.num_calls = num_calls

    def forward(self, x):
        for _ in range(self.num_calls):
            x = self.block(x)
        return x


def square(y):
    return y.square().mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("make", "shape", "names"),
    [
        (Recurrent, (32, 8, 16), [f"layers.{i}" for i in range(4)]),
        (OneForAll, (64, 32), ["block"] * 3),
    ],
)
def test_blocks_without_a_tree_are_found(make, shape, names):
    """F10"""
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    square(model(x)).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    whole = recoup.plan(model, x, budget="1 GiB", loss=square)
    assert [row.name for row in whole.blocks] == names
    assert whole.least_bytes < whole.most_bytes
    plan = recoup.plan(model, x, budget=whole.least_bytes, loss=square)
    model.zero_grad()
    with plan.applied():
        square(model(x)).backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_the_shared_layer_of_albert_is_found():
    """F10"""
    t = transformers_or_skip()
    torch.manual_seed(0)
    config = t.AlbertConfig(
        num_hidden_layers=3, hidden_size=32, num_attention_heads=2, intermediate_size=64,
        vocab_size=50, embedding_size=16,
    )  # fmt: skip
    model, tokens = t.AlbertForMaskedLM(config).train(), torch.randint(50, (2, 16))
    plan = recoup.plan(model, budget="1 GiB", input_ids=tokens, labels=tokens)
    assert len(plan.blocks) == 3
    assert plan.least_bytes < plan.most_bytes


class Stage(nn.Module):
    """Blocks in a list, then a module that makes their result smaller; and something beside."""

    def __init__(self, width: int, made: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(width) for _ in range(3))
        self.downsample = nn.Linear(width, made)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.downsample(x), x.mean()


class Skipping(Stage):
    """Adds to its list of layers what it was given."""

    def forward(self, x):
        y, mean = super().forward(x)
        return x + y, mean


class Changing(Stage):
    """Changes in place what the last module returned."""

    def forward(self, x):
        y, mean = super().forward(x)
        return y.relu_(), mean


class Stages(nn.Module):
    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x):
        for stage in self.stages:
            x, _ = stage(x)
        return x


@pytest.mark.slow
def test_blocks_within_stages_are_found():
    """F10: each with what lies between the lists; so that less is needed than by stages."""
    torch.manual_seed(0)
    model, x = Stages(Stage(32, 16), Stage(16, 16)), torch.randn(512, 32)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    whole = recoup.plan(model, x, budget="1 GiB", loss=square)
    inner = ["blocks.0", "blocks.1", "blocks.2", "downsample"]
    assert [row.name for row in whole.blocks] == [f"stages.{i}.{n}" for i in "01" for n in inner]
    by_stages = recoup.plan(model, x, budget="1 GiB", loss=square, blocks=r"stages\.\d")
    assert whole.least_bytes < 0.8 * by_stages.least_bytes
    plan = recoup.plan(model, x, budget=whole.least_bytes, loss=square)
    assert sum(row.num_forwards for row in plan.blocks) <= 2 * len(plan.blocks)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    square(model(x)).backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    with plan.applied():
        square(model(x)).backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [Skipping, Changing])
def test_a_block_with_a_list_within_is_no_stage(kind: type[Stage]):
    """F10: what it does with the result of its list is its own, so it stays one block."""
    model, x = Stages(kind(16, 16), kind(16, 16)), torch.randn(64, 16)
    plan = recoup.plan(model, x, budget="1 GiB", loss=square)
    assert [row.name for row in plan.blocks] == ["stages.0", "stages.1"]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["swin", "convnext"])
def test_the_layers_of_swin_and_convnext_are_found(name: str):
    """F10"""
    t = transformers_or_skip()
    torch.manual_seed(0)
    if name == "swin":
        config = t.SwinConfig(
            image_size=32, patch_size=2, embed_dim=16, depths=[2, 4], num_heads=[2, 2],
            window_size=4, num_labels=5,
        )  # fmt: skip
        model, stages = t.SwinForImageClassification(config).train(), r"swin\.encoder\.layers\.\d"
        num_blocks = 2 + 1 + 4
    else:
        config = t.ConvNextConfig(
            hidden_sizes=[16, 32], depths=[3, 5], num_stages=2, num_labels=5, image_size=32,
            patch_size=2, drop_path_rate=0.1,
        )  # fmt: skip
        model = t.ConvNextForImageClassification(config).train()
        stages, num_blocks = r"convnext\.encoder\.stages\.\d", 3 + 2 + 5
    images = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.arange(4)}
    whole = recoup.plan(model, budget="1 GiB", **images)
    assert len(whole.blocks) == num_blocks
    by_stages = recoup.plan(model, budget="1 GiB", blocks=stages, **images)
    assert whole.least_bytes < 0.85 * by_stages.least_bytes
    plan = recoup.plan(model, budget=by_stages.least_bytes, **images)
    torch.manual_seed(1)
    model(**images).loss.backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(1)
    with plan.applied():
        peak = recoup.measure(
            lambda: model(**images).loss.backward(), device="cpu", repeats=0
        ).peak_bytes
    assert peak <= plan.budget_bytes
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert (gradient is None) == (parameter.grad is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


class Holding(Residual):
    """Keeps something of its forward as an attribute."""

    aux: torch.Tensor

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        self.aux = hidden
        return x + self.down(hidden)


def test_a_plan_says_what_others_hold():
    """F11: how many bytes, by which attribute, and what to switch off."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Holding() for _ in range(2))), torch.randn(64, 32)
    shown = str(recoup.plan(model, x, budget="1 GiB", loss=square))
    assert "held by others: 64 KiB of the residuals of 2 blocks (`0` first)" in shown
    assert "held by attributes: `0.aux` and 1 more" in shown
    plain = recoup.plan(nn.Sequential(Residual(), Residual()), x, budget="1 GiB", loss=square)
    assert plain.held_by_others == ()


@pytest.mark.slow
def test_a_plan_says_that_a_cache_or_a_checkpoint_is_on():
    """F11"""
    t = transformers_or_skip()
    config = t.T5Config(
        num_layers=2, num_decoder_layers=2, d_model=32, d_ff=64, d_kv=8, num_heads=4,
        vocab_size=50, decoder_start_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(50, (2, 12))
    model = t.T5ForConditionalGeneration(config).train()
    kwargs = {"input_ids": tokens, "labels": tokens, "budget": "1 GiB"}
    assert "pass use_cache=False" in str(recoup.plan(model, **kwargs))
    assert recoup.plan(model, use_cache=False, **kwargs).held_by_others == ()


# -- groups of modules -----------------------------------------------------------------------------


def convolutions(*, inplace: bool) -> nn.Sequential:
    """A chain whose neighbours keep the same tensors (VGG)."""
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for width, out in ((3, 8), (8, 8), (8, 16), (16, 16)):
        modules += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU(inplace=inplace)]
        modules += [nn.MaxPool2d(2)] if width == out else []
    return nn.Sequential(*modules)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_convolution_and_what_follows_it_are_one_block(inplace):
    model, x = convolutions(inplace=inplace), torch.randn(4, 3, 32, 32)

    def step():
        model(x).square().sum().backward()

    def peak() -> int:
        model.zero_grad()
        return recoup.measure(step, device="cpu", repeats=0).peak_bytes

    frontier = recoup.plan(model, x, loss=lambda y: y.square().sum(), holds_output=False)
    assert frontier.points[-1].peak_bytes == peak()
    wanted = [p.grad.clone() for p in model.parameters()]
    calls: list[str] = []
    model[3].register_forward_hook(lambda *_: calls.append("hook"))
    for point in frontier.points:
        plan = frontier.plan(point.peak_bytes)
        assert [row.name for row in plan.blocks] == ["0-1", "2-4", "5-6", "7-9"]
        assert plan.blocks[1].kind == "Conv2d, ReLU, MaxPool2d"
        with plan.applied():
            assert recoup.applied_plans(model) == [plan]
            assert peak() == plan.rehearsed_peak_bytes == plan.predicted_peak_bytes
            assert all(map(torch.equal, (p.grad for p in model.parameters()), wanted))
        assert recoup.applied_plans(model) == []
    best = min(
        recoup.measure(
            lambda num=num: (
                checkpoint_sequential(model, num, x.clone().requires_grad_(), use_reentrant=False)
                .square()
                .sum()
                .backward()
            ),
            device="cpu",
            repeats=0,
        ).peak_bytes
        for num in ((2, 3, 4, 5) if not inplace else (1,))
    )
    assert frontier.points[0].peak_bytes <= best
    assert calls
    assert is_plain(model)


def test_a_sequence_that_calls_a_module_twice_or_otherwise_is_right():
    act = nn.Tanh()
    twice = nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 8), act, nn.Linear(8, 8), act)

    class Backwards(nn.Sequential):
        def forward(self, x):
            for module in reversed(self):
                x = module(x)
            return x

    for model in (twice, Backwards(*(nn.Linear(8, 8) for _ in range(4)))):
        x = torch.randn(64, 8)
        model(x).square().sum().backward()
        wanted = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        frontier = recoup.plan(model, x, loss=lambda y: y.square().sum())
        with frontier.plan(frontier.least_bytes).applied():
            model(x).square().sum().backward()
        assert all(map(torch.equal, (p.grad for p in model.parameters()), wanted))


class LayerByLayer(nn.Module):
    """Takes the layers of a sequence without calling it (features of an image)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = convolutions(inplace=False)
        self.head = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def forward(self, x):
        kept = []
        for layer in self.features:
            x = layer(x)
            kept.append(x.mean())
        return self.head(x.mean((2, 3))).sum() + sum(kept)


def gradients_of(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_modules_of_a_sequence_that_is_not_called_are_blocks_of_their_own():
    model, x = LayerByLayer(), torch.randn(4, 3, 32, 32)
    wanted = gradients_of(model, x)
    frontier = recoup.plan(model, x, loss=lambda y: y.square().sum())
    plan = frontier.plan(frontier.least_bytes)
    names = [row.name for row in plan.blocks]
    assert names[:2] == ["features.0", "features.1"]
    assert names[-4:] == ["head.0", "head.1", "head.2", "head.3"]
    with plan.applied():
        assert all(map(torch.equal, gradients_of(model, x), wanted))


@pytest.mark.parametrize("change", ["replaced", "appended"])
def test_a_sequence_that_has_other_modules_since_runs_as_it_is(change):
    model, x = convolutions(inplace=False), torch.randn(4, 3, 32, 32)
    frontier = recoup.plan(model, x, loss=lambda y: y.square().sum())
    plan = frontier.plan(frontier.least_bytes).apply()
    if change == "replaced":
        model[2] = nn.Conv2d(8, 8, 3, padding=1)
    else:
        model.append(nn.Tanh())
    with pytest.warns(UserWarning, match="other modules than when the plan was made"):
        found = gradients_of(model, x)
    plan.remove()
    assert all(map(torch.equal, found, gradients_of(model, x)))


class Stemmed(nn.Module):
    """A network of images, whose first layers have the largest activations."""

    def __init__(self, width, *, is_split):
        super().__init__()
        stem = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        if is_split:
            self.conv, self.norm, self.act = stem
        else:
            self.stem = nn.Sequential(*stem)
        self.pool = nn.AvgPool2d(2)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, width, 1))
            for _ in range(8)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        parts = (self.conv, self.norm, self.act) if hasattr(self, "conv") else (self.stem,)
        for part in (*parts, self.pool):
            x = part(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("is_split", [False, True])
def test_what_runs_before_the_blocks_is_a_block_where_it_holds_much(is_split):
    torch.manual_seed(0)
    model, x = Stemmed(16, is_split=is_split), torch.randn(4, 3, 32, 32)
    found = recoup.plan(model, x, loss=square)
    alone = recoup.plan(model, x, loss=square, blocks=r"layers\.\d")
    assert found.least_bytes < 0.85 * alone.least_bytes
    square(model(x)).backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    plan = found.plan(found.least_bytes)
    names = [row.name for row in plan.blocks]
    assert names[: -len(alone.plan("1 GiB").blocks)][-1] == "pool"
    model.zero_grad()
    running = [buffer.clone() for buffer in model.buffers()]
    with plan.applied():
        square(model(x)).backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
    again = Stemmed(16, is_split=is_split)
    again.load_state_dict(dict(model.named_parameters()) | dict(zip(
        (name for name, _ in model.named_buffers()), running, strict=True)))  # fmt: skip
    again(x)
    for buffer, expected in zip(model.buffers(), again.buffers(), strict=True):
        assert torch.equal(buffer, expected)


def test_what_runs_before_the_blocks_and_holds_little_is_none():
    model = Stemmed(16, is_split=True)
    model.layers.extend(nn.Sequential(nn.Conv2d(16, 256, 1), nn.ReLU(), nn.Conv2d(256, 16, 1))
                        for _ in range(12))  # fmt: skip
    x = torch.randn(4, 3, 8, 8)
    plan = recoup.plan(model, x, loss=square).plan("1 GiB")
    assert all(row.name.startswith("layers") for row in plan.blocks)


class Counting(nn.Module):
    """A module that cannot run again."""

    num_runs = 0

    def forward(self, x):
        self.num_runs += 1
        return x * self.num_runs


class Popping(nn.Module):
    """Another, which fails."""

    def forward(self, x):
        self.factors = getattr(self, "factors", [1.0])
        return x * self.factors.pop()


class Flipping(nn.Module):
    """An augmentation, which may repeat by chance."""

    def forward(self, x):
        return x.flip(-1) if random.random() < 0.5 else x


class OfForces(nn.Module):
    """A module that runs a backward of its own."""

    def forward(self, x):
        y = x.detach().requires_grad_()
        return x + torch.autograd.grad(y.sin().sum(), y)[0]


@pytest.mark.parametrize("kind", [Counting, Popping, Flipping])
def test_a_stem_that_cannot_run_again_is_no_block(kind):
    model = Stemmed(16, is_split=True)
    model.pool = nn.Sequential(kind(), nn.AvgPool2d(2))
    plans = recoup.plan(model, torch.randn(4, 3, 32, 32), loss=square)
    names = [row.name for row in plans.plan(plans.least_bytes).blocks]
    assert names == [f"layers.{place}" for place in range(8)]


def test_a_stem_that_runs_a_backward_of_its_own_is_blocks():
    torch.manual_seed(0)
    model, x = Stemmed(16, is_split=True), torch.randn(4, 3, 32, 32)
    model.pool = nn.Sequential(OfForces(), nn.AvgPool2d(2))
    wanted = gradients_of(model, x)
    plans = recoup.plan(model, x, loss=square)
    plan = plans.plan(plans.least_bytes)
    assert [row.name for row in plan.blocks][:5] == ["conv", "norm", "act", "pool", "layers.0"]
    with plan.applied():
        assert all(map(torch.equal, gradients_of(model, x), wanted))


def test_a_stem_before_groups_of_a_sequence():
    """Whose first group no hook sees."""
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(6)
        for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    ]
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act = stem
            self.pool, self.layers = nn.AvgPool2d(2), nn.Sequential(*layers)

        def forward(self, x):
            return self.layers(self.pool(self.act(self.conv(x))))

    plans = recoup.plan(Whole(), torch.randn(8, 3, 32, 32), loss=square)
    names = [row.name for row in plans.plan(plans.least_bytes).blocks]
    assert names[-6:] == [f"layers.{place}-{place + 2}" for place in range(0, 18, 3)]


class Pairs(nn.Module):
    """Layers that are lists or dicts of an attention and an MLP (vit-pytorch, rtdl)."""

    def __init__(self, kind: str, *, skips: bool = False) -> None:
        super().__init__()
        self.kind, self.skips = kind, skips
        self.layers = nn.ModuleList()
        for _ in range(4):
            attention = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            pair = {"a": attention, "m": mlp, "unused": nn.Linear(16, 16)}
            layer = nn.ModuleDict(pair) if kind == "dict" else nn.ModuleList(pair.values())
            self.layers.append(nn.ModuleList([layer]) if kind == "nested" else layer)

    def forward(self, x):
        for layer in self.layers:
            if self.skips and random.random() < 0.5:
                continue
            inner = layer[0] if self.kind == "nested" else layer
            attention, mlp, _ = inner.values() if self.kind == "dict" else inner
            x = mlp(attention(x))
        return x


@pytest.mark.parametrize("kind", ["list", "dict", "nested"])
def test_lists_of_lists_are_looked_into(kind):
    """Nothing calls them, so blocks are what a forward calls within them."""
    torch.manual_seed(0)
    model, x = Pairs(kind), torch.randn(4, 8, 16)

    def gradients():
        model.zero_grad()
        torch.manual_seed(1)
        square(model(x)).backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    wanted = gradients()
    names = {
        "list": r"layers\.\d\.[01]",
        "dict": r"layers\.\d\.[am]",
        "nested": r"layers\.\d\.0\.[01]",
    }
    by_name = recoup.plan(model, x, loss=square, blocks=names[kind])
    found = recoup.plan(model, x, loss=square)
    assert found.least_bytes == by_name.least_bytes < 0.75 * found.points[-1].peak_bytes
    plan = found.plan(found.least_bytes)
    assert [row.name for row in plan.blocks] == [
        row.name for row in by_name.plan(found.least_bytes).blocks
    ]
    with plan.applied():
        assert all(map(torch.equal, gradients(), wanted))
    assert recoup.estimate(lambda: (model, x)).points[-1].num_forwards == 8
    assert len(recoup.plan(model, x, policy="full").blocks) == 8


def test_layers_that_are_lists_may_be_left_out():
    """LayerDrop: a list within which this forward calls nothing has blocks for the next."""
    torch.manual_seed(0)
    random.seed(0)
    model, x = Pairs("list", skips=True), torch.randn(4, 8, 16)
    plan = recoup.plan(model, x, loss=square, budget="1 GiB")
    assert {row.name for row in plan.blocks} >= {f"layers.{i}.{j}" for i in "0123" for j in "01"}


class Potential(nn.Module):
    """Takes forces in its forward, of blocks that have a list of modules each (MACE)."""

    def __init__(self) -> None:
        super().__init__()
        self.interactions = nn.ModuleList(Summing() for _ in range(3))

    def forward(self, positions):
        x = positions = positions.requires_grad_()
        for interaction in self.interactions:
            x = interaction(x)
        energy = x.square().sum()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy + forces.square().sum()


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 3)) for _ in "ab"
        )

    def forward(self, x):
        return x + sum(part(x) for part in self.parts)


def test_a_forward_that_takes_forces_has_blocks_with_lists():
    """What is observed to find stages runs a backward of its own."""
    torch.manual_seed(0)
    model, x = Potential(), torch.randn(64, 3)
    model(x).backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    found = recoup.plan(model, x)
    by_name = recoup.plan(model, x, blocks=r"interactions\.\d")
    assert found.least_bytes == by_name.least_bytes < found.points[-1].peak_bytes
    plan = found.plan(found.least_bytes)
    assert [row.name for row in plan.blocks] == [f"interactions.{place}" for place in range(3)]
    with plan.applied():
        model(x).backward()
    assert all(map(torch.equal, (p.grad for p in model.parameters()), wanted))
    assert recoup.estimate(lambda: (model, x)).points[-1].num_forwards == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_code_of_torch_jit_within_lists_is_left_alone():
    """It takes no hooks, and nothing can follow it."""
    model = Pairs("list")
    for layer in model.layers:
        layer[1] = torch.jit.script(layer[1])
    plan = recoup.plan(model, torch.randn(4, 8, 16), loss=square, budget="1 GiB")
    assert [row.name for row in plan.blocks] == [f"layers.{place}.0" for place in range(4)]
