"""Code for blocks of `recomputing`, and what a step of it leaves and holds beside plain code."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup._core.storage_tracking import StorageTracker
from tests.oracle import hooks_in_force
from tests.zoo import SavesTwice

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
    (ours, held), (plain, held_plainly) = ran(body, recoup.recomputing), ran(body, nullcontext)
    assert ours[1].abs().sum() > 0
    assert_same(ours, plain)
    return held, held_plainly


def made_then(make, use=F.linear):
    def body(context, a, x):
        with context():
            w = make(a)
        return use(x, w)

    return body


def by_slices(a):
    out = torch.empty_like(a)
    for row in range(len(a)):
        out[row] = a[row] * row
    return out


def with_generator(a):
    generator = torch.Generator().manual_seed(7)
    torch.rand(5, generator=generator)
    first = torch.randn(a.shape, generator=generator) + torch.randn_like(a)
    return a + first * torch.empty_like(a).bernoulli_(0.5, generator=generator)


def views(w):
    parts = w.t()[1:4], torch.as_strided(w, (3, 2), (2, 5), 4), w.view(torch.int32).view(w.dtype)
    return w * sum((part * part).mean() for part in (*parts, w.expand(2, SIZE, SIZE)))


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


def changed_between_two_saves(context, a, x):
    """Plain torch minds only if backward comes to the first of them."""
    with context():
        h = a * 2
        h.sin()
        h.add_(1)
        w = h.sin()
    return F.linear(x, w)


def changed_afterwards(context, a, x):
    with context():
        w, u = noisy(a), noisy(a)
    w.mul_(2)
    used = x @ u
    return F.linear(x, w) + used


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
    """Through memory with a version of its own: the value is kept as it is then."""

    def body(context, a, x):
        with context():
            y = a.sin() @ a.sin()
        change(y)
        return (y * y).sin() * x.sum()

    return body


def autocast_around(context, a, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return made_then(lambda a: torch.mm(a, a.t()))(context, a, x)


USES = {
    "a view": lambda x, w: x @ w.view(-1).view(SIZE, SIZE),
    # Whose copy takes its place.
    "autocast": torch.autocast("cpu", dtype=torch.bfloat16)(lambda x, w: F.linear(x, w)),
    "two": lambda x, w: F.linear(x, w) + (x @ w).tanh().sum(),
}
LAYER = recoup.weight_noise(nn.Linear(SIZE, SIZE), std=0.1)
NOT_HELD = {  # what the block makes, and operators within save
    "its result": lambda a: a.tanh().exp(),
    "dropout in place": lambda a: F.dropout(a * 2, 0.3, inplace=True),
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
    "complex": lambda a: ((z := torch.fft.fft(a)) * z.conj()).real + z.conj().imag,
    "rand": lambda a: a * torch.rand(a.shape) + torch.randn(a.shape, device="cpu"),
    "multinomial": lambda a: a[:, torch.multinomial(torch.ones(SIZE), SIZE)],
    "as_strided_": lambda a: a.sin().as_strided_((2, 3), (1, 4), 1),
    "memory filled unseen": lambda a: (
        out := torch.empty(SIZE, SIZE),
        out.numpy().fill(3.0),
        a * out.mul_(2),
    )[-1],
    "views": views,
    "no_grad": lambda a: a * torch.no_grad()(torch.bernoulli)(a.sigmoid()),
    "other memory": lambda a: (((h := a * 2), h.detach().set_())[0] * 1).exp(),
    "a function": lambda a: SavesTwice.apply(a * 2),
    "sparse": lambda a: torch.sparse.mm((a * 1).to_sparse(), a.exp()),
    "seeded within": lambda a: (torch.rand(3), torch.manual_seed(2), noisy(a))[-1],
    "dropout": lambda a: F.dropout(torch.native_dropout(a, 0.4, True)[0], 0.4),
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
    "changed between two saves": (changed_between_two_saves, 0),
    "changed afterwards": (changed_afterwards, -UNIT + STATE),
    "outside changed within": (outside_changed_within, UNIT),
    "somebody's function": (made_then(noisy, lambda x, w: F.linear(x, SavesTwice.apply(w))), STATE),
    "autocast around": (autocast_around, -UNIT // 2),
    **{f"in {name}": (partial(in_a_checkpoint, call), UNIT) for name, call in CHECKPOINTS.items()},
    **{f"past its version, {n}": (past_its_version(way), UNIT) for n, way in enumerate(WAYS)},
}  # fmt: skip
