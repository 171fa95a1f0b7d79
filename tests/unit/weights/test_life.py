"""To whoever saves, copies, moves, steps or removes it, a reparametrized module is what it was."""

from __future__ import annotations

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import vector_to_parameters

import recoup
from recoup.weights import applied, remove, to_plain_names
from tests import weight_zoo as zoo
from tests.oracle import loss_of_all, tensors


@pytest.mark.parametrize("change", [recoup.weight_dropout, recoup.weight_noise, recoup.weight_norm])
def test_backward_has_the_weight_of_forward_where_its_parameter_was_given_other_memory(change):
    layer, x = change(nn.Linear(3, 3)), torch.ones(2, 3, requires_grad=True)
    loss = layer(x).sin().sum()
    want = torch.autograd.grad(loss, x, retain_graph=True)
    others = [torch.randn_like(p).flatten() for p in layer.parameters()]
    vector_to_parameters(torch.cat(others), layer.parameters())
    assert torch.equal(*torch.autograd.grad(loss, x), *want)


class Awkward(nn.Linear):
    def __getattr__(self, name):
        return "world" if name == "hello" else super().__getattr__(name)

    @property
    def doubled(self):
        return self.weight * 2

    def forward(self, x, *, twice: bool = True):
        return F.linear(x, self.doubled if twice else self.weight, self.bias)


def in_a_row():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


KINDS = {
    "lstm": zoo.Kind(lambda: nn.LSTM(4, 4, 2), zoo.given((3, 2, 4)), r"weight_hh_l\d"),
    "embedding": zoo.LAYERS["embedding"],
    "sequential": zoo.Kind(in_a_row, zoo.given((3, 4)), r"\d\.weight"),
    "class of a user": zoo.Kind(lambda: Awkward(4, 4), zoo.given((3, 4)), "weight"),
}
WAYS = {name: zoo.MORE[name] for name in ("dropout", "stacked", "learned", "function")}
BOTH = zoo.Way(dropout={"p": 0.5}, noise={"std": 0.1})


@pytest.fixture(params=KINDS)
def layer(request):
    kind = KINDS[request.param]
    return lambda: zoo.built(kind, dropout=False)[0], kind.pattern, kind.inputs()[0]


def first_of(output):
    return tensors(output)[0]


def assert_noisy(module, way, build, pattern, x):
    plain = build().to(next(module.parameters()).dtype)
    with torch.no_grad():
        torch.manual_seed(7)
        output = first_of(module.train()(x))
        torch.manual_seed(7)
        made = zoo.materialised(way, plain, pattern, zoo.by_name(module))
        made = {name: made[name] for name in zoo.by_name(plain)}
        want = first_of(functional_call(plain, made, x, tie_weights=False))
    torch.testing.assert_close(output, want, rtol=1e-5, atol=1e-5)
    plain.load_state_dict({n: v for n, v in module.state_dict().items() if n in plain.state_dict()})
    assert not torch.equal(output, first_of(plain(x)))


HAPPENS = {
    "a step": zoo.trained,
    "evaluation": lambda module, x: module.eval()(x) is not None and module.train(),
    "deepcopy": lambda module, x: copy.deepcopy(module),
    "copy": lambda module, x: copy.copy(module),
    "pickle": lambda module, x: pickle.loads(pickle.dumps(module)),
    "loaded": lambda module, x: zoo.loaded(module),
    "assigned": lambda module, x: zoo.loaded(module, assign=True),
    "float64 and float16": lambda module, x: module.double().half().float(),
    "meta": lambda module, x: zoo.loaded(module.to("meta").to_empty(device="cpu")),
    "set": lambda module, x: zoo.replaced(module),
}


@pytest.mark.sampled(44)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("happens", HAPPENS)
def test_whatever_happens_to_it_a_module_goes_on_with_its_noise(layer, happens, way):
    build, pattern, x = layer
    module = HAPPENS[happens](WAYS[way](build(), pattern), x)
    assert_noisy(module, WAYS[way], build, pattern, x)
    module.zero_grad()
    loss_of_all(module(x)).backward()
    assert all(p.grad is not None for p in module.parameters())
    assert_noisy(zoo.trained(module, x), WAYS[way], build, pattern, x)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_the_same_objects_through_training_and_removal(layer, way):
    build, pattern, x = layer
    module = build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)  # zoo.built before
    parameters, kinds = dict(module.named_parameters()), [*map(type, module.modules())]

    def snapshot():
        parts = [(type(part), list(vars(part))) for part in module.modules()]
        return parts, [(id(p), p.data_ptr()) for p in module.parameters()]

    plain, signature = snapshot(), inspect.signature(module.forward)
    assert WAYS[way](module, pattern) is module
    assert all(map(isinstance, module.modules(), kinds))
    assert inspect.signature(module.forward) == signature
    loss_of_all(module(x)).backward()
    want = {p: p.detach() - 0.1 * p.grad for p in parameters.values()}
    optimizer.step()
    assert all(torch.allclose(p, want[p]) for p in parameters.values())
    before = {p: (p.detach().clone(), p._version) for p in parameters.values()}
    module(x)
    assert all(torch.equal(p, v) and p._version == n for p, (v, n) in before.items())
    assert [name for name, _ in module.named_parameters() if name in parameters] == [*parameters]
    assert remove(module) is module
    assert snapshot() == plain
    assert way == "stacked" or all(torch.equal(p, value) for p, (value, _) in before.items())
    assert torch.equal(first_of(module(x)), first_of(module(x)))


def test_what_is_shown():
    linear = recoup.weight_dropout(nn.Linear(4, 3), p=0.25, axes=(-1,), mode="always")
    shown = 'weight_dropout(p=0.25, axes=(1,), mode="always") of weight'
    assert repr(linear) == f"Linear(in_features=4, out_features=3, bias=True, {shown})"


def test_removing_some_and_from_a_part():
    model, x = BOTH(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ".*"), torch.randn(3, 4)
    remove(model, r"0\..*|1\.bias")
    assert type(model[0]) is nn.Linear
    assert [entry.name for entry in applied(model)] == ["1.weight"] * 2
    assert not torch.equal(model(x), model(x))
    remove(model[1])
    assert applied(model) == []
    assert type(model[1]) is nn.Linear
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("way", ["dropout", "stacked", "learned"])
def test_a_functional_call_reparametrizes_what_it_is_given(layer, way):
    build, pattern, x = layer

    def lent(run, parameters, x):
        leaves = {name: torch.rand_like(p).requires_grad_() for name, p in parameters.items()}
        place = "ours." if hasattr(run, "ours") else ""
        output = functional_call(run, {place + name: leaf for name, leaf in leaves.items()}, x)
        loss_of_all(output).backward()
        gradients = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
        return gradients | {"output": first_of(output)} | parameters  # which are as they were

    zoo.compare(WAYS[way], build(), (x,), pattern, act=lent, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm])
def test_the_file_of_a_weight_norm_of_torch(norm):
    x = torch.randn(2, 3, 3)
    theirs = zoo.loaded(norm(nn.Conv1d(3, 4, 2), "weight"))
    names = to_plain_names(theirs.state_dict())
    ours = recoup.weight_norm(nn.Conv1d(3, 4, 2))
    ours.load_state_dict(names, strict=True)
    torch.testing.assert_close(ours(x), theirs(x))
    assert to_plain_names(names).keys() == names.keys()


NAMES = {  # as fastai and salesforce have them, and gluon
    "rnns.0.weight_hh_l0_raw": "rnns.0.weight_hh_l0",
    "rnns.0.module.weight_ih_l0": "rnns.0.weight_ih_l0",
    "rnns.1.module.weight_hh_l0_raw": "rnns.1.weight_hh_l0",
    "0.l1_i2h_weight": "0.weight_ih_l1",
    "0.r0_h2h_bias": "0.bias_hh_l0_reverse",
    "_unfused.1.r_cell.h2r_weight": "weight_hr_l1_reverse",
    "i2h_weight": "weight_ih",
    "module.decoder.bias": "module.decoder.bias",
}


def test_the_names_of_others():
    file = {name: torch.full((2,), place) for place, name in enumerate(NAMES)}
    got = to_plain_names(file)
    assert list(got) == list(NAMES.values())
    assert all(got[new] is file[old] for old, new in NAMES.items())
    raw = torch.ones(2)  # beside it is what the wrapper computes with, which is left out
    pair = {"module.weight_hh_l0": torch.zeros(2), "weight_hh_l0_raw": raw}
    for file in (pair, dict(reversed(pair.items()))):
        assert to_plain_names(file)["weight_hh_l0"] is raw
    assert list(to_plain_names({"0.gamma": np.ones(2, "float32")})) == ["0.weight"]
    with pytest.raises(ValueError, match="different values"):
        to_plain_names({"weight": torch.ones(1), "parametrizations.weight.original": torch.ones(2)})
