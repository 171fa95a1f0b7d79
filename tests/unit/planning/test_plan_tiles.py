"""A plan with `tiles`: the output layer of a language model runs in tiles, and its logits."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import recoup
from recoup.errors import ChangedError, GradientError
from tests.plan_oracle import Residual, assert_as_plain, step_of
from tests.planned_zoo import is_plain, transformers_or_skip

VOCABULARY = 4096


def gpt2():
    transformers = transformers_or_skip()
    config = transformers.GPT2Config(
        n_embd=64, n_head=4, n_layer=3, vocab_size=VOCABULARY, n_positions=128,
        use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)  # the head is the embedding


class Plain(nn.Module):
    """A language model that returns its logits."""

    def __init__(self, width=64, change=lambda model: None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Residual(width) for _ in "abc"))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        change(self)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


def batch(num=4, length=64):
    tokens = torch.randint(VOCABULARY, (num, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, : length // 4] = -100
    return tokens, labels


def shifted_loss(tokens):
    targets = tokens[:, 1:].flatten()
    return lambda logits: cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), targets)


def step(model, tokens, labels):
    model.zero_grad(set_to_none=True)
    loss = model(tokens, labels=labels).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


def errors(found, wanted):
    """How far the loss and each gradient are from others, relative to their norms."""
    pairs = zip(found, wanted, strict=True)
    return torch.stack([(a - b).norm() / b.norm().clamp_min(1e-30) for a, b in pairs])


def test_a_language_model_in_fewer_bytes_than_its_logits():
    torch.manual_seed(0)
    model, (tokens, labels) = gpt2(), batch()
    want = step(model, tokens, labels)
    exact = step(copy.deepcopy(model).double(), tokens, labels)
    whole = recoup.plan(model, tokens, labels=labels)
    tiled = recoup.plan(model, tokens, labels=labels, tiles=True)
    least, most = int(1.02 * tiled.points[0].peak_bytes), whole.points[0].peak_bytes
    assert least < most / 3
    for budget in (least, most // 2):
        plan = tiled.plan(budget)
        assert "tile: `lm_head`" in str(plan)
        with plan.applied():
            assert recoup.measure(lambda: step(model, tokens, labels)).peak_bytes <= budget
            got = step(model, tokens, labels)
        own, plain = errors(got, exact), errors(want, exact)
        assert own[0] <= 2 * torch.finfo(torch.float32).eps
        assert own.norm() <= 1.1 * plain.norm()
        assert own.max() <= 1.1 * plain.max()


def tied(model):
    model.head.weight = model.embedding.weight


def noisy_and_tied(model):
    tied(model)
    recoup.weight_noise(model, r"(head|embedding)\.weight", std=0.1)


HEADS = {
    "as it is": lambda model: None,
    "normed": lambda model: nn.utils.parametrizations.weight_norm(model.head),
    "noisy and tied": noisy_and_tied,
    "frozen": lambda model: model.head.requires_grad_(False),
    "after a frozen body": lambda model: model.blocks.requires_grad_(False),
}


@pytest.mark.parametrize("head", HEADS)
def test_output_layers_of_all_kinds_run_in_tiles(head):
    model, (tokens, _) = Plain(change=HEADS[head]), batch()
    loss = shifted_loss(tokens)
    plans = recoup.plan(model, tokens, loss=loss, tiles=True)
    assert plans.least_bytes < recoup.plan(model, tokens, loss=loss).least_bytes / 2
    plan = plans.plan(plans.least_bytes)
    assert "tile: `head`" in str(plan)
    assert_as_plain(plan, step_of(model, tokens, loss=loss), rtol=1e-5)


def test_small_gradients_in_float16():
    model, (tokens, _) = Plain(8), batch(1, 512)
    scale = 2.0**14  # of a GradScaler

    def loss(logits):
        return scale * cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())

    exact = torch.autograd.grad(loss(model(tokens)), list(model.parameters()))
    model.half()
    plan = recoup.plan(model, tokens, loss=loss, budget="16 MiB", tiles=True)
    assert plan.planned.tiled is not None
    with plan.applied():
        got = torch.autograd.grad(loss(model(tokens)), list(model.parameters()))
    assert errors([each.float() for each in got], exact).max() < 2e-2


def test_an_error_of_too_few_bytes_names_tiles():
    model, (tokens, _) = Plain(), batch()
    left_alone, tiled = (lambda logits: logits.square().mean()), shifted_loss(tokens)
    for loss, tiles in ((left_alone, True), (tiled, True), (tiled, False)):
        with pytest.raises(recoup.errors.BudgetError) as caught:
            recoup.plan(model, tokens, loss=loss, budget="1 MiB", tiles=tiles)
        assert ("tiles=True" in str(caught.value)) == (not tiles)


# -- logits: what is made of them, and refused -----------------------------------------------------


TOKENS, LABELS = batch()
LOSS, FLAT = shifted_loss(TOKENS), TOKENS.flatten()
RISING = torch.arange(VOCABULARY)


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
    "transposed": lambda y: cross_entropy(y.transpose(1, 2), TOKENS),
    "a weight": lambda y: cross_entropy(capped(y), FLAT, RISING.double(), label_smoothing=0.1),
    "a sum": lambda y: cross_entropy(y.double().flatten(0, 1), LABELS.flatten(), reduction="sum"),
    "chosen": lambda y: cross_entropy(y[TOKENS > 99], TOKENS[TOKENS > 99]),
    "no target": lambda y: cross_entropy(y.flatten(0, 1), torch.full((256,), -100)),
}


def of_loss(loss, model):
    found = loss(model(TOKENS))
    gradients = torch.autograd.grad(found, list(model.parameters()), materialize_grads=True)
    return [found.detach(), *gradients]


def as_they_are_read(model):
    y = model(TOKENS)
    assert y.requires_grad
    return [y, y[..., :-1, :].argmax(-1), y.mT, torch.cat([y, y]), y.view(torch.int64)]


def by_a_mask_that_is_written_to(model):
    mask = torch.ones(4, 64).tril().bool()
    taken = model(TOKENS)[mask]
    mask.zero_()
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
        found = [plain, softer, cross_entropy(rows, TOKENS[:, 1:].flatten())]
    assert not any(each.requires_grad for each in found)
    return [*found, softer.softmax(-1)]


def gradients_of_logits(model):
    output, other, calls = model(TOKENS), model(TOKENS), []
    output.grad_fn.register_prehook(calls.append)  # so the whole is there
    found = torch.autograd.grad(LOSS(output), output)
    LOSS(output).backward()
    assert len(calls) == 1
    flat = other.flatten(0, 1)
    other.retain_grad()
    cross_entropy(flat, FLAT).backward()
    return [*found, other.grad]


def seen_by_hooks(name, model):
    seen = []
    handle = getattr(model.head, name)(lambda *args: seen.append(args[-1][0].clone()))
    LOSS(model(TOKENS)).backward()
    handle.remove()
    return seen


def accumulated(model):
    for tokens in (batch(2)[0], batch(6)[0]):  # planned for 4
        (shifted_loss(tokens)(model(tokens)) / 2).backward()
    return [p.grad for p in model.parameters()]


STEPS = {
    **{f"a loss of {name}": partial(of_loss, loss) for name, loss in LOSSES.items()},
    "read": as_they_are_read,
    "a mask": by_a_mask_that_is_written_to,
    "other weights": of_weights_that_stand_in,
    "no graph": without_a_graph,
    "gradients of logits": gradients_of_logits,
    "backward hook": partial(seen_by_hooks, "register_full_backward_hook"),
    "backward pre-hook": partial(seen_by_hooks, "register_full_backward_pre_hook"),
    "checkpoint": lambda m: torch.autograd.grad(LOSS(recoup.checkpoint(m, TOKENS)), m.head.weight),
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
    forward = staticmethod(lambda ctx, logits: logits.sum())
    backward = staticmethod(lambda ctx, gradient: gradient.expand(4, 64, VOCABULARY))


def derived_before_a_write(model, logits, loss):
    flat = logits.view(-1, VOCABULARY)
    logits[0] = 0
    assert logits[0].abs().sum() == 0
    flat.sum()


NO_GRADIENT = GradientError, "no gradient of its own"
REFUSED = {
    "a gradient": (lambda model, y, loss: torch.autograd.grad(loss, [y]), *NO_GRADIENT),
    "grad_fn": (lambda model, y, loss: y.grad_fn, *NO_GRADIENT),
    "retain_grad": (lambda model, y, loss: y.retain_grad(), *NO_GRADIENT),
    "a second derivative": (
        lambda m, y, loss: torch.autograd.grad(loss, m.head.weight, create_graph=True),
        GradientError, "cannot be differentiated again",
    ),
    "another function": (lambda model, y, loss: _Own.apply(y).backward(), GradientError, "head"),
    "what was derived before a write": (derived_before_a_write, ChangedError, "changed in place"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_logits_in_tiles_cannot_give_is_an_error(doubles, name):
    model, plan = doubles
    ask, error, message = REFUSED[name]
    with plan.applied():
        logits = model(TOKENS)
        loss = LOSS(logits) if name != "another function" else None
        with pytest.raises(error, match=message):
            ask(model, logits, loss)
    model.zero_grad()


def test_an_output_layer_whose_loss_is_no_cross_entropy_is_left_alone():
    model = Plain(change=tied)
    made = recoup.plan(model, TOKENS, loss=_Own.apply, budget="30 MiB", tiles=True)
    assert made.planned.tiled is None
    with made.applied():
        assert type(model(TOKENS)) is torch.Tensor


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
    linear = model.head.forward
    model.head.forward = lambda x: linear(x) + x.mean((1, 2), keepdim=True) * RISING
    want = of_loss(LOSS, model)
    with plan.applied():
        assert errors(of_loss(LOSS, model), want).max() <= 1e-5


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
