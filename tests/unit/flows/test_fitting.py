"""`fit`: it is Adam on bits per dimension, in any memory mode, and leaves the caller alone."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from recoup.errors import BudgetError
from recoup.flows import Glow, RealNVP, fit, fitting
from tests.oracle import assert_same_tensors


def points(num=400):
    drawn = torch.randn(num, 2, generator=torch.Generator().manual_seed(0))
    return drawn @ torch.tensor([[1.0, 0.9], [0.0, 0.3]])


def small_flow(**options):
    torch.manual_seed(0)
    return RealNVP((2,), levels=None, **{"num_steps": 2, "width": 8} | options)


def fitted(flow, data=None, **options):
    data = points() if data is None else data
    return fit(flow, data, **{"epochs": 1, "progress": False} | options)


def test_memory_modes_have_the_same_figures():
    images = torch.randint(17, (80, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    found, flows = [], []
    for memory in ("linear", "sqrt", "constant"):
        torch.manual_seed(0)
        flows.append(Glow((1, 8, 8), levels=17, num_levels=1, num_steps=4, width=8, dropout=0.2))
        found.append(fitted(flows[-1], images.byte(), memory=memory))
        assert flows[-1].memory == memory
    assert_same_tensors(*(dict(flow.state_dict()) for flow in flows[:2]))
    linear, sqrt, constant = found
    assert sqrt.bits_per_dim == linear.bits_per_dim
    assert constant.bits_per_dim == pytest.approx(linear.bits_per_dim, rel=1e-4)
    assert constant.peak_bytes < sqrt.peak_bytes < linear.peak_bytes


def test_it_is_adam_on_bits_per_dim(monkeypatch):
    monkeypatch.setattr(fitting, "_MOST_GRADIENT", 0.05)  # so small that it counts
    flow, by_hand, x = small_flow(), small_flow(), points()
    result = fitted(flow, x, validation=x, test=0.0, batch_size=100)
    optimizer = torch.optim.Adam(by_hand.parameters())
    split = x[torch.randperm(400, generator=torch.Generator().manual_seed(0))]
    torch.manual_seed(0)
    for step, rows in enumerate(torch.randperm(400).split(100)):
        optimizer.param_groups[0]["lr"] = 1e-3 * (step + 1) / 50
        optimizer.zero_grad()
        by_hand.bits_per_dim(split[rows]).mean().backward()
        nn.utils.clip_grad_norm_(by_hand.parameters(), 0.05)
        optimizer.step()
    for ours, theirs in zip(flow.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    bits = by_hand.eval().bits_per_dim(x).mean().item()
    assert result.validation_bits_per_dim == pytest.approx(bits, rel=1e-5)
    assert result.bits_per_dim is None
    assert "not tested" in str(result)


def test_the_best_weights_are_left_and_patience_ends_it():
    flow, x = small_flow(), points()
    result = fitted(flow, x, epochs=8, learning_rate=3.0, patience=2, validation=x, test=x)
    assert 3 <= result.epochs < 8
    assert result.bits_per_dim == pytest.approx(result.validation_bits_per_dim)
    assert flow.bits_per_dim(x).mean().item() == pytest.approx(result.bits_per_dim, rel=1e-5)


@pytest.mark.parametrize("ends", [False, True])
def test_the_caller_is_left_as_it_was(ends):
    flow, num_left = small_flow(), itertools.count(-5)

    def interrupt(*_):
        if ends and next(num_left) == -1:
            raise KeyboardInterrupt

    flow.chain[0].register_forward_hook(interrupt)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with torch.no_grad(), pytest.raises(KeyboardInterrupt) if ends else nullcontext():
        fitted(flow, batch_size=50)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in flow.modules())
    assert all(parameter.grad is None for parameter in flow.parameters())
    with torch.inference_mode(), pytest.raises(ValueError, match="`fit` trains"):
        fitted(flow)


def test_bytes_bound_a_step():
    # Adam makes whole steps of gradients that are little more than the rounding of inverses.
    linear, flow = (small_flow(num_steps=3, width=16).double() for _ in range(2))
    most = fitted(linear, points().double(), batch_size=200).peak_bytes
    result = fitted(flow, points().double(), batch_size=200, memory=f"{0.7 * most:.0f} B")
    assert result.peak_bytes < 0.8 * most
    for ours, theirs in zip(flow.parameters(), linear.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    with pytest.raises(BudgetError):
        fitted(small_flow(), memory="1 KiB")


def test_labels_and_parts_of_their_own(capsys):
    data = points(90), torch.arange(90) % 3
    result = fitted(small_flow(num_classes=3), data, validation=data, test=data)
    assert result.bits_per_dim == pytest.approx(result.validation_bits_per_dim)
    # Numbers of any library; progress is a line for each epoch.
    given = {"validation": np.float32(0.1), "epochs": np.int64(2)}
    fitted(small_flow(num_classes=3), data, **given, progress=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line.split()[1] for line in printed.err.splitlines()] == ["1:", "2:"]


def test_parts_share_no_sample():
    seen, flow = [], small_flow()
    flow.chain.register_forward_pre_hook(lambda chain, x: seen.append((chain.training, x[0][:, 0])))
    x = torch.stack([torch.arange(100.0), torch.randn(100)], dim=1)
    fitted(flow, x, validation=0.2, test=0.3)
    trained = torch.cat([each for training, each in seen if training]).unique()
    others = torch.cat([each for training, each in seen if not training]).unique()
    assert (len(trained), len(others)) == (50, 50)
    assert torch.equal(torch.cat([trained, others]).sort().values, x[:, 0])


def labelled(labels):
    return {"flow": small_flow(num_classes=3), "data": (torch.zeros(9, 2), labels)}


def pictures(value):
    flow, data = RealNVP((1, 4, 4), levels=17, num_steps=1, width=8), torch.zeros(40, 1, 4, 4)
    data[30, 0, 1, 1] = value
    return {"flow": flow, "data": data, "memory": "sqrt"}


@pytest.mark.parametrize(("given", "message"), [
    ({"data": torch.zeros(9, 3)}, r"`images` is Tensor \(9, 3\), but must be a tensor .* \(N, 2\)"),
    ({"data": (torch.zeros(9, 2), torch.zeros(9))}, r"`images` is Tensor \(9, 2\), Tensor \(9,\)"),
    ({"data": points().index_fill(0, torch.tensor([7]), torch.nan)}, "`images` has values tha"),
    ({"data": points().numpy()}, "`images` is ndarray.* torch.from_numpy"),
    ({"data": torch.zeros(1, 2)}, "`images` has 1 samples, and none are left"),
    ({"validation": torch.zeros(9, 3)}, "`validation` is Tensor"),
    ({"validation": 0.0}, "`validation` is 0.0"),
    ({"test": 1.0}, "`test` is 1.0"),
    ({"epochs": 0}, "`epochs` is 0, but must be a whole number"),
    ({"learning_rate": -1.0}, "`learning_rate` is -1.0"),
    ({"memory": "cubic"}, "`memory` is 'cubic'"),
    ({"flow": small_flow().requires_grad_(False)}, "nothing to train"),
    (labelled(torch.rand(9)), r"`images\[1\]` is .*torch.float32"),
    (labelled(torch.arange(8)), r"`images\[1\]` is .*shape \(8,\)"),
    (labelled(torch.arange(9) - 1), r"`images\[1\]` holds -1 to 7"),
    *((pictures(value), r"`images` .* whole grey levels, 0 to 16") for value in (17, -3, 3.5)),
])  # fmt: skip
def test_a_mistake_is_named(given, message):
    given = {"flow": small_flow()} | given
    with pytest.raises(ValueError, match=message):
        fitted(**given)
    assert given["flow"].memory != "sqrt"


def test_a_training_that_diverges_is_seen():
    with pytest.warns(UserWarning, match="Try a smaller `learning_rate`"):
        assert fitted(small_flow(), learning_rate=1e30).validation_bits_per_dim == math.inf
