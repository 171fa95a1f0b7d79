"""`recoup.tiled`, and what `recoup.tiled_loss` has in common: the plain call is the oracle."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import ChangedError, RecoupError
from tests.oracle import assert_same_tensor, hooks_in_force, tensors

D, V = 6, 11
EXACT = 1e-10
CALLS = {"tiled": recoup.tiled, "tiled_loss": recoup.tiled_loss}


def mlp(p=0.0):
    torch.manual_seed(1)
    layers = nn.Linear(D, 4 * D), nn.GELU(), nn.Dropout(p), nn.Linear(4 * D, D)
    return nn.Sequential(*layers).double()


def rows(*shape):
    torch.manual_seed(2)
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def some_labels(ignored="some"):
    torch.manual_seed(3)
    labels = torch.randint(V, (3, 13))
    for kind, of_rows in {"some": slice(1, 13, 3), "a tile": slice(6), "all": slice(13)}.items():
        if kind == ignored:
            labels[:, of_rows] = -100
    return labels


def head_and_loss(reduction="mean", **more):
    torch.manual_seed(1)
    head = nn.Linear(D, V).double()

    def loss(hidden, labels):
        logits = head(hidden).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction=reduction, **more)

    return head, loss


def gradients(call, inputs, module=None):
    """The outputs of a call, and the gradients of inputs and parameters."""
    leaves = [*inputs, *(module.parameters() if module else ())]
    outputs = tensors(call())
    loss = sum(((place + 1.5) * each.sin()).sum() for place, each in enumerate(outputs))
    return [*outputs, *torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)]


def assert_same(found, wanted, rtol=EXACT):
    assert len(found) == len(wanted)
    for place, (got, want) in enumerate(zip(found, wanted, strict=True)):
        assert_same_tensor(str(place), got.detach(), want.detach(), rtol)


@pytest.mark.parametrize(
    ("shape", "dim", "tiles"),
    [((3, 13, D), 1, tiles) for tiles in (1, 2, 8, 13, 50)]
    + [((13, D), 0, 8), ((3, 13, D), -2, 8), ((2, 3, 5, D), 2, 8), ((3, 0, D), 1, 8)],
)
def test_shapes(shape, dim, tiles):
    module, x = mlp(), rows(*shape)
    found = gradients(lambda: recoup.tiled(module, dim=dim, tiles=tiles)(x), [x], module)
    assert_same(found, gradients(lambda: module(x), [x], module))


@pytest.mark.parametrize("fn", [lambda x: x.sin() * x.exp(), lambda x: (x * 2).sin_().mul_(3)])
def test_input_gradients_are_bitwise(fn):
    x = rows(3, 13, D)
    found = gradients(lambda: recoup.tiled(fn)(x), [x])
    assert_same(found, gradients(lambda: fn(x), [x]), rtol=0.0)


def test_tiles_differ_by_at_most_one_row():
    seen = []

    def fn(x):
        seen.append(x.shape[1])
        return x.sin()

    call = recoup.tiled(fn, tiles=8)
    call(rows(2, 9, D))  # the first call of some code is checked
    for length, sizes in ((19, [3, 3, 3, 2, 2, 2, 2, 2]), (3, [1, 1, 1])):
        seen.clear()
        call(rows(2, length, D)).sum().backward()
        assert seen[: len(sizes)] == sizes
        assert sorted(seen) == sorted(2 * sizes)  # each once more in backward


def test_arguments_of_any_structure():
    module = mlp()
    x, pair, shift = rows(3, 13, D), (rows(3, 13, D), rows(1, 13, 1)), rows(1, 1, D)
    mask = torch.rand(3, 1, 13, 13) < 0.5

    def fn(x, pair, flag, *, mask, shift, scale=None):
        assert (flag, scale, mask.shape) == ("yes", None, (3, 1, 13, 13))
        y = module(x * pair[0] + pair[1]) + shift
        return y, {"twice": 2 * y, "name": "n", "labels": x.argmax(-1)}

    def call(fn):
        y, more = fn(x, pair, "yes", mask=mask, shift=shift)
        assert (more["name"], more["labels"].shape) == ("n", (3, 13))
        return y, more["twice"]

    inputs = [x, *pair, shift]
    found = gradients(lambda: call(recoup.tiled(fn, tiles=4)), inputs, module)
    assert_same(found, gradients(lambda: call(fn), inputs, module))


@pytest.mark.parametrize(
    ("fn", "args", "dim", "split"),
    [
        (F.linear, (rows(3, D, D), nn.Parameter(rows(D, D).detach())), 1, None),  # no weight is
        (F.linear, (rows(D, D), rows(D, D)), 0, [0]),
        (torch.add, (rows(4, D), rows(4, 1)), 0, [0, 1]),
        (torch.sin, (nn.Parameter(rows(4, D).detach()),), 0, [0]),
        (torch.mul, (rows(2, 8, 8), rows(1, 8)), 1, [0]),
        (torch.mul, (rows(8, 8), rows(8)), 0, [0]),
    ],
)
def test_what_is_split(fn, args, dim, split):
    found = gradients(lambda: recoup.tiled(fn, dim, 3, split=split)(*args), args)
    assert_same(found, gradients(lambda: fn(*args), args))
    keywords = dict(zip(("input", "other"), args, strict=False))
    if fn in (torch.add, torch.mul):
        names = [list(keywords)[place] for place in split]
        got = recoup.tiled(lambda input, other: fn(input, other), dim, 3, split=names)(**keywords)
        assert torch.equal(got, fn(*args))
        if fn is torch.mul:  # it may be a value a row, or one a feature
            with pytest.raises(ValueError, match="`split` must say"):
                recoup.tiled(fn, dim, 3)(*args)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: recoup.tiled(7), "`fn` is 7"),
        (lambda: recoup.tiled(torch.sin, "1"), "`dim` is '1'"),
        (lambda: recoup.tiled(torch.sin, tiles=0), "`tiles` is 0"),
        (lambda: recoup.tiled(torch.sin, tiles=2.0), "`tiles` is 2.0"),
        (lambda: recoup.tiled(torch.sin, reduction="max"), "`reduction` is 'max'"),
        (lambda: recoup.tiled(torch.relu, split=0), "`split` is 0"),
        (lambda: recoup.tiled_loss(torch.sum, split="x"), "`split` is 'x'"),
        (lambda: recoup.tiled_loss(torch.sum, ignore_index=None), "`ignore_index` is None"),
        (lambda: recoup.tiled_loss(torch.sum, reduction="none"), '`reduction` is "none"'),
        (lambda: recoup.tiled(torch.sin)(rows(3)), "`dim` is 1.*shape \\(3,\\)"),
        (lambda: recoup.tiled(torch.sin, -3)(rows(3, 4)), "`dim` is -3"),
        (lambda: recoup.tiled(torch.sin)(3.0), "no argument that it allows is a tensor"),
        (lambda: recoup.tiled(torch.sin, split=[1])(rows(3, 4)), "names 1, but the call has 1"),
        (lambda: recoup.tiled(torch.sin, split=["x"])(rows(3, 4)), "names 'x'"),
        (lambda: recoup.tiled(torch.add, split=[0, 1])(rows(3, 4), rows(4)), "`split` names an"),
        (lambda: recoup.tiled(torch.add)(rows(2, 4, 3), rows(5, 4, 3)), "`split` must say"),
        (lambda: recoup.tiled(lambda x: x.mean(1))(rows(3, 4, 5)), "rows independently"),
        (lambda: recoup.tiled(lambda x: x.sum())(rows(3, 4, 5)), "`reduction="),
        (lambda: recoup.tiled(lambda x: (x, x.numel()), 1, 3)(rows(3, 4, 5)), "another structure"),
        (lambda: recoup.tiled(torch.sin, reduction="sum")(rows(3, 4)), "must return a loss"),
        (lambda: recoup.tiled(lambda x: None, reduction="sum")(rows(3, 4)), "no tensor"),
    ],
)
def test_mistakes(call, says):
    with pytest.raises(ValueError, match=says):
        call()
    assert hooks_in_force() is None


@pytest.mark.parametrize("ignored", ["none", "some", "a tile", "all"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tiles", [1, 4, 13])
@pytest.mark.parametrize("call", CALLS)
def test_a_loss_is_that_of_all_rows(call, tiles, reduction, ignored):
    head, fn = head_and_loss(reduction)
    hidden, labels = rows(3, 13, D), some_labels(ignored)
    tiled = CALLS[call](fn, tiles=tiles, reduction=reduction)

    def step(fn):
        leaves = [hidden, *head.parameters()]
        loss = 3 * fn(hidden, labels)
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    found, wanted = step(tiled), step(fn)
    assert found[0].isnan() == wanted[0].isnan() == (ignored == "all" and reduction == "mean")
    assert_same([each.nan_to_num() for each in found], [each.nan_to_num() for each in wanted])
    assert all(not each.isnan().any() for each in found[1:])


@pytest.mark.parametrize("call", CALLS)
def test_which_argument_has_the_targets(call):
    fn = head_and_loss(ignore_index=7)[1]
    hidden, labels = rows(3, 13, D), some_labels().masked_fill(some_labels() == -100, 7)
    places = torch.arange(13)[None].repeat(3, 1)
    tiled = CALLS[call]

    def loss(hidden, labels, *, places):
        return fn(hidden * (1 + places[..., None]), labels)

    for target, says in ((None, "`target` does not say"), (0, "`target` is 0")):
        with pytest.raises(ValueError, match=says):
            tiled(loss, reduction="mean", target=target)(hidden, labels, places=places)
    got = tiled(loss, reduction="mean", target=1, ignore_index=7)(hidden, labels, places=places)
    assert_same([got], [loss(hidden, labels, places=places)])
    got = tiled(F.mse_loss, tiles=5, reduction="mean")(hidden, hidden.detach().cos())
    assert_same([got], [F.mse_loss(hidden, hidden.detach().cos())])  # rows count without targets


# -- in the company of others ----------------------------------------------------------------------


def test_dropout_draws_the_same_in_the_second_run():
    module, x = mlp(p=0.5), rows(3, 12, D)

    def step(fn):
        torch.manual_seed(7)
        return [*gradients(lambda: fn(x), [x], module), torch.get_rng_state()]

    wanted = step(lambda x: torch.cat([module(part) for part in x.split(3, 1)], 1))
    assert_same(step(recoup.tiled(module, tiles=4)), wanted)


def test_without_grad_mode_and_without_gradients():
    module, x = mlp(), rows(3, 13, D)
    with torch.no_grad():
        assert_same([recoup.tiled(module)(x)], [module(x)])
    assert not recoup.tiled(torch.sin)(x.detach()).requires_grad
    assert recoup.tiled(torch.argmax, 0, split=[0])(x, dim=-1).dtype is torch.int64


def test_double_backward_and_retained_graphs():
    module, x = mlp(), rows(3, 13, D)

    def step(fn):
        y = fn(x).sin().sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        first = torch.autograd.grad(y, x, retain_graph=True)[0]
        return [g, first, *torch.autograd.grad(g.square().sum(), [x, *module.parameters()][:-1])]

    assert_same(step(recoup.tiled(module, tiles=3)), step(module))


class Call(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


def sequential(memory):
    def run(fn, x):
        parts = Call(torch.sin), Call(torch.asin), Call(fn), Call(torch.cos)
        return recoup.Sequential(*parts, memory=memory)(x / 4)

    return run


OUTER = {
    "checkpoint": recoup.checkpoint,
    "torch": lambda fn, x: torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False),
    "Sequential": sequential("sqrt"),
    "plain Sequential": sequential("linear"),
}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("call", CALLS)
def test_within_regions(outer, call):
    module, hidden, labels = mlp(), rows(3, 13, D), some_labels()
    head, fn = head_and_loss()
    both = nn.ModuleList([module, head])

    def body(cut):
        if call == "tiled":
            return lambda x: cut(recoup.tiled, module)(x.sin()).exp()
        return lambda x: cut(recoup.tiled_loss, fn)(module(x.sin()), labels).exp()

    tiled, plain = body(lambda make, fn: make(fn, tiles=3)), body(lambda make, fn: fn)
    found = gradients(lambda: OUTER[outer](tiled, hidden), [hidden], both)
    assert_same(found, gradients(lambda: OUTER[outer](plain, hidden), [hidden], both))


@pytest.mark.parametrize("call", CALLS)
def test_an_exception_within_leaves_nothing(call):
    fails, (head, plain) = [], head_and_loss()

    def fn(hidden, labels):
        if fails and fails.pop():
            raise KeyError("second")
        return plain(hidden, labels)

    x, labels, tiled = rows(3, 13, D), some_labels(), CALLS[call](fn, reduction="mean")
    tiled(x, labels)  # the first call of some code is checked
    fails += [True, False]
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        pytest.raises(KeyError, match="second"),
    ):
        tiled(x, labels)
    assert hooks_in_force() is None
    found = gradients(lambda: tiled(x, labels), [x], head)
    assert_same(found, gradients(lambda: plain(x, labels), [x], head))


def test_a_weight_changed_before_backward_is_an_error():
    module, x = mlp(), rows(3, 13, D)
    y = recoup.tiled(module)(x)
    with torch.no_grad():
        module[0].weight.mul_(2)
    with pytest.raises(ChangedError, match=r"tile . of Sequential"):
        y.sum().backward()


@pytest.mark.parametrize("call", CALLS)
def test_transforms_of_torch_func_are_refused(call):
    tiled, labels = CALLS[call](head_and_loss()[1], reduction="mean"), some_labels()
    with pytest.raises(RecoupError, match=r"torch\.func"):
        torch.func.grad(lambda x: tiled(x, labels))(rows(3, 13, D).detach())


def test_it_is_as_the_function_it_wraps():
    call, x = recoup.tiled(F.relu, dim=0, tiles=3), rows(7, 3)
    assert (call.__name__, repr(call)) == ("relu", "Tiled(relu, dim=0, tiles=3)")
    for other in (copy.deepcopy(call), pickle.loads(pickle.dumps(call))):
        assert torch.equal(other(x), F.relu(x))
    module, x = mlp(), rows(3, 13, D)
    wanted = gradients(lambda: module(x), [x], module)
    module.forward = recoup.tiled(module.forward, tiles=3)
    assert_same(gradients(lambda: module(x), [x], module), wanted)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile_and_export():
    module, x = mlp(), rows(3, 13, D)
    labels, (head, fn) = some_labels("a tile"), head_and_loss()
    tiled, both = Call(lambda x: recoup.tiled(module, tiles=3)(x)), nn.ModuleList([module, head])

    def step(x):
        y = tiled(x)
        return recoup.tiled_loss(fn, tiles=3)(y, labels) + y.sum()

    compiled = torch.compile(step, backend="aot_eager")
    wanted = gradients(lambda: fn(module(x), labels) + module(x).sum(), [x], both)
    assert_same(gradients(lambda: compiled(x), [x], both), wanted)
    options = {"backend": "aot_eager", "fullgraph": True}
    whole = torch.compile(tiled, **options)
    wanted = gradients(lambda: module(x), [x], module)
    assert_same(gradients(lambda: whole(x), [x], module), wanted)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs outside of graphs"):
        torch.compile(lambda x: recoup.tiled_loss(fn)(x, labels), **options)(x)
    exported = torch.export.export(tiled, (x.detach(),))
    assert_same([exported.module()(x)], [module(x)])
