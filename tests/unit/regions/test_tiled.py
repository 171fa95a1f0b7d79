"""`recoup.tiled`: the plain call is the oracle."""

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

D = 6
EXACT = 1e-10


def mlp(p=0.0):
    torch.manual_seed(1)
    layers = nn.Linear(D, 4 * D), nn.GELU(), nn.Dropout(p), nn.Linear(4 * D, D)
    return nn.Sequential(*layers).double()


def rows(*shape):
    torch.manual_seed(2)
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def gradients(call, inputs, module):
    """The outputs of a call, and the gradients of inputs and parameters."""
    leaves = [*inputs, *module.parameters()]
    for leaf in leaves:
        leaf.grad = None
    outputs = tensors(call())
    loss = sum(((place + 1.5) * each.sin()).sum() for place, each in enumerate(outputs))
    loss.backward()
    found = [*(each.detach() for each in outputs), *(leaf.grad for leaf in leaves)]
    for leaf in leaves:
        leaf.grad = None
    return found


def assert_same(found, wanted, rtol=EXACT):
    assert len(found) == len(wanted)
    for place, (got, want) in enumerate(zip(found, wanted, strict=True)):
        assert_same_tensor(str(place), got, want, rtol)


@pytest.mark.parametrize("tiles", [1, 2, 3, 8, 13, 50])
def test_an_mlp_along_the_sequence(tiles):
    module, x = mlp(), rows(3, 13, D)
    found = gradients(lambda: recoup.tiled(module, dim=1, tiles=tiles)(x), [x], module)
    assert_same(found, gradients(lambda: module(x), [x], module))


@pytest.mark.parametrize(
    ("shape", "dim"), [((13, D), 0), ((3, 13, D), -2), ((2, 3, 5, D), 2), ((3, 0, D), 1)]
)
def test_shapes(shape, dim):
    module, x = mlp(), rows(*shape)
    found = gradients(lambda: recoup.tiled(module, dim=dim)(x), [x], module)
    assert_same(found, gradients(lambda: module(x), [x], module))


def test_input_gradients_are_bitwise():
    def fn(x):
        return x.sin() * x.exp()

    x, module = rows(3, 13, D), nn.Identity()
    found = gradients(lambda: recoup.tiled(fn)(x), [x], module)
    assert_same(found, gradients(lambda: fn(x), [x], module), rtol=0.0)


def test_tiles_differ_by_at_most_one_row():
    seen = []

    def fn(x):
        seen.append(x.shape[1])
        return x.sin()

    with torch.no_grad():
        recoup.tiled(fn, tiles=8)(rows(2, 19, D))
    assert seen == [3, 3, 3, 2, 2, 2, 2, 2]
    seen.clear()
    recoup.tiled(fn, tiles=8)(rows(2, 3, D)).sum().backward()
    assert seen == [1] * 6  # each row once more in backward


def test_arguments_of_any_structure():
    module = mlp()
    x, pair, shift = rows(3, 13, D), (rows(3, 13, D), rows(1, 13, 1)), rows(1, 1, D)
    mask = torch.rand(3, 1, 13, 13) < 0.5

    def fn(x, pair, flag, *, mask, shift, scale=None):
        assert flag == "yes"
        assert scale is None
        assert mask.shape == (3, 1, 13, 13)
        y = module(x * pair[0] + pair[1]) + shift
        return y, {"twice": 2 * y, "name": "n", "labels": x.argmax(-1)}

    def call(fn):
        y, more = fn(x, pair, "yes", mask=mask, shift=shift)
        assert more["name"] == "n"
        assert more["labels"].shape == (3, 13)
        return y, more["twice"]

    inputs = [x, *pair, shift]
    found = gradients(lambda: call(recoup.tiled(fn, tiles=4)), inputs, module)
    assert_same(found, gradients(lambda: call(fn), inputs, module))


def test_a_weight_among_the_arguments_is_not_split():
    x = rows(3, D, D)  # as many rows as the weight has
    holder = nn.Module()
    holder.weight = nn.Parameter(rows(D, D).detach())

    def call(fn):
        return gradients(lambda: fn(x, holder.weight), [x], holder)

    assert_same(call(recoup.tiled(F.linear, tiles=3)), call(F.linear))


def test_what_is_split_can_be_named():
    x, w = rows(D, D), rows(D, D)
    found = gradients(lambda: recoup.tiled(F.linear, 0, 3, split=[0])(x, w), [x, w], nn.Identity())
    assert_same(found, gradients(lambda: F.linear(x, w), [x, w], nn.Identity()))

    def fn(a, b, *, c):
        return a + b + c

    a, b, c = rows(4, D), rows(4, 1), rows(4, D)
    call = recoup.tiled(fn, 0, 2, split=[0, 1, "c"])
    assert torch.equal(call(a, b, c=c), fn(a, b, c=c))
    parameter = nn.Parameter(rows(4, D).detach())
    assert recoup.tiled(torch.sin, 0, 2, split=[0])(parameter).shape == (4, D)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: recoup.tiled(7), "`fn` is 7"),
        (lambda: recoup.tiled(torch.sin, "1"), "`dim` is '1'"),
        (lambda: recoup.tiled(torch.sin, tiles=0), "`tiles` is 0"),
        (lambda: recoup.tiled(torch.sin, tiles=2.0), "`tiles` is 2.0"),
        (lambda: recoup.tiled(torch.sin, reduction="max"), "`reduction` is 'max'"),
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


@pytest.mark.parametrize("make", [recoup.tiled, recoup.tiled_loss])
def test_buffers_that_tiles_would_change_are_refused(make):
    module = nn.utils.spectral_norm(nn.Linear(13, 13)).double()

    def fn(x):
        return module(x).square().sum()

    tiled = make(fn, tiles=4, reduction="sum")
    x = torch.randn(2, 7, 13, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="changes its buffer `weight_u`"):
        tiled(x)
    module.eval()
    torch.testing.assert_close(tiled(x), fn(x))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_norms_over_rows_are_refused(norm):
    module = nn.Sequential(nn.Linear(13, 13), norm(7)).double()
    x = rows(7, 13)
    with pytest.raises(ValueError, match="statistics over rows"):
        recoup.tiled(module, 0)(x)
    with pytest.raises(ValueError, match="statistics over rows"):
        recoup.tiled(lambda x: module(x), 0)(x)
    module = nn.Sequential(nn.BatchNorm1d(13)).double().eval()
    assert torch.equal(recoup.tiled(module, 0)(x), module(x))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.softmax(1),
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x.cumsum(1),
        lambda x: x.roll(1, 1),
        lambda x: x + (x.detach() - x.detach().mean()),
        lambda x: x + torch.rand_like(x),
        lambda x: x if x.shape[1] < 13 else x.flip(1),
    ],
)
def test_check_finds_what_does_not_treat_rows_independently(fn):
    with pytest.raises(ValueError, match="rows independently"):
        recoup.tiled(fn).check(rows(3, 13, D))


def test_check_finds_wrong_gradients_and_passes_what_is_right():
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g - g.mean(1, keepdim=True)

    with pytest.raises(ValueError, match="gradient of argument tensor 0"):
        recoup.tiled(Odd.apply).check(rows(3, 13, D))
    module, x = mlp(p=0.5).eval(), rows(3, 13, D)
    before = torch.get_rng_state()
    recoup.tiled(module).check(x)
    recoup.tiled(module.float()).check(x.float())
    recoup.tiled(lambda x: (torch.rand(1), x.sin())[1]).check(x)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), before)


# -- losses ----------------------------------------------------------------------------------------


def head_and_loss(reduction):
    head = nn.Linear(D, 11).double()
    with torch.no_grad():
        head.weight.copy_(rows(11, D))
        head.bias.copy_(rows(11))

    def loss(hidden, labels):
        logits = head(hidden).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction=reduction)

    return head, loss


def some_labels(ignored):
    torch.manual_seed(3)
    labels = torch.randint(11, (3, 13))
    if ignored == "some":
        labels[:, 1::3] = labels[0, 5:9] = -100
    if ignored == "a tile":
        labels[:, :6] = -100
    if ignored == "all":
        labels[:] = -100
    return labels


CALLS = {
    "tiled": recoup.tiled,
    "tiled_loss": recoup.tiled_loss,
}


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
def test_a_mean_without_targets_counts_rows(call):
    module, x, y = mlp(), rows(3, 13, D), rows(3, 13, D).detach()

    def fn(x, y):
        return F.mse_loss(module(x), y)

    def step(fn):
        return torch.autograd.grad(fn(x, y), [x, *module.parameters()])

    assert_same(step(CALLS[call](fn, tiles=5, reduction="mean")), step(fn))


@pytest.mark.parametrize("call", CALLS)
def test_which_argument_has_the_targets(call):
    head, fn = head_and_loss("mean")
    hidden, labels, places = (
        rows(3, 13, D),
        some_labels("some"),
        torch.arange(13)[None].repeat(3, 1),
    )

    def loss(hidden, labels, *, places):
        return fn(hidden * (1 + places[..., None]), labels)

    with pytest.raises(ValueError, match="`target` does not say"):
        CALLS[call](loss, reduction="mean")(hidden, labels, places=places)
    with pytest.raises(ValueError, match="`target` is 0"):
        CALLS[call](loss, reduction="mean", target=0)(hidden, labels, places=places)
    got = CALLS[call](loss, reduction="mean", target=1)(hidden, labels, places=places)
    assert_same([got], [loss(hidden, labels, places=places)])
    other = labels.masked_fill(labels == -100, 7)

    def seven(hidden, labels):
        return F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), ignore_index=7)

    got = CALLS[call](seven, reduction="mean", ignore_index=7)(hidden, labels=other)
    assert_same([got], [seven(hidden, other)])


def test_check_of_losses():
    _, fn = head_and_loss("mean")
    hidden, labels = rows(3, 13, D), some_labels("some")
    for call in CALLS.values():
        call(fn, reduction="mean").check(hidden, labels)
        with pytest.raises(ValueError, match="rows independently"):  # a sum that is called a mean
            call(head_and_loss("sum")[1], reduction="mean").check(hidden, labels)
        shifted = lambda h, y: fn(h[:, :-1], y[:, 1:])  # noqa: E731
        with pytest.raises(ValueError, match="rows independently"):
            call(shifted, reduction="mean", tiles=3).check(hidden, labels)


# -- in the company of others ----------------------------------------------------------------------


def test_dropout_draws_the_same_in_the_second_run():
    module, x = mlp(p=0.5), rows(3, 12, D)

    def step(call):
        torch.manual_seed(7)
        found = gradients(call, [x], module)
        return [*found, torch.get_rng_state()]

    found = step(lambda: recoup.tiled(module, tiles=4)(x))
    wanted = step(lambda: torch.cat([module(part) for part in x.split(3, 1)], 1))
    assert_same(found[:-1], wanted[:-1])
    assert torch.equal(found[-1], wanted[-1])


def test_autocast():
    module, x = mlp().float(), rows(3, 13, D).float().detach().requires_grad_()

    def step(fn):
        with torch.autocast("cpu", torch.bfloat16):
            y = fn(x)
        assert y.dtype is torch.bfloat16
        return gradients(lambda: y, [x], module)

    assert_same(step(recoup.tiled(module, tiles=4)), step(module), rtol=2e-2)


def test_without_grad_mode_and_without_gradients():
    module, x = mlp(), rows(3, 13, D)
    with torch.no_grad():
        assert_same([recoup.tiled(module)(x)], [module(x)])
        assert not recoup.tiled(module)(x).requires_grad
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


@pytest.mark.parametrize("outer", ["checkpoint", "torch", "Sequential", "plain Sequential"])
@pytest.mark.parametrize("call", ["tiled", "tiled_loss"])
def test_within_regions(outer, call):
    module, hidden, labels = mlp(), rows(3, 13, D), some_labels("some")
    head, fn = head_and_loss("mean")

    def body(x):
        if call == "tiled":
            return recoup.tiled(module, tiles=3)(x.sin()).exp()
        return recoup.tiled_loss(fn, tiles=3)(module(x.sin()), labels).exp()

    def plainly(x):
        return module(x.sin()).exp() if call == "tiled" else fn(module(x.sin()), labels).exp()

    def run(x):
        if outer == "checkpoint":
            return recoup.checkpoint(body, x)
        if outer == "torch":
            return torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)
        memory = "linear" if outer == "plain Sequential" else "sqrt"
        parts = Call(torch.sin), Call(torch.asin), Call(body), Call(torch.cos)
        return recoup.Sequential(*parts, memory=memory)(x / 4)

    def want(x):
        return plainly(x / 4).cos() if "Sequential" in outer else plainly(x)

    both = nn.ModuleList([module, head])
    if call == "tiled":
        for parameter in head.parameters():
            parameter.requires_grad_(False)
    assert_same(
        gradients(lambda: run(hidden), [hidden], both),
        gradients(lambda: want(hidden), [hidden], both),
    )


def test_an_operator_in_place_within():
    def fn(x):
        return (x * 2).sin_().mul_(3).relu_()

    x = rows(3, 13, D)
    found = gradients(lambda: recoup.tiled(fn)(x), [x], nn.Identity())
    assert_same(found, gradients(lambda: fn(x), [x], nn.Identity()))


def test_an_exception_within_leaves_nothing():
    calls = []

    def fn(x):
        calls.append(1)
        if len(calls) % 3 == 0:
            raise KeyError("third")
        return x.sin()

    x = rows(3, 13, D)
    with pytest.raises(KeyError, match="third"):
        recoup.tiled(fn)(x)
    assert hooks_in_force() is None
    module = mlp()
    x = rows(3, 13, D)
    assert_same(
        gradients(lambda: recoup.tiled(module)(x), [x], module),
        gradients(lambda: module(x), [x], module),
    )


def test_a_weight_changed_before_backward_is_an_error():
    module, x = mlp(), rows(3, 13, D)
    y = recoup.tiled(module)(x)
    with torch.no_grad():
        module[0].weight.mul_(2)
    with pytest.raises(ChangedError, match=r"tile . of Sequential"):
        y.sum().backward()


def test_transforms_of_torch_func_are_refused():
    module, x = mlp(), rows(3, 13, D)
    _, fn = head_and_loss("mean")
    labels = some_labels("some")
    with pytest.raises(RecoupError, match=r"torch\.func"):
        torch.func.grad(lambda x: recoup.tiled(module)(x).sum())(x.detach())
    with pytest.raises(RecoupError, match=r"torch\.func"):
        torch.func.grad(lambda x: recoup.tiled_loss(fn)(x, labels))(x.detach())


def test_it_is_as_the_function_it_wraps():
    call = recoup.tiled(F.relu, dim=0, tiles=3)
    assert call.__name__ == "relu"
    assert repr(call) == "Tiled(relu, dim=0, tiles=3)"
    for other in (copy.deepcopy(call), pickle.loads(pickle.dumps(call))):
        x = rows(7, 3)
        assert torch.equal(other(x), F.relu(x))


def test_as_the_forward_of_a_module():
    module, x = mlp(), rows(3, 13, D)
    wanted = gradients(lambda: module(x), [x], module)
    module.forward = recoup.tiled(module.forward, tiles=3)
    assert_same(gradients(lambda: module(x), [x], module), wanted)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile_and_export():
    module, x = mlp(), rows(3, 13, D)
    head, fn = head_and_loss("mean")
    labels = some_labels("a tile")

    def step(x):
        y = recoup.tiled(module, tiles=3)(x)
        return recoup.tiled_loss(fn, tiles=3, reduction="mean")(y, labels) + y.sum()

    both = nn.ModuleList([module, head])
    wanted = gradients(lambda: fn(module(x), labels) + module(x).sum(), [x], both)
    compiled = torch.compile(step, backend="aot_eager")
    assert_same(gradients(lambda: compiled(x), [x], both), wanted)
    options = {"backend": "aot_eager", "fullgraph": True}
    whole = torch.compile(lambda x: recoup.tiled(module, tiles=3)(x), **options)
    found = gradients(lambda: whole(x), [x], module)
    assert_same(found, gradients(lambda: module(x), [x], module))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs outside of graphs"):
        torch.compile(lambda x: recoup.tiled_loss(fn)(x, labels), **options)(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = mlp()

        def forward(self, x):
            return recoup.tiled(self.mlp, tiles=3)(x)

    exported = torch.export.export(Model(), (x.detach(),))
    assert_same([exported.module()(x)], [module(x)])


@pytest.mark.parametrize(
    ("x", "other", "dim"), [((2, 8, 8), (1, 8), 1), ((8, 8), (8,), 0)], ids=["3d", "2d"]
)
def test_numbers_of_rows_or_of_features_have_to_be_named(x, other, dim):
    x, scale = torch.randn(x), torch.rand(other)
    with pytest.raises(ValueError, match=r"a value a row, or one a feature. `split` must say"):
        recoup.tiled(torch.mul, dim=dim, tiles=8)(x, scale)
    got = recoup.tiled(torch.mul, dim=dim, tiles=8, split=[0])(x, scale)
    assert torch.equal(got, x * scale)


@pytest.mark.parametrize(("name", "value"), [("split", 0), ("split", "x"), ("ignore_index", None)])
def test_what_is_split_and_ignored_is_checked(name, value):
    with pytest.raises(ValueError, match=f"`{name}` is "):
        recoup.tiled(torch.relu, **{name: value})
    with pytest.raises(ValueError, match=f"`{name}` is "):
        recoup.tiled_loss(torch.sum, **{name: value})
