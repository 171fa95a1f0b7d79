"""The logits of a planned model whose head runs in tiles: what is made of them, and refused."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import recoup
from recoup.errors import ChangedError, GradientError
from tests.planned_zoo import is_plain
from tests.unit.planning.test_plan_tiles import (
    VOCABULARY,
    Plain,
    batch,
    gpt2,
    shifted_loss,
    tied,
)

TOKENS, LABELS = batch()
LOSS = shifted_loss(TOKENS)


@pytest.fixture(scope="module")
def doubles():
    model = Plain().double()
    plan = recoup.plan(model, TOKENS, loss=LOSS, budget="9 MiB", tiles=4)
    assert plan.planned.tiled is not None
    return model, plan


def capped(logits):
    return (30 * torch.tanh(logits / 30)).flatten(0, 1)


LOSSES = {
    "a float": lambda y: y.float().logsumexp(-1).square().mean(),
    "parts": lambda y: y[:, :, 5].sum() + (y[:, 1:] * 2).view(-1, VOCABULARY).std(),
    "a cap": lambda y: capped(y).softmax(-1).square().sum(),
    "in place": lambda y: y.mul_(2).sum(0)[0, 0] + y.detach().sum(),
    "transposed": lambda y: F.cross_entropy(y.transpose(1, 2), TOKENS),
    "a weight": lambda y: F.cross_entropy(
        y.flatten(0, 1), TOKENS.flatten(), weight=torch.arange(VOCABULARY).double()
    ),
    "smoothing": lambda y: F.cross_entropy(capped(y), TOKENS.flatten(), label_smoothing=0.1),
    "a sum": lambda y: F.cross_entropy(
        y.to(torch.float64).view(-1, VOCABULARY), LABELS.view(-1), reduction="sum"
    ),
    "chosen": lambda y: F.cross_entropy(y[TOKENS > 99], TOKENS[TOKENS > 99]),
    "no target": lambda y: F.cross_entropy(y.flatten(0, 1), torch.full((256,), -100)),
    "a sum of none": lambda y: F.cross_entropy(
        y.flatten(0, 1), torch.full((256,), -100), reduction="sum"
    ),
}


def of_loss(loss, model):
    found = loss(model(TOKENS))
    gradients = torch.autograd.grad(found, list(model.parameters()), materialize_grads=True)
    return [found.detach(), *gradients]


def as_they_are_read(model):
    y = model(TOKENS)
    assert y.requires_grad
    return [y, y[..., :-1, :].argmax(-1), y.mT, torch.cat([y, y]), y.view(torch.int64)]


def by_an_index_that_is_written_to(index, model):
    taken, index = model(TOKENS), index.clone()
    taken = taken[index]
    index.zero_()
    return [taken.exp()]


def of_weights_that_stand_in(model):
    given = {"head.weight": (model.head.weight.detach() * 1.5).requires_grad_()}
    LOSS(torch.func.functional_call(model, given, (TOKENS,))).backward()
    assert model.head.weight.grad is None
    return [given["head.weight"].grad]


def without_a_graph(model):
    output = model(TOKENS)
    with torch.no_grad():
        plain = model(TOKENS)
        assert type(plain) is torch.Tensor
        softer, rows = output / 2.0, output[:, :-1].reshape(-1, VOCABULARY)
        found = [plain, softer, F.cross_entropy(rows, TOKENS[:, 1:].flatten())]
    found += [softer.softmax(-1), F.cross_entropy(rows, TOKENS[:, 1:].flatten())]
    assert not any(each.requires_grad for each in found)
    return found


def gradients_of_logits(model):
    output, other, calls = model(TOKENS), model(TOKENS), []
    output.grad_fn.register_prehook(calls.append)  # so the whole is there
    found = torch.autograd.grad(LOSS(output), output)
    assert len(calls) == 0
    LOSS(output).backward()
    assert len(calls) == 1
    flat = other.flatten(0, 1)
    other.retain_grad()
    F.cross_entropy(flat, TOKENS.flatten()).backward()
    return [*found, other.grad]


def seen_by_hooks(name, model):
    seen = []
    handle = getattr(model.head, name)(lambda *args: seen.append(args[-1][0].clone()))
    LOSS(model(TOKENS)).backward()
    handle.remove()
    return seen


def within_a_checkpoint(model):
    found = recoup.checkpoint(model, TOKENS)
    assert type(found) is torch.Tensor
    return torch.autograd.grad(LOSS(found), list(model.parameters()))


def accumulated(model):
    for tokens in (batch(2)[0], batch(6)[0]):  # planned for 4
        (shifted_loss(tokens)(model(tokens)) / 2).backward()
    return [p.grad for p in model.parameters()]


STEPS = {
    **{f"a loss of {name}": partial(of_loss, loss) for name, loss in LOSSES.items()},
    "read": as_they_are_read,
    "a mask": partial(by_an_index_that_is_written_to, torch.ones(4, 64).tril().bool()),
    "other weights": of_weights_that_stand_in,
    "no graph": without_a_graph,
    "gradients of logits": gradients_of_logits,
    "backward hook": partial(seen_by_hooks, "register_full_backward_hook"),
    "backward pre-hook": partial(seen_by_hooks, "register_full_backward_pre_hook"),
    "checkpoint": within_a_checkpoint,
    "compiled": lambda model: of_loss(LOSS, torch.compile(model, backend="aot_eager")),
    "accumulated": accumulated,
}


@pytest.mark.filterwarnings("ignore:The first step")  # which may have the whole logits
@pytest.mark.filterwarnings("ignore:A model that follows a plan was given to torch.compile")
@pytest.mark.filterwarnings("ignore:.*where the plan is for")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler looks at it
@pytest.mark.parametrize("name", STEPS)
def test_whatever_is_made_of_logits_is_that_of_the_plain_model(doubles, name):
    model, plan = doubles
    model.zero_grad()
    want = STEPS[name](model)
    model.zero_grad()
    with plan.applied():
        got = STEPS[name](model)
    model.zero_grad()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14, equal_nan=True, check_stride=False)


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(4, 64, VOCABULARY)


def derived_before_a_write(model, logits, loss):
    flat = logits.view(-1, VOCABULARY)
    logits[0] = 0
    assert logits[0].abs().sum() == 0
    flat.sum()


NO_GRADIENT = GradientError, "no gradient of its own"
REFUSED = {
    "a gradient": (
        lambda model, y, loss: torch.autograd.grad(loss, y, allow_unused=True), *NO_GRADIENT
    ),
    "gradients": (lambda model, y, loss: torch.autograd.grad(loss, [y]), *NO_GRADIENT),
    "grad_fn": (lambda model, y, loss: y.grad_fn, *NO_GRADIENT),
    "retain_grad": (lambda model, y, loss: y.retain_grad(), *NO_GRADIENT),
    "a second derivative": (
        lambda model, y, loss: torch.autograd.grad(
            loss, list(model.parameters()), create_graph=True
        ), GradientError, "cannot be differentiated again",
    ),
    "a function of another library": (
        lambda model, y, loss: _Own.apply(y).backward(), GradientError, "head",
    ),
    "what was derived before a write": (derived_before_a_write, ChangedError, "changed in place"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_logits_in_tiles_cannot_give_is_an_error(doubles, name):
    model, plan = doubles
    ask, error, message = REFUSED[name]
    with plan.applied():
        logits = model(TOKENS)
        loss = LOSS(logits) if name != "a function of another library" else None
        with pytest.raises(error, match=message):
            ask(model, logits, loss)
    model.zero_grad()


@pytest.mark.parametrize("loss", [_Own.apply, lambda y: y.square().mean()])
def test_an_output_layer_whose_loss_is_no_cross_entropy_is_left_alone(loss):
    model = Plain(change=tied)
    made = recoup.plan(model, TOKENS, loss=loss, budget="30 MiB", tiles=True)
    assert made.planned.tiled is None
    assert "tile: `head`" not in str(made)
    with made.applied():
        assert type(model(TOKENS)) is torch.Tensor


# -- what changes between a forward and a read -----------------------------------------------------


CHANGES = {
    "in place": lambda head: head.weight.detach().mul_(1.5),
    "another memory": lambda head: setattr(head.weight, "data", torch.ones(VOCABULARY, 64)),
    "frozen": lambda head: head.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_logits_are_not_read_after_the_weight_has_changed(change):
    model = Plain()
    with recoup.plan(model, TOKENS, loss=LOSS, budget="9 MiB", tiles=4).applied():
        logits = model(TOKENS)
        CHANGES[change](model.head)
        for read in (LOSS, torch.sum):  # in pieces, and whole
            with pytest.raises(ChangedError, match="`head` is computed when it is read"):
                read(logits)


@pytest.mark.filterwarnings("ignore:The first step")  # it takes more
def test_an_output_layer_that_has_become_another_runs_whole():
    model = Plain(change=tied)
    plan = recoup.plan(model, TOKENS, loss=LOSS, budget="9 MiB", tiles=4)
    linear, scale = model.head.forward, torch.arange(VOCABULARY)
    model.head.forward = lambda x: linear(x) + x.mean((1, 2), keepdim=True) * scale
    want = of_loss(LOSS, model)
    with plan.applied():
        for a, b in zip(of_loss(LOSS, model), want, strict=True):
            assert float((a - b).norm()) <= 1e-5 * float(b.norm())


# -- around the model ------------------------------------------------------------------------------


def test_what_is_removed_copied_and_pickled_is_the_model():
    torch.manual_seed(0)
    model = gpt2()
    plan = recoup.plan(model, TOKENS, labels=LABELS, budget="6 MiB", tiles=True)
    with plan.applied():
        assert recoup.applied_plans(model) == [plan]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(other(TOKENS, labels=LABELS).logits) is torch.Tensor
        logits = model(TOKENS, labels=LABELS).logits
        assert type(logits) is not torch.Tensor
        assert type(pickle.loads(pickle.dumps(logits.detach()))) is torch.Tensor
        made = model.eval().generate(TOKENS[:1, :5], max_new_tokens=3, do_sample=False)
    assert made.shape == (1, 8)
    assert is_plain(model)
    assert type(model.train()(TOKENS, labels=LABELS).logits) is torch.Tensor
