"""Flows of zuko, nflows, normflows and FrEIA in constant memory: the same training, by one line."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import DriftError
from recoup.flows import chains_of
from recoup.invertible import Chain, DriftGuard, adapt
from tests.alive import allocated_bytes
from tests.oracle import assert_same_step, assert_same_tensors, run_step, tensors
from tests.programs import flows
from tests.programs.flows import BATCH, CONTEXT, COUPLINGS, DIM, build, given, library

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, and that some are recomputed


class Density(nn.Module):
    def __init__(self, built):
        super().__init__()
        self.flow, self._log_prob = built

    def forward(self, inputs):
        return self._log_prob(self.flow, *inputs)


def pair(name, memory="constant", **options):
    plain = Density(build(name, **options))
    return plain, recoup.train_in(copy.deepcopy(plain), memory)


def assert_like_plain(plain, ours, inputs=None, rtol=1e-9):
    inputs = given() if inputs is None else inputs
    assert_same_step(run_step(ours, inputs), run_step(plain, inputs), rtol=rtol)


def assert_trained_alike(make, loss, inputs=lambda: (), rtol=1e-9, steps=1):
    """`loss(flow, *inputs)` has the gradients in constant memory that it has in linear."""
    found = []
    for memory in ("linear", "constant"):
        flow, values = make(), inputs()
        if isinstance(flow, Chain):
            flow.memory = memory
        else:
            recoup.train_in(flow, memory)
        for _ in range(steps):
            flow.zero_grad()
            torch.manual_seed(4)
            value = loss(flow, *values)
            value.backward()
        named = {f"input {k}": x for k, x in enumerate(tensors(values)) if x.requires_grad}
        named |= {name: p for name, p in flow.named_parameters() if p.requires_grad}
        found.append({"loss": value.detach()} | {name: x.grad for name, x in named.items()})
    assert_same_tensors(found[1], found[0], rtol)
    return flow


def of_kind(flow, kind):
    return [module for module in flow.modules() if type(module).__name__ == kind]


ONE_OF_EACH = ["zuko_affine", "nflows_affine", "normflows_spline", "freia_graph"]


@pytest.mark.parametrize(("name", "memory"), [
    *((name, "constant") for name in flows.FLOWS),
    *((name, memory) for name in ONE_OF_EACH for memory in ("sqrt", "2 MiB")),
])  # fmt: skip
def test_a_step_is_the_one_of_the_library(name, memory):
    plain, ours = pair(name, memory)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert list(map(type, ours.modules())) == list(map(type, plain.modules()))
    assert_like_plain(plain, ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", COUPLINGS)
def test_memory_is_flat_in_depth(name):
    def peak(depth, memory):
        # As the library starts it, and without dropout: draws keep the state of the generator.
        model, inputs = Density(build(name, depth, 64, std=0.0)).eval(), given(batch=64)
        recoup.train_in(model, memory)
        step = lambda: model(inputs).sum().backward()  # noqa: E731
        step()
        return allocated_bytes(step)[0]

    few = peak(6, "constant")
    assert peak(18, "constant") <= 1.02 * few
    assert few <= 0.4 * peak(6, "linear")


@pytest.mark.parametrize("name", flows.RECOMPUTED)
def test_autoregressive_layers_are_recomputed_and_it_is_said(name, monkeypatch):
    plain, ours = pair(name)
    (chain,) = chains_of(ours)
    layers = [each for each in chain.modules() if type(each).__name__.startswith("_Of")]
    sequential = [each for each in layers if "once for each dimension" in str(each)]
    assert sequential
    with pytest.warns(UserWarning, match="are recomputed from their kept inputs"):
        recoup.train_in(ours)
    for layer in sequential:
        monkeypatch.setattr(layer, "inverse", None)
        monkeypatch.setattr(layer, "input_of", None)
    assert_like_plain(plain, ours)


@pytest.mark.parametrize("name", COUPLINGS)
def test_networks_run_once_in_forward_and_once_in_backward(name):
    counts = []
    for density in pair(name, depth=4):
        # Layers start; without dropout, whose draws have the order of forward in backward, too.
        density.eval()(given())
        calls = []
        for where, module in density.named_modules():
            if type(module) is nn.Linear and "q0" not in where:
                module.register_forward_hook(lambda *_, calls=calls: calls.append(0))
        value = density(given()).sum()
        counts.append(len(calls))
        value.backward()
        counts.append(len(calls))
    forward, same, ours, both = counts
    assert forward == same == ours
    assert both == 2 * forward


def squared_slope(density, *inputs):
    value = density(inputs).sum()
    (gradient,) = torch.autograd.grad(value, inputs[0], create_graph=True)
    return gradient.square().sum() + 0 * sum(p.sum() for p in density.parameters())


INVERSES = {
    "zuko": lambda flow, z, context: flow(context).transform.inv.call_and_ladj(z),
    "nflows": lambda flow, z, context: flow.eval()._transform.inverse(z, context),
    "FrEIA": lambda flow, z, context: flow(z, c=[context], rev=True),
    "normflows": lambda flow, z, context: flow.forward_and_log_det(
        z, *((context,) if "Conditional" in type(flow).__name__ else ())
    ),
}


def of_both(pair):
    z, log_det = pair
    return z.sin().sum() + log_det.sum()


def way_to_the_data(density, z, context):
    kind = type(density.flow).__module__.partition(".")[0]
    return of_both(INVERSES[kind](density.flow, z, context))


@pytest.mark.parametrize("loss", [squared_slope, way_to_the_data])
@pytest.mark.parametrize("name", flows.FLOWS)
def test_second_derivatives_and_the_way_to_the_data(name, loss):
    def started():
        density = Density(build(name))
        density(given())
        return density

    torch.set_default_dtype(torch.float64)  # normflows makes zeros of it
    try:
        assert_trained_alike(started, loss, given, rtol=1e-8)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["nflows_affine", "normflows_affine", "freia_graph"])
def test_layers_start_once(name):
    plain, ours = pair(name)

    def state(density):
        norms = enumerate(of_kind(density, "ActNorm"))
        return {f"{k} {n}": v for k, each in norms for n, v in each.state_dict().items()}

    plain(given())
    wanted, loss = state(plain), ours(given()).sum()
    started = [value.data_ptr() for value in state(ours).values()]
    loss.backward()
    ours(given()).sum().backward()
    assert_same_tensors(state(ours), wanted)
    assert [value.data_ptr() for value in state(ours).values()] == started != []


@pytest.mark.parametrize("name", ["zuko_spline", "nflows_spline", "normflows_spline"])
def test_copies_pickles_and_the_way_back(name):
    plain, ours = pair(name)
    names = [set(vars(module)) for module in plain.modules()]
    for flow in (copy.deepcopy(ours.flow), pickle.loads(pickle.dumps(ours.flow))):
        own = {id(p) for p in flow.parameters()}
        assert all(id(p) in own for chain in chains_of(flow) for p in chain.parameters())
        ours.flow = flow
        assert_like_plain(plain, ours)
    recoup.train_in(ours, "linear")
    assert chains_of(ours) == []
    assert [set(vars(module)) for module in ours.modules()] == names


def test_layers_that_are_replaced_are_in_the_chain():
    plain, ours = pair("zuko_affine")
    for density in (plain, ours):
        density(given())
        layers = density.flow.transform.transforms
        layers[0] = copy.deepcopy(layers[2])
        layers.append(copy.deepcopy(layers[1]))
    assert_like_plain(plain, ours)


def test_batches_of_any_shape_and_no_context():
    nice = partial(library("zuko").flows.NICE, DIM, transforms=4)
    x, context = torch.randn(BATCH, BATCH, DIM), torch.randn(BATCH, BATCH)
    values = [(nice(), (), torch.randn(*shape, DIM)) for shape in ((), (5,), (2, 3))]
    for plain, args, each in (*values, (nice(context=BATCH), (context,), x)):
        ours = recoup.train_in(copy.deepcopy(plain))
        torch.testing.assert_close(ours(*args).log_prob(each), plain(*args).log_prob(each))
    for name, shape in (("zuko_affine", (5, BATCH)), ("zuko_autoregressive", ())):
        plain, ours = pair(name)
        context = given()[1]
        assert_like_plain(plain, ours, (torch.randn(*shape, DIM, dtype=context.dtype), context))
    assert ours.flow(context).event_shape == (DIM,)
    x, context = torch.rand(5, DIM).double(), torch.randn(5, CONTEXT).double()
    wanted = torch.stack([plain.flow(each.expand(5, -1)).log_prob(x) for each in context])
    for every in (context[:, None], context[:, None].expand(5, 5, -1)):
        torch.testing.assert_close(ours.flow(every).log_prob(x), wanted)


def test_without_a_graph_the_library_runs_by_itself():
    plain, ours = pair("zuko_spline")
    with torch.no_grad():
        assert torch.equal(ours(given()), plain(given()))
        found = []
        for flow in (plain.flow(given()[1]), ours.flow(given()[1])):
            torch.manual_seed(2)
            found.append(flow.sample((3,)))
    assert torch.equal(*found)


def test_a_wrong_inverse_is_found(monkeypatch):
    coupling = library("nflows.transforms").AffineCouplingTransform
    right, (_, ours) = coupling.inverse, pair("nflows_affine")
    monkeypatch.setattr(coupling, "inverse", lambda self, x, *given: right(self, x + 1e-2, *given))
    with pytest.raises(DriftError, match="_OfNflows"):
        ours.eval()(given()).sum().backward()


@pytest.mark.drifts
@pytest.mark.filterwarnings("ignore:Most states of this chain must be kept")
def test_two_networks_that_draw_are_recomputed():
    plain, ours = pair("freia_graph")
    for module in (*of_kind(plain, "Dropout"), *of_kind(ours, "Dropout")):
        module.p = 0.5
    with DriftGuard.strict(), pytest.raises(DriftError, match="_OfFrEIA"):
        run_step(ours, given())
    for _ in range(2):
        assert_like_plain(plain, ours)


@pytest.mark.drifts
@pytest.mark.parametrize("name", ["zuko_affine", "nflows_affine", "freia_sequence"])
def test_under_autocast(name):
    make = lambda: Density(build(name, dtype=torch.float32)).eval()  # noqa: E731
    loss = torch.autocast("cpu", dtype=torch.bfloat16)(lambda flow, *inputs: flow(inputs).sum())
    assert_trained_alike(make, loss, lambda: given(torch.float32), rtol=0.2)


def with_gaussians(name):
    flow = build("normflows_affine", dtype=torch.float32).flow
    setattr(flow, name, library("normflows").distributions.DiagGaussian(DIM))
    return flow


@pytest.mark.parametrize("score_fn", [True, False])
def test_reverse_kl_of_normflows(score_fn):
    make = lambda: with_gaussians("p")  # noqa: E731
    assert_trained_alike(make, lambda flow: flow.reverse_kld(16, score_fn=score_fn), rtol=1e-5)


def test_several_scales_of_normflows():
    theirs, base = library("normflows.flows"), library("normflows.distributions")

    def glow():
        torch.manual_seed(0)
        block = partial(theirs.GlowBlock, hidden_channels=8, init_zeros=False)
        levels = [[block(size), block(size), theirs.Squeeze()] for size in (8, 4)]
        bases = [base.ClassCondDiagGaussian(shape, 3) for shape in ((8, 2, 2), (2, 4, 4))]
        return library("normflows").MultiscaleFlow(bases, levels, [theirs.Merge()]).double()

    torch.manual_seed(1)
    x, labels = torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.arange(4) % 3
    flow = assert_trained_alike(glow, lambda flow: flow.forward_kld(x, labels), steps=2)
    assert len(chains_of(flow)) == 2


def test_several_conditions_of_freia():
    framework, modules = library("FrEIA.framework"), library("FrEIA.modules")
    conv = partial(nn.Conv2d, kernel_size=3, padding=1)

    def make():
        torch.manual_seed(0)
        flow, kind = framework.SequenceINN(4, 2, 2), modules.GLOWCouplingBlock
        flow.append(kind, cond=1, cond_shape=(3, 2, 2), subnet_constructor=conv)
        flow.append(modules.HaarDownsampling)
        flow.append(modules.Flatten)
        for _ in range(3):
            flow.append(kind, cond=0, cond_shape=(CONTEXT,), subnet_constructor=nn.Linear)
        return flow.double()

    def inputs():
        torch.manual_seed(1)
        shapes = (4, 2, 2), (CONTEXT,), (3, 2, 2)
        return [torch.randn(5, *s, dtype=torch.float64, requires_grad=True) for s in shapes]

    assert_trained_alike(make, lambda flow, x, *given: of_both(flow(x, c=given)), inputs)


def test_conditions_that_cannot_be_joined_go_to_the_own_call_of_freia():
    class Classes(nn.Embedding):
        def __init__(self, num_in, num_out):
            super().__init__(1000, num_out)

        def forward(self, labels):
            return super().forward(labels.flatten())

    modules, inn = library("FrEIA.modules"), library("FrEIA.framework").SequenceINN(DIM)
    affine, coupling = modules.ConditionalAffineTransform, modules.GLOWCouplingBlock
    inn.append(affine, cond=0, cond_shape=(1,), subnet_constructor=Classes)
    inn.append(coupling, cond=1, cond_shape=(3,), subnet_constructor=nn.Linear)
    x, labels = torch.randn(4, DIM), torch.tensor([[257], [515], [901], [7]])
    given = [labels, torch.randn(4, 3)]
    wanted = inn(x, c=given, jac=False)
    recoup.train_in(inn)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):  # which is no type to join them in
        torch.testing.assert_close(inn(x, c=given, jac=False), wanted)
    inn(x, c=given)[0].sum().backward()
    rows = inn.module_list[0].subnet.weight.grad.abs().sum(1).nonzero()
    assert rows.flatten().tolist() == [7, 257, 515, 901]
    with pytest.raises(RuntimeError):
        inn(x, c=given[::-1])


def test_a_method_on_the_instance_stays_and_it_is_said():
    flow = build("normflows_affine", dtype=torch.float32).flow
    flow.log_prob = lambda x: "own"
    with pytest.warns(UserWarning, match="`log_prob` of .* is its own"):
        recoup.train_in(flow)
    assert flow.log_prob(None) == recoup.train_in(flow, memory="linear").log_prob(None) == "own"


def test_an_evaluation_in_inference_mode_comes_first():
    normflows = library("normflows")
    layers = [normflows.flows.ActNorm(DIM) for _ in range(2)]
    flow = normflows.NormalizingFlow(normflows.distributions.DiagGaussian(DIM), layers)
    recoup.train_in(flow)
    with torch.inference_mode():
        flow.log_prob(torch.randn(BATCH, DIM))
    flow.forward_kld(torch.randn(BATCH, DIM)).backward()
    assert flow.flows[0].t.grad is not None


def test_a_chain_of_several_libraries():
    def make():
        zuko, nflows = build("zuko_affine").flow, build("nflows_spline").flow
        layers = [adapt(zuko.transform), adapt(nflows._transform), recoup.invertible.ActNorm(DIM)]
        return Chain(*layers).double().eval()

    assert_trained_alike(make, lambda chain, *inputs: of_both(chain(*inputs)), given)


def test_own_layers_are_recomputed():
    transforms = library("nflows.transforms")
    mine = type("Mine", (transforms.LULinear,), {})(DIM)
    assert adapt(transforms.LULinear(DIM)).inverts_in_backward
    assert not adapt(mine).inverts_in_backward


def test_what_is_no_sequence_or_not_bijective_is_refused():
    framework, modules = library("FrEIA.framework"), library("FrEIA.modules")
    start = framework.InputNode(4)
    split = framework.Node(start, modules.Split, {"section_sizes": [2, 2], "dim": 0})
    ends = [framework.OutputNode(split.out0), framework.OutputNode(split.out1)]
    graph = framework.GraphINN([start, split, *ends])
    softmax = library("zuko").flows.UnconditionalTransform(torch.distributions.SoftmaxTransform)
    for call, value, words in (
        (recoup.train_in, graph, "`model` has a GraphINN that splits or joins"),
        (adapt, graph.module_list[0], "`transform` is a Split, which splits or joins"),
        (adapt, softmax, r"`transform` is SoftmaxTransform.*not bijective"),
    ):
        with pytest.raises(ValueError, match=words):
            call(value)


def test_methods_of_a_derived_class_run_as_they_are():
    class Mine(library("normflows").NormalizingFlow):
        num_calls = 0

        def forward_kld(self, x):
            self.num_calls += 1
            return -self.log_prob(x).mean() * len(self.flows)

    def own():
        flow = with_gaussians("q0")
        flow.__class__ = Mine
        return flow

    x = torch.randn(BATCH, DIM)
    assert assert_trained_alike(own, lambda flow: flow.forward_kld(x), rtol=1e-5).num_calls == 1


@pytest.mark.drifts
def test_a_spline_that_refuses_a_rounding_is_computed_again():
    transforms, nets = library("nflows.transforms"), library("nflows.nn.nets")
    x = torch.randint(0, 4, (256, DIM)) / 3.0  # zeros and ones are at the bounds

    def make():
        torch.manual_seed(0)
        net = partial(nets.ResidualNet, hidden_features=16)
        kind = partial(transforms.PiecewiseRationalQuadraticCouplingTransform, num_bins=8)
        flow = transforms.CompositeTransform([kind(flows.evens(k), net) for k in range(6)])
        for each in flow.parameters():
            each.data.mul_(3.0)
        return flow

    with pytest.warns(UserWarning, match="failed, on a value that is a rounding away"):
        assert_trained_alike(make, lambda flow: of_both(flow(x)) / len(x), rtol=1e-3)
