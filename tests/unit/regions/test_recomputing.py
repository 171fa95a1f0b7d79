"""`recomputing`: the plain code is the oracle, for gradients, statistics, stream and bytes."""

from __future__ import annotations

import copy
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import ChangedError, RecoupError, ReplayError
from tests.alive import no_collector
from tests.oracle import Operators, hooks_in_force

recomputing, aten = recoup.recomputing, torch.ops.aten
SIZE = 48
UNIT = SIZE * SIZE * 4  # one noisy weight
STATE = 5056  # of a generator
CHECKPOINTS = {
    "torch": partial(torch_checkpoint, use_reentrant=False),
    "reentrant": partial(torch_checkpoint, use_reentrant=True),
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


def ran(body, context):
    """What a step leaves, and the bytes that it holds between its passes."""
    a, x = leaves()
    torch.manual_seed(5)
    torch.rand(3)
    with StorageTracker() as tracker:
        loss = body(context, a, x).float().square().mean()
        held = tracker.current_bytes
    assert nothing_of_ours()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which must not matter in backward
        torch.rand(7)
        loss.backward()
    return [loss.detach(), a.grad, x.grad, torch.get_rng_state()], held


def assert_same(got, want):
    for ours, plain in zip(got, want, strict=True):
        assert (ours is None) is (plain is None)
        assert ours is None or torch.equal(ours, plain)


def compare(body):
    """Run `body` plainly and in blocks, hold the two against each other; return what they held."""
    (ours, held), (plain, held_plainly) = ran(body, recomputing), ran(body, nullcontext)
    assert ours[1].abs().sum() > 0
    assert_same(ours, plain)
    return held, held_plainly


def made_then(make, use=F.linear):
    def body(context, a, x):
        with context():
            w = make(a)
        return use(x, w)

    return body


# -- code in a block, and around it ----------------------------------------------------------------


def by_slices(a):
    out = torch.empty_like(a)
    for row in range(len(a)):
        out[row] = a[row] * row
    return out


def filled_unseen(a):
    out = torch.empty(SIZE, SIZE)
    out.numpy()[...] = 3.0
    return a * out.mul_(2)


def with_generator(a):
    generator = torch.Generator().manual_seed(7)
    torch.rand(5, generator=generator)
    first = torch.randn(a.shape, generator=generator) + torch.randn_like(a)
    return a + first * torch.empty_like(a).bernoulli_(0.5, generator=generator)


def views(w):
    parts = w.t()[1:4], torch.as_strided(w, (3, 2), (2, 5), 4), w.expand(2, SIZE, SIZE)
    more = w.view(torch.int32).view(torch.float32)[2], torch.view_as_complex(w.view(SIZE, -1, 2))
    return w * sum((part * part).abs().mean() for part in (*parts, *more))


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


def of_another(context, a, x):
    with context():
        w, y = noisy(a), a * 2
    y.add_(1)  # before anything has saved it
    with context():
        h = F.gelu(F.linear(x, w)) @ y.sin()
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


def outside_changed_within(context, a, x):
    outside, total, part = x * 1, torch.ones(SIZE), torch.ones(SIZE)
    with context():
        part[:9].zero_()
        before = (outside + total) * part
        outside.add_(a[:8])
        total.add_(outside.detach().sum(0))
        torch.add(total, 1, out=total)
        w = (before + outside + total).exp()
    return F.linear(w, a) + outside + total


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


def past_its_version(change):
    """A change through memory with a version of its own: the value is kept as it is then."""

    def body(context, a, x):
        with context():
            y = a.sin() @ a.sin()
        change(y)
        return (y * y).sin() * x.sum()

    return body


def under_autocast(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, w)


def autocast_around(context, a, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return made_then(lambda a: torch.mm(a, a.t()))(context, a, x)


USES = {
    "times": lambda x, w: w[:8] * x,
    "a view": lambda x, w: x @ w.view(-1).view(SIZE, SIZE),
    "autocast": under_autocast,  # whose copy takes its place
    "two": lambda x, w: F.linear(x, w) + (x @ w).tanh().sum(),
}
LAYER = recoup.weight_noise(nn.Linear(SIZE, SIZE), std=0.1)
NOT_HELD = {  # what the block makes, and operators within save
    "its result": lambda a: a.tanh().exp(),
    "dropout in place": lambda a: F.dropout(a * 2, 0.3, inplace=True),
    "gelu of dropout": lambda a: F.gelu(F.dropout(a, 0.3)).exp(),
    "in place": lambda a: (a + 1).mul_(torch.rand_like(a)).add_(a),
    "through a view": lambda a: ((h := a * 2), h.t()[1:3].mul_(3))[0],
    "foreach": lambda a: torch._foreach_mul([a, noisy(a)], 2.0)[1],
    "another type": lambda a: noisy(a.double()).float(),
    "a layer with noise": lambda a: LAYER(a).tanh(),
}
CODE = {
    "data-dependent shapes": lambda a: a[(a > 0.5).any(1).nonzero()[:, 0]].exp(),
    "item": lambda a: a * (a.abs().max().item() + len(a[a > 0])),
    "slices of fresh memory": by_slices,
    "memory filled unseen": filled_unseen,
    "views": views,
    "no_grad": lambda a: a * torch.no_grad()(torch.bernoulli)(a.sigmoid()),
    "complex": lambda a: ((z := torch.fft.fft(a)) * z.conj()).real + z.conj().imag,
    "other memory": lambda a: (((h := a * 2), h.detach().set_())[0] * 1).exp(),
    "a function": lambda a: Exp.apply(a * 2),
    "sparse": lambda a: torch.sparse.mm((a * 1).to_sparse(), a.exp()),
    "seeded within": lambda a: (torch.rand(3), torch.manual_seed(2), noisy(a))[-1],
    "rand": lambda a: a * torch.rand(a.shape) + torch.randn(a.shape, device="cpu"),
    "randperm": lambda a: a[torch.randperm(SIZE)],
    "normal_": lambda a: a + torch.empty_like(a).normal_(),
    "multinomial": lambda a: a[:, torch.multinomial(torch.ones(SIZE), SIZE)],
    "dropout": lambda a: F.dropout(torch.native_dropout(a, 0.4, True)[0], 0.4),
    "rrelu": lambda a: F.rrelu(a, training=True),
    "t_": lambda a: a.sin().t_(),
    "transpose_": lambda a: a.sin().transpose_(0, 1),
    "unsqueeze_": lambda a: a.sin().unsqueeze_(1),
    "as_strided_": lambda a: a.sin().as_strided_((2, 3), (1, 4), 1),
    "a generator": with_generator,
    **{name: partial(call, lambda a: noisy(a).tanh()) for name, call in CHECKPOINTS.items()},
}
WAYS = (
    lambda y: y.unsafe_split(2, 1)[0].detach().mul_(3.0),
    lambda y: y.detach().numpy().__imul__(3.0),
    lambda y: torch.from_dlpack(y.detach()).mul_(3.0),
    lambda y: y.new_empty(0).set_(y.storage()).detach().mul_(3.0),
)
STEPS = {  # with the bytes that they may hold more than the plain code
    **{f"used, {name}": (made_then(noisy, use), -UNIT // (1 + (name == "autocast")))
       for name, use in USES.items()},
    **{f"not held, {name}": (made_then(make), None) for name, make in NOT_HELD.items()},
    **{f"code, {name}": (made_then(lambda a, make=make: make(a * 1),
                                   lambda x, w: (0.1 * w * w.flip(0)).exp() * x.sum()), 9 * UNIT)
       for name, make in CODE.items()},
    "nested": (nested, -UNIT),
    "of another": (of_another, -2 * UNIT),
    "long chain": (long_chain, UNIT),
    "changed afterwards": (changed_afterwards, -UNIT + STATE),
    "changed between two saves": (changed_between_two_saves, 0),
    "outside changed within": (outside_changed_within, UNIT),
    "somebody's function": (made_then(noisy, lambda x, w: F.linear(x, Exp.apply(w))), STATE),
    "autocast around": (autocast_around, -UNIT // 2),
    **{f"in {name}": (partial(in_a_checkpoint, call), UNIT) for name, call in CHECKPOINTS.items()},
    **{f"past its version, {n}": (past_its_version(way), UNIT) for n, way in enumerate(WAYS)},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", STEPS)
def test_steps(name):
    """Others draw before the block, between it and backward, and the stream goes on after it."""
    body, more = STEPS[name]
    held, held_plainly = compare(body)
    if more is None:
        held_plainly, more = ran(made_then(lambda a: a + 1), recomputing)[1], STATE
    assert held <= held_plainly + more


# -- what runs again -------------------------------------------------------------------------------


AGAIN = [  # what makes the values, how many of them are used, and how often what runs again
    (lambda a: (a.sin(), a.detach().cosh()), 1, {"sin": 1, "cosh": 0}),
    (lambda a: a * (torch.rand(6, 6), torch.rand(6, 6))[1], 1, {"rand": 2}),
    (lambda a: a * (torch.rand(6), torch.manual_seed(1), torch.rand(6))[2], 1, {"rand": 1}),
    (lambda a: a * a.abs().max().item(), 1, {"_local_scalar_dense": 0, "max": 0}),
    (lambda a: (a.sin(), a.cos().mul_(2)), 1, {"mul_": 0}),
    (lambda a: ((w := a.tanh()), w.exp()), 2, {"tanh": 1, "exp": 1}),
    (lambda a: a.exp() @ a.detach(), 0, {"exp": 1, "mm": 1}),  # of which one is backward's own
    (lambda a: a.repeat(2, 1), 0, {"repeat": 0}),
]


@pytest.mark.parametrize(("make", "num_used", "want"), AGAIN)
def test_what_runs_again(make, num_used, want):
    a = torch.randn(6, 6).requires_grad_()
    with recomputing():
        made = make(a)
    made = made if isinstance(made, tuple) else (made,)
    loss = sum(w.sum() for w in made) + sum((w * w).sum() for w in made[:num_used])
    with Operators() as seen:
        loss.backward()
    assert {op: seen.names.count(op) for op in want} == want


def cond(h):
    return torch.ops.higher_order.cond(torch.tensor(True), lambda t: (t * 2,), lambda t: (t,), (h,))


def test_results_that_no_operator_can_make_again():
    a, _ = leaves()
    with recomputing():
        with torch.no_grad():
            noise = torch.rand(SIZE, SIZE)
            (h,) = cond(noise)
        w = (a * h + noise).exp()
    assert type(h) is torch.Tensor
    w.sum().backward()
    assert torch.allclose(a.grad, (a * h + noise).exp() * h)


# -- never silently wrong --------------------------------------------------------------------------

_library = torch.library.Library("recoup_test", "FRAGMENT")
_calls, made = [], []
_FAULTY = {
    "clock": lambda x: _calls.append(x) or x + len(_calls),
    "greedy": lambda x: _calls.append(x) or x + torch.rand(len(_calls)).sum(),
    "fickle": lambda x: _calls.append(x) or x.new_zeros(SIZE + len(_calls) - 1),
}
for _name, _fn in _FAULTY.items():
    _library.define(f"{_name}(Tensor x) -> Tensor")
    _library.impl(_name, _fn, "CompositeExplicitAutograd")
ops = torch.ops.recoup_test


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


def of_a_branch(a):
    """What comes out is not asked for, and the last that was saved is not of this branch."""
    with recomputing():
        w = (a * ops.clock(a.detach())).tanh() + (a * a.detach()).exp()
    w.sum().backward()


def with_another_made_of_it(a):
    h = a + ops.clock(a.detach())
    made[:] = [h + 1]
    return h


def asked_within(a):
    h = (a * ops.clock(a.detach())).tanh()
    torch.autograd.grad(h.sum(), a)
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


def freed_since(a):
    given = a.detach().clone()
    block(lambda a: a * (given * 2).sin(), lambda a, w: given.untyped_storage().resize_(0))(a)


HERE = r"the block at .*test_recomputing\.py:\d+"
OTHER = HERE + r" again, and .* returned other numbers than in forward.*off by.*compare=False"
WRONG = {
    "outside": (block(noisy, lambda a, w: a.add_(1)), ChangedError, HERE),
    "the value": (block(noisy, lambda a, w: w.mul_(2)), ChangedError, HERE),
    "within": (block(lambda a: a.exp().add_(1)), ChangedError, "changed in place"),
    "an exception": (after_an_exception, ReplayError, "made before it raised an exception"),
    "fused": (block(lambda a: a * 2, fused), ReplayError, OTHER),
    "numpy": (block(lambda a: a * 2, lambda a, w: a.numpy().fill(3)), ReplayError, OTHER),
    "clock": (block(lambda a: ops.clock(a.detach()) * a), ReplayError, OTHER),
    "a mask": (block(lambda a: (ops.clock(a.detach()) > 2) * a), ReplayError, OTHER),
    "a branch": (of_a_branch, ReplayError, OTHER),
    "made of it": (block(with_another_made_of_it), ReplayError, OTHER),
    "within it": (block(asked_within), ReplayError, OTHER),
    "draws": (block(lambda a: ops.greedy(a.detach()) * a), ReplayError, "drew other numbers"),
    "a shape": (block(lambda a: ops.fickle(a.detach()) * a), ReplayError,
                "returned another tensor than in the first run"),
    "freed": (freed_since, ReplayError, "was freed before backward"),
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
        w = ops.clock(a.detach()) * a
    w.sum().backward()
    assert a.grad is not None


# -- threads and devices ---------------------------------------------------------------------------


@pytest.mark.parametrize("others_draw", [False, True])
def test_threads_with_blocks_of_their_own(others_draw):
    """From a default generator that they all draw from; one of them outside of any block."""
    one, is_done = recomputing(), []

    def work(place):
        while others_draw and place == 0 and not is_done:
            torch.rand(64)
        a, _ = leaves()
        for _ in range(25):
            with one:
                mask = F.dropout(torch.rand_like(a), 0.5)
                if not others_draw:  # it takes no generator
                    mask = mask * torch.native_dropout(torch.ones_like(a), 0.5, True)[0]
            want = mask.clone()
            (found,) = torch.autograd.grad((a * mask).sum(), a)
            if not torch.equal(found, want):
                return is_done.append(place)
        return is_done.append(place) or True

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(work, range(3)))


# -- a good guest ----------------------------------------------------------------------------------


def test_tensors_stay_what_they_are():
    with torch.no_grad(), recomputing():
        assert nothing_of_ours()
        assert type(leaves()[0] + 1) is torch.Tensor
    with recomputing():
        parameter, leaf = nn.Parameter(torch.randn(3)), torch.randn(3).requires_grad_()
        values, scalar = [torch.randn(3) for _ in range(20)], torch.randn(())
    assert (type(parameter), type(leaf)) == (nn.Parameter, torch.Tensor)
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


@pytest.mark.parametrize("is_nested", [False, True])
def test_hooks_around_see_what_is_kept(is_nested):
    """And may give it back in another layout."""
    seen = []

    def turned(tensor):
        return tensor if is_nested or tensor.dim() != 2 else tensor.t().contiguous()

    def body(context, a, x):
        with saved_tensors_hooks(lambda t: seen.append(t.shape) or turned(t), turned):
            with context(), context() if is_nested else nullcontext():
                w = noisy(a).tanh() * x.sum()
            return F.linear(x, w)

    ours, _ = ran(body, recomputing)
    assert (8, SIZE) in seen  # what `linear` saves of its input
    assert seen.count((SIZE, SIZE)) == 1 + is_nested  # `a`, once for each block that takes it
    assert torch.allclose(ours[1], ran(body, nullcontext)[0][1])


def test_compiled_code_in_a_block(fresh_compiler):
    within = torch.compile(lambda a: noisy(a).tanh(), backend="aot_eager")
    within(leaves()[0])
    compare(made_then(lambda a: within(a) * 2))
