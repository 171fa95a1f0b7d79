"""`recoup.tiled` and `recoup.tiled_loss`: the plain call is the oracle."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recoup
from recoup.errors import ChangedError, GradientError, RecoupError
from tests.oracle import assert_same_tensor, hooks_in_force, tensors

N, L, D, V = 3, 13, 6, 11
CALLS = {"tiled": recoup.tiled, "tiled_loss": recoup.tiled_loss}
both = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D)).double()


def rows(*shape, **more):
    torch.manual_seed(2)
    return torch.randn(*shape, **{"dtype": torch.float64, "requires_grad": True} | more)


def targets(ignored="some"):
    torch.manual_seed(3)
    labels = torch.randint(V, (N, L))
    for kind, of_rows in {"some": slice(1, L, 3), "a tile": slice(6), "all": slice(L)}.items():
        if kind == ignored:
            labels[:, of_rows] = -100
    return labels


class Model(nn.Module):
    """A body, and a head that may be tied to the embedding."""

    def __init__(self, tied=False, bias=True, p=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(V, D)
        self.body = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)
        self.dropout = nn.Dropout(p)
        self.head = nn.Linear(D, V, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.double()
        self.tokens = torch.randint(V, (N, L))

    def hidden(self):
        return self.body(self.embedding(self.tokens)).tanh()

    def loss(self, hidden, labels, **options):
        logits = self.head(self.dropout(self.norm(hidden)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def gradients(call, inputs, module=None):
    """The outputs of a call, and the gradients of inputs and parameters."""
    outputs, leaves = tensors(call()), [*inputs, *(module.parameters() if module else ())]
    real = [each for each in outputs if each.is_floating_point()]
    loss = sum(((place + 1.5) * each.sin()).sum() for place, each in enumerate(real))
    return [*outputs, *torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)]


def assert_same(found, wanted, rtol=1e-10):
    for place, (got, want) in enumerate(zip(found, wanted, strict=True)):
        if got is not None or want is not None:
            assert_same_tensor(str(place), got.detach(), want.detach(), rtol)


# -- which rows, of which arguments ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dim", "tiles"),
    [((N, L, D), 1, tiles) for tiles in (1, 2, 8, 13, 50)]
    + [((L, D), 0, 8), ((N, L, D), -2, 8), ((2, 3, 5, D), 2, 8), ((N, 0, D), 1, 8)],
)
def test_shapes(shape, dim, tiles):
    module, x = mlp(), rows(*shape)
    found = gradients(lambda: recoup.tiled(module, dim=dim, tiles=tiles)(x), [x], module)
    assert_same(found, gradients(lambda: module(x), [x], module))
    for fn in (lambda x: x.sin() * x.exp(), lambda x: (x * 2).sin_().mul_(3)):
        found = gradients(lambda fn=fn: recoup.tiled(fn, dim, tiles)(x), [x])
        assert_same(found, gradients(lambda fn=fn: fn(x), [x]), rtol=0.0)


def test_tiles_differ_by_at_most_one_row():
    seen = []
    call = recoup.tiled(lambda x: (seen.append(x.shape[1]), x.sin())[1], tiles=8)
    call(rows(2, 9, D))  # the first call of some code is checked
    for length, sizes in ((19, [3, 3, 3, 2, 2, 2, 2, 2]), (3, [1, 1, 1])):
        seen.clear()
        call(rows(2, length, D)).sum().backward()
        assert seen[: len(sizes)] == sizes
        assert sorted(seen) == sorted(2 * sizes)  # each once more in backward


def test_arguments_of_any_structure():
    x, pair, shift = rows(N, L, D), (rows(N, L, D), rows(1, L, 1)), rows(1, 1, D)
    mask = torch.rand(N, 1, L, L) < 0.5

    def fn(x, pair, flag, *, mask, shift, scale=None):
        assert (flag, scale, mask.shape) == ("yes", None, (N, 1, L, L))
        y = x.exp() * pair[0] + pair[1] + shift
        return y, {"twice": 2 * y, "name": "n", "labels": x.argmax(-1)}

    inputs, named = [x, *pair, shift], {"mask": mask, "shift": shift}
    found = gradients(lambda: recoup.tiled(fn, tiles=4)(x, pair, "yes", **named), inputs)
    assert_same(found, gradients(lambda: fn(x, pair, "yes", **named), inputs))


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
    if fn is torch.mul:  # it may be a value a row, or one a feature
        with pytest.raises(ValueError, match="`split` must say"):
            recoup.tiled(fn, dim, 3)(*args)
    if fn is torch.add:
        by_name = recoup.tiled(lambda a, b: fn(a, b), dim, 3, split=["a", "b"])
        assert torch.equal(by_name(a=args[0], b=args[1]), fn(*args))


def of_targets(**options):
    def call():
        hidden, labels, places = rows(N, L, D), targets(), torch.arange(L)[None].repeat(N, 1)
        recoup.tiled(Model().loss, reduction="mean", **options)(hidden, labels, places=places)

    return call


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
        (of_targets(), "`target` does not say"),
        (of_targets(target=0), "`target` is 0"),
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


# -- losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", ["none", "some", "a tile", "all"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("tiles", [1, 4])
@both
def test_a_loss_is_that_of_all_rows(call, tiles, reduction, ignored):
    model, hidden, labels = Model(), rows(N, L, D), targets(ignored)

    def fn(hidden, labels):
        return model.loss(hidden, labels, reduction=reduction)

    def step(fn):
        loss = 3 * fn(hidden, labels)
        leaves = [hidden, *model.norm.parameters(), *model.head.parameters()]
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    found, wanted = step(call(fn, tiles=tiles, reduction=reduction)), step(fn)
    assert found[0].isnan() == wanted[0].isnan() == (ignored == "all" and reduction == "mean")
    assert_same([each.nan_to_num() for each in found], [each.nan_to_num() for each in wanted])
    assert all(not each.isnan().any() for each in found[1:])


def ce(logits, labels):
    return F.cross_entropy(logits, labels.flatten())


def of_one(weight, x):
    return x @ weight + x.square() @ weight


HEADS = {  # how the head makes logits of (rows, D)
    "twice, transposed once": lambda m, x: of_one(m.head.weight.t(), x),
    "twice, not transposed": lambda m, x: of_one(m.body.weight, x) @ m.head.weight.t(),
    "twice": lambda m, x: (
        F.linear(F.linear(x, m.body.weight), m.body.weight.t()) @ m.embedding.weight.t()
    ),
    # Of transformers' GPT-2: the weight is not transposed.
    "Conv1D": lambda m, x: torch.addmm(m.head.bias, x @ m.body.weight, m.head.weight.t()),
    "alpha": lambda m, x: torch.addmm(m.head.bias, x, m.head.weight.t(), alpha=0.5),
    "beta": lambda m, x: torch.addmm(m.head.bias, x, m.head.weight.t(), beta=0.5),
    "batched": lambda m, x: torch.bmm(x[None], m.head.weight.t()[None])[0],
    "expanded": lambda m, x: x.sum(1, keepdim=True).expand(-1, D) @ m.head.weight.t(),
    "frozen": lambda m, x: F.linear(x, m.head.weight.detach(), m.head.bias),
    "parts": lambda m, x: F.linear(x, torch.cat(m.head.weight.split([4, 7])), m.head.bias),
    "complex": lambda m, x: F.linear(x.to(torch.complex128), m.head.weight + 0j).abs(),
}


def head(name):
    return lambda model: lambda x, y: ce(HEADS[name](model, x.flatten(0, 1)), y)


def changed(loss):
    return 1024 * loss + loss.square() / 3


def in_region(model):
    return lambda x, y: recoup.checkpoint(model.loss, x, y)


def hooked(model):
    model.head.bias.register_hook(lambda g: 2 * g)
    model.head.weight.register_hook(lambda g: g + 1)
    return model.loss


def noisy(model):
    recoup.weight_noise(model, "head.weight", 0.5)
    return model.loss


STEPS = {  # arguments of the model, what is called, what is made of the loss, tolerance
    **{f"tied={tied}, bias={bias}": ((tied, bias), None, None, 1e-10)
       for tied in (True, False) for bias in (True, False)},
    **{f"head, {name}": ((), head(name), None, 1e-10) for name in HEADS},
    "scaled and added": ((), None, changed, 1e-10),
    "a region within": ((True,), in_region, None, 1e-10),
    "hooks of parameters": ((True,), hooked, None, 1e-10),
    "noise": ((), noisy, None, 1e-10),
    "bfloat16": ((), lambda m: m.bfloat16().loss, None, 5e-2),
    "float16": ((), lambda m: m.half().loss, None, 5e-2),
}  # fmt: skip


def step(model, loss):
    model.zero_grad()
    with recoup.weights.same_draw(seed=3):
        value = loss(model.hidden())
    value.backward()
    return [value.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("name", STEPS)
@both
def test_losses_in_tiles(name, call):
    of_model, make, change, rtol = STEPS[name]
    model, labels = Model(*of_model), targets("a tile")
    loss, change = (make or (lambda m: m.loss))(model), change or (lambda value: value)
    tiled = call(loss, tiles=4, reduction="mean")
    found = step(model, lambda h: change(tiled(h, labels)))
    assert_same(found, step(model, lambda h: change(loss(h, labels))), rtol)
    assert found[0].dtype is model.norm.weight.dtype


@both
def test_which_argument_has_the_targets(call):
    model, hidden, places = Model(), rows(N, L, D), torch.arange(L)[None].repeat(N, 1)
    labels = targets().masked_fill(targets() == -100, 7)

    def loss(hidden, labels, *, places):
        return model.loss(hidden * (1 + places[..., None]), labels, ignore_index=7)

    got = call(loss, reduction="mean", target=1, ignore_index=7)(hidden, labels, places=places)
    assert_same([got], [loss(hidden, labels, places=places)])
    got = call(F.mse_loss, tiles=5, reduction="mean")(hidden, hidden.detach().cos())
    assert_same([got], [F.mse_loss(hidden, hidden.detach().cos())])  # rows count without targets


def test_a_mean_in_16_bits_whose_sum_is_too_large():
    x = torch.full((1, 1024), 200.0, dtype=torch.float16, requires_grad=True)
    for tiles in (1, 2, 64):
        value = recoup.tiled_loss(torch.mean, tiles=tiles)(x)
        assert value == 200
        assert torch.equal(torch.autograd.grad(value, x)[0], torch.full_like(x, 1 / 1024))


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("used_before", [True, False])
@pytest.mark.parametrize("is_off_within", [False, True])
def test_autocast(is_off_within, used_before, cache):
    model, labels = Model(tied=True).float(), targets()

    def within(hidden, labels):
        """Gradients of float32 operators stay in float32."""
        with torch.autocast("cpu", enabled=False):
            logits = F.linear(hidden.flatten(0, 1).float(), model.head.weight).sin()
        return ce(logits, labels)

    def run(make):
        loss = make(within if is_off_within else model.loss)
        hidden = rows(N, L, D, dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            if used_before:  # autocast keeps the copy of the weight that this makes
                model.head(hidden.detach())
            value = loss(hidden, labels) + loss(hidden, labels)
        leaves = [hidden, model.head.weight]
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    assert_same(run(recoup.tiled_loss), run(lambda fn: fn), 1e-5 if is_off_within else 2e-2)


@both
def test_dropout_draws_tile_by_tile_and_the_same_in_a_second_run(call):
    model, labels = Model(p=0.5), targets("none")

    def in_pieces(hidden, labels):
        parts = zip(hidden.split([4, 3, 3, 3], 1), labels.split([4, 3, 3, 3], 1), strict=True)
        return sum(model.loss(h, y) * h.shape[1] for h, y in parts) / L

    def run(loss):
        torch.manual_seed(5)
        return [*step(model, lambda h: loss(h, labels)), torch.get_rng_state()]

    assert_same(run(call(model.loss, tiles=4, reduction="mean")), run(in_pieces))


# -- gradients that are taken in forward -----------------------------------------------------------


def test_hooks_of_parameters_run_once_with_the_whole_gradient(monkeypatch):
    model, seen, labels = Model(tied=True), [], targets()
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: seen.append((name, g.clone())))
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.append((f"{name} at last", p.grad.clone()))
        )
    step(model, lambda h: model.loss(h, labels))
    wanted, seen[:] = dict(seen), []
    model.zero_grad()
    value = recoup.tiled_loss(model.loss, tiles=4)(model.hidden(), labels)
    assert not seen  # forward shows them nothing
    value.backward()
    assert len(seen) == len(wanted)
    assert_same([dict(seen)[name] for name in wanted], list(wanted.values()))

    def fail(*args, **kwargs):
        assert not model.norm.weight._backward_hooks
        raise KeyboardInterrupt

    hidden, before = model.hidden(), list(model.norm.weight._backward_hooks)
    monkeypatch.setattr(torch.autograd, "grad", fail)
    with pytest.raises(KeyboardInterrupt):
        recoup.tiled_loss(model.loss)(hidden, labels)
    assert hooks_in_force() is None
    assert list(model.norm.weight._backward_hooks) == before


def test_a_retained_graph_and_a_gradient_of_the_gradient():
    model, labels = Model(), targets()

    def of(loss):
        leaves = [model.head.weight, model.body.weight]
        value = loss(model.hidden(), labels)
        first = torch.autograd.grad(value, leaves, retain_graph=True)
        return [*first, *torch.autograd.grad(5 * value, leaves, retain_graph=True)]

    assert_same(of(recoup.tiled_loss(model.loss)), of(model.loss))
    value = recoup.tiled_loss(model.loss)(model.hidden(), labels)
    with pytest.raises(GradientError, match=r"taken in forward.*Use recoup\.tiled"):
        torch.autograd.grad(value, model.head.weight, create_graph=True)
    given = torch.eye(2).double()
    with pytest.raises((RecoupError, RuntimeError)):
        torch.autograd.grad(value.expand(2), model.head.bias, given, is_grads_batched=True)
    value = recoup.tiled_loss(model.loss)(model.hidden(), labels)
    value.backward()
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


@pytest.mark.parametrize("asked", ["body.weight", "head.bias", "norm.weight", ""])
def test_only_some_gradients(asked):
    model, labels = Model(), targets()
    model.requires_grad_(not asked.startswith("norm") and bool(asked))
    value = recoup.tiled_loss(model.loss)(model.hidden(), labels)
    assert value.requires_grad == model.head.bias.requires_grad
    if asked:
        leaf = model.get_parameter(asked).requires_grad_()
        value = recoup.tiled_loss(model.loss)(model.hidden(), labels)
        wanted = torch.autograd.grad(model.loss(model.hidden(), labels), leaf)
        assert_same(torch.autograd.grad(value, leaf), wanted)


@pytest.mark.parametrize("how", ["argument", "closure", "hidden"])
def test_a_tensor_that_was_computed_before(how):
    model, labels = Model(), targets()

    def run(make):
        before = model.head.weight.exp()
        before.register_hook(lambda g: 2 * g)
        held = SimpleNamespace(weights=[before]) if how == "hidden" else before

        def loss(hidden, labels, weight=None, *, bias):
            weight = (held.weights[0] if how == "hidden" else held) if weight is None else weight
            return ce(F.linear(hidden, weight, bias).flatten(0, 1), labels)

        args = (before,) if how == "argument" else ()
        bias = model.head.bias.sin()
        return step(model, lambda h: make(loss)(h, labels, *args, bias=bias))

    if how == "hidden":
        with pytest.raises(GradientError, match=r"Exp made it.*Pass it as an argument"):
            run(recoup.tiled_loss)
        assert hooks_in_force() is None
    else:
        assert_same(run(recoup.tiled_loss), run(lambda loss: loss))


def test_hooks_around_see_the_gradients_alone():
    model, seen = Model(), []
    hidden = model.hidden().detach().requires_grad_()
    note = lambda tensor: seen.append(tuple(tensor.shape)) or tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        value = recoup.tiled_loss(model.loss)(hidden, targets())
    used = [*model.norm.parameters(), *model.head.parameters()]
    assert sorted(seen) == sorted([(N, L, D), *(tuple(each.shape) for each in used)])
    store = recoup.GradStore([hidden, *used])
    store.backward(value)
    assert_same([store[hidden]], torch.autograd.grad(model.loss(hidden, targets()), hidden))


# -- in the company of others ----------------------------------------------------------------------


def test_without_gradients():
    module, x, model, labels = mlp(), rows(N, L, D), Model(), targets()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert_same([recoup.tiled(module)(x)], [module(x)])
            value = recoup.tiled_loss(model.loss)(x, labels)
            assert_same([value], [model.loss(x, labels)])
        assert not value.requires_grad
    assert not recoup.tiled(torch.sin)(x.detach()).requires_grad
    assert recoup.tiled(torch.argmax, 0, split=[0])(x, dim=-1).dtype is torch.int64


class Call(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


OUTER = {
    "checkpoint": recoup.checkpoint,
    "torch": lambda fn, x: torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False),
    "Sequential": lambda fn, x: recoup.Sequential(
        *map(Call, (torch.sin, torch.asin, fn, torch.cos)), memory="sqrt"
    )(x / 4),
}


@pytest.mark.parametrize("outer", OUTER)
@both
def test_within_regions(outer, call):
    module, hidden, model = mlp(), rows(N, L, D), Model()

    def body(cut):
        if call is recoup.tiled:
            return lambda x: cut(recoup.tiled, module)(x.sin()).exp()
        return lambda x: cut(call, model.loss)(module(x.sin()), targets()).exp()

    tiled, plain = body(lambda make, fn: make(fn, tiles=3)), body(lambda make, fn: fn)
    leaves = nn.ModuleList([module, model])
    found = gradients(lambda: OUTER[outer](tiled, hidden), [hidden], leaves)
    assert_same(found, gradients(lambda: OUTER[outer](plain, hidden), [hidden], leaves))


@both
def test_exceptions_and_transforms_of_torch_func(call):
    fails, model = [], Model()

    def fn(hidden, labels):
        if fails and fails.pop():
            raise KeyError("second")
        return model.loss(hidden, labels)

    x, labels, tiled = rows(N, L, D), targets(), call(fn, reduction="mean")
    tiled(x, labels)  # the first call of some code is checked
    fails += [True, False]
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
        pytest.raises(KeyError, match="second"),
    ):
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
    assert (call.__name__, repr(call)) == ("relu", "Tiled(relu, dim=0, tiles=3)")
    for other in (copy.deepcopy(call), pickle.loads(pickle.dumps(call))):
        assert torch.equal(other(x), F.relu(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile_and_export():
    module, x, labels, model = mlp(), rows(N, L, D), targets("a tile"), Model()
    tiled = Call(lambda x: recoup.tiled(module, tiles=3)(x))
    all_of_it = nn.ModuleList([module, model])

    def run(x):
        y = tiled(x)
        return recoup.tiled_loss(model.loss, tiles=3)(y, labels) + y.sum()

    compiled = torch.compile(run, backend="aot_eager")
    wanted = gradients(lambda: model.loss(module(x), labels) + module(x).sum(), [x], all_of_it)
    assert_same(gradients(lambda: compiled(x), [x], all_of_it), wanted)
    options = {"backend": "aot_eager", "fullgraph": True}
    whole = torch.compile(tiled, **options)
    wanted = gradients(lambda: module(x), [x], module)
    assert_same(gradients(lambda: whole(x), [x], module), wanted)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="runs outside of graphs"):
        torch.compile(lambda x: recoup.tiled_loss(model.loss)(x, labels), **options)(x)
    exported = torch.export.export(tiled, (x.detach(),))
    assert_same([exported.module()(x)], [module(x)])
