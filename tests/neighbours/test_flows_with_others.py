"""Flows beside the rest of PyTorch: the compiler, autocast, copies, and data of any type."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.func import functional_call

from recoup.flows import RealNVP
from tests.oracle import assert_same_tensors
from tests.unit.flows.models import BUILDERS, SMALL, built, digits, stirred
from tests.ways import Called

OPTIONS = {"nice exact": {"exact": True}, "flow++ variational": {"variational": True}}
MEMORIES = ("linear", "constant")

pytestmark = pytest.mark.filterwarnings("ignore:Under memory=:UserWarning")
of_all_flows = pytest.mark.parametrize("name", [*BUILDERS, *OPTIONS])


def fresh(name, memory="constant"):
    return built(name.partition(" ")[0], SMALL, memory=memory, **OPTIONS.get(name, {}))


def build(name, memory="constant", dtype=torch.float64):
    flow = stirred(fresh(name, memory))
    flow.chain.drift = "raise"  # so that nothing mends a wrong inverse
    return flow.to(dtype)


def pictures(n=4):
    return digits(n, SMALL).long()


def step_of(flow, x, cost=None):
    flow.zero_grad()
    torch.manual_seed(7)
    loss = (flow.bits_per_dim if cost is None else cost)(x).mean()
    loss.backward()
    found = {name: p.grad.clone() for name, p in flow.named_parameters() if p.grad is not None}
    assert found
    return {"loss": loss.detach(), **found}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "networks_alone"), [("glow", False), ("realnvp", True)])
def test_a_compiled_flow_and_compiled_networks_in_couplings(name, networks_alone):
    flow, x = build(name), pictures()
    want, cost = step_of(flow, x), torch.compile(flow.bits_per_dim, backend="aot_eager")
    for coupling in flow.chain if networks_alone else ():
        if hasattr(coupling, "network"):
            coupling.network.compile(backend="aot_eager")
    for memory in ("linear", "sqrt", "constant"):
        flow.memory = memory
        assert_same_tensors(step_of(flow, x, None if networks_alone else cost), want, 1e-9)


@pytest.mark.sampled(2)
@of_all_flows
def test_autocast_in_constant_memory_and_in_linear(name):
    """The networks are in bfloat16, and the rest, the sum of squares as well, in float32."""
    linear, constant = (build(name, memory, torch.float32) for memory in MEMORIES)
    plain, autocast = step_of(linear, pictures(16)), torch.autocast("cpu", torch.bfloat16)
    want, found = (step_of(f, pictures(16), autocast(f.bits_per_dim)) for f in (linear, constant))
    assert constant.bits_per_dim(pictures()).dtype is torch.float32
    assert_same_tensors(found, want, 5e-3)
    assert found["loss"].item() == pytest.approx(want["loss"].item(), rel=1e-6)
    is_plain = all(torch.equal(plain[key], want[key]) for key in plain)
    assert is_plain == (name == "iresnet")  # whose blocks stay in full precision


@pytest.mark.sampled(2)
@of_all_flows
def test_copies_and_functional_calls_compute_the_same(name):
    flow, x = build(name), pictures()
    want = step_of(flow, x)  # with plans, errors and sketches in it
    other = fresh(name).double()
    other.load_state_dict(flow.state_dict())
    mine = {p.data_ptr() for p in flow.parameters()}
    for copied in (copy.deepcopy(flow), pickle.loads(pickle.dumps(flow)), other):
        assert_same_tensors(step_of(copied, x), want, 1e-12)
        assert copied.memory == "constant"
        assert mine.isdisjoint(p.data_ptr() for p in copied.parameters())
    weights = {f"stages.0.{n}": p.detach().requires_grad_() for n, p in other.named_parameters()}
    for p in flow.parameters():
        p.data.zero_()
    flow.memory = "linear"
    torch.manual_seed(7)
    called = Called(lambda stages, x: stages[0].bits_per_dim(x), [flow])
    cost = functional_call(called, weights, (x,)).mean()
    found = torch.autograd.grad(cost, list(weights.values()))
    assert_same_tensors(dict(zip(want, (cost.detach(), *found), strict=True)), want, 1e-9)


@pytest.mark.sampled(4)
@of_all_flows
def test_batches_of_any_type_layout_size_and_value(name):
    flow, other = (build(name, memory) for memory in reversed(MEMORIES))
    x, want = pictures(), step_of(flow, pictures().double())
    if name != "iresnet":  # which estimates its volume
        for given in (x, x.byte(), x.double().to(memory_format=torch.channels_last)):
            assert_same_tensors(step_of(flow, given), want, 1e-9)
    for n in (0, 1):
        costs = [lambda x, each=each: each.bits_per_dim(x).sum() for each in (flow, other)]
        found = map(step_of, (flow, other), [pictures(n)] * 2, costs)
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)
        assert flow.bits_per_dim(pictures(n)).shape == (n,)
        assert flow.eval().sample(n).shape == (n, *SMALL)
        flow.train()
    x = x.double()
    x[0, 0, 0, 0] = torch.nan
    if name not in OPTIONS:
        assert flow.bits_per_dim(x).isnan().tolist() == [True, False, False, False]
        assert any(gradient.isnan().any() for gradient in step_of(flow, x).values())


def test_levels_and_complex_numbers_that_are_none_are_refused():
    """Images in [0, 1] would be taken for levels, and train to plausible bits."""
    flow, x = build("flow++ variational"), pictures(64).double()
    for call in (flow.bits_per_dim, flow.log_prob, flow.reconstruct):
        with pytest.raises(ValueError, match=r"from 0 to 1, not all.*`\(x \* 16\).round"):
            call(x / 16)
        with pytest.raises(ValueError, match=r"complex128.*two channels"):
            call(torch.complex(x, x))
    with pytest.raises(ValueError, match=r"complex64.*two channels"):  # of continuous data, too
        RealNVP((2,), levels=None).log_prob(torch.ones(3, 2, dtype=torch.complex64))
