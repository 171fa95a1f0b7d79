"""Flows beside the rest of PyTorch: DDP, the compiler, autocast, copies, functional calls."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from tests.neighbours.flows_ddp_worker import CASES
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from recoup.flows import NICE, FlowPlusPlus, Glow, IResNet, RealNVP
from recoup.invertible import ActNorm, AdditiveCoupling, AffineCoupling
from tests.neighbours.workers import both, found_by, furthest

SHAPE = (1, 4, 4)
FLOWS = {
    "nice": lambda **o: NICE(SHAPE, width=8, **o),
    "nice exact": lambda **o: NICE(SHAPE, width=8, exact=True, **o),
    "realnvp": lambda **o: RealNVP(SHAPE, width=8, num_steps=2, **o),
    "glow": lambda **o: Glow(SHAPE, width=8, num_steps=2, num_levels=2, **o),
    "flow++": lambda **o: FlowPlusPlus(SHAPE, width=8, num_steps=1, num_components=2, **o),
    "flow++ variational": lambda **o: FlowPlusPlus(
        SHAPE, width=8, num_steps=1, num_components=2, variational=True, **o
    ),
    "i-resnet": lambda **o: IResNet(SHAPE, width=8, num_steps=2, **o),
}
COUPLINGS = [name for name in FLOWS if name != "i-resnet"]

recomputes = pytest.mark.filterwarnings("ignore:Under memory=:UserWarning")


def build(name, dtype=torch.float64, **options):
    """A flow that is past the start of its ActNorms, and off the start of its networks."""
    torch.manual_seed(0)
    flow = FLOWS[name](levels=17, **options)
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


def gradients(flow, x, cost=None):
    flow.zero_grad()
    torch.manual_seed(7)
    loss = (flow.bits_per_dim if cost is None else cost)(x).mean()
    loss.backward()
    found = {name: p.grad.clone() for name, p in flow.named_parameters() if p.grad is not None}
    assert found
    return loss.item(), found


def assert_close(got, want, rtol):
    assert list(got) == list(want)
    largest = max(value.abs().max() for value in want.values())
    for name, value in want.items():
        scale = value.abs().max().clamp(min=1e-3 * largest)
        assert (got[name] - value).abs().max() <= rtol * scale, name


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by("flows_ddp_worker", tmp_path_factory.mktemp("flows_ddp"))


@pytest.mark.slow
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_flows_under_ddp_have_the_gradients_of_the_whole_batch(found, case, find_unused):
    assert furthest(found, f"{case} {find_unused}") < 1e-9


@pytest.mark.slow
def test_a_first_step_under_ddp_leaves_the_ranks_alike(found):
    first, second = both(found, "first step")
    assert first == second


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("memory", ["linear", "constant"])
def test_a_compiled_flow_is_right(memory):
    flow, x = build("glow", memory=memory), pictures()
    loss, want = gradients(flow, x)
    compiled = torch.compile(flow.bits_per_dim, backend="aot_eager")
    other, got = gradients(flow, x, compiled)
    assert other == pytest.approx(loss, rel=1e-9)
    assert_close(got, want, 1e-9)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_networks_in_couplings():
    flow, x = build("realnvp", memory="linear"), pictures()
    loss, want = gradients(flow, x)
    couplings = [m for m in flow.chain if isinstance(m, AdditiveCoupling | AffineCoupling)]
    for coupling in couplings:
        coupling.network.compile(backend="aot_eager")
    for memory in ("linear", "sqrt", "constant"):
        flow.memory = memory
        other, got = gradients(flow, x)
        assert other == pytest.approx(loss, rel=1e-9)
        assert_close(got, want, 1e-9)


@pytest.mark.sampled(2)
@recomputes
@pytest.mark.parametrize("name", FLOWS)
def test_autocast_in_constant_memory_and_in_linear(name):
    """The networks are in bfloat16, and the rest, the sum of squares as well, in float32."""
    found = {}
    for memory in ("linear", "constant"):
        flow = build(name, torch.float32, memory=memory)

        def cost(x, flow=flow):
            with torch.autocast("cpu", torch.bfloat16):
                return flow.bits_per_dim(x)

        found[memory] = gradients(flow, pictures(16), cost)
        assert flow.bits_per_dim(pictures()).dtype is torch.float32
    loss, want = found["linear"]
    other, got = found["constant"]
    assert other == pytest.approx(loss, rel=1e-6)
    assert_close(got, want, 5e-3)
    plain = gradients(build(name, torch.float32), pictures(16))[1]
    is_plain = all(torch.equal(plain[key], want[key]) for key in want)
    assert is_plain == (name == "i-resnet")  # whose blocks stay in full precision


@pytest.mark.sampled(1)
@recomputes
@pytest.mark.parametrize("name", FLOWS)
def test_copies_of_every_flow_compute_the_same(name):
    flow, x = build(name, memory="constant"), pictures()
    loss, want = gradients(flow, x)  # with plans, errors and sketches in it
    file = io.BytesIO()
    torch.save(flow, file)
    file.seek(0)
    other = FLOWS[name](levels=17, memory="constant").double()
    assert not torch.equal(next(other.parameters()), next(flow.parameters()))
    other.load_state_dict(flow.state_dict())
    copies = {
        "deepcopy": copy.deepcopy(flow),
        "pickle": pickle.loads(pickle.dumps(flow)),
        "torch.save": torch.load(file, weights_only=False),
        "state_dict": other,
    }
    for how, copied in copies.items():
        again, got = gradients(copied, x)
        assert again == loss, how
        assert_close(got, want, 1e-12)
        assert copied.memory == "constant"
    mine = {p.data_ptr() for p in flow.parameters()}
    assert not mine & {p.data_ptr() for c in copies.values() for p in c.parameters()}


@pytest.mark.sampled(3)
@recomputes
@pytest.mark.parametrize("name", FLOWS)
def test_an_averaged_flow_follows_and_samples(name):
    flow, x = build(name, memory="constant"), pictures()
    averaged = AveragedModel(flow, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    optimizer = torch.optim.SGD(flow.parameters(), lr=0.01)
    expected = {key: p.detach().clone() for key, p in flow.named_parameters()}
    for step in range(3):
        gradients(flow, x)
        optimizer.step()
        averaged.update_parameters(flow)
        for key, p in flow.named_parameters():  # the first update copies
            expected[key] = p.detach().lerp(expected[key], 0.0 if step == 0 else 0.5)
    for key, p in averaged.module.named_parameters():
        torch.testing.assert_close(p, expected[key], msg=key)
    samples = averaged.module.eval().sample(3)
    assert samples.shape == (3, *SHAPE)
    assert samples.isfinite().all()


@pytest.mark.parametrize("name", FLOWS)
def test_functional_call_in_linear_memory(name):
    """What an optimizer of its own, or a step of meta-learning, does with other weights."""
    flow, x = build(name), pictures()
    other = copy.deepcopy(flow)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.9)
    loss, want = gradients(other, x, lambda x: Cost(other)(x))
    weights = {f"flow.{key}": p.detach().requires_grad_() for key, p in other.named_parameters()}
    torch.manual_seed(7)
    cost = functional_call(Cost(flow), weights, (x,)).mean()
    found = torch.autograd.grad(cost, list(weights.values()))
    assert cost.item() == loss
    assert_close(dict(zip(want, found, strict=True)), want, 1e-12)
    assert all(p.grad is None for p in flow.parameters())


class Cost(torch.nn.Module):
    """What DDP and functional calls take: a module whose forward is the loss."""

    def __init__(self, flow):
        super().__init__()
        self.flow = flow

    def forward(self, x):
        return self.flow.bits_per_dim(x)


@pytest.mark.parametrize("name", COUPLINGS)
def test_gradients_are_those_of_channels_last_and_of_whole_numbers(name):
    flow, x = build(name, memory="constant"), pictures(4)
    loss, want = gradients(flow, x.double())
    for other in (x, x.byte(), x.double().to(memory_format=torch.channels_last)):
        again, got = gradients(flow, other)
        assert again == pytest.approx(loss, rel=1e-12)
        assert_close(got, want, 1e-9)


@pytest.mark.sampled(6)
@recomputes
@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("n", [0, 1])
def test_an_empty_batch_and_a_batch_of_one(name, n):
    found = {}
    for memory in ("linear", "constant"):
        flow = build(name, memory=memory)
        torch.manual_seed(7)
        bits = flow.bits_per_dim(pictures(n))
        assert bits.shape == (n,)
        bits.sum().backward()
        found[memory] = {key: p.grad for key, p in flow.named_parameters()}
    assert_close(found["constant"], found["linear"], 1e-9)
    assert flow.eval().sample(n).shape == (n, *SHAPE)


@recomputes
@pytest.mark.parametrize("memory", ["linear", "constant"])
@pytest.mark.parametrize("name", ["nice", "realnvp", "glow", "flow++", "i-resnet"])
def test_nan_in_the_data(name, memory):
    flow, x = build(name, memory=memory), pictures().double()
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


@recomputes
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, "images in [0, 1]") for name in FLOWS),
        *(("realnvp", each) for each in WRONG_LEVELS),
    ],
)
def test_levels_that_are_none_are_refused(name, wrong):
    """N5: images in [0, 1] were taken for levels, and trained to plausible bits."""
    change, words = WRONG_LEVELS[wrong]
    flow, x = build(name, memory="constant"), pictures(64).double()
    for call in (flow.bits_per_dim, flow.log_prob, flow.reconstruct):
        with pytest.raises(ValueError, match=words):
            call(change(x))
    assert flow.bits_per_dim(x).isfinite().all()
    with pytest.raises(ValueError, match=words):
        flow.eval().bits_per_dim(change(x))  # the first batch of the validation


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bool, torch.float16])
def test_levels_of_any_type(dtype):
    """N5: whole numbers are levels, whatever holds them."""
    flow, x = build("glow"), (pictures() > 3).to(dtype)
    torch.manual_seed(0)
    want = flow.bits_per_dim(x.double())
    torch.manual_seed(0)
    assert torch.equal(flow.bits_per_dim(x), want)


def test_a_flow_over_complex_numbers_is_refused():
    """N5: the imaginary part would be dropped."""
    flow = RealNVP((2,), levels=None)
    with pytest.raises(ValueError, match=r"complex64.*two channels"):
        flow.log_prob(torch.ones(3, 2, dtype=torch.complex64))


@pytest.mark.parametrize("levels", [2.5, 256.0, True, "256", 1, 0, -3])
def test_a_number_of_levels_that_is_none_is_refused(levels):
    """N5: half a level was accepted."""
    for name in FLOWS:
        with pytest.raises(ValueError, match=f"`levels` is {levels!r}.*whole number above 1"):
            FLOWS[name](levels=levels)


@recomputes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["nice", "realnvp", "glow", "flow++", "i-resnet"])
def test_flows_in_half_precision(name, dtype):
    flow = build(name, dtype, memory="constant")
    if name == "i-resnet":
        with pytest.raises(RuntimeError, match="Low precision"):
            flow.bits_per_dim(pictures())
        return
    loss, found = gradients(flow, pictures())
    assert loss == pytest.approx(gradients(build(name), pictures())[0], rel=0.05)
    assert all(value.isfinite().all() for value in found.values())
