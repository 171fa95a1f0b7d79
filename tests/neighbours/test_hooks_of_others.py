"""Law 4: hooks of others see what is kept, and names are those of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import recoup
from recoup.invertible import ActNorm, AdditiveCoupling, Chain, InvertibleConv1x1
from tests.oracle import assert_same_step, loss_of_all, run_step
from tests.zoo import Fn, chain_of, conv_net, invertible_chain_of


@pytest.mark.parametrize("memory", ["sqrt", "log", "constant"])
def test_hooks_outside_see_what_is_kept(memory):
    # Convolutions and norms save the parameter itself, linear layers a view of it.
    build = invertible_chain_of if memory == "constant" else chain_of
    modules, x = build("glow" if memory == "constant" else "convolutions and norms")
    model = (Chain if memory == "constant" else recoup.Sequential)(*modules, memory=memory)
    model(x)
    packed, unpacked = [], []
    with saved_tensors_hooks(
        lambda tensor: packed.append(tensor) or tensor.detach(),
        lambda tensor: unpacked.append(tensor) or tensor,
    ):
        output = model(x)
    loss_of_all(output).backward()
    seen = {id(tensor) for tensor in packed}
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d)]
    assert weights
    assert all(id(p) in seen for p in weights)
    others = {t.untyped_storage()._cdata for t in packed if not isinstance(t, nn.Parameter)}
    kept = output[0] if isinstance(output, tuple) else x
    assert kept.untyped_storage()._cdata in others
    assert unpacked


def test_names_are_those_of_torch():
    modules, _ = chain_of("convolutions and norms")
    ours, theirs = recoup.Sequential(*modules, memory="sqrt"), nn.Sequential(*modules)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert isinstance(ours, nn.Sequential)
    assert [id(p) for p in ours.parameters()] == [id(p) for p in theirs.parameters()]
    modules, _ = invertible_chain_of("glow")
    assert list(Chain(*modules).state_dict()) == list(nn.Sequential(*modules).state_dict())


def test_autocast_in_constant_memory():
    torch.manual_seed(0)
    modules = []
    for _ in range(3):
        modules += [ActNorm(6), InvertibleConv1x1(6)]
        modules += [AdditiveCoupling(conv_net(3, 3), conv_net(3, 3))]
    x = torch.randn(4, 6, 4, 4, requires_grad=True)

    def cast(x, chain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return chain(x)

    want = run_step(Fn(cast, Chain(*modules)), x)
    got = run_step(Fn(cast, Chain(*modules, memory="constant")), x)
    assert got.outputs[0].dtype is want.outputs[0].dtype is torch.float32
    assert_same_step(got, want, rtol=1e-2)
