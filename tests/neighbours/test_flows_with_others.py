"""Flows beside the rest of PyTorch: the compiler, autocast, copies, functional calls; and data."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.func import functional_call

from recoup.flows import NICE, FlowPlusPlus, Glow, IResNet, RealNVP
from recoup.invertible import ActNorm, AdditiveCoupling, AffineCoupling
from tests.oracle import assert_same_tensors

SHAPE = (1, 4, 4)
SMALL = {"width": 8, "num_steps": 1, "num_components": 2}
FLOWS = {
    "nice": lambda **o: NICE(SHAPE, width=8, **o),
    "nice exact": lambda **o: NICE(SHAPE, width=8, exact=True, **o),
    "realnvp": lambda **o: RealNVP(SHAPE, width=8, num_steps=2, **o),
    "glow": lambda **o: Glow(SHAPE, width=8, num_steps=2, num_levels=2, **o),
    "flow++": lambda **o: FlowPlusPlus(SHAPE, **SMALL, **o),
    "flow++ variational": lambda **o: FlowPlusPlus(SHAPE, **SMALL, variational=True, **o),
    "i-resnet": lambda **o: IResNet(SHAPE, width=8, num_steps=2, **o),
}
COUPLINGS = [name for name in FLOWS if name != "i-resnet"]
MEMORIES = ("linear", "constant")

pytestmark = pytest.mark.filterwarnings("ignore:Under memory=:UserWarning")
of_all_flows = pytest.mark.parametrize("name", FLOWS)


def build(name, memory="constant", dtype=torch.float64):
    """A flow that is past the start of its ActNorms, and off the start of its networks."""
    torch.manual_seed(0)
    flow = FLOWS[name](levels=17, memory=memory)
    for module in flow.modules():
        if isinstance(module, ActNorm):
            module.started = True
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    flow.chain.drift = "raise"  # so that nothing mends a wrong inverse
    return flow.to(dtype)


def pictures(n=4):
    return torch.randint(17, (n, *SHAPE), generator=torch.Generator().manual_seed(1))


def step_of(flow, x, cost=None):
    """The loss and the gradients of a step."""
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
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_compiled_flow_is_right(memory):
    flow, x = build("glow", memory), pictures()
    compiled = torch.compile(flow.bits_per_dim, backend="aot_eager")
    assert_same_tensors(step_of(flow, x, compiled), step_of(flow, x), 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_networks_in_couplings():
    flow, x = build("realnvp", "linear"), pictures()
    want = step_of(flow, x)
    for coupling in flow.chain:
        if isinstance(coupling, AdditiveCoupling | AffineCoupling):
            coupling.network.compile(backend="aot_eager")
    for memory in ("linear", "sqrt", "constant"):
        flow.memory = memory
        assert_same_tensors(step_of(flow, x), want, 1e-9)


@pytest.mark.sampled(2)
@of_all_flows
def test_autocast_in_constant_memory_and_in_linear(name):
    """The networks are in bfloat16, and the rest, the sum of squares as well, in float32."""
    found = []
    for memory in MEMORIES:
        flow = build(name, memory, torch.float32)

        def cost(x, flow=flow):
            with torch.autocast("cpu", torch.bfloat16):
                return flow.bits_per_dim(x)

        found.append(step_of(flow, pictures(16), cost))
        assert flow.bits_per_dim(pictures()).dtype is torch.float32
    assert_same_tensors(found[1], found[0], 5e-3)
    assert found[1]["loss"].item() == pytest.approx(found[0]["loss"].item(), rel=1e-6)
    plain = step_of(build(name, "linear", torch.float32), pictures(16))
    is_plain = all(torch.equal(plain[key], found[0][key]) for key in plain)
    assert is_plain == (name == "i-resnet")  # whose blocks stay in full precision


@pytest.mark.sampled(1)
@of_all_flows
def test_copies_of_every_flow_compute_the_same(name):
    flow, x = build(name), pictures()
    want = step_of(flow, x)  # with plans, errors and sketches in it
    file = io.BytesIO()
    torch.save(flow, file)
    file.seek(0)
    other = FLOWS[name](levels=17, memory="constant").double()
    assert not torch.equal(next(other.parameters()), next(flow.parameters()))
    other.load_state_dict(flow.state_dict())
    loaded = pickle.loads(pickle.dumps(flow)), torch.load(file, weights_only=False)
    mine = {p.data_ptr() for p in flow.parameters()}
    for copied in (copy.deepcopy(flow), *loaded, other):
        assert_same_tensors(step_of(copied, x), want, 1e-12)
        assert copied.memory == "constant"
        assert mine.isdisjoint(p.data_ptr() for p in copied.parameters())


class Cost(torch.nn.Module):
    """What functional calls take: a module whose forward is the loss."""

    def __init__(self, flow):
        super().__init__()
        self.flow = flow

    def forward(self, x):
        return self.flow.bits_per_dim(x)


@of_all_flows
def test_functional_call_in_linear_memory(name):
    """What an optimizer of its own, or a step of meta-learning, does with other weights."""
    flow, x = build(name, "linear"), pictures()
    other = copy.deepcopy(flow)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.9)
    want = step_of(other, x)
    weights = {f"flow.{key}": p.detach().requires_grad_() for key, p in other.named_parameters()}
    torch.manual_seed(7)
    cost = functional_call(Cost(flow), weights, (x,)).mean()
    found = torch.autograd.grad(cost, list(weights.values()))
    assert_same_tensors(dict(zip(want, (cost.detach(), *found), strict=True)), want, 1e-12)
    assert all(p.grad is None for p in flow.parameters())


# -- data ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUPLINGS)
def test_gradients_are_those_of_channels_last_and_of_whole_numbers(name):
    flow, x = build(name), pictures(4)
    want = step_of(flow, x.double())
    for other in (x, x.byte(), x.double().to(memory_format=torch.channels_last)):
        assert_same_tensors(step_of(flow, other), want, 1e-9)


@pytest.mark.sampled(6)
@of_all_flows
@pytest.mark.parametrize("n", [0, 1])
def test_an_empty_batch_and_a_batch_of_one(name, n):
    flows = [build(name, memory) for memory in MEMORIES]
    costs = [lambda x, flow=flow: flow.bits_per_dim(x).sum() for flow in flows]
    found = [step_of(flow, pictures(n), cost) for flow, cost in zip(flows, costs, strict=True)]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)
    assert flows[1].bits_per_dim(pictures(n)).shape == (n,)
    assert flows[1].eval().sample(n).shape == (n, *SHAPE)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("name", ["nice", "realnvp", "glow", "flow++", "i-resnet"])
def test_nan_in_the_data(name, memory):
    flow, x = build(name, memory), pictures().double()
    x[0, 0, 0, 0] = float("nan")
    bits = flow.bits_per_dim(x)
    assert bits.isnan().tolist() == [True, False, False, False]
    bits.mean().backward()
    assert any(p.grad.isnan().any() for p in flow.parameters())


WRONG_LEVELS = {
    "images in [0, 1]": (lambda x: x / 16, r"from 0 to 1, not all.*0 to 16.*`\(x \* 16\).round"),
    "images in [-1, 1]": (lambda x: x / 8 - 1, r"from -1 to 1, not all.*Shift"),
    "more levels": (lambda x: x + 30, r"from 30 to 46, but with `levels` 17.*Use `levels` 47"),
    "negative": (lambda x: x - 1, r"from -1 to 15"),
    "halves": (lambda x: x - 0.5, r"not all of them whole"),
    "infinite": (lambda x: x.masked_fill(x > 8, torch.inf), r"to inf.*Look for"),
    "complex": (lambda x: torch.complex(x, x), r"complex128.*two channels"),
}


@pytest.mark.parametrize("wrong", WRONG_LEVELS)
@pytest.mark.parametrize("name", ["nice", "flow++ variational"])
def test_levels_that_are_none_are_refused(name, wrong):
    """Images in [0, 1] would be taken for levels, and train to plausible bits."""
    change, words = WRONG_LEVELS[wrong]
    flow, x = build(name), pictures(64).double()
    for call in (flow.bits_per_dim, flow.log_prob, flow.reconstruct):
        with pytest.raises(ValueError, match=words):
            call(change(x))
    assert flow.bits_per_dim(x).isfinite().all()
    with pytest.raises(ValueError, match=words):
        flow.eval().bits_per_dim(change(x))  # the first batch of the validation


def test_a_flow_over_complex_numbers_is_refused():
    """The imaginary part would be dropped."""
    flow = RealNVP((2,), levels=None)
    with pytest.raises(ValueError, match=r"complex64.*two channels"):
        flow.log_prob(torch.ones(3, 2, dtype=torch.complex64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["nice", "realnvp", "glow", "flow++", "i-resnet"])
def test_flows_in_half_precision(name, dtype):
    flow = build(name, dtype=dtype)
    found, want = step_of(flow, pictures()), step_of(build(name, "linear"), pictures())
    assert found["loss"].item() == pytest.approx(want["loss"].item(), rel=0.05)
    assert all(value.isfinite().all() for value in found.values())
