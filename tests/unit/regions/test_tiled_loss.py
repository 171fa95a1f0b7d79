"""Losses in tiles, with gradients that are taken in forward: the plain call is the oracle."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import recoup
from recoup.errors import GradientError, RecoupError
from tests.tile_models import D, L, Model, N, assert_same, both, rows, targets


def step(model, loss, change=lambda value: value):
    model.zero_grad()
    with recoup.weights.same_draw(seed=3):
        value = change(loss(model.hidden()))
    value.backward()
    return [value.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("ignored", ["none", "some", "a tile", "all"])
@pytest.mark.parametrize(("reduction", "tiles"), [("mean", 1), ("mean", 4), ("sum", 4)])
@both
def test_a_loss_is_that_of_all_rows(call, reduction, tiles, ignored):
    model, labels = Model(), targets(ignored)

    def fn(hidden, labels):
        return 3 * model.loss(hidden, labels, reduction=reduction)

    found = step(model, lambda h: call(fn, tiles=tiles, reduction=reduction)(h, labels))
    wanted = step(model, lambda h: fn(h, labels))
    assert found[0].isnan() == wanted[0].isnan() == (ignored == "all" and reduction == "mean")
    assert_same([each.nan_to_num() for each in found], [each.nan_to_num() for each in wanted])
    assert all(not each.isnan().any() for each in found[1:])


def ce(logits, labels):
    return F.cross_entropy(logits, labels.flatten())


def of_one(weight, x):
    return x @ weight + x.square() @ weight


HEADS = {  # how the head makes logits of (rows, D)
    "twice, transposed once": lambda m, x: of_one(m.head.weight.t(), x),
    "twice": lambda m, x: of_one(m.body.weight, x @ m.body.weight.t()) @ m.head.weight.t(),
    "not transposed": lambda m, x: torch.addmm(m.head.bias, x @ m.body.weight, m.head.weight.t()),
    "scaled": lambda m, x: torch.addmm(m.head.bias, x, m.head.weight.t(), alpha=0.5, beta=2),
    "frozen": lambda m, x: F.linear(x, m.head.weight.detach(), m.head.bias),
    "parts": lambda m, x: F.linear(x, torch.cat(m.head.weight.split([4, 7])), m.head.bias),
    "complex": lambda m, x: F.linear(x.to(torch.complex128), m.head.weight + 0j).abs(),
}


def head(name):
    return lambda model: lambda x, y: ce(HEADS[name](model, x.flatten(0, 1)), y)


def hooked(model):
    model.head.bias.register_hook(lambda g: 2 * g)
    model.head.weight.register_hook(lambda g: g + 1)
    return model.loss


STEPS = {  # arguments of the model, what is called, tolerance
    "tied, no bias": ((True, False), lambda m: m.loss, 1e-10),
    "a bias": ((False, True), lambda m: m.loss, 1e-10),
    **{f"head, {name}": ((), head(name), 1e-10) for name in HEADS},
    "a region within": ((True,), lambda m: lambda *xy: recoup.checkpoint(m.loss, *xy), 1e-10),
    "hooks of parameters": ((True,), hooked, 1e-10),
    "noise": ((), lambda m: recoup.weight_noise(m, "head.weight", 0.5).loss, 1e-10),
    "float16": ((), lambda m: m.half().loss, 5e-2),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
@both
def test_losses_in_tiles(name, call):
    of_model, make, rtol = STEPS[name]
    model, labels = Model(*of_model), targets("a tile")
    loss, change = make(model), lambda value: 1024 * value + value.square() / 3
    tiled = call(loss, tiles=4, reduction="mean")
    found = step(model, lambda h: tiled(h, labels), change)
    assert_same(found, step(model, lambda h: loss(h, labels), change), rtol)
    assert found[0].dtype is model.norm.weight.dtype


@both
def test_which_argument_has_the_targets(call):
    model, hidden, places = Model(), rows(N, L, D), torch.arange(L)[None].repeat(N, 1)
    labels = targets().masked_fill(targets() == -100, 7)

    def loss(hidden, labels, *, places):
        return model.loss(hidden * (1 + places[..., None]), labels, ignore_index=7)

    got = call(loss, reduction="mean", target=1, ignore_index=7)(hidden, labels, places=places)
    assert_same([got], [loss(hidden, labels, places=places)])
    got = call(F.mse_loss, tiles=5, reduction="mean")(hidden, hidden.detach().cos())
    assert_same([got], [F.mse_loss(hidden, hidden.detach().cos())])  # rows count without targets


def test_a_mean_in_16_bits_whose_sum_is_too_large():
    x = torch.full((1, 1024), 200.0, dtype=torch.float16, requires_grad=True)
    for tiles in (1, 64):
        value = recoup.tiled_loss(torch.mean, tiles=tiles)(x)
        assert value == 200
        assert torch.equal(torch.autograd.grad(value, x)[0], torch.full_like(x, 1 / 1024))


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("is_off_within", [False, True])
def test_autocast(is_off_within, is_cached):
    model, labels = Model(tied=True).float(), targets()

    def within(hidden, labels):
        with torch.autocast("cpu", enabled=False):
            logits = F.linear(hidden.flatten(0, 1).float(), model.head.weight).sin()
        return ce(logits, labels)

    def run(make):
        loss = make(within if is_off_within else model.loss)
        hidden = rows(N, L, D, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_cached):
            model.head(hidden.detach())  # makes a copy of the weight
            value = loss(hidden, labels) + loss(hidden, labels)
        return [value.detach(), *torch.autograd.grad(value, [hidden, model.head.weight])]

    assert_same(run(recoup.tiled_loss), run(lambda fn: fn), 1e-5 if is_off_within else 2e-2)


@both
def test_dropout_draws_tile_by_tile_and_the_same_in_a_second_run(call):
    model, labels, sizes = Model(p=0.5), targets("none"), [4, 3, 3, 3]

    def in_pieces(hidden):
        parts = zip(hidden.split(sizes, 1), labels.split(sizes, 1), strict=True)
        return sum(model.loss(h, y) * h.shape[1] for h, y in parts) / L

    def run(loss):
        torch.manual_seed(5)
        return [*step(model, loss), torch.get_rng_state()]

    tiled = call(model.loss, tiles=4, reduction="mean")
    assert_same(run(lambda hidden: tiled(hidden, labels)), run(in_pieces))


def test_hooks_of_parameters_run_once_with_the_whole_gradient(monkeypatch):
    model, seen, labels = Model(tied=True), {}, targets()
    for name, p in model.named_parameters():
        seen[name] = noted = []
        p.register_hook(lambda g, noted=noted: noted.append(g.clone()))
        p.register_post_accumulate_grad_hook(lambda p, noted=noted: noted.append(p.grad))
    step(model, lambda h: model.loss(h, labels))
    wanted = {name: noted.copy() for name, noted in seen.items()}
    for noted in seen.values():
        noted.clear()
    model.zero_grad()
    value = recoup.tiled_loss(model.loss, tiles=4)(model.hidden(), labels)
    assert not any(seen.values())  # forward shows them nothing
    value.backward()
    for name, noted in seen.items():
        assert_same(noted, wanted[name])

    hidden, before = model.hidden(), list(model.norm.weight._backward_hooks)
    monkeypatch.setattr(torch.autograd, "grad", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        recoup.tiled_loss(model.loss)(hidden, labels)
    assert list(model.norm.weight._backward_hooks) == before


def test_a_retained_graph_and_a_gradient_of_the_gradient():
    model, labels = Model(), targets()
    tiled = lambda: recoup.tiled_loss(model.loss)(model.hidden(), labels)  # noqa: E731

    def of(value):
        leaves = [model.head.weight, model.body.weight]
        first = torch.autograd.grad(value, leaves, retain_graph=True)
        return [*first, *torch.autograd.grad(5 * value, leaves, retain_graph=True)]

    assert_same(of(tiled()), of(model.loss(model.hidden(), labels)))
    with pytest.raises(GradientError, match=r"taken in forward.*Use recoup\.tiled"):
        torch.autograd.grad(tiled(), model.head.weight, create_graph=True)
    given = torch.eye(2).double()
    with pytest.raises((RecoupError, RuntimeError)):
        torch.autograd.grad(tiled().expand(2), model.head.bias, given, is_grads_batched=True)
    value = tiled()
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


@pytest.mark.parametrize("asked", ["body.weight", "head.bias", "norm.weight"])
def test_only_some_gradients(asked):
    model, labels = Model(), targets()
    model.requires_grad_(asked != "norm.weight")
    leaf = model.get_parameter(asked)
    tiled = recoup.tiled_loss(model.loss)
    assert tiled(model.hidden(), labels).requires_grad == leaf.requires_grad
    leaf.requires_grad_()
    value = tiled(model.hidden(), labels)
    wanted = torch.autograd.grad(model.loss(model.hidden(), labels), leaf)
    assert_same(torch.autograd.grad(value, leaf), wanted)


@pytest.mark.parametrize("how", ["argument", "closure"])
def test_a_tensor_that_was_computed_before(how):
    model, labels = Model(), targets()

    def run(make):
        before = model.head.weight.exp()
        before.register_hook(lambda g: 2 * g)

        def loss(hidden, labels, weight=None, *, bias):
            weight = before if weight is None else weight
            return ce(F.linear(hidden, weight, bias).flatten(0, 1), labels)

        given = [before] if how == "argument" else []
        return step(model, lambda h: make(loss)(h, labels, *given, bias=model.head.bias.sin()))

    assert_same(run(recoup.tiled_loss), run(lambda loss: loss))


def test_a_tensor_that_was_computed_before_and_is_not_found_is_an_error():
    model = Model()
    held = SimpleNamespace(weights=[model.head.weight.exp()])
    loss = recoup.tiled_loss(lambda h, y: ce((h @ held.weights[0].t()).flatten(0, 1), y))
    with pytest.raises(GradientError, match=r"Exp made it.*Pass it as an argument"):
        loss(model.hidden(), targets())


def test_hooks_around_see_the_gradients_alone():
    model, seen = Model(), []
    hidden = model.hidden().detach().requires_grad_()
    note = lambda tensor: seen.append(tuple(tensor.shape)) or tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        value = recoup.tiled_loss(model.loss)(hidden, targets())
    used = [*model.norm.parameters(), *model.head.parameters()]
    assert sorted(seen) == sorted([(N, L, D), *(tuple(each.shape) for each in used)])
    store = recoup.GradStore.from_backward(value, [hidden, *used])
    assert_same([store[hidden]], torch.autograd.grad(model.loss(hidden, targets()), hidden))
