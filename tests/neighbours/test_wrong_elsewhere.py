"""What a second run gets wrong elsewhere: a step for each row of docs/wrong_elsewhere.md."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs

import recoup
from tests.deciding import Grouped, Router, distance, perturbed_linear
from tests.zoo import CountsTokens

RIGHT, WRONG, ERROR = "right", "wrong", "error"


def plainly(fn, *args, **kwargs):
    return fn(*args, **kwargs)


theirs, reentrant = (partial(torchs, use_reentrant=reentrant) for reentrant in (False, True))


def outcome(step, run):
    """Whether a step has the gradients and states of the plain one, or raises an error."""
    torch.manual_seed(0)
    expected = step(plainly)
    torch.manual_seed(0)
    try:
        found = step(run)
    except RuntimeError:  # of torch and of recoup
        return ERROR
    if [a is None for a in found] != [b is None for b in expected]:
        return WRONG
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None]
    if any(a.shape != b.shape for a, b in pairs):
        return WRONG
    return RIGHT if distance(*zip(*pairs, strict=True)) < 1e-4 else WRONG


def leaf(*size):
    return torch.randn(*size).requires_grad_()


def doubled(tensor, run):
    """What somebody does between forward and backward."""
    if run is not plainly:
        with torch.no_grad():
            tensor.mul_(2)


def a_module(build, *size, is_changed=False):

    def step(run):
        model, x = build(), leaf(*size)
        y = run(model, x)
        if is_changed:
            doubled(model[0].weight, run)
        y.square().sum().backward()
        states = [each for each in model.buffers() if each.is_floating_point()]
        return [x.grad, *(p.grad for p in model.parameters()), *states]

    return step


def a_function(fn, **options):

    def step(run):
        random.seed(0)
        x, generator = leaf(64), torch.Generator().manual_seed(0)
        run(lambda x: fn(x, generator), x, **({} if run is plainly else options)).sum().backward()
        return [x.grad]

    return step


def a_changed_tensor(call):
    """A step of a call that is given a tensor, which changes before backward."""

    def step(run):
        x, scale = leaf(64), torch.rand(64)
        y = call(run, x, scale)
        doubled(scale, run)
        y.sum().backward()
        return [x.grad]

    return step


def a_cache_of_transformers(run):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    model, x = transformers.LlamaModel(config), leaf(2, 8, 16)
    cache = transformers.DynamicCache(config=config)
    positions = model.rotary_emb(x, torch.arange(8)[None])
    more = {"position_embeddings": positions, "attention_mask": None, "past_key_values": cache}
    run(model.layers[0], x, **more).square().sum().backward()
    return [x.grad, cache.layers[0].keys.detach()]


SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "use_cache": False,
}  # fmt: skip
OF_QWEN = {"moe_intermediate_size": 32, "head_dim": 8, "decoder_sparse_step": 1}
KINDS = {"Mixtral": {"num_local_experts": 8}, "Qwen3Moe": {"num_experts": 8, **OF_QWEN}}


def mixture_of_transformers(kind, experts):
    """A model whose gates have ties between four experts, which a softmax shows."""
    transformers = pytest.importorskip("transformers")
    sizes = {**SIZES, **KINDS[kind], "experts_implementation": experts}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).train()
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    for gate in gates:
        gate.data.copy_(20 * gate.data[:2].repeat_interleave(4, 0))
    return model, gates, torch.randint(64, (2, 24))


def gradients_of_mixture(model, gates, ids):
    """The gradients of a step whose routers are a rounding step off in a second run."""
    model.zero_grad()
    with perturbed_linear(gates):
        model(input_ids=ids, labels=ids).loss.backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def a_mixture(kind, experts):
    """Two steps of such a model, which lets the checkpoint function call its layers."""

    def step(run):
        given = mixture_of_transformers(kind, experts)
        for module in given[0].modules():
            if hasattr(module, "gradient_checkpointing"):
                module._gradient_checkpointing_func = run
                module.gradient_checkpointing = True
        return [*gradients_of_mixture(*given), *gradients_of_mixture(*given)]

    return step


def a_loop_variable(run):
    x = y = leaf(3)
    for scale in (1.0, 2.0, 3.0):
        y = run(lambda y: (y * scale).sin(), y)  # noqa: B023 - the mistake that is meant
    y.sum().backward()
    return [x.grad]


def an_input_without_a_gradient(run):
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    (run(model, x) + leaf(3)).square().sum().backward()
    return [model.weight.grad]


def a_gradient_for_some_inputs(run):
    x = leaf(3)
    return list(torch.autograd.grad(run(torch.sin, x).sum(), x))


def linear_and(kind, *sizes):
    return lambda: nn.Sequential(nn.Linear(4, 4), kind(*sizes))


MAY_BE = WRONG, ERROR
BY_DRAW = a_function(lambda x, generator: (x * torch.rand(64, generator=generator)).sin())
DROPS = a_function(lambda x, _: nn.functional.dropout(x.exp()), preserve_rng_state=False)
BY_KEYWORD, BY_LIST, BY_CLOSURE = map(a_changed_tensor, (
    lambda run, x, s: run(lambda x, s: (x * s).sin(), x, s=s),
    lambda run, x, s: run(lambda x, given: (x * given[0]).sin(), x, [s]),
    lambda run, x, s: run(lambda x: (x * s).sin(), x),
))  # fmt: skip
ROWS = {  # the step, what it is elsewhere, and what it is here
    "a router a rounding error off": (a_module(Router, 32, 16), theirs, WRONG, RIGHT),
    "a router, expert by expert": (a_module(Grouped, 32, 16), theirs, ERROR, RIGHT),
    "Mixtral": (a_mixture("Mixtral", "eager"), theirs, MAY_BE, RIGHT),
    "Qwen3-MoE": (a_mixture("Qwen3Moe", "eager"), theirs, MAY_BE, RIGHT),
    "Mixtral, grouped": (a_mixture("Mixtral", None), theirs, MAY_BE, RIGHT),
    "Qwen3-MoE, grouped": (a_mixture("Qwen3Moe", None), theirs, MAY_BE, RIGHT),
    "what a module counts": (a_module(CountsTokens, 3, 6), theirs, MAY_BE, RIGHT),
    "a cache of transformers": (a_cache_of_transformers, theirs, MAY_BE, RIGHT),
    "batch norm": (a_module(linear_and(nn.BatchNorm1d, 4), 8, 4), theirs, WRONG, RIGHT),
    "a loop variable": (a_loop_variable, theirs, WRONG, ERROR),
    "a changed keyword": (BY_KEYWORD, theirs, WRONG, ERROR),
    "a changed list": (BY_LIST, theirs, WRONG, ERROR),
    "a changed closure": (BY_CLOSURE, theirs, WRONG, ERROR),
    "a changed weight": (
        a_module(linear_and(nn.Tanh), 8, 4, is_changed=True), theirs, WRONG, ERROR
    ),
    "a generator of its own": (BY_DRAW, theirs, WRONG, ERROR),
    "random of python": (
        a_function(lambda x, _: (x * random.random()).sin()), theirs, WRONG, ERROR
    ),
    "dropout without the random state": (DROPS, theirs, WRONG, RIGHT),
    "an input without a gradient": (an_input_without_a_gradient, reentrant, WRONG, RIGHT),
    "a gradient for some inputs": (a_gradient_for_some_inputs, reentrant, ERROR, RIGHT),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("row", ROWS)
def test_what_is_wrong_elsewhere(row):
    step, others, elsewhere, here = ROWS[row]
    assert outcome(step, others) in elsewhere
    assert outcome(step, recoup.checkpoint) == here


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_routes_as_it_did(kind):
    model, gates, ids = mixture_of_transformers(kind, "eager")
    plain = gradients_of_mixture(model, gates, ids)
    frontier = recoup.plan(model, input_ids=ids, labels=ids)
    with frontier.plan(frontier.least_bytes).applied():
        assert distance(gradients_of_mixture(model, gates, ids), plain) < 1e-4
