"""Impure code: values that change between the two runs of a region, and what they touch.

A case is a source (where a value is read), a position (what it affects), a way (which region), and
a moment (when it changes). `verdict` runs it beside plain torch with the same events.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from tests.plan_oracle import in_a_row
from tests.zoo import Fn

# --- sources: a value is 0.7 in the first run, or drawn, and another one later --------------------

LEVEL: Any = None

# What a place holds: the first value, the second, and the number that forward makes of it.
VALUES = {
    "number": (0.7, 1.3, float),
    "function": (lambda *_: 0.7, lambda *_: 1.3, lambda f: f()),
    "list": ([0.7], [1.3], lambda items: items[-1]),
    "numpy array": (np.array([0.7]), np.array([1.3]), lambda a: a.max()),
    "tensor": (torch.tensor(0.7), torch.tensor(1.3), lambda t: t),
}


def closed_over(held=None):
    read = lambda _: held  # noqa: E731
    return (lambda _, v: setattr(read.__closure__[0], "cell_contents", v)), read


# Where it is held: how it is put there, and how forward reads it.
HOLDERS = {
    "closure cell": closed_over(),
    "global": (lambda _, v: globals().update(LEVEL=v), lambda _: LEVEL),
    "attribute": (lambda m, v: setattr(m, "held", v), lambda m: m.held),
    "list item": (lambda m, v: m.items.__setitem__(0, v), lambda m: m.items[0]),
    "class attribute": (lambda m, v: setattr(type(m), "shared", v), lambda m: m.shared),
}


def cached(m):
    m.items[0] = m.k.exp().sin() if m.items[0] is None else m.items[0]
    return m.items[0]


def step(optimizer, **options):
    def change(m):
        m.k.grad = torch.ones_like(m.k)
        optimizer([m.k], lr=0.4, **options).step()
        m.k.grad = None

    return change


def double(*arguments):
    return arguments[-1] * 2


# How forward reads a value, and what changes it: nothing, where each read gives another one.
OTHERS: dict[str, tuple[Any, Any]] = {
    "random": (lambda _: random.random(), None),
    "numpy.random": (lambda _: np.random.random(), None),
    "generator": (lambda m: torch.rand(6, generator=m.generator), None),
    "count": (lambda m: next(m.count), None),
    "cached tensor": (cached, None),
    "environment": (
        lambda _: float(os.environ["RECOUP_TEST_LEVEL"]),
        lambda _: os.environ.update(RECOUP_TEST_LEVEL="1.3"),
    ),
    "default dtype": (
        lambda _: torch.empty(1).element_size() * 0.175,
        lambda _: torch.set_default_dtype(torch.float64),
    ),
    "autocast": (
        lambda _: (torch.full((1, 1), 0.7) @ torch.full((1, 1), 1.01)).float()[0],
        lambda _: torch.autocast("cpu", torch.bfloat16),
    ),
}
# What changes a hooked submodule, and a parameter.
SUBMODULE = {
    "hook": lambda m: m.sub.register_forward_hook(double),
    "hook removed": lambda m: m.handle.remove(),
    "pre-hook": lambda m: m.sub.register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
    "global hook": lambda m: torch_modules.register_module_forward_hook(
        lambda called, _, output: output * 2 if called is m.sub else None
    ),
    "forward replaced": lambda m: setattr(m.sub, "forward", double),
    "submodule replaced": lambda m: setattr(m, "sub", nn.Softplus()),
}
PARAMETER = {
    "in place": lambda m: m.k.detach().mul_(2),
    "data": lambda m: m.k.data.mul_(2),
    "data replaced": lambda m: setattr(m.k, "data", m.k.data * 2),
    "numpy view": lambda m: np.multiply(m.k.data.numpy(), 2, out=m.k.data.numpy()),
    "parameter replaced": lambda m: setattr(m, "k", nn.Parameter(m.k.detach() * 2)),
    "requires_grad": lambda m: m.k.requires_grad_(False),
    "SGD": step(torch.optim.SGD),
    "AdamW fused": step(torch.optim.AdamW, fused=True, amsgrad=True),
}
OTHERS |= {name: (lambda m: m.sub(torch.full((6,), 0.7)), c) for name, c in SUBMODULE.items()}
OTHERS |= {name: (lambda m: m.k, change) for name, change in PARAMETER.items()}
OTHERS |= {
    "buffer": (lambda m: m.state, lambda m: m.state.mul_(2)),
    "buffer replaced": (lambda m: m.state, lambda m: setattr(m, "state", m.state * 2)),
    "eval": (lambda m: m.drop(torch.ones(6)), lambda m: m.eval()),
    "dropout's p": (lambda m: m.drop(torch.ones(6)), lambda m: setattr(m.drop, "p", 0.9)),
    "reseeded": (lambda m: m.drop(torch.ones(6)), lambda _: torch.manual_seed(5)),
}

# --- positions: what the value touches ------------------------------------------------------------


def whole(k):
    return int(10 * float(k.detach().flatten()[0] if isinstance(k, torch.Tensor) else k) + 1e-4)


def looked_up(x, k):
    places = torch.arange(len(x))
    places[3] = whole(k) % len(x)
    return F.embedding(places, x).exp()


def permuted(x, k):
    order, at = torch.arange(x.numel()), whole(k) % 20
    order[[at, at + 1]] = order[[at + 1, at]]
    return x.flatten()[order].view_as(x).exp()


POSITIONS = {
    "early": lambda x, k: (x * k).sin().exp().tanh(),
    "last": lambda x, k: x.exp().tanh() * torch.as_tensor(k),
    "parallel branch": lambda x, k: (x * k).sin() * 2.0 + x.exp().tanh(),
    "branch that ends": lambda x, k: ((x * k).sin().exp(), x.exp().tanh()),
    "one row": lambda x, k: torch.where(torch.arange(len(x))[:, None] == 3, x * k, x).exp(),
    "one row looked up": looked_up,
    "two entries permuted": permuted,
    "index": lambda x, k: x.gather(1, ((torch.arange(6) + whole(k) // 2) % 6).expand_as(x)),
    "mask": lambda x, k: x.masked_fill(torch.tensor([n < whole(k) // 3 for n in range(6)]), 0.5),
    "compared": lambda x, k: x.masked_fill(x.detach() > torch.as_tensor(k) - 0.7, 0.5),
    "other operator": lambda x, k: x.tanh() if whole(k) < 9 else x.sigmoid(),
}


ROWS_THAT_DIFFER = ("one row", "one row looked up", "two entries permuted")


class Place(nn.Module):
    """A module that reads a value from a source and uses it in a position."""

    shared = None

    def __init__(self, setup, read, position):
        super().__init__()
        self.setup, self.read, self.position = setup, read, position
        self.k = nn.Parameter(torch.full((6,), 0.7, dtype=torch.float64))
        self.register_buffer("state", torch.full((6,), 0.7, dtype=torch.float64))
        self.sub, self.drop = nn.Identity(), nn.Dropout(0.5)
        self.begin()

    def begin(self):
        self.items, self.count, self.sub = [None], itertools.count(), nn.Identity()
        self.handle = self.sub.register_forward_hook(lambda _, args, output: output * 1.5)
        self.generator = torch.Generator().manual_seed(4)
        os.environ["RECOUP_TEST_LEVEL"] = "0.7"
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(4)
        self.setup(self)

    def forward(self, x):
        return self.position(x, self.read(self))


def join(outputs):
    return sum(t.sin() for t in (outputs if isinstance(outputs, tuple) else [outputs]))


# --- ways, and cases ------------------------------------------------------------------------------


def recomputing(place, x):
    with recoup.recomputing():
        return place(x)


def in_two(place, x):
    found = [place(part) for part in x.chunk(2)]
    joins = isinstance(found[0], tuple)
    return tuple(map(torch.cat, zip(*found, strict=True))) if joins else torch.cat(found)


REGIONS = {
    "plain": lambda place, x: place(x),
    "plain in two": in_two,
    "torch": lambda place, x: torch_checkpoint(place, x, use_reentrant=False),
    "checkpoint": recoup.checkpoint,
    "nested": lambda place, x: recoup.checkpoint(lambda y: recoup.checkpoint(place, y), x),
    "recompute": lambda place, x: recoup.recompute(place)(x),
    "recomputing": recomputing,
    "tiled": lambda place, x: recoup.tiled(place, dim=0, tiles=2)(x),
}
# Each with how often it is drawn.
WAYS = {"checkpoint": 4, "nested": 3, "recompute": 4, "recomputing": 2, "tiled": 3}
WAYS |= {"inputs": 3, "sqrt": 4, "log": 3, "plan": 1}
MOMENTS = {"after forward": 3, "in backward": 2, "between backwards": 1}


def build(way, place, x):
    region = functools.partial(REGIONS[way], place) if way in REGIONS else place
    stages = [nn.Tanh(), region, Fn(join), nn.Tanh(), nn.Tanh(), nn.Tanh()]
    if way in REGIONS:
        return functools.partial(in_a_row, stages)
    if way != "plan":
        return recoup.Sequential(*stages, memory=way)
    model = nn.Sequential(*stages)
    frontier = recoup.plan(model, x, blocks=stages)
    frontier.plan(frontier.least_bytes).apply()
    return model


class Case(NamedTuple):
    source: tuple[str, str]  # a name in OTHERS, or a holder and the kind of value that it holds
    position: str
    way: str
    moment: str

    def __str__(self):
        return ", ".join([" ".join(self.source).strip(), *self[1:]])

    def parts(self):
        name, kind = self.source
        if name in OTHERS:
            return lambda _: None, *OTHERS[name]
        (put, get), (first, second, use) = HOLDERS[name], VALUES[kind]
        return (lambda m: put(m, first)), (lambda m: use(get(m))), (lambda m: put(m, second))


def run(case, way, changes=True):
    setup, read, change = case.parts()
    with ExitStack() as undo:
        undo.enter_context(mock.patch.dict(os.environ))
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        place = Place(setup, read, POSITIONS[case.position])
        leaves = [torch.linspace(-2, 2, 384, dtype=torch.float64)[torch.randperm(384)], place.k]
        x = leaves[0].requires_grad_().view(64, 6)

        def happen():
            context = change(place) if changes and change else None
            if hasattr(context, "__enter__"):  # of a hook or a mode
                undo.enter_context(context)

        try:
            model = build(way, place, x)
            place.begin()
            y = model(x)
            if case.moment == "between backwards":
                y.square().sum().backward(retain_graph=True)
            if case.moment == "in backward":
                y.register_hook(lambda _: happen())
            else:
                happen()
            y.square().sum().backward()
        except (RuntimeError, ValueError) as error:  # of recoup or of torch
            return error
        return [leaf.grad for leaf in leaves]


def same(got, want):
    return all(
        g is w if g is None or w is None else torch.allclose(g, w, rtol=1e-9, atol=1e-11)
        for g, w in zip(got, want, strict=True)
    )


def verdict(case, changes=True):
    """Whether the case was "right", "refused" or "silently wrong", and the error if any."""
    got = run(case, case.way, changes)
    if isinstance(got, Exception):
        return "refused", got
    plain = "plain in two" if case.way == "tiled" else "plain"
    want = run(case, plain, changes)
    if isinstance(want, Exception):  # so has plain torch: then only the true gradient is right
        want = run(case, plain, changes=False)
    return ("right" if same(got, want) else "silently wrong"), None


def draw_cases(number_a_group, seed=7):
    dice = random.Random(seed)
    groups = [[(holder, kind) for kind in VALUES] for holder in HOLDERS]
    groups += [[(name, "")] for name in OTHERS]
    kinds = [dict.fromkeys(POSITIONS, 1), WAYS, MOMENTS]
    found = [
        Case(dice.choice(group), *(dice.choices([*kind], kind.values())[0] for kind in kinds))
        for group in groups
        for _ in range(number_a_group)
    ]
    # Tiles refuse what mixes rows.
    return [case for case in found if case.way != "tiled" or case.position not in ROWS_THAT_DIFFER]
