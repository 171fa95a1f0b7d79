"""Letters N2, N3 and N4: an exception leaves nothing behind, be it of the user's Ctrl-C."""

from __future__ import annotations

import functools
import tempfile
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import recoup
from recoup import weights
from recoup.invertible import ActNorm, AdditiveCoupling, Chain
from tests.deciding import is_second_run
from tests.oracle import state_of_torch
from tests.zoo import Fn

X = torch.linspace(-20, 20, 512 * 6).reshape(512, 6).sin()
TRAP = SimpleNamespace(place="", error=KeyError)  # where a step raises, and what


def trap(x):
    """Raises in a forward, in a forward that backward runs again, or in backward itself."""
    if TRAP.place == ("again" if is_second_run() else "forward"):
        spring()
    if TRAP.place == "backward" and x.requires_grad:
        x.register_hook(spring)
    return x.sin()


def spring(gradient=None):
    TRAP.place = ""
    raise TRAP.error("sprung")


def plain(kind=nn.Sequential, **options):
    parts = [(nn.Linear(6, 6), nn.BatchNorm1d(6), Fn(trap), nn.Dropout(0.3)) for _ in range(4)]
    blocks = (nn.Sequential(*each, nn.Tanh()) for each in parts)
    return kind(*(Fn(lambda x, block: x + block(x), block) for block in blocks), **options)


def noisy(memory):
    return recoup.weight_dropout(plain(recoup.Sequential, memory=memory), "0.*0.weight", 0.3)


def flow():
    coupling = AdditiveCoupling(nn.Sequential(nn.Linear(3, 3), Fn(trap), nn.Linear(3, 3)))
    return recoup.flows.Flow(Chain(ActNorm(6), coupling, memory="constant"), shape=(6,))


@functools.cache
def planned():
    model = plain()
    frontier = recoup.plan(model, X)
    frontier.plan(frontier.least_bytes).apply()
    return model


def by(call, context=torch.enable_grad):
    def step(model):
        with context():
            y = call(model, X)
        y.float().square().mean().backward()

    return step


def within(context):
    return lambda model: by(nn.Module.__call__, lambda: context(model))(model)


def by_store(collect):
    def step(model):
        store = recoup.GradStore(model.parameters())
        collect(store, model)
        with store.as_grad(model.parameters(), consume=False):
            model(X)
        return [*store.values()]

    return plain, step


def collect_within(store, model):
    with store.collecting():
        model(X).mean().backward()


def looked_at(model):
    recoup.residuals(lambda: model(X))
    model(X).sum().backward()


STORES = {
    "auto": by_store(lambda store, m: store.backward(m(X).mean())),
    "grad": by_store(lambda store, m: store.backward(m(X).mean(), mode="grad")),
    "harvest": by_store(lambda store, m: store.backward(m(X).mean(), mode="harvest")),
    "collecting": by_store(collect_within),
}
ONCE = STORES | {
    "residuals": (plain, looked_at),
    "recomputing": (plain, within(lambda _: recoup.recomputing())),
    "offloading": (plain, within(lambda _: recoup.offloading(1, tempfile.gettempdir()))),
}
MODES = ONCE | {
    "segments": by_store(lambda s, m: recoup.segments_backward(list(m), X, torch.mean, s)),
    "checkpoint": (plain, by(recoup.checkpoint)),
    "autocast": (plain, by(recoup.checkpoint, lambda: torch.autocast("cpu", torch.bfloat16))),
    "recompute": (plain, by(lambda model, x: recoup.recompute(model)(x))),
    "sqrt": (lambda: noisy("sqrt"), within(weights.step)),
    "same draw": (lambda: noisy("log"), within(lambda _: weights.same_draw())),
    "disabled": (lambda: noisy(2), within(weights.disabled)),
    "sampled": (flow, by(lambda flow, x: flow.log_prob(flow.sample(4).detach()))),
    "planned": (planned, by(nn.Module.__call__)),
}


def run(step, model, state):
    model.load_state_dict(state)
    torch.manual_seed(1)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    given = step(model) or []
    grads = [each.grad for each in model.parameters()]
    return [*given, *grads, *map(torch.clone, model.buffers()), torch.get_rng_state()]


@pytest.mark.filterwarnings("ignore:The first step of a Sequential under its plan")  # its loss
@pytest.mark.parametrize("place", ["forward", "again", "backward"])
@pytest.mark.parametrize("mode", MODES)
def test_n2_n3_n4_an_exception_leaves_nothing(mode, place):
    make, step = MODES[mode]
    before, model = state_of_torch(), make()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [part.training for part in model.modules()]
    for TRAP.error in (KeyError, KeyboardInterrupt):
        TRAP.place = place
        is_sprung = place != "again" or mode not in ONCE
        with pytest.raises(TRAP.error, match="sprung") if is_sprung else nullcontext():
            run(step, model, state)
        TRAP.place = ""
        assert state_of_torch() == before
        assert [part.training for part in model.modules()] == modes
        if mode in STORES:
            assert all(each.grad.eq(1).all() for each in model.parameters())
    again = run(step, model, state)
    undisturbed = plain() if mode == "planned" else make()
    assert all(map(torch.equal, again, run(step, undisturbed, state)))
