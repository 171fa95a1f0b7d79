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
        if got is not None or want is not None:
            assert_same_tensor(str(place), got, want, rtol)


def assert_as_plain(model, tokens, labels, loss=None, change=lambda loss: loss, rtol=EXACT):
    """Check the loss and its gradients in tiles against those at once; return the former."""
    loss = loss or model.loss
    tiled = recoup.tiled_loss(loss, tiles=4)
    found = step(model, tokens, lambda h: change(tiled(h, labels)))
    assert_same(found, step(model, tokens, lambda h: change(loss(h, labels))), rtol)
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights(tied, bias, tokens, labels):
    assert_as_plain(Model(tied, bias), tokens, labels)


def twice(model, x):
    mixed = F.linear(F.linear(x, model.body.weight), model.body.weight.t())
    return mixed @ model.embedding.weight.t() + mixed.square() @ model.embedding.weight.t()


def of_one(weight, x):
    return x @ weight + x.square() @ weight


HEADS = {
    "twice, transposed once": lambda m, x: of_one(m.head.weight.t(), x),
    "twice, not transposed": lambda m, x: of_one(m.body.weight, x) @ m.head.weight.t(),
    "twice": twice,
    # Of transformers' GPT-2: the weight is not transposed.
    "Conv1D": lambda m, x: torch.addmm(m.head.bias, x @ m.body.weight, m.head.weight.t()),
    "alpha": lambda m, x: torch.addmm(m.head.bias, x, m.head.weight.t(), alpha=0.5),
    "beta": lambda m, x: torch.addmm(m.head.bias, x, m.head.weight.t(), beta=0.5),
    "batched": lambda m, x: torch.bmm(x[None], m.head.weight.t()[None])[0],
    "expanded": lambda m, x: x.sum(1, keepdim=True).expand(-1, D) @ m.head.weight.t(),
    "frozen": lambda m, x: F.linear(x, m.head.weight.detach(), m.head.bias),
    "parts": lambda m, x: F.linear(x, torch.cat(m.head.weight.split([4, 7])), m.head.bias),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_weight_that_a_tile_uses_twice_and_other_products(head, tokens, labels):
    model = Model()

    def loss(x, y):
        return F.cross_entropy(HEADS[head](model, x.flatten(0, 1)), y.flatten())

    assert_as_plain(model, tokens, labels, loss)


def test_hooks_of_parameters_run_once_with_the_whole_gradient(tokens, labels):
    model, seen = Model(tied=True), []
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: seen.append((name, g.clone())))
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append((f"{name} at last", p.grad.clone()))
        )
    step(model, tokens, lambda h: model.loss(h, labels))
    wanted, seen[:] = dict(seen), []
    model.zero_grad()
    value = recoup.tiled_loss(model.loss, tiles=4)(model.hidden(tokens), labels)
    assert not seen  # forward shows them nothing
    value.backward()
    assert len(seen) == len(wanted)
    assert_same([dict(seen)[name] for name in wanted], list(wanted.values()))
    model.head.bias.register_hook(lambda g: 2 * g)
    model.head.weight.register_hook(lambda g: g + 1)
    assert_as_plain(model, tokens, labels)


def test_hooks_come_back_after_an_exception(tokens, labels, monkeypatch):
    model = Model()
    handle = model.norm.weight.register_hook(lambda g: 3 * g)
    tiled = recoup.tiled_loss(model.loss)

    def fail(*args, **kwargs):
        assert not model.norm.weight._backward_hooks
        raise KeyboardInterrupt

    hidden = model.hidden(tokens)
    monkeypatch.setattr(torch.autograd, "grad", fail)
    with pytest.raises(KeyboardInterrupt):
        tiled(hidden, labels)
    assert hooks_in_force() is None
    assert list(model.norm.weight._backward_hooks) == [handle.id]


def test_each_tile_runs_once_and_without_targets_not_at_all(tokens, labels):
    model, sizes = Model(), []

    def loss(hidden, labels):
        sizes.append(hidden.shape[1])
        return model.loss(hidden, labels)

    tiled = recoup.tiled_loss(loss, tiles=4)
    tiled(model.hidden(tokens), labels)  # the first call of some code is checked
    labels[:, 4:7] = -100
    sizes.clear()
    tiled(model.hidden(tokens), labels).backward()
    assert sizes == [4, 3, 3]  # of 4, 3, 3, 3 rows; the second has no target


def test_scaled_and_added_losses(tokens, labels):
    model = Model()
    hidden = model.hidden(tokens).detach()

    def change(loss):
        return 1024 * loss + loss.square() / 3 + model.head(hidden).square().mean()

    assert_as_plain(model, tokens, labels, change=change)


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


@pytest.mark.parametrize("asked", ["body.weight", "head.bias", "norm.weight", ""])
def test_only_some_gradients(asked, tokens, labels):
    model = Model()
    model.requires_grad_(not asked.startswith("norm") and bool(asked))
    value = recoup.tiled_loss(model.loss)(model.hidden(tokens), labels)
    assert value.requires_grad == model.head.bias.requires_grad
    if asked:
        leaf = model.get_parameter(asked).requires_grad_()
        value = recoup.tiled_loss(model.loss)(model.hidden(tokens), labels)
        wanted = torch.autograd.grad(model.loss(model.hidden(tokens), labels), leaf)
        assert_same(torch.autograd.grad(value, leaf), wanted)


def test_without_grad_mode_nothing_is_differentiated(tokens, labels):
    model = Model()
    with torch.no_grad():
        value = recoup.tiled_loss(model.loss)(model.hidden(tokens), labels)
        assert_same([value], [model.loss(model.hidden(tokens), labels)])
    assert not value.requires_grad
    with torch.inference_mode():
        recoup.tiled_loss(model.loss)(model.hidden(tokens), labels)


@pytest.mark.parametrize("how", ["argument", "closure"])
def test_a_tensor_that_was_computed_before(how, tokens, labels):
    model = Model()

    def run(make):
        before = model.head.weight.exp()
        before.register_hook(lambda g: 2 * g)

        def loss(hidden, labels, weight=None, *, bias):
            logits = F.linear(hidden, before if weight is None else weight, bias)
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

        args = (before,) if how == "argument" else ()
        bias = model.head.bias.sin()
        return step(model, tokens, lambda h: make(loss)(h, labels, *args, bias=bias))

    assert_same(run(recoup.tiled_loss), run(lambda loss: loss))


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


def test_dropout_draws_tile_by_tile(tokens, labels):
    model = Model(p=0.5)
    labels[labels == -100] = 0

    def in_pieces(hidden, labels):
        parts = zip(hidden.split([4, 3, 3, 3], 1), labels.split([4, 3, 3, 3], 1), strict=True)
        return sum(model.loss(h, y) * h.shape[1] for h, y in parts) / L

    def run(loss):
        torch.manual_seed(5)
        return [*step(model, tokens, lambda h: loss(h, labels)), torch.get_rng_state()]

    assert_same(run(recoup.tiled_loss(model.loss, tiles=4)), run(in_pieces))


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("used_before", [True, False])
def test_autocast(used_before, cache, tokens, labels):
    model = Model(tied=True).float()

    def run(loss):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            hidden = model.hidden(tokens)
            if used_before:  # autocast keeps the copy of the weight that this makes
                model.head(hidden.detach())
            value = loss(hidden, labels) + loss(hidden, labels)
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
    assert assert_as_plain(Model().to(dtype), tokens, labels, rtol=5e-2)[0].dtype is dtype


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


def test_with_regions_within_and_sums_into_a_store(tokens, labels):
    model = Model(tied=True)
    wanted = step(model, tokens, lambda h: model.loss(h, labels))[1:]
    model.zero_grad()
    tiled = recoup.tiled_loss(lambda h, y: recoup.checkpoint(model.loss, h, y), tiles=4)
    store = recoup.GradStore(model.parameters())
    store.backward(tiled(model.hidden(tokens), labels))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same([store[parameter] for parameter in model.parameters()], wanted)


def test_gradients_of_many_at_once_are_right_or_an_error(tokens, labels):
    model = Model()
    value = recoup.tiled_loss(model.loss)(model.hidden(tokens), labels)
    with pytest.raises((RecoupError, RuntimeError)):
        torch.autograd.grad(
            value.expand(2), model.head.bias, torch.eye(2).double(), is_grads_batched=True
        )
