"""`check_invertible`: each damage is found and named, right modules pass, nothing is disturbed."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from recoup import invertible as inv
from tests.invertible_zoo import Scale, conv_net
from tests.oracle import assert_same_tensors


def failed(report):
    return [finding.name for finding in report.findings if not finding.passed]


class Bends(inv.InvertibleModule):
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


class OfContext(inv.InvertibleModule):
    takes_context = True

    def __init__(self, *forgets):
        super().__init__()
        self.forgets = forgets

    def forward(self, x, context):
        of_log_det = context.detach() if "the gradient" in self.forgets else context
        return x * context.exp(), of_log_det.sum(1)

    def inverse(self, y, context):
        of_value = 0 * context if "the inverse" in self.forgets else -context
        return y * of_value.exp(), -context.sum(1)


ROUND_TRIPS = ["forward, then inverse", "inverse, then forward"]
OF_LOG_DET, OF_INVERSE = "gradient of the log-det", "gradient of the inverse's log-det"
JACOBIAN, LOG_DETS = "log-det and autograd's Jacobian", "log-det of forward and inverse"
NUMBER = {"log_det": lambda self, d: (d.detach(),)}  # training drives the scale to infinity
DEPENDS, GRADIENTS = "no gradient, though it depends on:", "wrong: a stage before (log_scale), w"
DAMAGED = {  # the module, the names of findings, and what the report says
    "inverse": (Scale(inverse=lambda self, x, d: (x + 1e-3, d)), [*ROUND_TRIPS, "constant"], ""),
    "no inverse": (Scale(inverse=lambda self, y, _: inv.InvertibleModule.inverse(self, y)),
                   [*ROUND_TRIPS, "log-det of", OF_INVERSE, "constant"], "Scale does not define"),
    "sign": (Scale(inverse=lambda self, x, d: (x, -d)), [LOG_DETS, OF_INVERSE], ""),
    "absolute": (Scale(log_det=lambda self, d: (d.abs(),)), [JACOBIAN, OF_LOG_DET, OF_INVERSE], ""),
    "a number within": (inv.Chain(inv.Flip(), Scale(**NUMBER), inv.Flip()),
                        [OF_LOG_DET, OF_INVERSE], f"{DEPENDS} 1.w"),
    "a number back": (Scale(inverse=lambda self, x, d: (x, d.detach())), [OF_INVERSE], ""),
    "nan in training": (Scale(inverse=lambda self, x, d: (x * math.nan if self.training else x, d)),
                        ["constant"], GRADIENTS),
    "not of x": (Bends(("x",)), [OF_LOG_DET, OF_INVERSE], f"{DEPENDS} the input"),
    "not of w": (Bends(("w",)), [OF_LOG_DET, OF_INVERSE], f"{DEPENDS} w"),
    "no pair": (Scale(forward=lambda self, y, d: y), ["what forward returns"],
                "returned a tensor of shape (3, 3)"),
    "dimensions": (Scale(forward=lambda self, y, d: (y[:, :2], d)), None,
                   "`forward` maps 3 numbers a sample to 2"),
    "context": (OfContext("the gradient"), [OF_LOG_DET], f"{DEPENDS} the context"),
    "context of the inverse": (OfContext("the inverse"), [*ROUND_TRIPS, "constant"], "the context"),
}  # fmt: skip
X = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", DAMAGED)
def test_each_damage_is_found_and_nothing_else(name):
    module, names, words = DAMAGED[name]
    report = inv.check_invertible(module, X, *([X.flip(0)] if module.takes_context else []))
    assert not report
    assert "FAILED" in str(report)
    assert words in str(report), str(report)
    if names is not None:
        assert len(failed(report)) == len(names), str(report)
        assert all(map(str.__contains__, failed(report), names)), str(report)


def multiscale():
    return inv.Chain(
        *(inv.Dequantize(5), inv.Logit(), inv.Squeeze(), inv.ActNorm(8), inv.InvertibleConv1x1(8)),
        *(inv.AdditiveCoupling(conv_net(4, 4, 0.5)), inv.Split()),
        *(inv.ActNorm(4), inv.AffineCoupling(conv_net(2, 4, 0.5))),
        memory="constant",
    )


LEVELS = torch.randint(5, (3, 2, 4, 4), generator=torch.Generator().manual_seed(1))


def test_a_right_module_passes(case):
    report = inv.check_invertible(*case)
    assert report, str(report)
    assert len(report.findings) == 8


def test_stand_ins_chains_and_contexts_pass():
    of_context = inv.Chain(OfContext(), inv.Flip(), OfContext())
    for given in ((Bends(), X), (multiscale(), LEVELS.byte()), (of_context, X, X.flip(0))):
        report = inv.check_invertible(*given)
        assert report, str(report)


def test_the_tolerance_is_the_bar_and_an_unused_parameter_is_said():
    assert inv.check_invertible(DAMAGED["inverse"][0], X, tolerance=0.1)
    module = Scale()
    module.spare = nn.Parameter(torch.zeros(1))
    report = inv.check_invertible(module, X)
    assert report
    assert "no gradient in any mode: spare" in str(report)


def test_nothing_is_disturbed():
    chain, x = multiscale(), LEVELS.float()
    chain[5].network.eval()
    chain[3].bias.grad = torch.ones(8)
    before, values = copy.deepcopy(chain), [x, *chain.parameters(), *chain.buffers()]
    modes, versions = [m.training for m in chain.modules()], [value._version for value in values]
    state = torch.random.get_rng_state()
    assert inv.check_invertible(chain, x)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [value._version for value in values] == versions
    assert [module.training for module in chain.modules()] == modes
    assert not chain[3].started
    assert chain.memory == "constant"
    assert chain[3].bias.grad.tolist() == [1.0] * 8
    assert [n for n, p in chain.named_parameters() if p.grad is not None] == ["3.bias"]
    assert_same_tensors(dict(chain.state_dict()), dict(before.state_dict()))
