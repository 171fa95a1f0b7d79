"""Gradients of many backwards over shared weights: peak bytes and time, by how they are summed."""

import statistics
from collections.abc import Iterator
from functools import partial

import torch
from couplings import peak_and_held
from timing import clock_of, in_turn
from torch import nn

import recoup

NUM_SEGMENTS = 16


# -- sums over 128 MiB of shared weights -----------------------------------------------------------


def list_of_stores(model, xs):
    """Keep the gradients of every backward, and sum them at the end."""
    parameters = list(model.parameters())
    stores = [torch.autograd.grad(loss(model(x)), parameters) for x in xs]
    return [sum(each[1:], start=each[0]) for each in zip(*stores, strict=True)]


def out_of_place(model, xs):
    """candle's merge: a new tensor for each sum."""
    parameters = list(model.parameters())
    total = None
    for x in xs:
        found = torch.autograd.grad(loss(model(x)), parameters)
        total = found if total is None else [a + b for a, b in zip(total, found, strict=True)]
    return total


def grad_and_add(model, xs):
    """torch.autograd.grad, added in place."""
    parameters = list(model.parameters())
    total = None
    for x in xs:
        found = torch.autograd.grad(loss(model(x)), parameters)
        if total is None:
            total = list(found)
        else:
            for into, gradient in zip(total, found, strict=True):
                into.add_(gradient)
        del found
    return total


def plain(model, xs):
    """`.backward()`, which sums in `.grad`."""
    for x in xs:
        loss(model(x)).backward()
    found = [each.grad for each in model.parameters()]
    model.zero_grad()
    return found


def popped_by_hooks(model, xs):
    """A post-accumulate hook that takes each gradient away."""
    total = {}

    def take(parameter):
        gradient, parameter.grad = parameter.grad, None
        if parameter in total:
            total[parameter].add_(gradient)
        else:
            total[parameter] = gradient

    handles = [each.register_post_accumulate_grad_hook(take) for each in model.parameters()]
    for x in xs:
        loss(model(x)).backward()
    for handle in handles:
        handle.remove()
    return list(total.values())


def store(mode):
    def summed(model, xs):
        found = recoup.GradStore(model.parameters())
        for x in xs:
            found.backward(loss(model(x)), mode=mode)
        return found

    return summed


MECHANISMS = {
    "plain .backward()": plain,
    "list of stores": list_of_stores,
    "merged out of place (candle)": out_of_place,
    "autograd.grad, added in place": grad_and_add,
    "popped by hooks": popped_by_hooks,
    "recoup": store("auto"),
    'recoup, mode="grad"': store("grad"),
}


def loss(y):
    return y.square().mean()


def sums(device: str) -> list[dict]:
    """Measure sixteen backwards over four weights of 32 MiB."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2896, 2896, bias=False) for _ in range(4))).to(device)
    xs = torch.randn(NUM_SEGMENTS, 2, 2896, device=device)
    calls = {name: partial(fn, model, xs) for name, fn in MECHANISMS.items()}
    seconds = _seconds(calls, 5, device)
    rows = []
    for name, call in calls.items():
        peak, _ = peak_and_held(call, device)
        rows.append({"name": name, "peak_bytes": peak, "seconds": seconds[name]})
    return rows


# -- the loop of the candle thread -----------------------------------------------------------------


def one_backward(cell, x, num_segments):
    """Keep the activations of all segments."""
    found = recoup.GradStore(cell.parameters())
    y = x
    for _ in range(num_segments):
        y = cell(y)
    found.backward(loss(y))
    return found


def candle_loop(cell, x, num_segments):
    """Keep inputs, run segments again and merge stores out of place, as in candle #1483."""
    inputs = [x]
    with torch.no_grad():
        for _ in range(num_segments):
            inputs.append(cell(inputs[-1]))
    y = inputs.pop().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(y), y)
    parameters, total = list(cell.parameters()), None
    while inputs:
        given = inputs.pop().requires_grad_()
        *found, gradient = torch.autograd.grad(cell(given), [*parameters, given], gradient)
        total = found if total is None else [a + b for a, b in zip(total, found, strict=True)]
    x.requires_grad_(False)
    return total


def segments(memory):
    def run(cell, x, num_segments):
        found = recoup.GradStore(cell.parameters())
        recoup.segments_backward([cell] * num_segments, x, loss, found, memory=memory)
        return found

    return run


LOOPS = {
    "one backward": one_backward,
    "candle's loop": candle_loop,
    "recoup, inputs": segments("inputs"),
    "recoup, sqrt": segments("sqrt"),
    "recoup, log": segments("log"),
}


def loops(device: str) -> list[dict]:
    """A recurrent cell of two linear layers, its activations larger than its weights."""
    torch.manual_seed(0)
    linears = [nn.init.orthogonal_(torch.empty(128, 128), 1.5) for _ in range(2)]
    cell = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
    with torch.no_grad():  # signals that vanish would be denormal numbers, which are slow
        cell[0].weight.copy_(linears[0])
        cell[2].weight.copy_(linears[1])
    cell, x = cell.to(device), torch.randn(1024, 128, device=device)
    rows = []
    for num_segments in (4, 16, 64, 256):
        calls = {name: partial(fn, cell, x, num_segments) for name, fn in LOOPS.items()}
        seconds = _seconds(calls, 3, device)
        for name, call in calls.items():
            peak, _ = peak_and_held(call, device)
            row = {"name": name, "num_segments": num_segments, "input_bytes": x.nbytes}
            rows.append({**row, "peak_bytes": peak, "seconds": seconds[name]})
    return rows


def _seconds(calls: dict, rounds: int, device: str) -> dict:
    """Return medians of processor time, the ways in turn."""
    for call in calls.values():
        call()
    times = in_turn(calls, rounds, device, clock_of(device))
    return {name: statistics.median(found) for name, found in times.items()}


def suite(device: str) -> Iterator[tuple[str, list[dict]]]:
    """Yield the tables."""
    yield "sums", sums(device)
    yield "loops", loops(device)
