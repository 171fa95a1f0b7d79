"""To whoever saves, copies, moves, steps or removes it, a reparametrized module is what it was."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import recoup
from recoup.weights import applied, disabled, remove, same_draw
from tests.oracle import loss_of_all, tensors
from tests.weight_zoo import (
    LAYERS,
    MORE,
    OURS,
    Kind,
    Way,
    built,
    by_name,
    given,
    loaded,
    materialised,
    replaced,
    trained,
)


def sequential():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


KINDS = {
    "linear": Kind(lambda: nn.Linear(4, 4), given((3, 4))),
    "lstm": Kind(
        lambda: nn.LSTM(4, 4, 2, bidirectional=True), given((3, 2, 4)), r"weight_hh_l\d+(_reverse)?"
    ),
    "cell": Kind(lambda: nn.GRUCell(4, 4), given((3, 4)), "weight_.*"),
    "embedding": LAYERS["embedding"],
    "sequential": Kind(sequential, given((3, 4)), r"\d\.weight"),
    "encoder layer": LAYERS["encoder layer"],
}
WAYS = {
    "dropout": OURS["dropout"],
    "both": Way(dropout={"p": 0.5}, noise={"std": 0.1}),
    "stacked": OURS["stacked"],
    "learned": MORE["learned"],
    "function": MORE["function"],
}


@pytest.fixture(params=KINDS)
def layer(request):
    """How the plain layer is built, the pattern of its weights, and its input."""
    kind = KINDS[request.param]
    return lambda: built(kind, dropout=False)[0], kind.pattern, kind.inputs()[0]


def first_of(output):
    return tensors(output)[0]


def assert_noisy(module, way, build, pattern, x):
    """What forward uses is the raw parameters of this very module, reparametrized."""
    plain = build().to(next(module.parameters()).dtype)
    with torch.no_grad():
        torch.manual_seed(7)
        output = first_of(module.train()(x))
        torch.manual_seed(7)
        made = materialised(way, plain, pattern, by_name(module))
        made = {name: made[name] for name in by_name(plain)}
        want = first_of(functional_call(plain, made, x, tie_weights=False))
    torch.testing.assert_close(output, want, rtol=1e-5, atol=1e-5)
    plain.load_state_dict({n: v for n, v in module.state_dict().items() if n in plain.state_dict()})
    assert not torch.equal(output, first_of(plain(x)))


# -- what happens to a module ----------------------------------------------------------------------


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def emptied(module, x):
    state = copy.deepcopy(module.state_dict())
    module.to("meta").to_empty(device="cpu").load_state_dict(state)
    return module


HAPPENS = {
    "nothing": lambda module, x: module,
    "forward": lambda module, x: module(x) is not None and module,
    "a step": trained,
    "evaluation": lambda module, x: module.eval()(x) is not None and module.train(),
    "deepcopy": lambda module, x: copy.deepcopy(module),
    "copy": lambda module, x: copy.copy(module),
    "pickle": lambda module, x: pickle.loads(pickle.dumps(module)),
    "old pickle": lambda module, x: pickle.loads(pickle.dumps(module, protocol=2)),
    "torch.save": lambda module, x: saved(trained(module, x)),
    "loaded": lambda module, x: loaded(module),
    "assigned": lambda module, x: loaded(module, assign=True),
    "float64 and back": lambda module, x: module.double().float(),
    "float16 and back": lambda module, x: module.half().float(),
    "meta": emptied,
    "shared memory": lambda module, x: module.share_memory(),
    "set": lambda module, x: replaced(module),
}


@pytest.mark.sampled(110)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("happens", HAPPENS)
def test_whatever_happens_to_it_a_module_goes_on_with_its_noise(layer, happens, way):
    build, pattern, x = layer
    module = HAPPENS[happens](WAYS[way](build(), pattern), x)
    assert_noisy(module, WAYS[way], build, pattern, x)
    module.zero_grad()
    loss_of_all(module(x)).backward()
    assert all(p.grad is not None for p in module.parameters())
    assert_noisy(trained(module, x), WAYS[way], build, pattern, x)


@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_the_same_objects_through_training_and_removal(layer, way):
    build, pattern, x = layer
    module = build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)  # built before

    parameters, parts = dict(module.named_parameters()), [*module.modules()]
    kinds, keys = [type(part) for part in parts], [list(vars(part)) for part in parts]
    pointers = [p.data_ptr() for p in parameters.values()]
    signature = inspect.signature(module.forward)
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
    assert ([type(part) for part in parts], [list(vars(part)) for part in parts]) == (kinds, keys)
    assert [*map(id, module.parameters())] == [*map(id, parameters.values())]
    assert [p.data_ptr() for p in parameters.values()] == pointers
    assert way == "stacked" or all(torch.equal(p, value) for p, (value, _) in before.items())
    assert applied(module) == []
    assert torch.equal(first_of(module(x)), first_of(module(x)))
    assert_noisy(WAYS[way](module, pattern), WAYS[way], build, pattern, x)


@pytest.mark.parametrize("copied", [copy.deepcopy, saved])
@pytest.mark.parametrize("way", WAYS)
def test_a_copy_has_a_life_of_its_own(layer, way, copied):
    build, pattern, x = layer
    module = WAYS[way](build(), pattern)
    loss_of_all(module(x)).backward()
    other = copied(module)
    assert (type(other), repr(other)) == (type(module), repr(module))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for (name, a), b in zip(other.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.data_ptr() != b.data_ptr()
    outputs = []
    for each in (module, other):
        with same_draw(3):
            outputs.append(first_of(each(x)))
    assert torch.equal(*outputs)  # the same noise where the same is asked for, and else its own
    assert not torch.equal(first_of(module(x)), first_of(other(x)))
    num_steps = [entry.step for entry in applied(module)]
    trained(other, x)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert [entry.step for entry in applied(module)] == num_steps
    with disabled(module):
        assert not torch.equal(first_of(other(x)), first_of(other(x)))
    remove(other)
    assert_noisy(module, WAYS[way], build, pattern, x)


def test_what_is_shown():
    linear = recoup.weight_dropout(nn.Linear(4, 3), p=0.25)
    recoup.weight_noise(linear, std=torch.tensor(0.5), mode="always")
    parts = ["weight_dropout(p=0.25)", 'weight_noise(std=0.5, mode="always")']
    shown = ", ".join(f"{part} of weight" for part in parts)
    assert repr(linear) == f"Linear(in_features=4, out_features=3, bias=True, {shown})"
    assert repr(applied(linear)) == f"[{', '.join(f'weight: {part}' for part in parts)}]"
    rows = recoup.weight_dropout(recoup.weight_norm(nn.Linear(4, 3), dim=-1), axes=(-1,))
    shown = "[weight: weight_norm(dim=1), weight: weight_dropout(p=0.5, axes=(1,))]"
    assert repr(applied(rows)) == shown


# -- state_dict and functional calls ---------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_a_checkpoint_without_norms_sets_them_and_one_without_deviations_leaves_them(assign, dim):
    plain = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(3, 4, 1))
    model = Way({"dim": dim}, noise={"std": 0.25, "learned": "row"})(copy.deepcopy(plain))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)
    state = plain.state_dict()
    keys = list(state)
    assert model.load_state_dict(state, strict=True, assign=assign) == ([], [])
    assert list(state) == keys
    for place in range(2):
        norms = torch.norm_except_dim(plain[place].weight, 2, -1 if dim is None else dim)
        assert torch.equal(model[place].weight_g, norms)
        assert (model[place].weight_std == 0.75).all()
    x = torch.randn(2, 3, 4)
    with disabled(model):
        torch.testing.assert_close(model(x), plain(x))
    loss_of_all(model(x)).backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(RuntimeError, match=r"weight_g.*weight_std"):
        plain.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        model[0].load_state_dict({"bias": torch.zeros(4)}, strict=True)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "function"])
def test_a_functional_call_reparametrizes_what_it_is_given(layer, way):
    build, pattern, x = layer
    way, plain = WAYS[way], build()
    module = way(copy.deepcopy(plain), pattern)
    before = copy.deepcopy(dict(module.named_parameters()))
    some = {entry.name for entry in applied(module)}
    for names in (by_name(module).keys(), some):
        values = {name: torch.rand_like(p) for name, p in by_name(module).items() if name in names}
        leaves = [{n: v.clone().requires_grad_() for n, v in values.items()} for _ in range(2)]
        torch.manual_seed(3)
        output = first_of(functional_call(module, leaves[0], x))
        torch.manual_seed(3)
        made = materialised(way, plain, pattern, {**by_name(module), **leaves[1]})
        made = {name: made[name] for name in by_name(plain)}
        want = first_of(functional_call(plain, made, x))
        torch.testing.assert_close(output, want, rtol=1e-4, atol=1e-5)
        for y in (output, want):
            y.sin().sum().backward()
        for mine, theirs in zip(*(each.values() for each in leaves), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    for name, value in module.named_parameters():
        assert torch.equal(value, before[name])


# -- assigning, freezing, removing -----------------------------------------------------------------


def test_assigning_freezing_and_making_a_layer_like_another():
    lstm, x = WAYS["both"](nn.LSTM(4, 4), "weight_hh_l0"), torch.randn(3, 2, 4)
    for value in (torch.zeros(16, 4), "text"):
        with pytest.raises(TypeError, match=r"cannot assign .* as parameter 'weight_hh_l0'"):
            lstm.weight_hh_l0 = value
    for is_trained in (False, True):
        lstm.get_parameter("weight_hh_l0").requires_grad_(is_trained)
        loss_of_all(lstm(x)).backward()
        assert (lstm.get_parameter("weight_hh_l0").grad is not None) == is_trained
    linear = recoup.weight_dropout(nn.Linear(4, 4), ".*", p=0.5)
    linear.bias = None
    assert linear(x).shape == x.shape
    linear.register_parameter("bias", nn.Parameter(torch.ones(4)))
    assert not torch.equal(linear(x), linear(x))
    assert not hasattr(linear, "nothing")
    other = type(lstm)(5, 6)
    assert applied(other) == []
    assert other(torch.randn(2, 1, 5))[0].shape == (2, 1, 6)
    assert pickle.loads(pickle.dumps(other)).state_dict().keys() == other.state_dict().keys()


def test_removing_some_and_from_a_part():
    model = WAYS["both"](nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ".*")
    remove(model, r"0\..*|1\.bias")
    assert type(model[0]) is nn.Linear
    assert [entry.name for entry in applied(model)] == ["1.weight"] * 2
    x = torch.randn(3, 4)
    with recoup.weights.step(model):
        assert torch.equal(model(x), model(x))
    assert not torch.equal(model(x), model(x))
    remove(model[1])
    assert applied(model) == []
    assert type(model[1]) is nn.Linear
    assert torch.equal(model(x), model(x))
    remove(WAYS["both"](model, ".*"))
    assert type(model) is nn.Sequential


class Awkward(nn.Linear):
    """Properties, a signature of its own, and `__getattr__` that answers for more."""

    def __init__(self):
        super().__init__(4, 4)

    def __getattr__(self, name):
        return "world" if name == "hello" else super().__getattr__(name)

    @property
    def doubled(self):
        return self.weight * 2

    def forward(self, x, *, twice: bool = True):
        return F.linear(x, self.doubled if twice else self.weight, self.bias)


def test_a_class_of_a_user_keeps_what_it_is():
    module, x, way = Awkward(), torch.randn(3, 4), WAYS["dropout"]
    way(module, "weight")
    kind = type(module)
    assert isinstance(module, Awkward)
    assert (kind.__name__, kind.__qualname__) == ("Awkward", "Awkward")
    assert inspect.signature(kind) == inspect.signature(Awkward)
    assert inspect.signature(module.forward) == inspect.signature(Awkward().forward)
    for each in (copy.deepcopy(module), module):
        assert_noisy(each, way, Awkward, "weight", x)
    assert module.hello == "world"
    assert module.doubled.requires_grad
    with recoup.weights.step(module):
        assert torch.equal(module.doubled, 2 * module.weight)
    assert type(remove(module)) is Awkward


def test_a_replica_has_tensors_for_parameters():
    """As DataParallel makes them."""
    module = recoup.weight_dropout(nn.Linear(4, 4)).eval()
    replica = module._replicate_for_data_parallel()
    replica.weight, replica.bias = module.weight.detach() + 1, module.bias
    assert torch.equal(replica(torch.zeros(1, 4)), module(torch.zeros(1, 4)))
    assert torch.equal(replica.weight, module.weight + 1)
