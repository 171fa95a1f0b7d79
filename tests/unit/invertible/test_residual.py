from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import ConvergenceError, RecoupError
from recoup.invertible import (
    ActNorm,
    Chain,
    InvertibleResidual,
    LipschitzConv2d,
    LipschitzLinear,
    LipSwish,
    check_invertible,
)
from recoup.invertible.residual import power_series, series_weights


def dense(size=2, width=8, coefficient=0.9, seed=0):
    """A network that contracts by as much as it may, with parameters of both signs."""
    torch.manual_seed(seed)
    network = nn.Sequential(
        LipschitzLinear(size, width, coefficient=coefficient),
        LipSwish(),
        LipschitzLinear(width, size, coefficient=coefficient),
    ).double()
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    return network


def conv(size=2, width=4, seed=0):
    torch.manual_seed(seed)
    network = nn.Sequential(
        LipschitzConv2d(size, width, 3, padding=1),
        nn.ELU(),
        LipschitzConv2d(width, size, 3, padding=1),
    ).double()
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    return network


def double(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


BLOCKS = {
    "dense": (lambda **options: InvertibleResidual(dense(5), **options), (3, 5)),
    "conv": (lambda **options: InvertibleResidual(conv(), **options), (3, 2, 4, 4)),
}
blocks = pytest.mark.parametrize(("build", "shape"), BLOCKS.values(), ids=BLOCKS)


@blocks
def test_the_whole_contract_in_every_memory_mode(build, shape):
    report = check_invertible(build(), double(*shape), tolerance=1e-10)
    assert report, str(report)


@pytest.mark.sampled(6)
@pytest.mark.filterwarnings("ignore:Under memory=.constant.:UserWarning")
@pytest.mark.parametrize("log_det", ["exact", "series", "unbiased"])
@pytest.mark.parametrize("memory", ["sqrt", "log", 1, "constant"])
def test_gradients_are_those_of_linear_memory(log_det, memory):
    stages = []
    for seed in range(3):
        network = conv(seed=seed) if seed < 2 else conv(seed=0)
        stages += [ActNorm(2).double(), InvertibleResidual(network, log_det=log_det, num_probes=2)]
    chain = Chain(*stages)
    x = double(3, 2, 3, 3)
    chain(x)  # the start
    results = {}
    for mode in ("linear", memory):
        chain.memory = mode
        leaf = x.clone().requires_grad_()
        torch.manual_seed(7)
        y, values = chain(leaf)
        loss = y.square().sum() + (values * torch.arange(1.0, 4.0)).sum()
        after = torch.rand(3)
        gradients = torch.autograd.grad(loss, [leaf, *chain.parameters()])
        results[mode] = (loss, after, *gradients)
    for actual, expected in zip(results[memory], results["linear"], strict=True):
        assert expected.abs().sum() > 0
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("log_det", ["exact", "series", "unbiased"])
def test_gradients_are_those_of_finite_differences(log_det):
    block = InvertibleResidual(dense(3, 4), log_det=log_det, num_terms=3)
    names = [name for name, _ in block.named_parameters()]

    def call(x, *parameters):
        torch.manual_seed(3)
        return torch.func.functional_call(block, dict(zip(names, parameters, strict=True)), (x,))

    x = double(2, 3).requires_grad_()
    assert call(x, *block.parameters())[1].requires_grad  # or gradcheck leaves it out
    assert torch.autograd.gradcheck(call, (x, *block.parameters()))


def test_inside_a_checkpoint_of_ours_and_of_torch():
    block = InvertibleResidual(dense(3), log_det="unbiased")
    x = double(4, 3).requires_grad_()
    wanted = [x, *block.parameters()]

    def gradients(call):
        torch.manual_seed(5)
        y, log_det = call(block, x)
        return torch.autograd.grad(y.square().sum() + log_det.sum(), wanted)

    expected = gradients(lambda block, x: block(x))
    for call in (
        recoup.checkpoint,
        lambda block, x: recoup.checkpoint(lambda x: recoup.checkpoint(block, x), x),
        lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False),
    ):
        for actual, gradient in zip(gradients(call), expected, strict=True):
            torch.testing.assert_close(actual, gradient, rtol=1e-12, atol=1e-12)


def test_a_compiled_model_leaves_blocks_alone():
    block = InvertibleResidual(dense(3))
    model = nn.ModuleList([block])
    model.forward = lambda x: model[0](2 * x)
    compiled = torch.compile(model, backend="aot_eager")
    x = double(4, 3)
    for actual, expected in zip(compiled(x), model[0](2 * x), strict=True):
        assert torch.equal(actual, expected)


def exact_traces(block, x, num_terms):
    """The series without noise: in two dimensions these signs average to the identity."""
    probes = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=x.dtype)
    probes = probes[:, None].expand(2, *x.shape)
    return power_series(block.network, x, probes, series_weights(num_terms, 0, 0.5))[1]


def test_series_converges_to_exact_within_the_stated_bound():
    block, x = InvertibleResidual(dense(coefficient=0.95)), double(50, 2)
    lipschitz = 0.95**2
    exact = block(x)[1]
    errors = []
    for num_terms in (1, 2, 4, 8, 16, 64):
        error = (exact_traces(block, x, num_terms) - exact).abs().max().item()
        bound = 2 * lipschitz ** (num_terms + 1) / ((num_terms + 1) * (1 - lipschitz))
        assert error <= bound
        errors.append(error)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-4


def test_mean_of_the_series_over_probes_is_the_series_without_noise():
    block = InvertibleResidual(dense(), log_det="series", num_terms=2, num_probes=4000)
    x = double(1, 2)
    torch.manual_seed(0)
    values = torch.stack([block(x)[1] for _ in range(8)])
    error = 3 * values.std() / math.sqrt(8) + 1e-12
    assert (values.mean() - exact_traces(block, x, 2)).abs() < error
    # and it is off by what is cut off, which these probes can tell
    assert (values.mean() - InvertibleResidual(block.network)(x)[1]).abs() > error


@pytest.mark.slow
def test_mean_of_the_unbiased_estimate_and_of_its_gradient_is_exact():
    # One term at least, so that the roulette carries what two and more of them mean.
    network = dense(coefficient=0.8)
    options = {"num_terms": 1, "continuation": 0.6, "num_probes": 4}
    block = InvertibleResidual(network, log_det="unbiased", **options)
    x = double(3, 2)
    wanted = list(network.parameters())

    def estimate(block):
        leaf = x.clone().requires_grad_()
        log_det = block(leaf)[1]
        gradients = torch.autograd.grad(log_det.sum(), [leaf, *wanted], materialize_grads=True)
        return torch.cat([log_det, *(g.flatten() for g in gradients)]).detach()

    exact = estimate(InvertibleResidual(network))
    torch.manual_seed(0)
    num = 2000
    values = torch.stack([estimate(block) for _ in range(num)])
    errors = (values.mean(0) - exact).abs() / (values.std(0) / math.sqrt(num)).clamp(min=1e-12)
    assert errors.max() < 3
    cut = estimate(InvertibleResidual(network, log_det="series", num_terms=1, num_probes=4000))
    assert ((cut - exact).abs() / (values.std(0) / math.sqrt(num)).clamp(min=1e-12)).max() > 6


@pytest.mark.parametrize("log_det", ["series", "unbiased"])
def test_draws_follow_from_one_seed_a_call(log_det):
    block, x = InvertibleResidual(dense(4), log_det=log_det, num_terms=2), double(3, 4)
    torch.manual_seed(0)
    first, second = block(x)[1], block(x)[1]
    after = torch.rand(3)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(block(x)[1], first)
    torch.manual_seed(0)
    torch.randint(2**63 - 1, (2,), dtype=torch.int64)  # the stream moves by one number a call
    assert torch.equal(torch.rand(3), after)


def test_exact_draws_nothing():
    block = InvertibleResidual(dense())
    before = torch.get_rng_state()
    block(double(3, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_lengths_of_a_roulette_have_the_chances_that_they_are_divided_by():
    from recoup.invertible.residual import probes_for

    torch.manual_seed(0)
    lengths = torch.tensor([probes_for(torch.zeros(1, 1), 1, 0.7)[1] for _ in range(4000)])
    for j in (1, 2, 5):
        share = (lengths >= j).double().mean().item()
        chance = 0.7**j
        assert share == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / 4000))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("log_det", ["exact", "unbiased"])
def test_value_is_the_same_with_and_without_gradients(mode, log_det):
    block, x = InvertibleResidual(dense(), log_det=log_det), double(3, 2)
    torch.manual_seed(0)
    expected = block(x)
    torch.manual_seed(0)
    with mode():
        actual = block(x)
        back = block.inverse(actual[0])[0]
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
        assert a.requires_grad is (mode is torch.enable_grad)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-8)


def test_frozen_networks_and_inputs_without_gradient():
    block = InvertibleResidual(dense()).requires_grad_(False)
    x = double(3, 2)
    y, log_det = block(x)
    assert not y.requires_grad
    assert not log_det.requires_grad
    leaf = x.clone().requires_grad_()
    seen = []
    leaf.register_hook(seen.append)
    block(leaf)[1].sum().backward()
    assert len(seen) == 1  # derivatives within forward are nobody else's
    assert x.grad is None
    assert leaf.grad.abs().sum() > 0


def test_gradients_of_parameters_come_from_backward_alone():
    block = InvertibleResidual(dense())
    calls = []
    for parameter in block.parameters():
        parameter.register_hook(lambda gradient: calls.append(gradient))
    _, log_det = block(double(3, 2))
    assert calls == []
    assert all(p.grad is None for p in block.parameters())
    log_det.sum().backward()
    assert len(calls) == sum(p.grad is not None for p in block.parameters()) > 2


def test_inverse_has_the_gradient_of_the_inverse_function():
    block = InvertibleResidual(dense())
    x = double(1, 2)
    y = block(x)[0].detach().requires_grad_()
    back = block.inverse(y)[0]
    rows = [torch.autograd.grad(back[0, i], y, retain_graph=True)[0][0] for i in range(2)]
    jacobian = torch.autograd.functional.jacobian(lambda x: block(x)[0][0], x).view(2, 2)
    unit = torch.eye(2, dtype=x.dtype)
    torch.testing.assert_close(torch.stack(rows) @ jacobian, unit, rtol=0, atol=1e-10)


def test_weights_are_normalised_once_a_call(monkeypatch):
    layers = [m for m in dense(3).modules() if isinstance(m, LipschitzLinear)]
    block = InvertibleResidual(nn.Sequential(*layers))
    counts = itertools.count()
    linalg = torch.linalg.matrix_norm
    monkeypatch.setattr(
        torch.linalg, "matrix_norm", lambda *a, **k: (next(counts), linalg(*a, **k))[1]
    )
    y = block(double(4, 3))[0]
    assert next(counts) == 2
    with torch.no_grad():
        block.inverse(y)
    assert next(counts) - 3 <= 4  # with and without a graph


def test_inverse_that_does_not_converge_names_the_block_and_the_way_out():
    network = nn.Linear(2, 2).double()
    with torch.no_grad():
        network.weight.copy_(2 * torch.eye(2))
    block = InvertibleResidual(network, max_iterations=20)
    words = r"InvertibleResidual over Linear.*after 20 rep.*residual is .*LipschitzLinear"
    with pytest.raises(ConvergenceError, match=words) as caught:
        block.inverse(double(3, 2))
    assert isinstance(caught.value, RecoupError)
    assert isinstance(caught.value, ArithmeticError)
    with pytest.raises(ConvergenceError, match="not finite"):
        block.inverse(torch.full((1, 2), math.inf, dtype=torch.float64))


def test_too_few_repetitions_are_an_error_and_a_larger_tolerance_is_met():
    x = double(3, 2)
    block = InvertibleResidual(dense(), max_iterations=3)
    y = block(x)[0]
    with pytest.raises(ConvergenceError, match="`max_iterations` 3"):
        block.inverse(y)
    block.tolerance, block.max_iterations = 1e-3, 500
    residual = (block(block.inverse(y)[0])[0] - y).abs().max()
    assert 1e-9 < residual <= 1e-3 * y.abs().max().clamp(min=1)


def test_float32_and_autocast():
    block, x = InvertibleResidual(dense(16, 64).float()), 10 * double(20, 16).float()
    expected = block(x)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        y, log_det = block(x)
        back, _ = block.inverse(y)
    assert torch.equal(y, expected[0])
    assert torch.equal(log_det, expected[1])
    torch.testing.assert_close(back, x, rtol=0, atol=2e-3)


@pytest.mark.parametrize("log_det", ["exact", "unbiased"])
def test_an_empty_batch(log_det):
    block = InvertibleResidual(dense(), log_det=log_det)
    y, values = block(torch.zeros(0, 2, dtype=torch.float64))
    assert y.shape == (0, 2)
    assert values.shape == (0,)
    assert block.inverse(y)[0].shape == (0, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"log_det": "trace"}, "`log_det` is 'trace'"),
        ({"num_terms": 0}, "`num_terms` is 0"),
        ({"num_probes": 0}, "`num_probes` is 0"),
        ({"max_iterations": 0}, "`max_iterations` is 0"),
        ({"continuation": 1.0}, "`continuation` is 1.0"),
        ({"tolerance": 0.0}, "`tolerance` is 0.0"),
    ],
    ids=str,
)
def test_unsuitable_arguments_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        InvertibleResidual(dense(), **options)


def test_unsuitable_networks_and_inputs_are_refused():
    with pytest.raises(ValueError, match="has a Dropout at `1`"):
        InvertibleResidual(nn.Sequential(LipschitzLinear(2, 2), nn.Dropout()))
    with pytest.raises(ValueError, match="has a BatchNorm1d"):
        InvertibleResidual(nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"shape \(1, 3\).*same shape"):
        InvertibleResidual(nn.Linear(2, 3))(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="at most 256"):
        InvertibleResidual(nn.Identity())(torch.zeros(1, 1, 16, 17))


def test_a_large_sample_leaves_the_others_exact():
    block = InvertibleResidual(
        nn.Sequential(LipschitzLinear(2, 8, coefficient=0.9), nn.Tanh(), LipschitzLinear(8, 2))
    )
    y = torch.tensor([[1e6, 1e6], [0.5, -0.3]])
    together, alone = block.inverse(y)[0][1], block.inverse(y[1:])[0][0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
