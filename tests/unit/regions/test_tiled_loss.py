"""`recoup.tiled_loss`: what taking gradients in forward must not change.

That the loss and its gradients are those of all rows is in test_tiled.py, with `tiled`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import GradientError, RecoupError
from tests.oracle import assert_same_tensor, hooks_in_force

N, L, D, V = 3, 13, 6, 11
EXACT = 1e-10


class Model(nn.Module):
    """A body, and a head that may be tied to the embedding."""

    def __init__(self, tied=False, bias=True, p=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(V, D)
        self.body = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)
        self.dropout = nn.Dropout(p)
        self.head = nn.Linear(D, V, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.double()

    def hidden(self, tokens):
        return self.body(self.embedding(tokens)).tanh()

    def loss(self, hidden, labels):
        logits = self.head(self.dropout(self.norm(hidden)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.fixture
def tokens():
    torch.manual_seed(2)
    return torch.randint(V, (N, L))


@pytest.fixture
def labels():
    torch.manual_seed(3)
    labels = torch.randint(V, (N, L))
    labels[:, 2:7] = -100
    return labels


def step(model, tokens, loss):
    model.zero_grad()
    value = loss(model.hidden(tokens))
    value.backward()
    return [value.detach(), *(parameter.grad for parameter in model.parameters())]


def assert_same(found, wanted, rtol=EXACT):
    assert len(found) == len(wanted)
    for place, (got, want) in enumerate(zip(found, wanted, strict=True)):
        assert_same_tensor(str(place), got, want, rtol)


def both(model, tokens, labels, change=lambda loss: loss, **kwargs):
    tiled = recoup.tiled_loss(model.loss, tiles=4, **kwargs)
    found = step(model, tokens, lambda h: change(tiled(h, labels)))
    return found, step(model, tokens, lambda h: change(model.loss(h, labels)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights(tied, bias, tokens, labels):
    assert_same(*both(Model(tied, bias), tokens, labels))


def test_a_weight_that_a_tile_uses_twice(tokens, labels):
    model = Model()

    def loss(hidden, labels):
        mixed = F.linear(F.linear(hidden, model.body.weight), model.body.weight.t())
        mixed = mixed + model.embedding(labels.clamp_min(0))
        logits = mixed @ model.embedding.weight.t() + mixed.square() @ model.embedding.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model.loss = loss
    found, wanted = both(model, tokens, labels)
    assert all((got is None) == (want is None) for got, want in zip(found, wanted, strict=True))
    assert_same([x for x in found if x is not None], [x for x in wanted if x is not None])


@pytest.mark.parametrize("weight", ["Conv1D", "alpha", "beta", "batched", "frozen", "expanded"])
def test_products_of_other_kinds(weight, tokens, labels):
    model = Model()
    w = model.head.weight

    def head(x):
        flat = x.flatten(0, 1)
        if weight == "Conv1D":  # of transformers' GPT-2: the weight is not transposed
            return torch.addmm(model.head.bias, flat @ model.body.weight, w.t())
        if weight == "alpha":
            return torch.addmm(model.head.bias, flat, w.t(), alpha=0.5)
        if weight == "beta":
            return torch.addmm(model.head.bias, flat, w.t(), beta=0.5)
        if weight == "batched":
            return torch.bmm(x, w.t().expand(N, -1, -1)).flatten(0, 1)
        if weight == "expanded":
            return flat.sum(1, keepdim=True).expand(-1, D) @ w.t()
        return F.linear(flat, w.detach(), model.head.bias)

    model.loss = lambda x, y: F.cross_entropy(head(x), y.flatten())
    found, wanted = both(model, tokens, labels)
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a is not None or b is not None]
    assert_same([a for a, _ in pairs], [b for _, b in pairs])


def test_hooks_of_parameters_run_once_with_the_whole_gradient(tokens, labels):
    model = Model(tied=True)
    seen: list[tuple[str, torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: seen.append((name, g.clone())))
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append((f"{name} at last", p.grad.clone()))
        )
    step(model, tokens, lambda h: model.loss(h, labels))
    wanted, seen[:] = dict(seen), []
    value = recoup.tiled_loss(model.loss, tiles=4)(model.hidden(tokens), labels)
    assert not seen  # forward shows them nothing
    model.zero_grad()
    value.backward()
    assert len(seen) == len(wanted)
    found = dict(seen)
    assert_same([found[name] for name in wanted], list(wanted.values()))


def test_a_hook_that_changes_a_gradient(tokens, labels):
    model = Model()
    model.head.bias.register_hook(lambda g: 2 * g)
    model.head.weight.register_hook(lambda g: g + 1)
    assert_same(*both(model, tokens, labels))


def test_hooks_come_back_after_an_exception(labels, monkeypatch):
    model = Model()
    handle = model.norm.weight.register_hook(lambda g: 3 * g)
    hidden = torch.ones(N, L, D, dtype=torch.float64, requires_grad=True)

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    tiled = recoup.tiled_loss(model.loss)
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", fail)
        with pytest.raises(KeyboardInterrupt):
            tiled(hidden, labels)
    assert hooks_in_force() is None
    assert len(model.norm.weight._backward_hooks) == 1
    handle.remove()
    assert not model.norm.weight._backward_hooks


def test_an_exception_within_leaves_nothing(tokens, labels):
    model, calls = Model(), []
    plain = model.loss

    def loss(hidden, labels):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("second")
        return plain(hidden, labels)

    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        pytest.raises(KeyError, match="second"),
    ):
        recoup.tiled_loss(loss)(model.hidden(tokens), labels)
    assert hooks_in_force() is None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same(*both(model, tokens, labels))


def test_each_tile_runs_once_and_without_targets_not_at_all(tokens, labels):
    model, sizes = Model(), []

    def loss(hidden, labels):
        sizes.append(hidden.shape[1])
        return model.loss(hidden, labels)

    labels[:, 4:7] = -100
    value = recoup.tiled_loss(loss, tiles=4)(model.hidden(tokens), labels)
    value.backward()
    assert sizes == [4, 3, 3]  # of 4, 3, 3, 3 rows; the second has no target


def test_scaled_and_added_losses(tokens, labels):
    model = Model()
    hidden = model.hidden(tokens).detach()

    def change(loss):
        return 1024 * loss + loss.square() / 3 + model.head(hidden).square().mean()

    assert_same(*both(model, tokens, labels, change))


def test_a_retained_graph_gives_the_same_again(tokens, labels):
    model = Model()

    def of(loss):
        leaves = [model.head.weight, model.body.weight]
        value = loss(model.hidden(tokens), labels)
        first = torch.autograd.grad(value, leaves, retain_graph=True)
        second = torch.autograd.grad(5 * value, leaves, retain_graph=True)
        return [*first, *second, *torch.autograd.grad(value, leaves)]

    assert_same(of(recoup.tiled_loss(model.loss)), of(model.loss))
    value = recoup.tiled_loss(model.loss)(model.hidden(tokens), labels)
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_a_gradient_of_the_gradient_is_an_error(tokens, labels):
    model = Model()
    value = recoup.tiled_loss(model.loss)(model.hidden(tokens), labels)
    with pytest.raises(GradientError, match=r"taken in forward.*Use recoup\.tiled"):
        torch.autograd.grad(value, model.head.weight, create_graph=True)


def test_only_some_gradients(tokens, labels):
    model = Model()
    for asked in ([model.body.weight], [model.head.bias]):
        value = recoup.tiled_loss(model.loss)(model.hidden(tokens), labels)
        wanted = torch.autograd.grad(model.loss(model.hidden(tokens), labels), asked)
        assert_same(torch.autograd.grad(value, asked), wanted)
    model.requires_grad_(False)
    assert not recoup.tiled_loss(model.loss)(model.hidden(tokens), labels).requires_grad
    model.norm.requires_grad_(True)
    value = recoup.tiled_loss(model.loss)(model.hidden(tokens), labels)
    wanted = torch.autograd.grad(model.loss(model.hidden(tokens), labels), model.norm.weight)
    assert_same(torch.autograd.grad(value, model.norm.weight), wanted)


def test_without_grad_mode_nothing_is_differentiated(tokens, labels):
    model = Model()
    with torch.no_grad():
        value = recoup.tiled_loss(model.loss)(model.hidden(tokens), labels)
        assert_same([value], [model.loss(model.hidden(tokens), labels)])
    assert not value.requires_grad
    with torch.inference_mode():
        recoup.tiled_loss(model.loss)(model.hidden(tokens), labels)


def test_a_weight_as_an_argument_that_was_computed_before(tokens, labels):
    model = Model()

    def loss(hidden, labels, weight, *, bias):
        return F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, 1), labels.flatten())

    def run(call):
        weight, bias = model.head.weight.exp(), model.head.bias.sin()
        return step(model, tokens, lambda h: call(h, labels, weight, bias=bias))

    found, wanted = run(recoup.tiled_loss(loss)), run(loss)
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if b is not None]
    assert_same([a for a, _ in pairs], [b for _, b in pairs])


def test_a_tensor_that_was_computed_before(tokens, labels):
    model = Model()

    def run(tiled):
        weight = model.head.weight.exp()
        weight.register_hook(lambda g: 2 * g)

        def loss(hidden, labels):
            return F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.flatten())

        return step(
            model, tokens, lambda h: (recoup.tiled_loss(loss) if tiled else loss)(h, labels)
        )

    found, wanted = run(tiled=True), run(tiled=False)
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if b is not None]
    assert_same([a for a, _ in pairs], [b for _, b in pairs])


def test_a_hidden_tensor_that_was_computed_before_is_an_error(tokens, labels):
    class Holder:
        pass

    model, holder = Model(), Holder()
    holder.by_name = {"weight": [model.head.weight.exp()]}

    def loss(hidden, labels):
        logits = F.linear(hidden, holder.by_name["weight"][0])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    with pytest.raises(GradientError, match=r"Exp made it.*Pass it as an argument"):
        recoup.tiled_loss(loss)(model.hidden(tokens), labels)
    assert hooks_in_force() is None


def test_a_tensor_that_is_an_argument_twice(labels):
    x = torch.randn(N, L, D, dtype=torch.float64, requires_grad=True)

    def loss(a, b, *, c):
        assert a is b
        return (a * b.detach() + b.sin() + c).square().mean()

    def run(call):
        return torch.autograd.grad(call(x, x, c=x), x)

    assert_same(run(recoup.tiled_loss(loss)), run(loss))


def test_a_residual_changed_in_place_is_the_plain_error(tokens, labels):
    model = Model()

    def loss(hidden, labels):
        y = hidden.exp()
        z = y.sum()
        y.mul_(2)
        return z + y.sum()

    with (
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ):
        recoup.tiled_loss(loss, reduction="sum")(model.hidden(tokens), labels)


def test_dropout_draws_tile_by_tile(tokens, labels):
    model = Model(p=0.5)
    labels[labels == -100] = 0

    def in_pieces(hidden):
        parts = zip(hidden.split([4, 3, 3, 3], 1), labels.split([4, 3, 3, 3], 1), strict=True)
        return sum(model.loss(h, y) * h.shape[1] for h, y in parts) / L

    def run(loss):
        torch.manual_seed(5)
        return [*step(model, tokens, loss), torch.get_rng_state()]

    tiled = recoup.tiled_loss(model.loss, tiles=4)
    found, wanted = run(lambda h: tiled(h, labels)), run(in_pieces)
    assert_same(found[:-1], wanted[:-1])
    assert torch.equal(found[-1], wanted[-1])


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("used_before", [True, False])
def test_autocast(used_before, cache, tokens, labels):
    model = Model(tied=True).float()

    def run(loss):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            hidden = model.hidden(tokens)
            if used_before:  # autocast keeps the copy of the weight that this makes
                model.head(hidden.detach())
            value = loss(hidden, labels) + loss(hidden, labels)
            assert value.dtype is torch.float32
        model.zero_grad()
        value.backward()
        return [value.detach(), *(parameter.grad for parameter in model.parameters())]

    assert_same(run(recoup.tiled_loss(model.loss)), run(model.loss), rtol=2e-2)


def test_backward_of_a_tile_is_not_cast(labels):
    """Forward runs within autocast, and gradients of float32 operators stay in float32."""
    torch.manual_seed(0)
    x = torch.randn(N, L, 64).requires_grad_()
    w = nn.Parameter(torch.randn(64, 64))

    def loss(x, y):
        with torch.autocast("cpu", enabled=False):
            return (x.flatten(0, 1) @ w).sin().sum()

    def run(call):
        with torch.autocast("cpu", torch.bfloat16):
            value = call(x, labels)
        return torch.autograd.grad(value, [x, w])

    assert_same(run(recoup.tiled_loss(loss, reduction="sum")), run(loss), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype, tokens, labels):
    model = Model().to(dtype)
    found, wanted = both(model, tokens, labels)
    assert found[0].dtype is dtype
    assert_same(found, wanted, rtol=5e-2)


def test_a_mean_in_16_bits_whose_sum_is_too_large():
    x = torch.full((1, 1024), 200.0, dtype=torch.float16, requires_grad=True)
    for tiles in (1, 2, 64):
        value = recoup.tiled_loss(torch.mean, tiles=tiles)(x)
        assert value == 200
        assert torch.equal(torch.autograd.grad(value, x)[0], torch.full_like(x, 1 / 1024))


def test_complex_weights():
    torch.manual_seed(0)
    x = torch.randn(N, L, D, dtype=torch.complex128, requires_grad=True)
    w = nn.Parameter(torch.randn(V, D, dtype=torch.complex128))

    def loss(x):
        return F.linear(x.flatten(0, 1), w).abs().square().sum()

    found = torch.autograd.grad(recoup.tiled_loss(loss, reduction="sum")(x), [x, w])
    assert_same(
        [torch.view_as_real(each) for each in found],
        [torch.view_as_real(each) for each in torch.autograd.grad(loss(x), [x, w])],
    )


@pytest.mark.parametrize("call", [recoup.tiled, recoup.tiled_loss])
def test_noise_on_a_weight_is_one_draw(call, tokens, labels):
    model = Model()
    recoup.weight_noise(model, "head.weight", 0.5)

    def run(loss):
        with recoup.weights.same_draw(seed=3):
            return step(model, tokens, loss)

    tiled = call(model.loss, tiles=4, reduction="mean")
    assert_same(run(lambda h: tiled(h, labels)), run(lambda h: model.loss(h, labels)))


def test_sums_into_a_store(tokens, labels):
    model = Model(tied=True)
    wanted = step(model, tokens, lambda h: model.loss(h, labels))[1:]
    model.zero_grad()
    tiled = recoup.tiled_loss(model.loss)
    store = recoup.GradStore(model.parameters())
    store.backward(tiled(model.hidden(tokens), labels))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same([store[parameter] for parameter in model.parameters()], wanted)


def test_hooks_around_see_the_gradients_alone(tokens, labels):
    model, seen = Model(), []
    hidden = model.hidden(tokens).detach().requires_grad_()

    def pack(tensor):
        seen.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = recoup.tiled_loss(model.loss)(hidden, labels)
    used = [*model.norm.parameters(), *model.head.parameters()]
    shapes = sorted([(N, L, D), *(tuple(each.shape) for each in used)])
    assert sorted(seen) == shapes
    value.backward()
    assert hidden.grad is not None


def test_with_regions_within(tokens, labels):
    model = Model()
    plain = model.loss
    model.loss = lambda h, y: recoup.checkpoint(plain, h, y)
    wanted = step(model, tokens, lambda h: plain(h, labels))
    tiled = recoup.tiled_loss(model.loss, tiles=4)
    assert_same(step(model, tokens, lambda h: tiled(h, labels)), wanted)


def test_reduction_none_is_refused():
    with pytest.raises(ValueError, match=r"`reduction` is \"none\""):
        recoup.tiled_loss(F.cross_entropy, reduction="none")


def test_gradients_of_many_at_once_are_right_or_an_error(tokens, labels):
    model = Model()
    value = recoup.tiled_loss(model.loss)(model.hidden(tokens), labels)
    with pytest.raises((RecoupError, RuntimeError)):
        torch.autograd.grad(
            value.expand(2), model.head.bias, torch.eye(2).double(), is_grads_batched=True
        )
