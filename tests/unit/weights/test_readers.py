"""What the source of reading code shows, one line a case."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from recoup.weights.readers import Use, use_of

CASES = {
    Use.COMPUTES: [
        "F.linear(x, m.weight)",
        "F.layer_norm(x, (3,), m.weight)",
        "x @ m.weight",
        "x @ m.weight.clone()",
        "x.matmul(m.weight)",
        "m.weight.matmul(x)",
        "torch.einsum('ij,jk', x, m.weight)",
        "torch.conv1d(input=x, weight=m.weight)",
        "F.linear(x, *[m.weight])",
        "w = m.weight; y = F.linear(x, w)",
        "w = m.weight; w = w if x is None else w; y = x @ w",
        "y = [F.linear(x, w) for w in (m.weight, m.weight)]",
        "(w := m.weight).sum() + F.linear(x, w).sum()",
        "F.linear(x, getattr(m, 'weight'))",
        "w, b = m.weight, x; y = F.linear(x, w)",
        "import torch.nn.functional as G; G.linear(x, m.weight)",
        "linear = F.linear; linear(x, m.weight)",
        "ws = []; ws.append(m.weight); y = F.linear(x, *ws)",
        "w = m.weight\n    y = x @ w\n    w = x\n    w.norm()",
    ],
    Use.COMBINES: [
        "x * m.weight",
        "-m.weight",
        "m.weight.exp()",
        "m.weight.t()",
        "m.weight.to(x.dtype)",
        "y = x.add(m.weight)",
        "torch.cat([m.weight, x])",
        "sum([m.weight, x])",
        "x += m.weight",
        "m.weight[0] * 2",
        "m.weight[x].mean(1)",
        "m.weight.mean(dim=1)",
        "m.weight.softmax(-1)",
        "torch.lerp(x, m.weight, 0.1)",
    ],
    Use.ASKS: [
        "m.weight.grad",
        "m.weight.data.clamp_(0)",
        "m.weight.shape",
        "m.weight.square().sum()",
        "m.weight ** 2",
        "m.weight.sum()",
        "torch.abs(m.weight)",
        "torch.equal(m.weight[x > 0], x)",
        "torch.mean(m.weight)",
        "((m.weight - x) ** 2).sum()",
        "(m.weight - x).abs().max()",
        "(w := m.weight).norm()",
        "ps = []; ps.append(m.weight); torch.optim.SGD(ps)",
        "w = m.weight\n    w.norm()\n    w = x\n    y = x @ w",
        "w = m.weight; w.norm(); f = lambda w: x @ w",
        "import copy; copy.deepcopy(m.weight)",
        "w, b = m.weight, x; w.data.clamp_(0)",
        "before = m.weight.clone(); torch.equal(before, x)",
        "m.weight is x",
        "m.weight == x",
        "f'{m.weight}'",
        "m.weight",
        "nn.init.zeros_(m.weight)",
        "torch.equal(m.weight, x)",
        "torch.linalg.vector_norm(m.weight)",
        "torch.optim.SGD([m.weight], lr=0.1)",
        "torch.optim.SGD([{'params': [m.weight]}], lr=0.1)",
        "o.add_param_group({'params': [m.weight]})",
        "torch.autograd.grad(x, [m.weight])",
        "print(m.weight)",
        "isinstance(m.weight, nn.Parameter)",
        "o.weight = m.weight",
        "o.weights['a'] = m.weight",
        "x.copy_(m.weight)",
        "m.weight.register_hook(print)",
    ],
    Use.UNKNOWN: [
        "unknown(m.weight)",
        "(lambda: m.weight)()",
        "w = m.weight; unknown(w)",
        "o.add_later(m.weight)",
    ],
}


class AskedError(Exception):
    """Raised by a read, so that what follows need not work."""


class Reads:
    """A module whose read is looked at."""

    @property
    def weight(self):
        raise AskedError(use_of(sys._getframe(1)))


class Other:
    """An object with any method."""

    def __getattr__(self, name):
        return unknown


def unknown(value):
    return value


@pytest.mark.parametrize(
    ("use", "line"), [(use, line) for use, lines in CASES.items() for line in lines]
)
def test_a_line_of_source(use, line, tmp_path):
    path = tmp_path / "code.py"
    path.write_text(f"def run(m, x, o):\n    {line}\n")
    names = {"F": F, "torch": torch, "nn": nn, "unknown": unknown}
    exec(compile(path.read_text(), str(path), "exec"), names)
    with pytest.raises(AskedError) as caught:
        names["run"](Reads(), torch.ones(3), Other())
    assert caught.value.args[0] is use


@pytest.mark.parametrize(
    ("use", "line"),
    [
        (Use.ASKS, "torch.autograd.grad(x, last(m))"),
        (Use.COMPUTES, "F.linear(x, last(m))"),
        (Use.ASKS, "w = last(m); w.grad"),
        (Use.UNKNOWN, "unknown(last(m))"),
    ],
)
def test_a_weight_that_a_function_returns(use, line, tmp_path):
    """The use is that of the caller."""
    path = tmp_path / "caller.py"
    path.write_text(f"def last(m):\n    return m.weight\n\ndef run(m, x):\n    {line}\n")
    names = {"F": F, "torch": torch, "unknown": unknown}
    exec(compile(path.read_text(), str(path), "exec"), names)
    with pytest.raises(AskedError) as caught:
        names["run"](Reads(), torch.ones(3))
    assert caught.value.args[0] is use


@pytest.mark.parametrize(
    ("use", "line"),
    [
        (Use.ASKS, "m.weight.grad"),
        (Use.ASKS, "o.weight = m.weight"),
        (Use.ASKS, "m.weight is x"),
        (Use.COMBINES, "m.weight.t()"),
        (Use.UNKNOWN, "F.linear(x, m.weight)"),
    ],
)
def test_a_line_without_source(use, line):
    names = {"F": F}
    exec(f"\n\ndef run(m, x, o):\n    {line}\n", names)  # equal code in a file has a source
    with pytest.raises(AskedError) as caught:
        names["run"](Reads(), torch.ones(3), Other())
    assert caught.value.args[0] is use
