"""`recomputing`: the plain code is the oracle, for gradients, statistics, stream and bytes."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import ChangedError, RecoupError, ReplayError
from recoup.regions.operator_draws import Draws
from recoup.regions.recomputing import recomputing
from tests.alive import no_collector
from tests.oracle import hooks_in_force

SIZE = 48
UNIT = SIZE * SIZE * 4  # one noisy weight
STATE = 5056  # of a generator
CHECKPOINTS = {
    "torch": partial(torch_checkpoint, use_reentrant=False),
    "torch, reentrant": partial(torch_checkpoint, use_reentrant=True),
    "ours": recoup.checkpoint,
    "recompute": lambda fn, *args: recoup.recompute(fn)(*args),
}


def nothing_of_ours():
    return hooks_in_force() is None and torch._C._len_torch_dispatch_stack() == 0


def leaves():
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(SIZE, SIZE, generator=generator).div_(4).requires_grad_()
    return a, torch.randn(8, SIZE, generator=generator).requires_grad_()


def noisy(a):
    return a + 0.1 * torch.randn_like(a)


class Ran:
    """A step of `body(context, a, x)`: what it left, and what it held between its passes."""

    def __init__(self, body, context, between=nullcontext):
        a, x = leaves()
        torch.manual_seed(5)
        torch.rand(3)
        with StorageTracker() as tracker:
            output = body(context, a, x)
            loss = output.float().square().mean()
            del output
            self.held = tracker.current_bytes
        assert nothing_of_ours()
        with between():
            torch.rand(7)
            loss.backward()
        self.left = [loss.detach(), a.grad, x.grad, torch.get_rng_state()]


def assert_same(got, want):
    for ours, plain in zip(got, want, strict=True):
        assert (ours is None) is (plain is None)
        assert ours is None or torch.equal(ours, plain)


def compare(body, between=nullcontext):
    """Run `body` plainly and in blocks, hold the two against each other, and return both."""
    ours, plain = Ran(body, recomputing, between), Ran(body, nullcontext, between)
    assert ours.left[1].abs().sum() > 0
    assert_same(ours.left, plain.left)
    return ours, plain


def made_then(make, use=F.linear):
    def body(context, a, x):
        with context():
            w = make(a)
        return use(x, w)

    return body


# -- bytes ----------------------------------------------------------------------------------------


def under_autocast(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, w)


CONSUMERS = {
    "v_ * x": lambda x, w: w[:8] * x,
    "F.linear, 3-D": lambda x, w: F.linear(x.view(2, 4, SIZE), w, w[0]),
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "a view": lambda x, w: x @ w.view(-1).view(SIZE, SIZE),
    "autocast": under_autocast,
    "two consumers": lambda x, w: F.linear(x, w) + (x @ w).tanh().sum(),
}


@pytest.mark.parametrize("name", CONSUMERS)
def test_the_noisy_tensor_is_not_held(name):
    ours, plain = compare(made_then(noisy, CONSUMERS[name]))
    copies = UNIT // 2 if name == "autocast" else UNIT  # autocast's copy takes its place
    assert plain.held - ours.held == copies


def changed_through_a_view(h):
    h.t()[1:3].mul_(3)
    return h


MAKERS = {
    "saves its result": lambda a: a.tanh().exp(),
    "dropout in place": lambda a: F.dropout(a * 2, 0.3, inplace=True),
    "gelu of dropout": lambda a: F.gelu(F.dropout(a, 0.3)).exp(),
    "in place": lambda a: (a + 1).mul_(torch.rand_like(a)).add_(a),
    "in place through a view": lambda a: changed_through_a_view(a * 2),
    "foreach": lambda a: torch._foreach_mul([a, noisy(a)], 2.0)[1],
    "another type": lambda a: noisy(a.double()).float(),
    "a layer with noise": lambda a: LAYER(a).tanh(),
}
LAYER = recoup.weight_noise(nn.Linear(SIZE, SIZE), std=0.1)


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_saved_within_is_not_held(name):
    ours, _ = compare(made_then(MAKERS[name]))
    nothing_saved, _ = compare(made_then(lambda a: a + 1))
    assert ours.held <= nothing_saved.held + STATE


def test_a_state_is_kept_where_it_does_not_follow_from_the_last():
    recorder, aten, own = Draws(), torch.ops.aten, torch.Generator().manual_seed(4)
    torch.manual_seed(1)
    ran = [recorder.first(aten.rand.default, ([3],), {}) for _ in range(2)]
    torch.rand(1)
    ran.append(recorder.first(aten.rand.default, ([3],), {}))
    ran.append(recorder.first(aten.rand.generator, ([3],), {"generator": own}))
    assert [type(draw.before) for _, draw in ran] == [
        int, type(None), torch.Tensor, int
    ]  # fmt: skip
    no_draw = recorder.first(aten.native_dropout.default, (ran[0][0], 0.5, False), {})
    assert no_draw[1] is None


# -- any code, anywhere ---------------------------------------------------------------------------


def by_slices(a):
    out = torch.empty_like(a)
    for row in range(len(a)):
        out[row] = a[row] * row
    return out


def filled_behind_our_back(a):
    out = torch.empty(SIZE, SIZE)
    out.numpy()[...] = 3.0
    return a * out.mul_(2)


def with_no_grad(a):
    with torch.no_grad():
        mask = torch.rand_like(a) > 0.5
    return a * mask


def through_complex(a):
    z = torch.fft.fft(a)
    return (z * z.conj()).real + torch.view_as_real(z)[..., 1] + z.conj().imag


def moved_to_other_memory(a):
    h = a * 2
    h.detach().set_()
    return (h * 1).exp()


def with_generator(a):
    generator = torch.Generator().manual_seed(7)
    torch.rand(5, generator=generator)
    first = torch.randn(a.shape, generator=generator) + torch.randn_like(a)
    return a + first * torch.empty_like(a).bernoulli_(0.5, generator=generator)


def with_a_gradient(a):
    h = (a * torch.rand_like(a)).tanh()
    (grad,) = torch.autograd.grad(h.square().sum(), a, create_graph=True)
    return (h * grad).sin()


def views_of_every_kind(w):
    parts = (
        w.t()[1:4],
        torch.as_strided(w, (3, 2), (2, 5), 4),
        w.view(torch.int32).view(torch.float32)[2],
        w.diagonal(),
        w.expand(2, SIZE, SIZE),
        torch.view_as_complex(w.view(SIZE, -1, 2)).abs(),
    )
    return w * sum((part * part).mean() for part in parts)


class Exp(torch.autograd.Function):
    """Saves what it is given and what it returns."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y * (x == x)


CODE = {
    "data-dependent shapes": lambda a: a[(a > 0.5).any(1).nonzero()[:, 0]].exp(),
    "item": lambda a: a * (a.abs().max().item() + len(a[a > 0])),
    "constants": lambda a: a * torch.tensor(2.0) + torch.arange(SIZE),
    "slices of fresh memory": by_slices,
    "memory filled behind our back": filled_behind_our_back,
    "views": views_of_every_kind,
    "no_grad": with_no_grad,
    "complex": through_complex,
    "other memory": moved_to_other_memory,
    "a gradient": with_a_gradient,
    "autograd.Function": lambda a: Exp.apply(a * 2),
    "sparse": lambda a: torch.sparse.mm((a * 1).to_sparse(), a.exp()),
    "linalg": lambda a: torch.linalg.svd(a)[1][:, None] * a,
    "seeded within": lambda a: (torch.rand(3), torch.manual_seed(2), noisy(a))[-1],
    "vmap": torch.vmap(lambda row: row.tanh() * row),
    "bool index": lambda a: a.masked_fill(a > 0.2, 0.0).sort(dim=1)[0],
    "rand": lambda a: a * torch.rand(a.shape) + torch.randn(a.shape, device="cpu"),
    "randint": lambda a: a * torch.randint(5, a.shape) * torch.randint_like(a, 2, 5),
    "randperm": lambda a: a[torch.randperm(SIZE)],
    "normal_": lambda a: a + torch.empty_like(a).normal_(),
    "bernoulli": lambda a: a * torch.bernoulli(a.detach().sigmoid()),
    "multinomial": lambda a: a[:, torch.multinomial(torch.ones(SIZE), SIZE)],
    "dropout": lambda a: F.dropout(torch.native_dropout(a, 0.4, True)[0], 0.4),
    "rrelu": lambda a: F.rrelu(a, training=True),
    "a generator": with_generator,
    **{f"checkpoint, {name}": partial(call, lambda a: noisy(a).tanh())
       for name, call in CHECKPOINTS.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", CODE)
def test_code_within(name):
    """Others draw before the block, between it and backward, and the stream goes on after it."""
    make = CODE[name]
    use = lambda x, w: (0.1 * w * w.flip(0)).exp() * x.sum()  # noqa: E731
    compare(made_then(lambda a: make(a * 1), use))


def nested(context, a, x):
    block = context()
    with block:
        h = x * 2
        with block:
            w = noisy(a).tanh()
        h = F.linear(h, w).tanh()
    with block:
        u = w.exp()
    return F.linear(h, w) @ u


def many(context, a, x):
    weights = []
    for _ in range(10):
        with context():
            weights.append(noisy(a))
    for place in (3, 1, 4, 0, 5, 2, 3, 1, 0, 0):
        x = F.linear(x, weights.pop(place))
    return x


def of_another(context, a, x):
    with context():
        w = noisy(a)
    with context():
        h = F.gelu(F.linear(x, w))
    return h @ a


def long_chain(context, a, x):
    """Asked as a whole, it would be made again as a whole, by a recursion as deep as it is long."""
    for _ in range(150):
        with context():
            x = (x + 1).sin()
    return x @ a


def changed_afterwards(context, a, x):
    with context():
        w, u = noisy(a), noisy(a)
    w.mul_(2)
    used = x @ u
    return F.linear(x, w) + used


def changed_between_two_saves(context, a, x):
    """Plain torch minds only if backward comes to the first of them."""
    with context():
        h = a * 2
        h.sin()
        h.add_(1)
        w = h.sin()
    return F.linear(x, w)


def taken_and_changed_there(context, a, x):
    with context():
        y = (x * 1).sin()
    z = y * 2
    y.add_(1)  # nobody saved it
    return z @ a


def outside_changed_within(context, a, x):
    outside, total = x * 1, torch.ones(SIZE)
    with context():
        before = outside + total
        outside.add_(a[:8])
        total.add_(outside.detach().sum(0))
        torch.add(total, 1, out=total)
        w = (before + outside + total).exp()
    return F.linear(w, a) + outside + total


def somebodys_function(context, a, x):
    with context():
        w = noisy(a)
    return F.linear(x, Exp.apply(w))


def autocast_around(context, a, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with context():
            w = torch.mm(a, a.t())
        return F.linear(x, w)


def in_a_checkpoint(call, context, a, x):
    with context():
        v = noisy(a)

    def fn(x, a, v):
        h = x * 2
        with context():
            w = noisy(a).tanh()
        return F.linear(h.sin(), w) @ w * v[0]

    with context():
        y = call(fn, x * 1, a, v)
    return y @ call(fn, a, a, v)


def on_cpu(where, context, a, x):
    with save_on_cpu() if where == "around" else nullcontext():
        with context(), save_on_cpu() if where == "within" else nullcontext():
            w = noisy(a).tanh()
        with save_on_cpu() if where == "after" else nullcontext():
            return F.linear(x, w).exp()


# What they may hold more than the plain code.
STEPS = {
    "nested": (nested, -UNIT),
    "many": (many, -10 * UNIT + 10 * STATE),
    "of another": (of_another, -UNIT),
    "long chain": (long_chain, UNIT),
    "changed afterwards": (changed_afterwards, -UNIT + STATE),
    "changed between two saves": (changed_between_two_saves, 0),
    "taken and changed there": (taken_and_changed_there, 0),
    "outside changed within": (outside_changed_within, UNIT),
    "somebody's function": (somebodys_function, STATE),
    "autocast": (autocast_around, -UNIT // 2),
    **{f"in {name}": (partial(in_a_checkpoint, call), UNIT) for name, call in CHECKPOINTS.items()},
    **{f"on cpu, {where}": (partial(on_cpu, where), 0) for where in ("around", "after", "within")},
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    body, more = STEPS[name]
    ours, plain = compare(body, partial(torch.autocast, "cpu", dtype=torch.bfloat16))
    assert ours.held <= plain.held + more


LAYERS = {
    "LSTM": lambda: nn.LSTM(SIZE, SIZE, 2, dropout=0.2),
    "GRU": lambda: nn.GRU(SIZE, SIZE, bidirectional=True),
    "attention": lambda: nn.TransformerEncoderLayer(SIZE, 4, SIZE, dropout=0.2),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(SIZE, SIZE)),
    "weight dropout": lambda: recoup.weight_dropout(nn.LSTM(SIZE, SIZE), "weight_hh_l0", p=0.5),
    "batch norm": lambda: nn.BatchNorm1d(2),
    "batch norm, evaluated": lambda: nn.BatchNorm1d(2).eval(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_within(name):
    """Statistics count once, and another forward before backward does not disturb."""
    torch.manual_seed(1)
    layer = LAYERS[name]()

    def run(context):
        module = copy.deepcopy(layer)
        _, x = leaves()
        x = x.detach().view(4, 2, SIZE).requires_grad_()
        torch.manual_seed(2)
        with context():
            h = module(x)
            h = h[0] if isinstance(h, tuple) else h
            with torch.no_grad():
                module(x.detach())
        with torch.no_grad():
            module.train()(x * 3)
        h.exp().square().sum().backward()
        found = [parameter.grad for parameter in module.parameters()]
        return [x.grad, *found, *module.buffers(), torch.get_rng_state()]

    assert_same(run(recomputing), run(nullcontext))


def test_gradients_of_every_kind():
    a = leaves()[0][:4, :4].detach().double().requires_grad_()

    def fn(a):
        with recomputing():
            h = (a @ a).tanh()
        return h * a + h.t() @ h

    assert torch.autograd.gradcheck(fn, (a,))
    assert torch.autograd.gradgradcheck(fn, (a,))
    with recomputing():
        w = noisy(a).tanh()
    loss = F.linear(a, w).square().sum()
    first = torch.autograd.grad(loss, a, retain_graph=True)
    torch.manual_seed(0)
    assert_same(torch.autograd.grad(loss, a, retain_graph=True), first)


# -- never silently wrong -------------------------------------------------------------------------

_library = torch.library.Library("recoup_test", "FRAGMENT")
_calls = []


def clock(x):
    _calls.append(x)
    return x + len(_calls)


def greedy(x):
    _calls.append(x)
    return x + torch.rand(len(_calls)).sum()


for _fn in (clock, greedy):
    _library.define(f"{_fn.__name__}(Tensor x) -> Tensor")
    _library.impl(_fn.__name__, _fn, "CompositeExplicitAutograd")


def block(make, then=lambda a, w: None):
    def step(a):
        with recomputing():
            w = make(a)
        loss = F.linear(a[:3].detach(), w).sum() + (w * w).sum()
        with torch.no_grad():
            then(a, w)
        loss.backward()

    return step


def fused(a, w):
    a.grad = torch.ones_like(a)
    torch.optim.AdamW([a], lr=0.1, fused=True).step()


def one_of_two_branches(a):
    p = (a * torch.ops.recoup_test.clock(a.detach())).tanh()
    q = (a * a.detach()).exp()
    return p + q


def with_another_made_of_it(a):
    h = a + torch.ops.recoup_test.clock(a.detach())
    made[:] = [h + 1]
    return h


def asked_within(a):
    h = (a * torch.ops.recoup_test.clock(a.detach())).tanh()
    torch.autograd.grad(h.sum(), a)
    return h


def changed_unseen(a):
    h = a.exp()
    h.add_(1)
    return h


def fails(a):
    made.append(noisy(a).exp())
    raise ZeroDivisionError


def after_an_exception(a):
    with pytest.raises(ZeroDivisionError), recomputing():
        fails(a)
    assert nothing_of_ours()
    assert type(made[-1]) is torch.Tensor
    made.pop().sin().sum().backward()


made = []
HERE = r"the block at .*test_recomputing\.py:\d+"
OTHER = HERE + r" again, and .* returned other numbers than in forward.*off by.*compare=False"
WRONG = {
    "outside": (block(noisy, lambda a, w: a.add_(1)), ChangedError, HERE),
    "the value": (block(noisy, lambda a, w: w.mul_(2)), ChangedError, HERE),
    "within": (block(changed_unseen), ChangedError, "changed in place"),
    "an exception": (after_an_exception, ReplayError, "made before it raised an exception"),
    "fused": (block(lambda a: a * 2, fused), ReplayError, OTHER),
    "numpy": (block(lambda a: a * 2, lambda a, w: a.numpy().fill(3)), ReplayError, OTHER),
    "clock": (block(lambda a: torch.ops.recoup_test.clock(a.detach()) * a), ReplayError, OTHER),
    "a mask": (block(lambda a: (torch.ops.recoup_test.clock(a.detach()) > 2) * a), ReplayError,
               OTHER),
    "a branch": (block(one_of_two_branches), ReplayError, OTHER),
    "made of it": (block(with_another_made_of_it), ReplayError, OTHER),
    "within it": (block(asked_within), ReplayError, OTHER),
    "draws": (block(lambda a: torch.ops.recoup_test.greedy(a.detach()) * a), ReplayError,
              "drew other numbers in backward"),
    "sparse": (block(lambda a: a.detach().to_sparse().mul_(2)), ReplayError, "outside of the bl"),
    "func": (torch.func.grad(lambda a: block(torch.sin)(a)), RecoupError, r"of torch\.func"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_right_is_an_error(name):
    step, error, match = WRONG[name]
    _calls.clear()
    with pytest.raises(error, match=match):
        step(leaves()[0])
    assert nothing_of_ours()


def test_a_comparison_can_be_left_out():
    a, _ = leaves()
    with recomputing(compare=False):
        w = torch.ops.recoup_test.clock(a.detach()) * a
    w.sum().backward()
    assert a.grad is not None


# -- threads and devices --------------------------------------------------------------------------


def in_threads(work, count):
    wrong = []

    def run(place):
        try:
            wrong.extend([place] if not work(place) else [])
        except Exception as error:  # noqa: BLE001
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_threads_share_a_graph():
    a, x = leaves()
    with recomputing():
        w = noisy(a).tanh()
    losses = [(F.linear(x, w) * (1 + place)).sum() for place in range(8)]
    (want,) = torch.autograd.grad(losses[0], a, retain_graph=True)

    def work(place):
        found = [torch.autograd.grad(losses[place], a, retain_graph=True)[0] for _ in range(25)]
        return all(torch.allclose(each, want * (1 + place), rtol=1e-4) for each in found)

    in_threads(work, 8)


@pytest.mark.parametrize("others_draw", [False, True])
def test_threads_with_blocks_of_their_own(others_draw):
    """From a default generator that they all draw from; one of them outside of any block."""
    one, is_done = recomputing(), threading.Event()

    def work(place):
        if others_draw and place == 0:
            while not is_done.wait(0.0001):
                torch.rand(64)
            return True
        a, _ = leaves()
        for _ in range(25):
            with one:
                mask = F.dropout(torch.rand_like(a), 0.5)
                if not others_draw:  # it takes no generator
                    mask = mask * torch.native_dropout(torch.ones_like(a), 0.5, True)[0]
            want = mask.clone()
            (found,) = torch.autograd.grad((a * mask).sum(), a)
            if not torch.equal(found, want):
                return False
        is_done.set()
        return True

    in_threads(work, 3)


def test_draws_on_any_device(monkeypatch):
    """By the module that torch has for it, whose generator is as it was afterwards."""
    generator = torch.Generator().manual_seed(4)
    module = SimpleNamespace(
        get_rng_state=lambda device: generator.get_state(),
        set_rng_state=lambda state, device: generator.set_state(state),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)

    class Drawing:
        _schema = SimpleNamespace(arguments=[])
        overloadpacket = SimpleNamespace(overloads=list)

        def __call__(self, device):
            return torch.rand(5, generator=generator)

    func, kwargs = Drawing(), {"device": torch.device("xpu", 0)}
    recorder, replayer = Draws(), Draws()
    ran = [recorder.first(func, (), kwargs) for _ in range(3)]
    state = generator.get_state()
    for result, draw in ran:
        assert torch.equal(replayer.again(func, (), kwargs, draw), result)
    assert torch.equal(generator.get_state(), state)
    assert [draw.before is None for _, draw in ran] == [False, True, True]
    monkeypatch.undo()
    with pytest.raises(ReplayError, match="draws on vulkan, whose torch module has no"):
        recorder.first(func, (), {"device": torch.device("vulkan")})


@pytest.mark.cuda
def test_draws_on_cuda():
    a = torch.ones(64, 64, device="cuda", requires_grad=True)
    generator = torch.Generator("cuda").manual_seed(1)
    with recomputing():
        mask = F.dropout(torch.ones_like(a), 0.5) * torch.rand(64, 64, device="cuda")
        mask = mask + torch.randn(64, 64, device="cuda", generator=generator) + torch.randn_like(a)
    want = mask.clone()
    torch.rand(3, device="cuda")
    state = torch.cuda.get_rng_state()
    (got,) = torch.autograd.grad((a * mask).sum(), a)
    assert torch.equal(got, want)
    assert torch.equal(torch.cuda.get_rng_state(), state)


# -- a good guest ---------------------------------------------------------------------------------


def test_tensors_stay_what_they_are():
    with torch.no_grad(), recomputing():
        assert nothing_of_ours()
        assert type(leaves()[0] + 1) is torch.Tensor
    with recomputing():
        parameter, leaf = nn.Parameter(torch.randn(3)), torch.randn(3).requires_grad_()
        values = [torch.randn(3) for _ in range(20)]
    assert (type(parameter), type(leaf)) == (nn.Parameter, torch.Tensor)
    with recomputing():
        scalar = torch.randn(())
    assert f"{scalar:.3f}" == f"{scalar.item():.3f}"
    values.append(values[0])
    for copied in (copy.deepcopy(values), pickle.loads(pickle.dumps(values))):
        assert {type(each) for each in copied} == {torch.Tensor}
        assert_same(copied, values)
        assert copied[0] is copied[-1]


def test_nothing_is_left_without_the_collector():
    a, x = leaves()
    layer, gone = nn.BatchNorm1d(SIZE), []
    with no_collector(), StorageTracker() as tracker:
        for step in range(6):
            with recomputing():
                w = noisy(a).tanh()
                with recomputing():
                    h = layer(w).exp()
            loss = F.linear(x, w).sum() + (h * w).sum()
            gone += [weakref.ref(w._recoup_source), weakref.ref(h._recoup_source)]
            if step % 2:
                loss.backward()
                a.grad = x.grad = None
            del w, h, loss
            layer.zero_grad()
        with pytest.raises(ZeroDivisionError), recomputing():
            fails(a)
        made.clear()
        assert all(ref() is None for ref in gone)
        assert tracker.current_bytes == 0


def test_memory_falls_as_the_block_runs_and_runs_again():
    """At most two of ten states in a row are alive, in forward and when they are made again."""
    a, _ = leaves()
    with StorageTracker() as tracker:
        with recomputing():
            h = a.detach()
            for _ in range(10):
                h = torch.randn_like(h) + h
            y = a * h
        del h
        loss = y.sum()
        del y
        assert tracker.peak_bytes <= 3 * UNIT + 3 * 8192
        tracker.peak_bytes = tracker.current_bytes
        loss.backward()
    assert tracker.peak_bytes <= 5 * UNIT + 3 * 8192


def test_early_stop_of_a_checkpoint():
    """The recomputation ends in the midst of a block, or in its end."""

    def fn(x, a):
        with recomputing():
            w = noisy(a)
            w = w * x.sum()
        return w.exp().sum()

    a, x = leaves()
    torch_checkpoint(fn, x * 1, a, use_reentrant=False).backward()
    assert nothing_of_ours()
    assert a.grad is not None


@pytest.mark.parametrize("is_nested", [False, True])
def test_hooks_around_see_what_is_kept(is_nested):
    """And may give it back in another layout."""
    seen = []

    def see(tensor):
        seen.append(tensor.shape)
        return tensor if is_nested or tensor.dim() != 2 else tensor.t().contiguous()

    def back(tensor):
        return tensor if is_nested or tensor.dim() != 2 else tensor.t()

    def body(context, a, x):
        with saved_tensors_hooks(see, back):
            with context(), context() if is_nested else nullcontext():
                w = noisy(a).tanh() * x.sum()
            return F.linear(x, w)

    ours = Ran(body, recomputing)
    assert (8, SIZE) in seen  # what `linear` saves of its input
    assert seen.count((SIZE, SIZE)) == 1 + is_nested  # `a`, once for each block that takes it
    assert torch.allclose(ours.left[1], Ran(body, nullcontext).left[1])


def test_hooks_that_are_disabled():
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
        recomputing(),
    ):
        leaves()[0].exp()
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled(fresh_compiler, fullgraph):
    def body(context, a, x):
        h = x * 2
        with context():
            w = (a * a).tanh()
        return F.linear(h, w)

    compiled = torch.compile(partial(body, recomputing), backend="aot_eager", fullgraph=fullgraph)
    for _ in range(2):
        found = [torch.autograd.grad(fn(*given).sum(), given) for fn, given in (
            (compiled, leaves()), (partial(body, nullcontext), leaves()))]  # fmt: skip
        assert all(map(torch.allclose, *found))
        assert nothing_of_ours()
    within = torch.compile(lambda a: noisy(a).tanh(), backend="aot_eager")
    within(leaves()[0])
    compare(made_then(lambda a: within(a) * 2))


WAYS_PAST_THE_VERSION = {
    "unsafe_chunk": lambda y: torch.unsafe_chunk(y, 2, 1)[0].detach().mul_(3.0),
    "unsafe_split": lambda y: y.unsafe_split(2, 1)[0].detach().mul_(3.0),
    "data": lambda y: y.data.mul_(3.0),
    "numpy": lambda y: y.detach().numpy().__imul__(3.0),
    "__array__": lambda y: y.detach().__array__().__imul__(3.0),
    "dlpack": lambda y: torch.from_dlpack(y.detach()).mul_(3.0),
    "storage": lambda y: y.new_empty(0).set_(y.storage()).detach().mul_(3.0),
}


@pytest.mark.parametrize("way", WAYS_PAST_THE_VERSION)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_value_changed_through_memory_with_a_version_of_its_own(way):
    """Before it is saved: it is kept as it is then."""

    def body(context, a, x):
        with context():
            y = a.sin() @ a.sin()
        WAYS_PAST_THE_VERSION[way](y)
        return (y * y).sin() * x.sum()

    compare(body)
