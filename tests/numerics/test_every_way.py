"""Law 1: a zoo of models x every way x every situation leave what ordinary autograd leaves.

The oracle is the same code around the same modules in a plain `nn.Sequential`, or in a `Chain` that
keeps everything. What recomputes is compared bit by bit, what inverts to a tolerance.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import recoup
from recoup._core import slots
from recoup.invertible import Chain
from tests import ways
from tests.invertible_zoo import INVERTIBLE, invertible_chain_of
from tests.oracle import assert_same_step, loss_of_all, run_step
from tests.ways import INVERTING, SITUATIONS, USUAL, WAYS, a_step, assert_same, built, outcome
from tests.zoo import CHAINS, MODULES, chain_of, dense, leaf

in_situations = pytest.mark.parametrize("name", SITUATIONS)


@pytest.fixture(autouse=True)
def small_residuals_are_worth_a_stop(monkeypatch):
    """A second run ends with the last of them."""
    monkeypatch.setattr(slots, "_WORTH_A_STOP", 0)


def assert_as_plain(name, way, situation, given=None):
    modules, x = given or chain_of(name)
    want = outcome(built("plain", modules), x, situation)
    assert_same(outcome(built(way, modules), x, situation), want)


@pytest.mark.sampled(110)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*CHAINS, *MODULES])
def test_every_model_in_every_way(name, way):
    assert_as_plain(name, way, a_step)


@pytest.mark.sampled(150)
@in_situations
@pytest.mark.parametrize("way", [*USUAL, "recompute_"])
def test_every_situation(name, way):
    # In a checkpoint of torch norms count twice; `recompute_` adds second derivatives otherwise.
    is_plain = "torchs" in name or way == "recompute_"
    assert_as_plain("dropout" if is_plain else "draws and buffers", way, SITUATIONS[name])


@pytest.mark.parametrize("way", USUAL)
def test_the_kernels_of_attention_are_those_that_forward_chose(way):
    in_plain_products = ways.a_step_with(around=lambda: sdpa_kernel(SDPBackend.MATH))
    assert_as_plain("encoder in evaluation", way, in_plain_products)


@pytest.mark.parametrize("name", ["input_used_beside", "in_a_checkpoint", "in_torchs_checkpoint"])
@pytest.mark.parametrize("way", USUAL)
def test_a_model_that_changes_its_input_in_place(way, name):
    first = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6))
    modules, x = [each.double() for each in (first, dense(0.2), nn.ELU(inplace=True))], leaf(4, 6)
    assert_as_plain("", way, SITUATIONS[name], (modules, x))


HARDER = [
    (name, situation)
    for name in MODULES
    for situation in ("retained", "gradient_of_the_gradient", "two_forwards", "three_steps")
    # Torch has no second derivative of it.
    if (name, situation) != ("encoder in evaluation", "gradient_of_the_gradient")
]


@pytest.mark.sampled(50)
@pytest.mark.parametrize("way", USUAL)
@pytest.mark.parametrize(("name", "situation"), HARDER)
def test_models_in_the_harder_situations(name, way, situation):
    assert_as_plain(name, way, SITUATIONS[situation])


@pytest.mark.sampled(35)
@pytest.mark.parametrize("way", [*INVERTING, "sqrt", "log", "1 slot", "tape first, keep later"])
@pytest.mark.parametrize("name", INVERTIBLE)
def test_every_invertible_chain_in_every_way(name, way):
    modules, x = invertible_chain_of(name)
    memory = (INVERTING | ways.MEMORY)[way](len(modules))
    want = outcome(Chain(*copy.deepcopy(modules)), x, a_step)
    got = outcome(Chain(*modules, memory=memory), x, a_step)
    assert_same(got, want, 1e-10 if way in INVERTING else 0.0)


@pytest.mark.sampled(40)
@in_situations
@pytest.mark.parametrize("chain", ["dropout", "norms"])
def test_every_situation_in_constant_memory(chain, name):
    modules, x = invertible_chain_of(chain)
    rtol = 1e-3 if "autocast" in name else 1e-10
    want = outcome(Chain(*copy.deepcopy(modules)), x, SITUATIONS[name])
    assert_same(outcome(Chain(*modules, memory="constant"), x, SITUATIONS[name]), want, rtol)


@pytest.mark.parametrize("inner", ["linear", "sqrt", "constant"])
@pytest.mark.parametrize("outer", ["constant", 1])
def test_a_chain_of_chains(inner, outer):
    (first, x), (second, _) = map(invertible_chain_of, ("dropout", "norms"))
    want = run_step(Chain(Chain(*first), Chain(*second)), x)
    model = Chain(Chain(*first, memory=inner), Chain(*second, memory=inner))
    assert_same_step(run_step(model, x, memory=outer), want, rtol=1e-10)


@pytest.mark.parametrize("way", [*INVERTING, "sqrt", "1 slot"])
@pytest.mark.parametrize("part", ["y", "log_det", "latent"])
def test_a_loss_of_one_output_alone(part, way):
    parts = {"y": lambda z: z[0], "log_det": lambda z: z[1].square(), "latent": lambda z: z[0][1]}
    modules, x = invertible_chain_of("multi-scale")
    memory = (INVERTING | ways.MEMORY)[way](len(modules))
    loss = lambda output: loss_of_all(parts[part](output))  # noqa: E731
    want = run_step(Chain(*modules), x, loss=loss)
    rtol = 1e-10 if way in INVERTING else 0.0
    assert_same_step(run_step(Chain(*modules), x, memory=memory, loss=loss), want, rtol)


@pytest.mark.parametrize("otherwise", ["recompute", "keep"])
def test_constant_with_a_word_for_what_has_no_inverse(otherwise):
    modules, x = chain_of("dropout")
    couplings, _ = invertible_chain_of("dropout")
    mixture = [couplings[0], modules[0], couplings[1], couplings[2], modules[1], couplings[4]]
    model = recoup.Sequential(*mixture, otherwise=otherwise)
    want = run_step(model, x, memory="linear")
    assert_same_step(run_step(model, x, memory="constant"), want, rtol=1e-10)
    assert_same_step(run_step(model, x, memory="sqrt"), want)


def nested(x, *, scale):
    early = (x["a"][0] * scale[0]).sin().exp()
    return early, {"late": (early.tanh() * x["b"]).cumprod(1), "nothing": None}


@pytest.mark.parametrize("used", [[0], [1], [1, 0]], ids=str)
@pytest.mark.parametrize("call", [partial(recoup.checkpoint, nested), recoup.recompute(nested)])
def test_nested_arguments_and_outputs_of_which_some_are_used(used, call):
    def gradients_by(call):
        a, b, scale = (torch.linspace(0.1, n, 12).view(2, 6).requires_grad_() for n in (1, 2, 3))
        early, rest = call({"a": [a], "b": b}, scale=(scale,))
        assert rest["nothing"] is None
        loss = sum((early, rest["late"])[n].square().sum() for n in used)
        return torch.autograd.grad(loss, [a, b, scale], allow_unused=True)

    assert_same(gradients_by(call), gradients_by(nested))


def test_threads_leave_norms_as_they_were():
    norms = [nn.BatchNorm1d(64) for _ in range(6)]
    stages = [nn.Sequential(nn.Linear(64, 64), *norms[at : at + 2]) for at in (0, 2, 4)]
    model = recoup.Sequential(*stages, memory=1)

    def work(_):
        for _ in range(15):
            model(torch.randn(256, 64, requires_grad=True)).sum().backward()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert [norm.momentum for norm in norms] == [0.1] * len(norms)
    # Of the stage that runs again, which is counted under a lock; torch may lose counts of others.
    assert [int(norm.num_batches_tracked) for norm in norms[:2]] == [60, 60]
