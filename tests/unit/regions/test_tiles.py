"""`recoup.tiled`, and what it has in common with `tiled_loss`: the plain call is the oracle."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import ChangedError, RecoupError
from tests.block_code import CHECKPOINTS
from tests.oracle import hooks_in_force
from tests.tile_models import D, L, Model, N, assert_same, both, gradients, mlp, rows, targets
from tests.zoo import Fn


@pytest.mark.parametrize(("length", "sizes"), [(19, [3, 3, 3, 2, 2, 2, 2, 2]), (3, [1, 1, 1])])
@both
def test_tiles_differ_by_at_most_one_row_and_run_twice_or_once(call, length, sizes):
    seen, times = [], 2 if call is recoup.tiled else 1
    loss = call(lambda x: (seen.append(x.shape[1]), x.sin().sum())[1], tiles=8, reduction="sum")
    loss(rows(2, length, D)).backward()
    checks, tiles = seen[: -times * len(sizes)], seen[-times * len(sizes) :]
    assert 0 < sum(checks) <= 6 * 5
    assert tiles[: len(sizes)] == sizes
    assert sorted(tiles) == sorted(times * sizes)


def of_any_structure(x, pair, flag, *, mask, shift, scale=None):
    assert (flag, scale, mask.shape) == ("yes", None, (N, 1, L, L))
    y = x.exp() * pair[0] + pair[1] + shift
    return y, {"twice": 2 * y, "name": "n", "labels": x.argmax(-1)}


PARAMETER = nn.Parameter(rows(D, D).detach())
CALLS = {  # a function, its arguments, and how they are split
    **{f"{tiles} tiles": (mlp(), (rows(N, L, D),), {"tiles": tiles}) for tiles in (1, 8, 50)},
    "rows first": (mlp(), (rows(L, D),), {"dim": 0}),
    "a negative dimension": (mlp(), (rows(2, 3, 5, D),), {"dim": -2}),
    "no rows": (mlp(), (rows(N, 0, D),), {}),
    "in place": (lambda x: (x * 2).sin_().mul_(3), (rows(N, L, D),), {}),
    "no weight": (F.linear, (rows(3, D, D), PARAMETER), {}),
    "the first alone": (F.linear, (rows(D, D), rows(D, D)), {"dim": 0, "split": [0]}),
    "both": (torch.add, (rows(4, D), rows(4, 1)), {"dim": 0, "split": [0, 1]}),
    "a parameter": (torch.sin, (PARAMETER,), {"dim": 0, "split": [0]}),
    "features": (torch.mul, (rows(8, 8), rows(8)), {"dim": 0, "split": [0]}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_tiles_is_the_plain_one(name):
    fn, args, options = CALLS[name]
    leaves = [each for each in args if each.requires_grad]
    module = fn if isinstance(fn, nn.Module) else None
    found = gradients(lambda: recoup.tiled(fn, **options)(*args), leaves, module)
    assert_same(found, gradients(lambda: fn(*args), leaves, module))


def test_arguments_of_any_structure_and_by_name():
    args = rows(N, L, D), (rows(N, L, D), rows(1, L, 1)), "yes"
    named = {"mask": torch.ones(N, 1, L, L) > 0, "shift": rows(1, 1, D)}
    leaves = [args[0], *args[1], named["shift"]]
    found = gradients(lambda: recoup.tiled(of_any_structure, tiles=4)(*args, **named), leaves)
    assert_same(found, gradients(lambda: of_any_structure(*args, **named), leaves))
    by_name = recoup.tiled(lambda a, b: a + b, 0, 3, split=["a", "b"])
    a, b = rows(4, D), rows(4, 1)
    assert torch.equal(by_name(a=a, b=b), a + b)


def of_targets(**options):
    hidden, labels, places = rows(N, L, D), targets(), torch.arange(L)[None].repeat(N, 1)
    recoup.tiled(Model().loss, reduction="mean", **options)(hidden, labels, places=places)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: recoup.tiled_loss(torch.sum, reduction="none"), '`reduction` is "none"'),
        (lambda: recoup.tiled(torch.sin)(rows(3)), "`dim` is 1.*shape \\(3,\\)"),
        (lambda: recoup.tiled(torch.sin, split=[1])(rows(3, 4)), "names 1, but the call has 1"),
        (lambda: recoup.tiled(torch.add, split=[0, 1])(rows(3, 4), rows(4)), "`split` names an"),
        (lambda: recoup.tiled(torch.add)(rows(2, 4, 3), rows(5, 4, 3)), "`split` must say"),
        (lambda: recoup.tiled(torch.mul, 0)(rows(8, 8), rows(8)), "one a feature"),
        (of_targets, "`target` does not say"),
        (lambda: of_targets(target=0), "`target` is 0"),
        (lambda: recoup.tiled(lambda x: x.mean(1))(rows(3, 4, 5)), "rows independently"),
        (lambda: recoup.tiled(lambda x: x.sum())(rows(3, 4, 5)), "`reduction="),
        (lambda: recoup.tiled(lambda x: (x, x.numel()), 1, 3)(rows(3, 4, 5)), "another structure"),
        (lambda: recoup.tiled(torch.sin, reduction="sum")(rows(3, 4)), "must return a loss"),
        (lambda: recoup.tiled(torch.sin)(torch.eye(4).to_sparse()), "nested or sparse"),
    ],
)
def test_mistakes(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_without_gradients():
    module, x, model, labels = mlp(), rows(N, L, D), Model(), targets()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_same([recoup.tiled(module)(x)], [module(x)])
            value = recoup.tiled_loss(model.loss)(x, labels)
            assert_same([value], [model.loss(x, labels)])
        assert not value.requires_grad
    assert recoup.tiled(torch.argmax, 0, split=[0])(x, dim=-1).dtype is torch.int64


def in_a_chain(fn, x):
    return recoup.Sequential(*map(Fn, (torch.sin, torch.asin, fn, torch.cos)), memory="sqrt")(x / 4)


@pytest.mark.parametrize("outer", [CHECKPOINTS[each] for each in ("torch", "ours")] + [in_a_chain])
@both
def test_within_regions(outer, call):
    module, hidden, model = mlp(), rows(N, L, D), Model()

    def run(make):
        if call is recoup.tiled:
            return outer(lambda x: make(module)(x.sin()).exp(), hidden)
        return outer(lambda x: make(model.loss)(module(x.sin()), targets()).exp(), hidden)

    leaves = [hidden], nn.ModuleList([module, model])
    found = gradients(lambda: run(lambda fn: call(fn, tiles=3)), *leaves)
    assert_same(found, gradients(lambda: run(lambda fn: fn), *leaves))


@both
def test_exceptions_and_transforms_of_torch_func(call):
    calls, model, x, labels = [], Model(), rows(N, L, D), targets()

    def fn(hidden, labels):
        calls.append(len(calls))
        if len(calls) == 2 * num_calls:
            raise KeyError("last")
        return model.loss(hidden, labels)

    tiled, num_calls = call(fn, reduction="mean"), math.inf
    tiled(x, labels)
    num_calls = len(calls)  # of a check and of all tiles
    with pytest.raises(KeyError, match="last"):
        tiled(x, labels)
    assert hooks_in_force() is None
    found = gradients(lambda: tiled(x, labels), [x], model)
    assert_same(found, gradients(lambda: model.loss(x, labels), [x], model))
    with pytest.raises(RecoupError, match=r"torch\.func"):
        torch.func.grad(lambda x: tiled(x, labels))(x.detach())


def test_a_weight_changed_before_backward_is_an_error():
    module, x = mlp(), rows(N, L, D)
    y = recoup.tiled(module)(x)
    with torch.no_grad():
        module[0].weight.mul_(2)
    with pytest.raises(ChangedError, match=r"tile . of Sequential"):
        y.sum().backward()


def test_it_is_as_the_function_it_wraps():
    call, x = recoup.tiled(F.relu, dim=0, tiles=3), rows(7, 3)
    assert repr(call) == "Tiled(relu, dim=0, tiles=3)"
    assert torch.equal(pickle.loads(pickle.dumps(copy.deepcopy(call)))(x), F.relu(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile_and_export():
    module, x, labels, model = mlp(), rows(N, L, D), targets("a tile"), Model()
    tiled, leaves = Fn(lambda x: recoup.tiled(module, tiles=3)(x)), nn.ModuleList([module, model])

    def run(x):
        return recoup.tiled_loss(model.loss, tiles=3)(tiled(x), labels)

    compiled = torch.compile(run, backend="aot_eager")
    wanted = gradients(lambda: model.loss(module(x), labels), [x], leaves)
    assert_same(gradients(lambda: compiled(x), [x], leaves), wanted)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs outside of graphs"):
        torch.compile(lambda x: run(x), backend="aot_eager", fullgraph=True)(x)
    exported = torch.export.export(tiled, (x.detach(),))
    assert_same([exported.module()(x)], [module(x)])


def test_double_backward_and_retained_graphs():
    module, x = mlp(), rows(N, L, D)

    def of(fn):
        y = fn(x).sin().sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        first = torch.autograd.grad(y, x, retain_graph=True)[0]
        return [g, first, *torch.autograd.grad(g.square().sum(), [x, *module.parameters()][:-1])]

    assert_same(of(recoup.tiled(module, tiles=3)), of(module))
