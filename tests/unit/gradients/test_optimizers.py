"""Every optimizer of torch: a step from a store is the step from `.grad`, its state included."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils._pytree import tree_flatten

import recoup

SPECIAL = {"Optimizer", "LBFGS", "SparseAdam"}
OPTIMIZERS = sorted(
    name
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, torch.optim.Optimizer) and name not in SPECIAL
)
VARIANTS = {
    "plain": {},
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "maximize": {"maximize": True},
    "maximize foreach": {"maximize": True, "foreach": True},
    "nesterov": {"nesterov": True, "momentum": 0.9},
    "nesterov foreach": {"nesterov": True, "momentum": 0.9, "foreach": True},
    "decay": {"weight_decay": 0.1},
    "amsgrad foreach": {"amsgrad": True, "foreach": True},
    "decay foreach maximize": {"weight_decay": 0.1, "foreach": True, "maximize": True},
}


def takes(name, settings):
    known = torch.optim.__dict__[name].__init__.__annotations__
    return set(settings) <= set(known)


CASES = [(name, way) for name in OPTIMIZERS for way in VARIANTS if takes(name, VARIANTS[way])]


def parameters(dtype=torch.float32):
    """Of two dimensions, as Muon asks for."""
    torch.manual_seed(1)
    shapes = [(4, 3), (5, 5), (1, 7), (2, 6)]
    return [nn.Parameter(torch.randn(*each, dtype=dtype)) for each in shapes]


def assert_same(got, want):
    """Compare nested values bit by bit."""
    got_leaves, got_kind = tree_flatten(got)
    want_leaves, want_kind = tree_flatten(want)
    assert got_kind == want_kind
    for one, other in zip(got_leaves, want_leaves, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other


def run_both(name, settings, *, dtype=torch.float32, consume=True, **preset):
    """Step a pair of models side by side: one by `.grad`, and one by a store."""
    build = torch.optim.__dict__[name]
    plain, ours = parameters(dtype), parameters(dtype)
    optimizers = [build(each, lr=0.05, **settings) for each in (plain, ours)]
    for each in (*plain, *ours):
        each.grad_dtype = preset.get("grad_dtype", each.grad_dtype)
    for step in range(4):
        store = recoup.GradStore(ours)
        for place, (one, other) in enumerate(zip(plain, ours, strict=True)):
            # What has no gradient in a step has an old one lying around.
            one.grad, other.grad = None, torch.full_like(other, 100.0, dtype=other.grad_dtype)
            if step == place:
                continue
            gradient = torch.randn(one.shape)
            one.grad = gradient.to(preset.get("grad_dtype") or dtype)
            store.add_(other, gradient)
        before = {each: value.clone() for each, value in store.items()}
        stale = [each.grad for each in ours]
        optimizers[0].step()
        assert store.step(optimizers[1], consume=consume) is None
        assert all(each.grad is value for each, value in zip(ours, stale, strict=True))
        assert all(bool((value == 100).all()) for value in stale)
        if consume:
            assert len(store) == 0
        else:
            assert_same(list(store.values()), list(before.values()))
        assert_same(ours, plain)
    assert_same(optimizers[1].state_dict(), optimizers[0].state_dict())
    assert [each.grad_dtype for each in ours] == [each.grad_dtype for each in plain]


@pytest.mark.sampled(29)
@pytest.mark.parametrize("consume", [True, False], ids=["consumed", "kept"])
@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_step_is_that_of_torch(name, way, consume):
    run_both(name, VARIANTS[way], consume=consume)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_sums_for_parameters_of_16_bits(name):
    run_both(name, {}, dtype=torch.bfloat16)


# -- those that are not like the others ------------------------------------------------------------


def embeddings():
    torch.manual_seed(1)
    return nn.Embedding(6, 3, sparse=True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch's Adagrad
@pytest.mark.parametrize(
    "windows",
    [
        pytest.param([[[1, 1, 4]], [[0, 4, 0]]], id="few rows"),
        pytest.param([[[0, 1], [2, 3], [3, 4], [4, 5]], [[2, 2]]], id="most rows"),
    ],
)
@pytest.mark.parametrize("name", ["SparseAdam", "SGD", "Adagrad"])
def test_sparse_gradients(name, windows):
    """What torch keeps sparse must stay so for an optimizer that takes nothing else."""
    plain, ours = embeddings(), embeddings()
    optimizers = [torch.optim.__dict__[name](each.parameters(), lr=0.1) for each in (plain, ours)]
    for window in windows:
        store = recoup.GradStore(ours.parameters())
        plain.weight.grad = None
        for rows in window:
            plain(torch.tensor(rows)).pow(2).sum().backward()
            store.backward(ours(torch.tensor(rows)).pow(2).sum())
        optimizers[0].step()
        store.step(optimizers[1])
    torch.testing.assert_close(ours.weight, plain.weight, rtol=1e-6, atol=1e-7)
    for key, value in optimizers[0].state[plain.weight].items():
        found = optimizers[1].state[ours.weight][key]
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-7)


def test_a_layout_that_an_optimizer_refuses_leaves_a_store_that_can_be_mended():
    layer = embeddings()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    store = recoup.GradStore(layer.parameters())
    store.backward(layer(torch.tensor([1, 1])).sum())
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match="sparse"):
        store.step(optimizer)
    assert torch.equal(layer.weight, before)
    store.densify_().step(optimizer)
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize("grad_dtype", [torch.float32, None], ids=str)
@pytest.mark.parametrize("name", ["SGD", "Adafactor", "Muon"])
def test_the_type_that_was_asked_of_gradients_reaches_the_optimizer(name, grad_dtype):
    run_both(name, {}, dtype=torch.bfloat16, grad_dtype=grad_dtype)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_gradients_are_installed_in_the_strides_of_their_parameter(layout):
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last))
    store = recoup.GradStore([weight])
    gradient = torch.randn(4, 3, 2, 2)
    store.add_(weight, gradient.contiguous(memory_format=layout))
    with store.as_grad([weight]):
        assert weight.grad.stride() == weight.stride()
        assert torch.equal(weight.grad, gradient)


# -- what belongs to a step ------------------------------------------------------------------------


def sequential(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, parts, [2])


@pytest.mark.parametrize("make", [lambda each: lr_scheduler.StepLR(each, 2), sequential])
def test_schedules_and_hooks_see_the_step(make):
    """Schedules warn if `optimizer.step` was not called before theirs: an error here."""
    ends = []
    for is_ours in (False, True):
        torch.manual_seed(2)
        params, seen = parameters(), []
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        schedule = make(optimizer)

        def before(*_, params=params, seen=seen):
            seen.append([param.grad is None for param in params])
            torch.nn.utils.clip_grad_value_(params, 0.5)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
        for _ in range(4):
            store = recoup.GradStore(params)
            for param in params[1:]:
                param.grad = torch.randn_like(param)
                store.add_(param, param.grad)
            store.step(optimizer) if is_ours else optimizer.step()
            schedule.step()
        assert seen == [[True, False, False, False], "after"] * 4
        ends.append([*params, torch.tensor(schedule.get_last_lr())])
    assert_same(*ends)
