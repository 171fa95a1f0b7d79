"""Layers whose second run would be another one: an error says so, and what to do."""

from __future__ import annotations

import pytest
import torch

import recoup
from recoup.invertible import Chain, adapt
from tests.oracle import assert_same_tensors
from tests.programs.flows import DIM, given, library

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries, and that some are recomputed
MODES = ["constant", "sqrt"]

# -- linear layers of nflows, which keep their matrix in evaluation mode ---------------------------


def cached(kind="LULinear"):
    transforms = library("nflows.transforms")
    torch.manual_seed(0)
    layers = [getattr(transforms, kind)(DIM, using_cache=True).double() for _ in range(2)]
    base = library("nflows.distributions").StandardNormal([DIM])
    return library("nflows.flows").Flow(transforms.CompositeTransform(layers), base)


def gradients(flow):
    flow.zero_grad()
    flow.log_prob(given()[0]).sum().backward()
    return {name: p.grad for name, p in flow.named_parameters()}


@pytest.mark.parametrize("memory", MODES)
@pytest.mark.parametrize("kind", ["LULinear", "NaiveLinear"])
def test_a_matrix_in_a_cache_is_refused_where_a_graph_is_built(kind, memory):
    expected = gradients(cached(kind))
    flow = recoup.train_in(cached(kind), memory)
    assert_same_tensors(gradients(flow), expected, rtol=1e-10)  # in training it is off
    flow.eval()
    for _ in range(2):  # the second call finds what the first may have kept
        with pytest.raises(ValueError, match=rf"A {kind} keeps its matrix.*use_cache\(False\)"):
            flow.log_prob(given()[0])
    for layer in flow._transform._transforms:
        layer.use_cache(False)
    assert_same_tensors(gradients(flow), expected, rtol=1e-10)


def test_a_cache_serves_where_no_graph_is_built():
    plain, flow = cached().eval(), recoup.train_in(cached()).eval()
    chain = Chain(*map(adapt, cached()._transform._transforms), memory="constant").eval()
    x = given()[0].detach()
    with torch.no_grad():
        assert torch.equal(flow.log_prob(x), plain.log_prob(x))
        assert torch.equal(chain(x)[0], plain._transform(x)[0])


# -- residual flows of normflows, which draw their number of terms ---------------------------------


def residual(**options):
    normflows = library("normflows")
    torch.manual_seed(0)
    network = normflows.nets.LipschitzMLP([DIM, 8, DIM], init_zeros=False, lipschitz_const=0.9)
    return normflows.flows.Residual(network, **options)


def residual_flow(**options):
    normflows = library("normflows")
    layers = [residual(**options) for _ in range(3)]
    return normflows.NormalizingFlow(normflows.distributions.DiagGaussian(DIM), layers).double()


@pytest.mark.parametrize("reduce_memory", [True, False])
def test_a_number_of_terms_from_numpy_is_refused(reduce_memory):
    flow = residual_flow(reduce_memory=reduce_memory)
    with pytest.raises(ValueError, match=r"`model` has a Residual that draws.*`n_power_series`"):
        recoup.train_in(flow)
    assert not {"forward", "log_prob"} & set(vars(flow))
    with pytest.raises(ValueError, match=r"`transform` is a Residual that draws.*InvertibleResid"):
        adapt(residual(reduce_memory=reduce_memory))
    assert not adapt(residual(brute_force=True)).inverts_in_backward


@pytest.mark.parametrize("reduce_memory", [True, False])
def test_with_a_fixed_number_it_trains(reduce_memory):
    found = []
    for mode in ("linear", *MODES):
        flow = recoup.train_in(residual_flow(reduce_memory=reduce_memory, n_power_series=4), mode)
        torch.manual_seed(3)
        flow.forward_kld(given()[0]).backward()
        found.append({name: p.grad for name, p in flow.named_parameters() if p.grad is not None})
        assert_same_tensors(found[-1], found[0], rtol=1e-12)
