"""Compiled chains and flows: the gradients of eager ones, in every memory mode."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import recoup
from recoup._core import drift_comparison
from recoup._core.saved_tensors import backward_id
from recoup.errors import ChangedError, DriftError, RecoupError
from recoup.flows import NICE, Flow, FlowPlusPlus, Glow, IResNet, RealNVP
from recoup.invertible import (
    ActNorm,
    AdditiveCoupling,
    AffineCoupling,
    Chain,
    Flip,
    InvertibleModule,
    Split,
    compiled_steps,
)

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # The compiler looks at the `grad` of its inputs.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]
SHAPE = (1, 4, 4)
FLOWS = {
    "nice": lambda **o: NICE(SHAPE, width=8, **o),
    "nice exact": lambda **o: NICE(SHAPE, width=8, exact=True, **o),
    "realnvp": lambda **o: RealNVP(SHAPE, width=8, num_steps=1, **o),
    "glow": lambda **o: Glow(SHAPE, width=8, num_steps=2, num_levels=2, **o),
    "glow lu": lambda **o: Glow(SHAPE, width=8, num_steps=2, num_levels=1, conv1x1="lu", **o),
    "flow++": lambda **o: FlowPlusPlus(SHAPE, width=8, num_steps=1, num_components=2, **o),
    "flow++ variational": lambda **o: FlowPlusPlus(
        SHAPE, width=8, num_steps=1, num_components=2, variational=True, **o
    ),
    "i-resnet": lambda **o: IResNet(SHAPE, width=8, num_steps=1, **o),
}
MODES = ("linear", "sqrt", "constant")


def few(names, kept):
    """All names, those that are not kept marked as exhaustive."""
    mark = pytest.mark.exhaustive
    return [name if name in kept else pytest.param(name, marks=mark) for name in names]


FEW_MODES = few(MODES, ["constant"])
FEW_FLOWS = few(FLOWS, ["glow", "flow++ variational"])


def started(model: nn.Module) -> nn.Module:
    """The model past the start of its ActNorms, and off the zeros that its networks start with."""
    for module in model.modules():
        if isinstance(module, ActNorm):
            module.started = True
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def glow(memory="constant", dtype=torch.float64, **options) -> Glow:
    torch.manual_seed(0)
    options = {"num_levels": 1, "num_steps": 2, "width": 8, **options}
    return started(Glow(SHAPE, levels=17, memory=memory, **options)).to(dtype)


def pictures(n=4):
    return torch.randint(17, (n, *SHAPE), generator=torch.Generator().manual_seed(1))


def step(flow, x=None, call=None, **kwargs):
    """Loss, gradients and the next number of the random stream of one step."""
    x = pictures() if x is None else x
    flow.zero_grad()
    torch.manual_seed(7)
    loss = (call or flow.bits_per_dim)(x, **kwargs).mean()
    loss.backward()
    found = {name: p.grad.clone() for name, p in flow.named_parameters() if p.grad is not None}
    return loss.item(), found, torch.rand(()).item()


def assert_same(got, want, rtol=1e-10):
    (loss, found, number), (other, expected, next_number) = got, want
    assert loss == pytest.approx(other, rel=rtol)
    assert number == next_number
    assert list(found) == list(expected)
    largest = max(value.abs().max() for value in expected.values())
    for name, value in expected.items():
        scale = value.abs().max().clamp(min=1e-3 * largest)
        assert (found[name] - value).abs().max() <= rtol * scale, name


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def count_from_zero():
    torch._dynamo.utils.counters.clear()


@pytest.fixture(autouse=True)
def all_are_compiled(request):
    """A step that is not compiled is an error, where a test does not say otherwise."""
    with warnings.catch_warnings():
        if "ignore" not in [m.args[0] for m in request.node.iter_markers("filterwarnings")]:
            warnings.filterwarnings("error", message=".*is not compiled")
        yield


def test_a_compiled_glow_has_the_gradients_of_the_eager_one():
    want = step(glow("linear"))
    flow = glow("constant")
    flow.drift = "raise"
    assert_same(step(flow), want)
    flow.compile(backend="aot_eager")
    for _ in range(2):
        assert_same(step(flow), want)
    assert num_graphs() > 0
    for memory in ("linear", "sqrt"):
        flow.memory = memory
        for _ in range(2):
            assert_same(step(flow), want)
    flow.compile(disable=True)
    seen = num_graphs()
    assert_same(step(flow), want)
    assert num_graphs() == seen


@pytest.mark.slow
def test_alike_steps_are_compiled_once():
    found = []
    for num_steps in (3, 9):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        flow = glow(num_steps=num_steps)
        flow.drift = "raise"
        step(flow)
        flow.compile(backend="aot_eager")
        step(flow)
        found.append(num_graphs())
    # One more: in a deep flow there are gradients with the memory layout that a step gives them.
    assert found[1] <= found[0] + 1


def test_an_input_without_a_gradient_is_no_other_kind():
    layers = [AffineCoupling(nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 4))) for _ in range(3)]
    chain = Chain(Flip(), *layers, memory="constant")
    chain.compile(backend="aot_eager")
    for _ in range(2):
        chain(torch.randn(5, 4))[0].square().sum().backward()
    assert num_graphs() == 3  # flipping, a coupling, and its gradients with its inverse


@pytest.mark.slow
def test_what_passes_a_compiled_step_is_not_compared_at_each(monkeypatch):
    flow = glow(num_levels=2, num_steps=3)
    flow.compile(backend="aot_eager")
    for _ in range(3):
        step(flow)
    assert flow.drift._is_calm(0)
    compared = []
    sketch = drift_comparison._sketch_of

    def counted(value):
        compared.append(backward_id() != -1)
        return sketch(value)

    monkeypatch.setattr(drift_comparison, "_sketch_of", counted)
    step(flow)
    # Once in forward and once in backward; the first latent only where its split returns it.
    assert compared.count(True) == compared.count(False) == 7


def squashed(x):
    return x.tanh()


class Squashing(nn.Linear):
    draws_only_in_modules = True

    def forward(self, input):
        return squashed(nn.Linear.forward(self, input))


def script():
    """A namespace of code that belongs to no module, as of a notebook."""
    names = {"torch": torch, "squashed": squashed}
    exec(inspect.getsource(Squashing).replace("nn.Linear", "torch.nn.Linear"), names)
    return names


@pytest.mark.sampled(1)
@pytest.mark.parametrize("names", [globals, script])
@pytest.mark.parametrize("by", [squashed, torch.tanh])
def test_a_function_that_user_code_names_is_looked_at(monkeypatch, by, names):
    names = names()
    monkeypatch.setitem(names, "squashed", by)
    layers = [AdditiveCoupling(names["Squashing"](2, 2)) for _ in range(2)]
    chain = Chain(*layers, memory="constant")
    chain.compile(backend="aot_eager")
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    for other in (by, torch.sigmoid):
        monkeypatch.setitem(names, "squashed", other)
        got = [chain(x)[0], *torch.autograd.grad(chain(x)[0].sum(), chain.parameters())]
        chain.memory = "linear"
        with torch.compiler.set_stance("force_eager"):
            want = [chain(x)[0], *torch.autograd.grad(chain(x)[0].sum(), chain.parameters())]
        chain.memory = "constant"
        for value, expected in zip(got, want, strict=True):
            torch.testing.assert_close(value, expected)


def test_compiled_code_is_freed_with_the_last_chain_that_uses_it():
    flows = [glow() for _ in range(2)]
    for flow in flows:
        flow.compile(backend="aot_eager")
        step(flow)
    assert len(compiled_steps._codes) > 0
    flows.pop()
    gc.collect()
    assert len(compiled_steps._codes) > 0
    del flow, flows
    gc.collect()
    assert len(compiled_steps._codes) == 0


@pytest.mark.slow
def test_the_peak_does_not_grow_with_the_depth():
    """Beyond gradients, which are allocated before, and eight numbers a step for the guard."""
    torch.set_num_threads(1)
    peaks = {}
    for num_steps in (4, 12):
        torch.manual_seed(0)
        flow = Glow(
            (1, 8, 8), levels=17, num_steps=num_steps, num_levels=1, width=32, memory="constant"
        )
        flow.compile(backend="aot_eager")
        x = torch.randint(17, (32, 1, 8, 8))

        def run(flow=flow, x=x):
            flow.zero_grad(set_to_none=False)
            flow.bits_per_dim(x).mean().backward()

        for _ in range(3):
            run()
        peaks[num_steps] = recoup.measure(run, device="cpu", repeats=1).peak_bytes
    assert peaks[12] < 1.15 * peaks[4]


@pytest.mark.parametrize("memory", MODES)
def test_dropout_runs_uncompiled_with_the_draws_of_eager(memory):
    want = step(glow("linear", dropout=0.5))
    flow = glow(memory, dropout=0.5)
    flow.drift = "raise"
    flow.compile(backend="aot_eager")
    with pytest.warns(UserWarning, match="is not compiled: ConvNetwork may draw"):
        assert_same(step(flow), want)
    assert_same(step(flow), want)


@pytest.mark.slow
def test_labels():
    labels = torch.tensor([0, 1, 2, 1])
    want = step(glow("linear", num_classes=3), labels=labels)
    flow = glow("constant", num_classes=3)
    flow.drift = "raise"
    step(flow, labels=labels)
    flow.compile(backend="aot_eager")
    assert_same(step(flow, labels=labels), want)


class Conditioned(nn.Module):
    takes_context = True
    draws_only_in_modules = True

    def __init__(self, width, copies):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width + 2, 8), nn.Tanh(), nn.Linear(8, copies * width))

    def forward(self, x, context):
        return self.net(torch.cat((x, context), 1))


def features(memory):
    torch.manual_seed(0)
    couplings = [AffineCoupling(Conditioned(3, 2), Conditioned(3, 2)) for _ in range(2)]
    rest = [AffineCoupling(nn.Linear(2, 2), nn.Linear(1, 4)) for _ in range(2)]
    return started(Chain(*couplings, Split(), *rest, memory=memory)).double()


def run_with_context(chain):
    x, context = torch.randn(5, 6, dtype=torch.double), torch.randn(5, 2, dtype=torch.double)
    x.requires_grad_()
    context.requires_grad_()
    (early, y), log_det = chain(x, context)
    (early.square().sum() + y.square().sum() - (log_det * torch.arange(5)).sum()).backward()
    return [x.grad, context.grad, *(p.grad for p in chain.parameters())]


@pytest.mark.slow
def test_a_context_two_networks_and_a_split():
    linear = features("linear")
    torch.manual_seed(3)
    want = run_with_context(linear)
    chain = features("constant")
    chain.drift = "raise"
    for compiled in (False, True):
        torch.manual_seed(3)
        chain.zero_grad()
        if compiled:
            chain.compile(backend="aot_eager")
        for value, expected in zip(run_with_context(chain), want, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-11)
    assert num_graphs() > 0


@pytest.mark.drifts
@pytest.mark.filterwarnings("ignore:Most states of this chain must be kept")
def test_the_guard_compares_and_repairs():
    """An inverse that is off by a twentieth: the gradients are right all the same."""

    def grads(model):
        torch.manual_seed(1)
        model.zero_grad()
        y, log_det = model(torch.randn(16, 6))
        (y.tanh().sum() + log_det.mean()).backward()
        return [p.grad.clone() for p in model.parameters()]

    def build(memory):
        torch.manual_seed(0)
        networks = (nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(6))
        return Chain(*map(Off, networks), memory=memory)

    want = grads(build("linear"))
    model = build("constant")
    model.compile(backend="aot_eager")
    for _ in range(3):
        for value, expected in zip(grads(model), want, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    assert num_graphs() > 0
    assert model.drift.refused
    assert model.drift.kept
    model.drift = "raise"
    with pytest.raises(DriftError):
        grads(model)


class Off(AdditiveCoupling):
    draws_only_in_modules = True

    def inverse(self, y, context=None):
        x, log_det = super().inverse(y, context)
        return x + 0.05, log_det


@pytest.mark.slow
def test_a_graph_that_is_used_twice_and_in_part():
    flow, x = glow("constant"), pictures()
    step(flow)
    flow.compile(backend="aot_eager")
    loss = flow.bits_per_dim(x).mean()
    parameters = list(flow.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    last = torch.autograd.grad(loss, parameters[-2:], retain_graph=True)
    again = torch.autograd.grad(loss, parameters)
    for one, other in zip((*first, *first[-2:]), (*again, *last), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)
    with pytest.raises(RecoupError, match="disable=True"):
        torch.autograd.grad(flow.bits_per_dim(x).mean(), parameters, create_graph=True)


@pytest.mark.exhaustive
def test_an_early_latent_alone():
    def run(flow):
        flow.zero_grad()
        torch.manual_seed(7)
        (early, _), _ = flow(pictures())
        early.square().sum().backward()
        return 0.0, {n: p.grad.clone() for n, p in flow.named_parameters() if p.grad is not None}, 0

    options = {"num_levels": 2}
    want = run(glow("linear", **options))
    flow = glow("constant", **options)
    flow.drift = "raise"
    run(flow)
    flow.compile(backend="aot_eager")
    got = run(flow)
    for name, value in want[1].items():  # compiled steps also give zeros
        torch.testing.assert_close(got[1][name], value, rtol=1e-10, atol=1e-11)


@pytest.mark.exhaustive
def test_frozen_parameters_and_other_batches():
    def prepared(memory):
        flow = glow(memory)
        for coupling in flow.chain:
            if isinstance(coupling, AffineCoupling):
                coupling.network[0].requires_grad_(False)
        return flow

    flow = prepared("constant")
    flow.drift = "raise"
    step(flow)
    flow.compile(backend="aot_eager")
    for n in (4, 6):
        assert_same(step(flow, pictures(n)), step(prepared("linear"), pictures(n)))


@pytest.mark.slow
def test_autocast_in_constant_memory():
    def cost(flow):
        def call(x):
            with torch.autocast("cpu", torch.bfloat16):
                return flow.bits_per_dim(x)

        return call

    flow = glow("linear", torch.float32)
    want = step(flow, pictures(16), cost(flow))
    flow = glow("constant", torch.float32)
    flow.drift = "raise"
    step(flow, pictures(16), cost(flow))
    flow.compile(backend="aot_eager")
    assert_same(step(flow, pictures(16), cost(flow)), want, 1e-2)


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"mode": "most"}, ValueError, "'mode': 'most'.*max-autotune"),
        ({"backend": "most"}, ValueError, "'backend': 'most'.*Invalid backend"),
        ({"options": {"most": 1}}, ValueError, "Unexpected optimization option most"),
        ({"budget": 1}, TypeError, "'budget'"),
    ],
)
def test_settings_that_torch_compile_does_not_take_are_refused_at_once(settings, error, said):
    flow = glow()
    with pytest.raises(error, match=said):
        flow.compile(**settings)
    assert flow.chain._settings is None


@pytest.mark.slow
def test_copies_are_compiled_likewise():
    flow = glow("constant")
    flow.compile(backend="aot_eager")
    for _ in range(2):
        want = step(flow)
    seen = num_graphs()
    for other in (copy.deepcopy(flow), pickle.loads(pickle.dumps(flow))):
        for _ in range(2):
            assert_same(step(other), want)
    buffer = io.BytesIO()
    torch.save(flow, buffer)
    buffer.seek(0)
    assert_same(step(torch.load(buffer, weights_only=False)), want)
    assert num_graphs() == seen
    assert flow.state_dict().keys() == glow("constant").state_dict().keys()


@pytest.mark.filterwarnings("ignore")  # what the compiler itself warns of when a graph breaks
@pytest.mark.slow
@pytest.mark.parametrize("memory", FEW_MODES)
def test_torch_compile_of_the_flow_compiles_the_steps(memory):
    want = step(glow("linear"))
    flow = glow(memory)
    flow.drift = "raise"
    step(flow)
    compiled = torch.compile(flow.bits_per_dim, backend="aot_eager")
    for _ in range(2):
        assert_same(step(flow, call=compiled), want)
    assert num_graphs() >= (1 if memory == "linear" else 4)


class Odd(InvertibleModule):
    """A module that the compiler cannot trace: it reads a number."""

    draws_only_in_modules = True

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        scale = 1.0 if float(x.detach().sum()) > 1e9 else 2.0
        return x * scale * self.weight, (x.shape[1] * (self.weight.log() + 0.0)).expand(len(x))

    def inverse(self, y):
        return y / (2.0 * self.weight), y.new_zeros(len(y))


def test_what_cannot_be_compiled_runs_as_before_and_says_so_once():
    def build(memory):
        torch.manual_seed(0)
        parts = [AdditiveCoupling(nn.Linear(3, 3)), Odd(), AdditiveCoupling(nn.Linear(3, 3)), Odd()]
        return Chain(*parts, memory=memory)

    def run(chain):
        chain.zero_grad()
        y, log_det = chain(torch.linspace(-1, 1, 30).view(5, 6))
        (y.square().sum() + log_det.sum()).backward()
        return [p.grad.clone() for p in chain.parameters()]

    want = run(build("linear"))
    chain = build("constant")
    chain.compile(backend="aot_eager")
    said = []
    for _ in range(4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for value, expected in zip(run(chain), want, strict=True):
                torch.testing.assert_close(value, expected)
        said += [str(w.message) for w in caught if "is not compiled" in str(w.message)]
    assert said
    assert len(said) == len(set(said))
    assert all("Odd" in text for text in said)
    chain.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises((ValueError, torch._dynamo.exc.TorchDynamoException)):
        run(chain)


@pytest.mark.parametrize("reason", ["hooks", "computed", "random numbers", "statistics"])
def test_obstacles_are_named(reason):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    chain = Chain(AdditiveCoupling(network, nn.Linear(3, 3)), memory="constant").double()
    if reason == "hooks":
        network[0].register_forward_hook(lambda *args: None)
    elif reason == "statistics":
        network.insert(1, nn.BatchNorm1d(8).double())
    elif reason == "computed":
        recoup.weight_noise(network, ".*", std=0.1)
    else:
        chain[0].g = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).double()
        network.append(nn.Dropout(0.5))
    x = torch.randn(5, 6, dtype=torch.double)

    def run(memory):
        chain.zero_grad()
        chain.memory = memory
        torch.manual_seed(5)
        chain(x)[0].square().sum().backward()
        return [p.grad.clone() for p in chain.parameters()]

    want = run("linear")
    chain.compile(backend="aot_eager")
    with pytest.warns(UserWarning, match=f"is not compiled.*{reason}"):
        run("constant")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = run("constant")
    for value, expected in zip(got, want, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("memory", FEW_MODES)
@pytest.mark.parametrize("name", FEW_FLOWS)
def test_every_flow_compiled_equals_the_eager_one(name, memory):
    def build(memory):
        torch.manual_seed(0)
        return started(FLOWS[name](levels=17, memory=memory)).double()

    want = step(build("linear"))
    flow = build(memory)
    flow.compile(backend="aot_eager")
    for _ in range(3):
        assert_same(step(flow), want, 1e-9)
    x = flow.sample(3)
    assert x.shape == (3, *SHAPE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("memory", FEW_MODES)
def test_inductor(memory):
    want = step(glow("linear", torch.float32))
    flow = glow(memory, torch.float32)
    step(flow)
    flow.compile()
    for _ in range(2):
        assert_same(step(flow), want, 1e-5)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_inductor_around_the_flow():
    want = step(glow("linear", torch.float32))
    flow = glow("constant", torch.float32)
    step(flow)
    compiled = torch.compile(flow.log_prob)
    got = step(flow, call=lambda x: flow._to_bits(compiled(x)))
    assert_same(got, want, 1e-5)


def test_a_flow_that_is_given_no_gradient_is_compiled_too():
    flow: Flow = glow("constant")
    with torch.no_grad():
        torch.manual_seed(0)
        want = flow.log_prob(pictures())
        flow.compile(backend="aot_eager")
        torch.manual_seed(0)
        torch.testing.assert_close(flow.log_prob(pictures()), want, rtol=1e-10, atol=1e-10)
    assert num_graphs() > 0


class ReadsAChild(InvertibleModule):
    """A coupling whose `then` reads the parameters of another part of it."""

    draws_only_in_modules = True

    def __init__(self):
        super().__init__()
        self.network, self.scale = nn.Linear(3, 3), nn.Linear(3, 3)

    def then(self, value):
        log_scale = torch.tanh(self.scale(value))
        return log_scale.exp(), log_scale.sum(1)

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        scale, log_det = self.evaluate(self.network, a, then=self.then)
        return torch.cat([b * scale, a], dim=1), log_det

    def inverse(self, y):
        b, a = y.chunk(2, dim=1)
        scale, log_det = self.evaluate(self.network, a, then=self.then)
        return torch.cat([a, b / scale], dim=1), -log_det


def test_what_follows_a_network_may_read_any_parameter():
    torch.manual_seed(0)
    chain = Chain(*(ReadsAChild() for _ in range(3)), memory="constant").double()
    x = torch.randn(5, 6, dtype=torch.double)

    def run():
        chain.zero_grad()
        y, log_det = chain(x)
        (y.square().sum() + log_det.sum()).backward()
        return [p.grad.clone() for p in chain.parameters()]

    want = run()
    chain.compile(backend="aot_eager")
    for value, expected in zip(run(), want, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11)


def test_freezing_between_forward_and_backward_is_an_error():
    torch.manual_seed(0)
    chain = Chain(*(ReadsAChild() for _ in range(3)), memory="constant").double()
    chain.compile(backend="aot_eager")
    for is_frozen in (False, True):
        y, log_det = chain(torch.randn(5, 6, dtype=torch.double))
        loss = y.square().sum() + log_det.sum()
        if is_frozen:
            chain.requires_grad_(False)
            with pytest.raises(ChangedError, match="requires_grad"):
                loss.backward()
        else:
            loss.backward()
