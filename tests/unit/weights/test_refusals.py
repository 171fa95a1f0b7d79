"""What is chosen and what is refused: an error names the argument, and changes nothing."""

from __future__ import annotations

import re
import types
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization
from torch.testing._internal.two_tensor import TwoTensor

import recoup
from recoup import weights
from recoup.errors import RecoupError
from recoup.weights import applied, apply, freeze_dropped, remove, step, update
from tests.oracle import hooks_in_force, tensors
from tests.weight_zoo import MORE, Scaled, multiplied, used

NAN, INF = float("nan"), float("inf")
KINDS = [recoup.weight_dropout, recoup.weight_noise, recoup.weight_norm]


def tree():
    return nn.Sequential(
        nn.Embedding(5, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), nn.LSTM(4, 3)
    )


def names(module):
    return [each.name for each in applied(module)]


CHOSEN = [
    (r"1\..*weight", ["1.0.weight", "1.1.weight"]),
    (re.compile("2.WEIGHT_hh_l0", re.IGNORECASE), ["2.weight_hh_l0"]),
    (nn.RNNBase, ["2.weight_ih_l0", "2.weight_hh_l0"]),
    ((nn.Linear, "2.weight_hh_l0"), ["1.0.weight", "2.weight_hh_l0"]),
    (["2.weight_hh_l0", nn.Linear, "1.0.*"], ["1.0.weight", "1.0.bias", "2.weight_hh_l0"]),
    (lambda name, p, module: isinstance(module, nn.LayerNorm), ["1.1.weight", "1.1.bias"]),
]


@pytest.mark.parametrize(("where", "expected"), CHOSEN)
def test_what_is_chosen(where, expected):
    found = recoup.weight_noise(tree(), where)
    assert names(found) == expected
    assert names(remove(found, where)) == []


def test_what_a_pattern_and_a_type_leave_out():
    module = recoup.weight_norm(tree(), nn.Linear)
    module[0].weight.requires_grad_(False)
    module[2].weight_count = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
    recoup.weight_noise(module, std=0.1)
    weights = ["1.0.weight", "1.1.weight", "2.weight_ih_l0", "2.weight_hh_l0"]
    assert names(module) == ["1.0.weight", *weights]
    recoup.weight_dropout(module, ["0.weight", "1.0.weight_g"])  # named in full
    assert {"0.weight", "1.0.weight_g"} < set(names(module))


def layer():
    return nn.Linear(2, 2)


def noisy():
    return recoup.weight_noise(recoup.weight_dropout(layer()), std=0.5)


def learned():
    return recoup.weight_noise(layer(), learned="row")


def replaced():
    module = layer()
    module.forward = types.MethodType(lambda self, x: x, module)
    return module


def taken():
    """A layer that has the names that ours would add."""
    module = layer()
    module.weight_std, module.weight_scaled = nn.Parameter(torch.ones(3)), nn.Identity()
    return module


def parametrized(module):
    with weights.disabled(module):
        register_parametrization(module, "weight", nn.Identity())


def pruned(module):
    return prune.l1_unstructured(module, "weight", 0.25)


def twice():
    module = nn.Sequential(layer(), layer())
    module[1].weight = module[0].weight
    return recoup.weight_norm(module, ".*weight")


def step_of(module):
    module(torch.ones(1, 2))


def of(number, **how):
    return lambda m: KINDS[number](m, **how)


REQUIRES = torch.tensor(0.5, requires_grad=True)
# Values of a wrong type are in tests/api/test_wrong_arguments.py.
RATES = [-0.1, NAN, INF, True, torch.tensor([0.5, 0.5]), torch.tensor(-1.0), torch.tensor(NAN),
         torch.tensor(True), lambda _: -1.0, lambda _: torch.tensor([0.1, 0.2])]  # fmt: skip
REFUSED = [
    *((layer, of(0, p=p), "`p` is .* from 0 to 1") for p in (1.1, 1 + 1e-9, *RATES)),
    *((layer, of(1, std=s), "`std` is .* 0 or more") for s in RATES),
    *((layer, of(k, **{n: r}), f"`{n}` requires a .*detach") for k, n in ((0, "p"), (1, "std"))
      for r in (REQUIRES, REQUIRES.square(), lambda _: REQUIRES)),
    *((layer, of(k, mode="train"), '`mode` is .*"training".*"always"') for k in (0, 1)),
    (layer, of(0, axes=(2,)), "`axes` is"),
    (tree, of(0, axes=(1,)), r"`axes` .*`1\.1\.weight` has shape \(4,\)"),
    *((layer, of(2, dim=dim), "`dim` is .*or None") for dim in (2, -3, 1.0, True)),
    (lambda: nn.Embedding(5, 3, padding_idx=0), of(2), "`weight` has rows of zeros .*direction"),
    *((lambda kind=kind: kind(5, 3, max_norm=0.5), of(k), "`max_norm`.* writes to")
      for k in range(3) for kind in (nn.Embedding, nn.EmbeddingBag)),
    *((layer, of(k, pattern=p), "`pattern`") for k in range(3) for p in
      ("(", ["weight", 3], "eight", nn.Conv2d, lambda *_: False, [nn.Linear, nn.Conv2d])),
    (lambda: nn.Sequential(*[layer() for _ in range(9)]), of(0, pattern="weight"),
     r"'weight' matches no parameter of Sequential.*whole.*0\.weight, .*3\.bias, \.\.\."),
    *((layer, lambda _, s=s: weights.same_draw(s), "`seed` is .*least 0") for s in (-1, 0.5, True)),
    *((noisy, lambda m, s=s: weights.set_step(m, s), "`step` is .*least 0") for s in (-1, 0.5)),
    (layer, lambda m: apply(m, Scaled), "`fn` is"),
    *((noisy, lambda m, k=k: KINDS[k](m), "`weight` has .*already.*remove") for k in (0, 1)),
    (lambda: recoup.weight_norm(layer()), of(2), "`weight_g` exists already"),
    (taken, of(1, learned="row"), "`weight_std` exists already"),
    (taken, lambda m: apply(m, Scaled()), "`weight_scaled` exists already"),
    *((lambda: nn.Sequential(nn.LazyLinear(2), layer()), of(k, pattern=r"0\.weight"),
       "`0.weight` has no shape.*batch") for k in range(3)),
    *((lambda: layer().to(torch.float8_e4m3fn), of(k), "`weight` is torch.float8") for k in (0, 1)),
    *((lambda: layer().requires_grad_(False), of(k), "`weight` requires no") for k in range(3)),
    *((build, of(k), "`forward`.*before") for k in range(3)
      for build in (replaced, lambda: nn.Sequential(replaced()))),
    *((layer, of(1, **how), text) for how, text in (
        ({"learned": "column"}, "`learned` is 'column'"),
        ({"learned": "row", "std": lambda step: 0.1}, "the number `std`"),
        ({"learned": "row", "std": nn.Parameter(torch.ones(()))}, "is a Parameter itself"),
        ({"std": nn.Parameter(torch.ones(3))}, r"shape \(3,\), but .*broadcast to that of"),
        ({"std": nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))}, "floating-point n"))),
    (layer, lambda m: remove(m), "`pattern` .*applied"),
    *((noisy, lambda m, p=p: remove(m, p), "`pattern`") for p in ("bias", "weigh", "(")),
    (noisy, update, "Neither `p` nor `std` is given"),
    (noisy, lambda m: update(m, p=0.1, std=-1.0), "`std` is -1.0"),
    (layer, lambda m: update(m, p=0.1), "`where` .*anything is applied"),
    (learned, lambda m: update(m, p=0.1), "`p` is given, and no parameter"),
    *((learned, lambda m, s=s: update(m, std=s), text) for s, text in (
        (lambda step: 0.1, "is learned, as `weight_std`"), (-1, "`std` is -1"))),
    *((noisy, lambda m, how=how: weights.kl_divergence(m, **how), text) for how, text in (
        ({"prior_std": 0.0}, "`prior_std` is 0.0, but must be a number above 0"),
        ({"prior_std": None, "prior_mean": 0.5}, "`prior_mean` is given, but `prior_std` is None"),
        ({"prior_std": 1.0, "where": "bias"}, "matches no parameter"))),
    (lambda: of(0)(layer()), lambda m: weights.kl_divergence(m, prior_std=1.0), "no divergence"),
    *((build, lambda m: freeze_dropped(torch.optim.SGD(m.parameters()), m), "nothing to leave")
      for build in (layer, lambda: recoup.weight_noise(layer()),
                    lambda: recoup.weight_norm(recoup.weight_dropout(layer())))),
    (lambda: nn.Sequential(nn.DataParallel(layer())), weights.twin, r"`module\.0` is a Data"),
    (noisy, parametrized, "`weight` of Linear is to be deleted.*remove"),
    (layer, lambda _: weights.Draw(torch.arange(3), 3), "`weight` is torch.int64, but"),
    *((lambda fn=fn: apply(layer(), fn), step_of, text) for fn, text in (
        (lambda weight, draw: None, "returned NoneType"),
        (lambda weight, draw: weight.detach().mul_(2), "in place"))),
    (lambda: noisy().eval(), pruned, "`weight` of Linear is to be replaced.*remove before"),
    *((lambda made=made: made(layer()), of(k, **how), "computes a weight from") for k in range(2)
      for made, key in ((pruned, "weight_orig"), (torch.nn.utils.weight_norm, "weight_v"))
      for how in ({}, {"pattern": key})),
    (lambda: recoup.weight_norm(layer()),
     lambda m: setattr(m, "weight", nn.Parameter(torch.ones(2, 2))),
     "`weight` of Linear is to be replaced.*its norm"),
    (twice, remove, r"`0\.weight` and `1\.weight` are one parameter"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("place", range(len(REFUSED)))
def test_a_refusal_names_what_is_wrong_and_changes_nothing(place):
    build, call, words = REFUSED[place]
    module = build()

    def snapshot():
        parts = [*module.modules()]
        ids = [{name: id(p) for name, p in part._parameters.items()} for part in parts]
        keys = [sorted(vars(part)) for part in parts]
        return [*map(type, parts)], keys, ids, repr(applied(module))

    before, stream = snapshot(), torch.get_rng_state()
    values = {n: p.detach().clone() for n, p in module.named_parameters() if not is_lazy(p)}
    with pytest.raises(ValueError, match=f"(?s){words}"):
        call(module)
    assert snapshot() == before
    if call is not step_of:  # a function of a user's has drawn by then
        assert torch.equal(stream, torch.get_rng_state())
        for name, value in module.named_parameters():
            assert name not in values or torch.equal(value.double(), values[name].double())


def test_weights_of_tensor_parallelism_are_refused_where_they_are_applied():
    part = nn.Parameter(TwoTensor(torch.randn(6, 6), torch.randn(6, 6)))  # wraps, as a DTensor does
    plain = nn.Linear(6, 6)
    plain.weight = part
    for apply_to in (*KINDS, lambda m: apply(m, multiplied)):
        with pytest.raises(ValueError, match=r"a TwoTensor.*tensor parallelism"):
            apply_to(plain)


WRITES = {
    "data": lambda weight: weight.data,
    "set data": lambda weight: setattr(weight, "data", torch.zeros(2, 2)),
    "add": lambda weight: weight.__iadd__(1),
    "detached": lambda weight: weight.detach().zero_(),
    "a view without a graph": torch.no_grad()(lambda weight: weight.view(-1)[:3].zero_()),
    "out": lambda weight: torch.zeros(6, 6, out=weight),
    "a list": lambda weight: torch._foreach_zero_([weight]),
    "optimizer": lambda weight: torch.optim.SGD([weight], lr=0.1),
    "parameter": nn.Parameter,
    "tie": lambda weight: setattr(layer(), "weight", weight),
    "grad": lambda weight: weight.grad,
    "rows": lambda weight: nn.functional.embedding(torch.tensor([0]), weight, max_norm=1e-3),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", ["dropout", "noise", "norm", "function"])
@pytest.mark.parametrize("where", ["step", "outside"])
def test_a_write_to_a_computed_weight_is_an_error(where, kind, write):
    model = MORE[kind](nn.Sequential(layer()))
    before = model.get_parameter("0.weight").clone()
    for has_graph in (True, False) if where == "step" and write in ("add", "rows") else (True,):
        with (
            step(model) if where == "step" else nullcontext(),
            torch.set_grad_enabled(has_graph),
            pytest.raises((RecoupError, TypeError), match=r"get_parameter\(.*weights.disabled"),
        ):
            WRITES[write](model[0].weight)
    assert torch.equal(model.get_parameter("0.weight"), before)


@pytest.mark.parametrize(
    ("way", "suffix"),
    [("dropout", ""), ("noise", ""), ("function", ""), ("norm", ""), ("norm", "_g"),
     ("learned", "_std"), ("all", ""), ("all", "_g"), ("all", "_std")],
)  # fmt: skip
def test_what_a_weight_is_made_of_must_not_change_before_backward(way, suffix):
    for change in (lambda p: p.add_(1.0), lambda p: p.detach().view(-1)[:1].mul_(2.0)):
        module = MORE[way](nn.Sequential(nn.LSTM(4, 4)), r"0\.weight_hh_l0")
        loss = tensors(module(torch.randn(3, 2, 4, requires_grad=True)))[0].sum()
        loss.backward(retain_graph=True)
        with torch.no_grad():
            change(module.get_parameter(f"0.weight_hh_l0{suffix}"))
        with pytest.raises(RecoupError, match=r"`0\.weight_hh_l0` of \w+.* changed in place"):
            loss.backward()
        assert hooks_in_force() is None


@pytest.mark.parametrize("is_needed", [False, True])
def test_a_change_that_plain_torch_allows_too(is_needed):
    linear = recoup.weight_dropout(nn.Linear(4, 4), p=0.3)
    raw, x = linear.get_parameter("weight"), torch.randn(3, 4, requires_grad=is_needed)
    with step(linear):
        loss, weight = linear(x).sum(), used(linear)
    scales = weight / raw.detach()
    with torch.no_grad():
        (raw.data if is_needed else raw).mul_(2.0)
    loss.backward()
    torch.testing.assert_close(raw.grad, x.detach().sum(0).expand(4, 4) * scales)
    assert not is_needed or torch.allclose(x.grad, 2 * weight.sum(0).expand(3, -1))
