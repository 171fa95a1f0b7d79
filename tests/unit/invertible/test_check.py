from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from recoup.invertible import (
    ActNorm,
    AdditiveCoupling,
    AffineCoupling,
    Chain,
    Dequantize,
    Flip,
    InvertibleConv1x1,
    InvertibleModule,
    Logit,
    Split,
    Squeeze,
    check_invertible,
)


class Scale(InvertibleModule):
    """Multiplication by a learned number, right in everything; subclasses break one thing."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([-1.5, 0.5, 2.0]))

    def scale(self):
        return self.w

    def log_det(self, x):
        return self.w.abs().log().sum().expand(len(x))

    def forward(self, x):
        return x * self.scale(), self.log_det(x)

    def inverse(self, y):
        return y / self.w, -self.log_det(y)


class WrongInverse(Scale):
    def inverse(self, y):
        return y / self.w + 1e-3, -self.log_det(y)


class NoInverse(Scale):
    def inverse(self, y):
        raise NotImplementedError("not written yet")


class WrongSignOfInverseLogDet(Scale):
    def inverse(self, y):
        return y / self.w, self.log_det(y)


class AbsoluteLogDet(Scale):
    """The log-determinant as a sum of absolute values: wrong for every |w| below 1."""

    def log_det(self, x):
        return self.w.abs().log().abs().sum().expand(len(x))


class NumberForLogDet(Scale):
    """The right value, without a gradient: training by it drives the scale to infinity."""

    def log_det(self, x):
        return x.new_full((len(x),), float(super().log_det(x[:1]).detach()))


class NumberForInverseLogDet(Scale):
    def inverse(self, y):
        x, log_det = super().inverse(y)
        return x, log_det.detach()


class Bends(InvertibleModule):
    """``x + x**3 w**2 / 3``: a log-determinant that depends on the input and on a parameter."""

    def __init__(self, detached=()):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.7, -0.5, 1.1]))
        self.detached = detached

    def log_det(self, x):
        x = x.detach() if "x" in self.detached else x
        w = self.w.detach() if "w" in self.detached else self.w
        return (x * w).square().log1p().sum(1)

    def forward(self, x):
        return x + x**3 * self.w**2 / 3, self.log_det(x)

    def inverse(self, y):
        x = y.detach()
        for _ in range(60):
            x = x - (self(x)[0] - y) / (1 + (x * self.w) ** 2)
        return x, -self.log_det(x)


class WrongInTraining(Scale):
    """The reconstruction is wrong only where the gradients of training are made."""

    def inverse(self, y):
        x = y / self.w
        return (x + 1 if self.training else x), -self.log_det(y)


class NanInTraining(Scale):
    def inverse(self, y):
        x = y / self.w
        return (x * math.nan if self.training else x), -self.log_det(y)


class Drops(Scale):
    def forward(self, x):
        return (x * self.w)[:, :2], self.log_det(x)


def failed(report):
    return [finding.name for finding in report.findings if not finding.passed]


X = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.sampled(10)
def test_a_right_module_passes(case):
    report = check_invertible(case.layer, case.x)
    assert report, str(report)
    assert len(report.findings) == 8


def test_the_undamaged_stand_in_passes():
    assert check_invertible(Scale(), X)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (WrongInverse, ["forward, then inverse", "inverse, then forward", "constant"]),
        (
            NoInverse,
            [
                "forward, then inverse",
                "inverse, then forward",
                "log-det of",
                "gradient of the inverse's log-det",
                "constant",
            ],
        ),
        (
            WrongSignOfInverseLogDet,
            ["log-det of forward and inverse", "gradient of the inverse's log-det"],
        ),
        (
            AbsoluteLogDet,
            [
                "log-det and autograd's Jacobian",
                "gradient of the log-det",
                "gradient of the inverse's log-det",
            ],
        ),
        (NumberForLogDet, ["gradient of the log-det", "gradient of the inverse's log-det"]),
        (NumberForInverseLogDet, ["gradient of the inverse's log-det"]),
        (WrongInTraining, ["constant"]),
        (NanInTraining, ["constant"]),
    ],
)
def test_each_damage_is_found_and_nothing_else(kind, names):
    report = check_invertible(kind(), X)
    assert not report
    found = failed(report)
    assert len(found) == len(names), str(report)
    assert all(name in actual for name, actual in zip(names, found, strict=True)), str(report)
    assert "FAILED" in str(report)


@pytest.mark.parametrize("what", ["x", "w"])
def test_a_log_det_whose_gradient_lacks_a_part_is_named(what):
    """R1: the value is right, so that round trips and the Jacobian's determinant are, too."""
    assert check_invertible(Bends(), X), str(check_invertible(Bends(), X))
    report = check_invertible(Bends(detached=(what,)), X)
    assert failed(report) == ["gradient of the log-det", "gradient of the inverse's log-det"]
    assert f"no gradient, though it depends on: {'the input' if what == 'x' else what}" in str(
        report
    )


def test_a_log_det_without_a_gradient_is_named():
    """R1: such a layer was certified, and trained to nonsense."""
    report = check_invertible(NumberForLogDet(), X)
    assert "no gradient, though it depends on: w" in str(report)
    report = check_invertible(Chain(Flip(), NumberForLogDet(), Flip()), X)
    assert "no gradient, though it depends on: 1.w" in str(report)


def test_what_is_no_pair_is_reported():
    """R1: a forgotten log-determinant, of two samples, was taken apart along the batch."""

    class Forgetful(Scale):
        def forward(self, x):
            return x * self.w

    report = check_invertible(Forgetful(), X[:2])
    assert failed(report) == ["what forward returns"]
    assert "returned a tensor of shape (2, 3)" in str(report)


@pytest.mark.parametrize("kind", [WrongInTraining, NanInTraining])
def test_wrong_gradients_are_named(kind):
    report = check_invertible(kind(), X)
    assert "wrong: a stage before (log_scale), w" in str(report)


def test_an_error_is_reported_with_its_words():
    assert "NotImplementedError: not written yet" in str(check_invertible(NoInverse(), X))


def test_lost_dimensions_are_reported():
    assert "`forward` maps 3 numbers a sample to 2" in str(check_invertible(Drops(), X))


def test_missing_gradients_are_reported():
    module = Scale()
    module.spare = nn.Parameter(torch.zeros(1))
    report = check_invertible(module, X)
    assert report  # unused everywhere is legal, but said
    assert "no gradient in any mode: spare" in str(report)


def network(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Conv2d(4, outputs, 1),
    )


def multiscale():
    return Chain(
        Dequantize(5),
        Logit(),
        Squeeze(),
        ActNorm(8),
        InvertibleConv1x1(8),
        AdditiveCoupling(network(4, 4)),
        Split(),
        ActNorm(4),
        AffineCoupling(network(2, 4)),
        memory="constant",
    )


def test_a_multiscale_chain_of_random_layers_passes():
    report = check_invertible(multiscale(), torch.randint(5, (3, 2, 4, 4), dtype=torch.uint8))
    assert report, str(report)


def test_nothing_is_disturbed():
    chain = multiscale()
    chain[5].network.eval()
    chain[3].bias.grad = torch.ones(8)
    before = copy.deepcopy(chain)
    modes = [module.training for module in chain.modules()]
    x = torch.randint(5, (3, 2, 4, 4)).float()
    versions = [value._version for value in (x, *chain.parameters(), *chain.buffers())]
    state = torch.random.get_rng_state()
    check_invertible(chain, x)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [value._version for value in (x, *chain.parameters(), *chain.buffers())] == versions
    assert [module.training for module in chain.modules()] == modes
    assert not chain[3].started
    assert chain.memory == "constant"
    assert chain[3].bias.grad.tolist() == [1.0] * 8
    assert [n for n, p in chain.named_parameters() if p.grad is not None] == ["3.bias"]
    after = chain.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.state_dict().items())


def test_unsuitable_inputs_are_refused():
    with pytest.raises(ValueError, match="`max_dims` 5"):
        check_invertible(Scale(), torch.randn(2, 6), max_dims=5)
    for shape in [(0, 3), (3,)]:
        with pytest.raises(ValueError, match=r"a batch \(N, ...\) is needed"):
            check_invertible(Scale(), torch.randn(shape))


def test_tolerance_is_the_bar():
    assert check_invertible(WrongInverse(), X, tolerance=0.1)


class Scaled(InvertibleModule):
    """Scales by what the context says."""

    takes_context = True

    def forward(self, x, context):
        return x * context.exp(), context.sum(1)

    def inverse(self, y, context):
        return y * (-context).exp(), -context.sum(1)


class Forgets(Scaled):
    def inverse(self, y, context):
        return y, -context.sum(1)


def test_a_module_with_a_context():
    x, context = torch.randn(3, 4), torch.randn(3, 4)
    report = check_invertible(Scaled(), x, context)
    assert report, str(report)
    report = check_invertible(Chain(Scaled(), Flip(), Scaled()), x, context)
    assert report, str(report)
    report = check_invertible(Forgets(), x, context)
    wrong = [finding for finding in report.findings if not finding.passed]
    assert "gradient of the log-det" not in failed(report)
    assert "forward, then inverse" in [finding.name for finding in wrong]
    assert "the context" in wrong[-1].note


class IgnoresTheContext(Scaled):
    """In the gradient of its log-determinant."""

    def forward(self, x, context):
        return x * context.exp(), context.detach().sum(1)


def test_the_gradient_to_the_context_is_compared():
    """R1."""
    report = check_invertible(IgnoresTheContext(), torch.randn(3, 4), torch.randn(3, 4))
    assert failed(report) == ["gradient of the log-det"]
    assert "no gradient, though it depends on: the context" in str(report)
