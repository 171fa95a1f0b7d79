from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from recoup.errors import NotInvertibleError
from recoup.flows import ConvNetwork, DenseNetwork
from recoup.invertible import ActNorm, Chain, MixtureCoupling, check_invertible
from recoup.invertible import mixture as module
from tests.invertible_zoo import kept_bytes
from tests.unit.flows.models import filled


class Says(nn.Module):
    """A network that says the same `values`, one a block, for every entry."""

    def __init__(self, values, num_channels=1):
        super().__init__()
        self.values = torch.tensor(values)
        self.num_channels = num_channels

    def forward(self, x):
        values = self.values.to(x).repeat_interleave(self.num_channels)
        return values.view(1, -1, *(1,) * (x.dim() - 2)).expand(len(x), -1, *x.shape[2:])


def vectors(k=4, size=5, condition="first", std=1.0, **options):
    given, changed = (3, 2) if condition == "first" else (2, 3)
    network = DenseNetwork(given, (3 * k + 2) * changed, width=6)
    layer = MixtureCoupling(network, num_components=k, condition=condition, **options)
    return filled(layer, std), torch.randn(3, size, dtype=torch.float64)


def images(k=3, condition="first", split="channels"):
    channels = (1, 1) if split == "channels" else (2, 2)
    network = ConvNetwork(channels[0], (3 * k + 2) * channels[1], width=6)
    layer = MixtureCoupling(network, num_components=k, condition=condition, split=split)
    return filled(layer, 0.5), torch.randn(2, 2, 4, 2, dtype=torch.float64)


CASES = {
    "vectors": vectors,
    "second": lambda: vectors(condition="second"),
    "one component": lambda: vectors(k=1),
    "many components": lambda: vectors(k=16),
    "sharp": lambda: vectors(bound=5.0),
    "half identity": lambda: vectors(least_slope=0.5),
    "channels": images,
    "board": lambda: images(split="checkerboard"),
    "board, second": lambda: images(split="checkerboard", condition="second"),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_inverse_log_det_and_gradients_with_random_parameters(name, seed):
    torch.manual_seed(seed)
    layer, x = CASES[name]()
    report = check_invertible(layer, x)
    assert report, str(report)


def test_the_inverse_has_the_derivatives_of_the_inverse_function():
    layer, x = vectors(std=0.5)
    y = layer(x)[0].detach().requires_grad_()
    names = [name for name, _ in layer.named_parameters()]

    def call(y, *values):
        parameters = {f"layer.{n}": v for n, v in zip(names, values, strict=True)}
        return torch.func.functional_call(_Backwards(layer), parameters, (y,))

    parameters = [p.detach().clone().requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(call, [y, *parameters], fast_mode=True)
    assert torch.autograd.gradgradcheck(
        lambda v: layer.inverse(v)[0], [y], fast_mode=True, atol=1e-4
    )


class _Backwards(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, y):
        return self.layer.inverse(y)


def of_distributions(x, logits, means, scales, least_slope):
    """What `h` is, written with torch's own distributions, as the paper has it."""
    weights = torch.softmax(logits, -1)
    below = (weights * torch.sigmoid((x.unsqueeze(-1) - means) / scales)).sum(-1)
    return (1 - least_slope) * torch.logit(below) + least_slope * x


def test_it_is_the_coupling_of_the_paper_and_a_share_of_the_identity():
    logits, means, raw = [0.3, -1.0, 0.5], [2.0, -1.0, 0.5], [0.2, -0.9, 0.0]
    shift, raw_scale = -0.7, 0.4
    layer = MixtureCoupling(
        Says([*logits, *means, *raw, shift, raw_scale]), num_components=3, bound=3.0
    )
    x = torch.linspace(-4, 4, 21, dtype=torch.float64).view(-1, 1)
    y, log_det = layer(torch.cat([x, x], dim=1))
    logits, means, raw = torch.tensor([logits, means, raw], dtype=torch.float64)
    scales = (3 * torch.tanh(raw / 3)).exp()
    means = means + torch.tensor([-1.0, 0.0, 1.0])
    log_scale = 3 * torch.tanh(torch.tensor(raw_scale, dtype=torch.float64) / 3)
    x.requires_grad_()
    expected = of_distributions(x, logits, means, scales, 0.01) * log_scale.exp() + shift
    torch.testing.assert_close(y[:, 1:], expected, rtol=1e-7, atol=1e-7)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(log_det, slope.log().squeeze(1), rtol=1e-6, atol=1e-6)


def test_one_component_of_zeros_is_the_identity():
    x = torch.randn(4, 2, dtype=torch.float64)
    y, log_det = MixtureCoupling(Says([0.0] * 5), num_components=1)(x)
    torch.testing.assert_close(y, x)
    torch.testing.assert_close(log_det, torch.zeros(4, dtype=torch.float64))


def test_components_do_not_start_alike():
    layer = MixtureCoupling(DenseNetwork(1, 26, width=4), num_components=8)
    y, log_det = layer(torch.randn(64, 2))
    (y.pow(4).sum() + log_det.sum()).backward()
    means = layer.network[-1].bias.grad[8:16]
    assert len(set(means.tolist())) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("far", [1.0, 1e2, 1e5])
def test_far_values_have_a_finite_log_det_gradient_and_inverse(dtype, far):
    torch.manual_seed(0)
    layer, _ = vectors()
    layer = layer.to(dtype)
    x = torch.randn(64, 5, dtype=dtype)
    x[:, 3:] *= far  # what is changed; the network sees ordinary values
    x.requires_grad_()
    y, log_det = layer(x)
    (y.sum() + log_det.sum()).backward()
    assert log_det.isfinite().all()
    assert x.grad.isfinite().all()
    back, undone = layer.inverse(y)
    # 0.01 is the least slope: what rounding does to y is at most a hundred times that in x
    tolerance = 4e3 * torch.finfo(dtype).eps
    torch.testing.assert_close(back, x, rtol=tolerance, atol=tolerance)
    assert (log_det + undone).abs().max() < 1e4 * tolerance


def test_in_a_wide_gap_the_inverse_is_not_lost():
    # Two sharp components 40 apart: between them the distribution function is flat to every digit.
    layer = MixtureCoupling(Says([0.0, 0.0, -19.0, 19.0, -9.0, -9.0, 0.0, 0.0]), num_components=2)
    x = torch.zeros(41, 2)
    x[:, 1] = torch.linspace(-20, 20, 41)
    y, log_det = layer(x)
    assert log_det.min() == pytest.approx(torch.tensor(0.01).log().item(), rel=1e-3)
    torch.testing.assert_close(layer.inverse(y)[0], x, rtol=1e-4, atol=1e-4)
    # and without the floor there would be nothing to find
    no_floor = copy.copy(layer)
    no_floor.least_slope = 0.0
    back = no_floor.inverse(no_floor(x)[0])[0]
    assert not torch.allclose(back, x, rtol=1e-2, atol=1e-2)


def test_the_search_takes_few_steps(monkeypatch):
    layer, x = vectors(k=8)
    x = torch.randn(500, 5, dtype=torch.float64)
    y, _ = layer(x)
    calls = []
    value_and_slope = module._Bend.value_and_slope

    def counted(bend, x):
        calls.append(x)
        return value_and_slope(bend, x)

    monkeypatch.setattr(module._Bend, "value_and_slope", counted)
    with torch.no_grad():
        layer.inverse(y)
    assert 2 <= len(calls) <= 40


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_come_back_as_nan(bad):
    layer, x = vectors()
    y = layer(x)[0].detach()
    y[0, 4] = bad
    back, _ = layer.inverse(y)
    assert back[0, 4].isnan()
    torch.testing.assert_close(back[1:], x[1:])


def test_a_search_that_does_not_converge_says_so(monkeypatch):
    layer, x = vectors()
    monkeypatch.setattr(module, "_MOST_STEPS", 1)
    with pytest.raises(NotInvertibleError, match="did not converge in 1 steps"):
        layer.inverse(layer(x)[0])


def test_constant_memory_is_linear_memory_with_dropout_and_a_context():
    torch.manual_seed(0)
    network = DenseNetwork(2, 22, width=6, dropout=0.5, num_context=3)
    stages = [
        stage
        for place in range(3)
        for stage in (
            ActNorm(4),
            MixtureCoupling(
                copy.deepcopy(network),
                num_components=3,
                condition="second" if place % 2 else "first",
            ),
        )
    ]
    chain = filled(Chain(*stages))
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    context = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    found = {}
    for memory in ("linear", "constant", "sqrt"):
        chain.memory = memory
        torch.manual_seed(1)
        y, log_det = chain(x, context)
        wanted = {"x": x, "context": context} | dict(chain.named_parameters())
        loss = y.pow(2).sum() + log_det.sum()
        gradients = torch.autograd.grad(loss, list(wanted.values()))
        found[memory] = (loss, dict(zip(wanted, gradients, strict=True)))
    for memory in ("constant", "sqrt"):
        assert torch.equal(found[memory][0], found["linear"][0])
        for name, gradient in found["linear"][1].items():
            torch.testing.assert_close(
                found[memory][1][name], gradient, rtol=1e-8, atol=1e-9, msg=name
            )


def test_unsuitable_arguments_are_refused():
    for name, value in (("num_components", 0), ("bound", 0.0), ("least_slope", 0.0)):
        with pytest.raises(ValueError, match=f"`{name}` is {value}"):
            MixtureCoupling(nn.Identity(), **{name: value})
    with pytest.raises(ValueError, match="`condition` is 'left'"):
        MixtureCoupling(nn.Identity(), condition="left")
    with pytest.raises(ValueError, match="Give it 14 output channels"):
        MixtureCoupling(nn.Linear(1, 3), num_components=4)(torch.randn(1, 2))


def test_what_the_docstring_says_is_kept():
    k = 16
    layer = MixtureCoupling(nn.Conv2d(2, (3 * k + 2) * 2, 1, bias=False), num_components=k)
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    changed = x.untyped_storage().nbytes() // 2
    assert 12 * k * changed < kept_bytes(layer, x) < 16 * k * changed
