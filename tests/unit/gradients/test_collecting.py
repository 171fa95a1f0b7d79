"""What is collected is what plain autograd gives, in each mode, and nothing else is touched."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import recoup
from recoup import GradStore
from recoup.errors import GradientError
from tests.unit.gradients.cases import (
    LAYERS,
    MODES,
    Undisturbed,
    assert_holds,
    loss_of,
    made,
    plain,
)


def parameter(*size, **kwargs):
    return nn.Parameter(torch.randn(*(size or (3, 3)), dtype=torch.float64, **kwargs))


# -- equal to plain autograd -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", LAYERS)
def test_equals_plain_backward(layer, mode):
    module, inputs = made(layer)
    want = plain(module, inputs)
    store = GradStore(module.parameters())
    with Undisturbed(*module.parameters()):
        for x in inputs:
            store.backward(loss_of(module(x)), mode=mode)
    assert_holds(store, module, want, 1e-14 if "sparse" in layer else 0.0)


@pytest.mark.parametrize("layer", LAYERS)
def test_collecting_equals_plain_backward(layer):
    module, inputs = made(layer)
    want = plain(module, inputs)
    store = GradStore(module.parameters())
    with Undisturbed(*module.parameters()):
        for x in inputs:
            with store.collecting():
                loss_of(module(x)).backward()
    assert_holds(store, module, want, 1e-14 if "sparse" in layer else 0.0)
    assert store.weight == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", ["linear", "bfloat16", "complex", "sparse"])
def test_in_another_type(layer, mode, dtype):
    module, inputs = made(layer)
    want = plain(module, inputs)
    store = GradStore(module.parameters(), dtype=dtype)
    with Undisturbed(*module.parameters()):
        for x in inputs:
            store.backward(loss_of(module(x)), mode=mode)
    for name, gradient in store.named(module).items():
        kind = dtype.to_complex() if layer == "complex" else dtype
        assert gradient.dtype is kind
        torch.testing.assert_close(gradient.to_dense(), want[name].to(kind), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("preset", [torch.float32, None], ids=str)
def test_grad_dtype_that_was_set(preset, mode):
    module, inputs = made("bfloat16")
    want = plain(module, inputs)
    module.weight.grad_dtype = preset
    store = GradStore(module.parameters())
    with Undisturbed(*module.parameters()):
        for x in inputs:
            store.backward(loss_of(module(x)), mode=mode)
    assert module.weight.grad_dtype is preset
    assert_holds(store, module, want)
    assert store[module.weight].dtype is torch.float32


@pytest.mark.parametrize("mode", MODES)
def test_gradients_follow_a_model_that_is_cast_later(mode):
    """A `grad_dtype` that was set no longer follows the type of a parameter."""
    module = nn.Linear(3, 2)
    GradStore.from_backward(module(torch.ones(1, 3)).sum(), module.parameters(), mode=mode)
    module.double()
    module(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert module.weight.grad.dtype is torch.float64


@pytest.mark.parametrize("mode", MODES)
def test_under_autocast(mode):
    module, inputs = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)), torch.randn(5, 4)

    def run(module):
        with torch.autocast("cpu", torch.bfloat16):
            return module(inputs).float().sin().sum()

    twin = copy.deepcopy(module)
    run(twin).backward()
    store = GradStore.from_backward(run(module), module.parameters(), mode=mode)
    assert_holds(store, module, {name: p.grad for name, p in twin.named_parameters()})


@pytest.mark.parametrize("mode", MODES)
def test_compiled(mode, fresh_compiler):
    module, inputs = made("linear")
    compiled = torch.compile(copy.deepcopy(module), backend="aot_eager")
    for x in inputs:
        loss_of(compiled(x)).backward()
    want = {name: p.grad.clone() for name, p in compiled._orig_mod.named_parameters()}
    compiled.zero_grad()
    store = GradStore(compiled.parameters())
    with Undisturbed(*compiled.parameters()):
        for x in inputs:
            store.backward(loss_of(compiled(x)), mode=mode)
    assert_holds(store, compiled._orig_mod, want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["dropout", "noise", "sqrt", "log", 2])
def test_weights_and_chains_of_ours(kind, mode):
    if kind in ("dropout", "noise"):
        module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        apply = recoup.weight_dropout if kind == "dropout" else recoup.weight_noise
        apply(module, ".*weight")
    else:
        shared = nn.Linear(4, 4)
        stages = [shared, nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.3), shared, nn.Tanh()]
        module = recoup.Sequential(*stages, memory=kind)
    module.double()
    inputs = [torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    torch.manual_seed(3)
    want = plain(module, inputs)
    want_x = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    torch.manual_seed(3)
    store = GradStore(module.parameters())
    got_x = []
    with Undisturbed(*module.parameters(), *inputs):
        for x in inputs:
            got_x += store.backward(loss_of(module(x)), inputs=x, mode=mode)
    assert_holds(store, module, want)
    for got, expected in zip(got_x, want_x, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("mode", MODES)
def test_many_16_bit_sums(mode):
    """In the type of the parameters, small gradients are lost to rounding."""
    w = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    gradients = torch.rand(512, 64).bfloat16()
    exact = gradients.double().sum(0)
    found = {}
    for dtype in (None, torch.bfloat16):
        store = GradStore([w], dtype=dtype)
        for each in gradients:
            store.backward((w * each).sum(), mode=mode)
        found[dtype] = float((store[w].double() - exact).norm() / exact.norm())
    assert found[None] < 1e-3
    assert found[torch.bfloat16] > 10 * found[None]


# -- which targets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_what_took_no_part_is_absent(mode):
    used, unused, frozen = parameter(), parameter(), parameter()
    frozen.requires_grad_(False)
    store = GradStore([used, unused, frozen])
    with Undisturbed(used, unused):
        store.backward((used * frozen).sum(), mode=mode)
    assert list(store) == [used]
    with pytest.raises(GradientError, match="None of the 1 targets"):
        store.backward(used.sum(), params=[unused], mode=mode)
    store.backward(used.sum(), params=[unused], mode=mode, allow_empty=True)
    assert torch.equal(store[used], frozen)


@pytest.mark.parametrize("mode", MODES)
def test_all_are_frozen(mode):
    frozen, x = parameter(), parameter()
    store = GradStore([frozen.requires_grad_(False)])
    (dx,) = store.backward((frozen * x).sum(), inputs=x, mode=mode)
    assert torch.equal(dx, frozen)
    store.backward((frozen * x).sum(), mode=mode, allow_empty=True)
    assert len(store) == 0


@pytest.mark.parametrize("mode", MODES)
def test_leaves_that_are_no_targets(mode):
    """Nor are inputs: their gradients are returned."""
    w, other, x = parameter(), parameter(), parameter()
    store = GradStore([w])
    with Undisturbed(w, other, x):
        (dx,) = store.backward((x @ w @ other).sum(), inputs=[x], mode=mode)
    want_x, want_w = torch.autograd.grad((x @ w @ other).sum(), [x, w])
    assert list(store) == [w]
    assert torch.equal(dx, want_x)
    assert torch.equal(store[w], want_w)


@pytest.mark.parametrize("mode", ["auto", "grad"])
def test_tensors_within_the_graph(mode):
    w, x = parameter(), parameter()
    inside = (w @ w).tanh()
    want_x, want = torch.autograd.grad((inside @ x).sum(), [x, inside], retain_graph=True)
    store = GradStore([inside])
    (dx,) = store.backward((inside @ x).sum(), inputs=x, mode=mode)
    assert torch.equal(store[inside], want)
    assert torch.equal(dx, want_x)
    assert w.grad is None


def test_tensors_within_the_graph_are_refused():
    inside = parameter() * 2
    with pytest.raises(GradientError, match=r'no.* leaf.*Use mode="grad"'):
        GradStore([inside]).backward(inside.sum(), mode="harvest")
    with (
        pytest.raises(GradientError, match=r"no.* leaf.*Use `backward`"),
        GradStore([inside]).collecting(),
    ):
        pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["x@w@w", "two names", "named twice"])
def test_one_parameter_counts_once(form, mode):
    w, x = parameter(), parameter()
    w.grad = None
    (x @ w @ w).sum().backward(inputs=[w])
    want, w.grad = w.grad, None
    given = {"x@w@w": [w], "two names": [("a", w), ("b", w)], "named twice": [w, w]}[form]
    store = GradStore(given)
    store.backward((x @ w @ w).sum(), mode=mode)
    assert len(store) == 1
    assert torch.equal(store[w], want)


# -- several backwards -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_two_losses_of_one_graph(mode):
    module, (x, _) = made("linear")
    first, second = GradStore(module.parameters()), GradStore(module.parameters())
    y = module(x)
    first.backward(y.sin().sum(), mode=mode, retain_graph=True)
    second.backward(y.exp().sum(), mode=mode)
    assert_holds(first, module, plain(module, [x], lambda y: y.sin().sum()))
    assert_holds(second, module, plain(module, [x], lambda y: y.exp().sum()))


def test_collecting_within_collecting():
    module, (x, _) = made("linear")
    outer, inner = GradStore(module.parameters()), GradStore(module.parameters())
    for _ in range(2):
        with Undisturbed(*module.parameters()), outer.collecting():
            module(x).sin().sum().backward()
            with inner.collecting():
                module(x).exp().sum().backward()
            inner.backward(module(x).exp().sum())
            module(x).cos().sum().backward()
    want = plain(module, [x, x], lambda y: y.sin().sum() + y.cos().sum())
    assert_holds(outer, module, want, 1e-14)
    assert_holds(inner, module, plain(module, [x] * 4, lambda y: y.exp().sum()), 1e-14)


@pytest.mark.parametrize("layer", ["linear", "sparse"])
def test_backward_within_collecting_of_the_same_store(layer):
    module, (x, y) = made(layer)
    store = GradStore(module.parameters())
    for _ in range(2):
        with Undisturbed(*module.parameters()), store.collecting():
            loss_of(module(x)).backward()
            store.backward(loss_of(module(y)))
            loss_of(module(x)).backward()
    assert_holds(store, module, plain(module, [x, y, x] * 2), 1e-14)


# -- graphs of gradients ---------------------------------------------------------------------------


def test_hessian_times_vector():
    w, v = parameter(4), torch.randn(4, dtype=torch.float64)

    def loss(w):
        return (w.sin() * w.roll(1) ** 2).sum()

    want = torch.autograd.functional.hvp(loss, w, v)[1]
    store = GradStore([w])
    store.backward(loss(w) / 2, create_graph=True)
    other = GradStore.from_backward(loss(w) / 2, [w], create_graph=True)
    store.extend_(other)
    second = GradStore.from_backward((store[w] * v).sum(), [w])
    torch.testing.assert_close(second[w], want)
    assert store[w].requires_grad
    assert not store.detach_()[w].requires_grad


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("first", ["plain", "graph"])
@pytest.mark.parametrize("layer", ["linear", "sparse"])
def test_gradients_with_and_without_a_graph_are_summed(layer, first, mode):
    module, (x, _) = made(layer)
    store = GradStore(module.parameters())
    calls = [lambda: store.backward(loss_of(module(x)), mode=mode)]
    calls.append(lambda: store.backward((module.weight**3).sum(), create_graph=True))
    for call in calls if first == "plain" else reversed(calls):
        call()
    want = plain(module, [x])["weight"] + 3 * module.weight.detach() ** 2
    torch.testing.assert_close(store[module.weight].detach(), want, rtol=1e-14, atol=1e-14)
    assert store[module.weight].requires_grad


# -- what lives on ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layer", ["linear", "lstm", "sparse"])
def test_nothing_of_the_graph_lives_on(layer, mode):
    module, (x, _) = made(layer)
    store = GradStore(module.parameters())
    gc.disable()
    try:
        y = module(x)
        loss = loss_of(y)
        watched = [weakref.ref(each) for each in (y, loss, y.untyped_storage())]
        store.backward(loss, mode=mode)
        del y, loss
        assert [each() for each in watched] == [None] * 3
    finally:
        gc.enable()
