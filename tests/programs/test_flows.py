"""Flows of zuko, nflows, normflows and FrEIA in constant memory: the same training, by one line."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import recoup
from recoup.errors import DriftError
from recoup.flows import chains_of
from recoup.invertible import Chain, DriftGuard, adapt, check_invertible
from tests.alive import allocated_bytes
from tests.neighbours.workers import found_by, furthest
from tests.oracle import assert_same_step, assert_same_tensors, run_step
from tests.programs.flows import (
    BATCH,
    CONTEXT,
    COUPLINGS,
    DIM,
    FLOWS,
    RECOMPUTED,
    build,
    given,
    library,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, and that some are recomputed


class Density(nn.Module):
    """The log-probabilities of a flow, as `run_step` and DDP call a module."""

    def __init__(self, built):
        super().__init__()
        self.flow, self._log_prob = built

    def forward(self, inputs):
        return self._log_prob(self.flow, *inputs)


def pair(name, memory="constant", **options):
    """A flow as its library has it, and the same in a memory mode."""
    plain = Density(build(name, **options))
    return plain, recoup.train_in(copy.deepcopy(plain), memory)


def of_kind(flow, kind):
    return [module for module in flow.modules() if type(module).__name__ == kind]


@pytest.mark.parametrize("memory", ["constant", "sqrt", "2 MiB"])
@pytest.mark.parametrize("name", FLOWS)
def test_a_step_is_the_one_of_the_library(name, memory):
    plain, ours = pair(name, memory)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert list(map(type, ours.modules())) == list(map(type, plain.modules()))
    assert_same_step(run_step(ours, given()), run_step(plain, given()), rtol=1e-9)


@pytest.mark.parametrize("name", COUPLINGS)
def test_a_step_in_float32(name):
    plain, ours = pair(name, depth=8, width=32, dtype=torch.float32, std=0.05)
    x = given(torch.float32)
    assert_same_step(run_step(ours, x), run_step(plain, x), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", COUPLINGS)
def test_memory_is_flat_in_depth(name):
    def peak(depth, memory):
        # As the library starts it, and without dropout: draws keep the state of the generator.
        model = Density(build(name, depth, 64, std=0.0)).eval()
        inputs = given(batch=64)
        recoup.train_in(model, memory)

        def step():
            model(inputs).sum().backward()

        step()
        return allocated_bytes(step)[0]

    few = peak(6, "constant")
    assert peak(18, "constant") <= 1.02 * few
    assert few <= 0.4 * peak(6, "linear")


@pytest.mark.parametrize("name", RECOMPUTED)
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
    assert_same_step(run_step(ours, given()), run_step(plain, given()), rtol=1e-9)


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
        counts.append([len(calls)])
        value.backward()
        counts[-1].append(len(calls))
    (forward, same), (ours, both) = counts
    assert forward == same == ours
    assert both == 2 * forward


@pytest.mark.parametrize("name", FLOWS)
def test_second_derivatives(name):
    found = []
    for density in pair(name):
        torch.manual_seed(3)
        inputs = given()
        parameters = {n: p for n, p in density.named_parameters() if p.requires_grad}
        (gradient,) = torch.autograd.grad(density(inputs).sum(), inputs[0], create_graph=True)
        wanted = [*inputs, *parameters.values()]
        second = torch.autograd.grad(gradient.square().sum(), wanted, materialize_grads=True)
        found.append(dict(zip(["x", "context", *parameters], second, strict=True)))
    assert_same_tensors(found[1], found[0], rtol=1e-8)


@pytest.mark.parametrize("name", [name for name in FLOWS if name != "nflows_batch_norm"])
def test_adapted_layers_keep_the_contract(name):
    flow = recoup.train_in(build(name, depth=2, width=4).flow.eval())
    (chain,) = chains_of(flow)
    x, context = given(batch=2)
    takes = chain.takes_context and not name.startswith(("normflows_affine", "normflows_auto"))
    report = check_invertible(chain, x, context if takes else None, tolerance=1e-5)
    assert report, report


@pytest.mark.parametrize("name", FLOWS)
def test_the_way_to_the_data_is_trained_too(name):
    def inverted(built, z, context):
        flow, _ = built
        kind = type(flow).__module__.partition(".")[0]
        if kind == "zuko":
            return flow(context).transform.inv.call_and_ladj(z)
        if kind == "nflows":
            return flow.eval()._transform.inverse(z, context)
        if kind == "FrEIA":
            return flow(z, c=[context], rev=True)
        extra = (context,) if name == "normflows_spline" else ()
        return flow.forward_and_log_det(z, *extra)

    found = []
    for memory in ("linear", "constant"):
        torch.set_default_dtype(torch.float64)  # normflows makes zeros of it
        try:
            built, (z, context) = build(name), given()
            built.log_prob(built.flow, z, context)  # layers start
            recoup.train_in(built.flow, memory)
            x, log_det = inverted(built, z, context)
            (x.sin().sum() + log_det.sum()).backward()
        finally:
            torch.set_default_dtype(torch.float32)
        gradients = {n: p.grad for n, p in built.flow.named_parameters() if "base" not in n}
        found.append({"z": z.grad, "x": x.detach(), **gradients})
    assert_same_tensors(found[1], found[0], rtol=1e-8)


@pytest.mark.parametrize("name", ["nflows_affine", "normflows_affine", "freia_graph"])
def test_layers_start_once(name):
    plain, ours = pair(name)
    plain(given())
    loss = ours(given()).sum()

    def state(density):
        norms = of_kind(density, "ActNorm")
        assert norms
        return {f"{k} {n}": v for k, each in enumerate(norms) for n, v in each.state_dict().items()}

    started = {name: value.data_ptr() for name, value in state(ours).items()}
    assert_same_tensors(state(ours), state(plain))
    loss.backward()
    assert {name: value.data_ptr() for name, value in state(ours).items()} == started
    ours(given()).sum().backward()
    assert_same_tensors(state(ours), state(plain))


@pytest.mark.parametrize("name", ["zuko_spline", "nflows_spline", "normflows_spline"])
def test_copies_pickles_and_the_way_back(name):
    plain, ours = pair(name)
    names = [set(vars(module)) for module in plain.modules()]
    want = run_step(plain, given())
    copied = copy.deepcopy(ours.flow)
    for flow in (copied, pickle.loads(pickle.dumps(ours.flow))):
        own = {id(p) for p in flow.parameters()}
        assert all(id(p) in own for chain in chains_of(flow) for p in chain.parameters())
        ours.flow = flow
        assert_same_step(run_step(ours, given()), want, rtol=1e-9)
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
    assert_same_step(run_step(ours, given()), run_step(plain, given()), rtol=1e-9)


def test_batches_of_any_shape_and_no_context():
    flows = library("zuko").flows
    plain = flows.NICE(DIM, transforms=4)
    ours = recoup.train_in(copy.deepcopy(plain))
    for shape in ((), (5,), (2, 3)):
        x = torch.randn(*shape, DIM)
        torch.testing.assert_close(ours().log_prob(x), plain().log_prob(x))
    for name, shape in (("zuko_affine", (5, BATCH)), ("zuko_autoregressive", ())):
        plain, ours = pair(name)
        context = given()[1]
        inputs = torch.randn(*shape, DIM, dtype=context.dtype), context
        assert_same_step(run_step(ours, inputs), run_step(plain, inputs), rtol=1e-9)
    assert ours.flow(context).event_shape == (DIM,)


def test_without_a_graph_the_library_runs_by_itself():
    plain, ours = pair("zuko_spline")
    with torch.no_grad():
        assert torch.equal(ours(given()), plain(given()))
        samples = []
        for density in (plain, ours):
            torch.manual_seed(2)
            samples.append(density.flow(given()[1]).sample((3,)))
    assert torch.equal(*samples)


def test_a_wrong_inverse_is_found(monkeypatch):
    coupling = library("nflows.transforms").AffineCouplingTransform
    right = coupling.inverse

    def wrong(self, *args):
        x, log_det = right(self, *args)
        return x + 1e-2, log_det

    _, ours = pair("nflows_affine")
    monkeypatch.setattr(coupling, "inverse", wrong)
    with pytest.raises(DriftError, match="_OfNflows"):
        ours.eval()(given()).sum().backward()


@pytest.mark.drifts
@pytest.mark.filterwarnings("ignore:Most states of this chain must be kept")
@pytest.mark.parametrize("is_strict", [False, True])
def test_two_networks_that_draw_are_recomputed(is_strict):
    """The inverse calls them in another order, in which they draw each other's masks."""
    plain, ours = pair("freia_graph")
    for module in (*of_kind(plain, "Dropout"), *of_kind(ours, "Dropout")):
        module.p = 0.5
    if is_strict:
        with DriftGuard.strict(), pytest.raises(DriftError, match="_OfFrEIA"):
            ours(given()).sum().backward()
        return
    for _ in range(2):
        assert_same_step(run_step(ours, given()), run_step(plain, given()), rtol=1e-9)


@pytest.mark.drifts
@pytest.mark.parametrize("name", ["zuko_affine", "nflows_affine", "freia_sequence"])
def test_under_autocast(name):
    found = []
    for density in pair(name, dtype=torch.float32):
        inputs = given(torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.manual_seed(5)
            value = density.eval()(inputs).sum()
        value.backward()
        gradients = {n: p.grad for n, p in density.named_parameters()}
        found.append({"x": inputs[0].grad, "context": inputs[1].grad, **gradients})
    assert_same_tensors(found[1], found[0], rtol=0.2)


def test_networks_are_found_as_they_are():
    """nflows divides by the width that it finds on the network, where it finds one."""
    transforms = library("nflows.transforms")
    seen = []

    class Coupling(transforms.AffineCouplingTransform):
        def _scale_and_shift(self, values):
            seen.append((type(self.transform_net).__name__, self.transform_net.hidden_features))
            return super()._scale_and_shift(values)

    _, ours = pair("nflows_affine")
    of_kind(ours, "AffineCouplingTransform")[1].__class__ = Coupling
    ours(given()).sum().backward()
    assert set(seen) == {("ResidualNet", 8)}


def test_own_layers_are_recomputed():
    transforms = library("nflows.transforms")
    mine = type("Mine", (transforms.LULinear,), {})(DIM)
    assert adapt(transforms.LULinear(DIM)).inverts_in_backward
    assert not adapt(mine).inverts_in_backward


@pytest.mark.parametrize("score_fn", [True, False])
def test_reverse_kl_of_normflows(score_fn):
    normflows = library("normflows")
    found = []
    for memory in ("linear", "constant"):
        built = build("normflows_affine", dtype=torch.float32)
        flow = recoup.train_in(built.flow, memory)
        flow.p = normflows.distributions.DiagGaussian(DIM)
        torch.manual_seed(4)
        loss = flow.reverse_kld(16, score_fn=score_fn)
        loss.backward()
        gradients = {name: p.grad for name, p in flow.named_parameters()}
        found.append({"loss": loss.detach(), **gradients})
    assert_same_tensors(found[1], found[0], rtol=1e-5)


def test_several_scales_of_normflows():
    normflows = library("normflows")

    def glow():
        torch.manual_seed(0)
        block = normflows.flows.GlowBlock
        levels = [
            [block(8, 8, init_zeros=False) for _ in range(2)],
            [*[block(4, 8, init_zeros=False) for _ in range(2)], normflows.flows.Squeeze()],
        ]
        bases = [normflows.distributions.ClassCondDiagGaussian((4, 2, 2), 3) for _ in levels]
        levels[0].append(normflows.flows.Squeeze())
        bases[0] = normflows.distributions.ClassCondDiagGaussian((8, 2, 2), 3)
        bases[1] = normflows.distributions.ClassCondDiagGaussian((2, 4, 4), 3)
        return normflows.MultiscaleFlow(bases, levels, [normflows.flows.Merge()])

    torch.manual_seed(1)
    x, labels = torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.arange(4) % 3
    found = []
    for memory in ("linear", "constant"):
        flow = recoup.train_in(glow().double(), memory)
        flow.forward_kld(x, labels).backward()
        flow.zero_grad()
        flow.forward_kld(x, labels).backward()
        found.append({name: p.grad for name, p in flow.named_parameters()})
    assert len(chains_of(flow)) == 2
    assert_same_tensors(found[1], found[0], rtol=1e-9)


def test_several_conditions_of_freia():
    framework, modules = library("FrEIA.framework"), library("FrEIA.modules")
    flow = framework.SequenceINN(4, 2, 2)

    def conv(num_in, num_out):
        return nn.Conv2d(num_in, num_out, 3, padding=1)

    flow.append(modules.GLOWCouplingBlock, cond=1, cond_shape=(3, 2, 2), subnet_constructor=conv)
    flow.append(modules.HaarDownsampling)
    flow.append(modules.Flatten)
    for _ in range(3):
        options = {"cond": 0, "cond_shape": (CONTEXT,), "subnet_constructor": nn.Linear}
        flow.append(modules.GLOWCouplingBlock, **options)
    flow.double()
    found = []
    for memory in ("linear", "constant"):
        recoup.train_in(flow, memory).zero_grad()
        torch.manual_seed(1)
        shapes = (4, 2, 2), (CONTEXT,), (3, 2, 2)
        inputs = [torch.randn(5, *s, dtype=torch.float64, requires_grad=True) for s in shapes]
        z, log_det = flow(inputs[0], c=inputs[1:])
        (z.sin().sum() + log_det.sum()).backward()
        gradients = {n: p.grad.clone() for n, p in flow.named_parameters() if p.requires_grad}
        found.append({**{str(k): v.grad for k, v in enumerate(inputs)}, **gradients})
    assert_same_tensors(found[1], found[0], rtol=1e-9)


def split_graph():
    framework, modules = library("FrEIA.framework"), library("FrEIA.modules")
    start = framework.InputNode(4)
    split = framework.Node(start, modules.Split, {"section_sizes": [2, 2], "dim": 0})
    ends = [framework.OutputNode(split.out0), framework.OutputNode(split.out1)]
    return framework.GraphINN([start, split, *ends])


def test_what_is_no_sequence_is_refused():
    with pytest.raises(ValueError, match="`model` has a GraphINN that splits or joins"):
        recoup.train_in(split_graph())
    with pytest.raises(ValueError, match="`transform` is a GraphINN that splits or joins"):
        adapt(split_graph())
    with pytest.raises(ValueError, match="`transform` is a Split, which splits or joins"):
        adapt(split_graph().module_list[0])


def test_what_is_not_bijective_is_refused():
    flows = library("zuko").flows
    softmax = flows.UnconditionalTransform(torch.distributions.SoftmaxTransform)
    with pytest.raises(ValueError, match=r"`transform` is SoftmaxTransform.*not bijective"):
        adapt(softmax)


def test_a_chain_of_several_libraries():
    zuko, nflows = build("zuko_affine").flow, build("nflows_spline").flow
    layers = [adapt(zuko.transform), adapt(nflows._transform), recoup.invertible.ActNorm(DIM)]
    found = []
    for memory in ("linear", "constant"):
        chain = copy.deepcopy(Chain(*layers, memory=memory).double().eval())
        x, context = given()
        z, log_det = chain(x, context)
        (z.sin().sum() + log_det.sum()).backward()
        gradients = {name: p.grad for name, p in chain.named_parameters()}
        found.append({"x": x.grad, "context": context.grad, **gradients})
    assert_same_tensors(found[1], found[0], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zuko_spline", "nflows_affine", "freia_sequence"])
def test_under_ddp(case, tmp_path_factory):
    library({"zuko": "zuko", "nflows": "nflows", "freia": "FrEIA"}[case.partition("_")[0]])
    found = found_by("foreign_flows_ddp_worker", tmp_path_factory.mktemp("ddp"), case)
    assert furthest(found, case) < 1e-9
