"""Law 2 for values that are named: what `recompute` returns is not held, whoever saves it."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import recoup
from recoup._core.storage_tracking import StorageTracker
from tests.alive import held_after, no_collector
from tests.neighbours.planned import assert_same, result_of
from tests.oracle import assert_same_tensor, tensors
from tests.planned_zoo import transformers_or_skip
from tests.weight_zoo import around

pytestmark = pytest.mark.usefixtures("measured")

VALUE = 64 * 256 * 4
STATE = torch.get_rng_state().nbytes


def leaf():
    return torch.randn(64, 256, requires_grad=True)


def weight(precision="float32"):
    dtype = torch.bfloat16 if precision == "autocast" else torch.float32  # not copied, therefore
    return (torch.randn(256, 32) / 16).to(dtype).requires_grad_()


def of_views(y, w):
    parts = [part @ w[:128] for part in y.chunk(2, 1)]
    ones = torch.ones(3, 64, dtype=w.dtype)
    return y.view(-1, 64) @ w[:64], y[:, :128] @ w[128:], y[8:16] @ w, *parts, ones @ y


def of_parts(y, w):
    parts = y.view(256, 64).chunk(4)
    return parts[0] @ parts[1]  # one operator, and one node of the graph, for two of them


CONSUMERS = {
    "matmul": lambda y, w: y @ w,
    "bmm": lambda y, w: torch.bmm(y.view(2, 32, 256), w.expand(2, -1, -1)),
    "two": lambda y, w: (y @ w, y.sin()),
    "transposed": lambda y, w: w.t() @ y.t(),
    "views": of_views,
    "parts": of_parts,
}
in_consumers = pytest.mark.parametrize("consume", CONSUMERS.values(), ids=CONSUMERS)


def held_bytes(run, precision="float32"):
    own: dict[int, int] = {}

    def run_and_count():
        outputs = run()
        for storage in (output.untyped_storage() for output in tensors(outputs)):
            own[storage._cdata] = storage.nbytes()
        return outputs

    held = held_after(run_and_count, (), functools.partial(around, precision))
    return held.num_bytes - sum(own.values())


@pytest.mark.parametrize("precision", ["float32", "autocast"])
@in_consumers
def test_only_what_it_was_made_of_is_held_and_gradients_are_the_same(consume, precision):
    x, w, found = leaf(), weight(precision), []
    ones = 3 * 64 * w.element_size() if consume is of_views else 0
    for fn in (F.gelu, recoup.recompute(F.gelu)):
        held = held_bytes(lambda fn=fn: consume(fn(x), w), precision)
        assert held >= VALUE // 4 if fn is F.gelu else held <= ones
        with around(precision):
            loss = sum(part.double().square().sum() for part in tensors(consume(fn(x), w)))
        found.append(torch.autograd.grad(loss, (x, w), allow_unused=True))
    for want, got in zip(*found, strict=True):
        assert_same_tensor("a gradient", got, want)


def twice(x):
    return x.sin(), {"cosine": x.cos(), "whole": 3}


MADE = {  # what makes values, how they are used, and the bytes of plain code and ours
    "a draw": (lambda x: x + torch.randn_like(x), lambda y, w: y @ w, VALUE, STATE),
    "two": (twice, lambda y, w: (y[0] @ w, y[1]["cosine"] @ w), 2 * VALUE, 0),
    "one of two": (twice, lambda y, w: y[0] @ w, VALUE, 0),
    "a checkpoint": (
        lambda x: checkpoint(lambda x: F.gelu(x.sin()), x, use_reentrant=False),
        lambda y, w: y @ w, VALUE, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_what_is_held_of_values_that_are_made_by(name):
    fn, use, plain, ours = MADE[name]
    x, w = leaf(), weight()
    assert held_bytes(lambda: use(fn(x), w)) == plain
    assert held_bytes(lambda: use(recoup.recompute(fn)(x), w)) <= ours


def test_each_function_of_a_chain_of_values_runs_again_once():
    x, w, runs = leaf(), weight(), []

    def counted(op):
        return recoup.recompute(lambda x: runs.append(op.__name__) or op(x))

    def step(x, make, checkpointed):
        first = make(torch.sin)(x * 1.0)
        one, two = make(torch.exp)(first), make(torch.tanh)(first)
        three = checkpointed(lambda first: first.cos().sin(), first)
        return sum((each @ w).sin().sum() for each in (one, two, three))

    want = torch.autograd.grad(step(x, lambda op: op, lambda fn, x: fn(x)), (x, w))
    with no_collector(), StorageTracker() as tracker:
        loss = step(x, counted, recoup.checkpoint)
        # x * 1.0, what the products return, and what the last one saves
        assert tracker.current_bytes <= 2 * VALUE + 3 * 64 * 32 * 4 + 4
        for _ in range(2):
            runs.clear()
            got = torch.autograd.grad(loss, (x, w), retain_graph=True)
            assert sorted(runs) == ["exp", "sin", "tanh"]
            assert all(map(torch.equal, got, want))


# peft 0.21 asks transformers 5.23 for a name that version 6 has no more.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_holds_no_mask_and_no_dropped_copy_and_its_step_is_the_plain_one():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers, tokens = transformers_or_skip(), torch.randint(64, (2, 16))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, use_cache=False)

    def with_adapters(p):
        adapters = peft.LoraConfig(
            r=4, lora_dropout=p, target_modules="all-linear", init_lora_weights=False
        )
        return peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)

    def loss_of(model):
        return sum(each.square().mean() for each in tensors(model(tokens)))

    def bytes_of_loss(model):
        loss_of(model)  # what is made once
        return held_after(lambda: loss_of(model)).num_bytes

    without, plain = bytes_of_loss(with_adapters(0.0)), with_adapters(0.1)
    model = recoup.recompute_(copy.deepcopy(plain), nn.Dropout)
    assert bytes_of_loss(plain) > 1.1 * without
    assert bytes_of_loss(model) == without
    found, want = (
        result_of(each, lambda each=each: loss_of(each).backward()) for each in (model, plain)
    )
    assert any(name.startswith("grad") for name in want)
    assert_same(found, want)
