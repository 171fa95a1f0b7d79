"""Stores of gradients under FSDP2, of each layer or of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

import recoup
from recoup.errors import GradientError
from tests.neighbours.stores_worker import STEPS, Model, batch, collect, loss_of, mean_square, train
from tests.neighbours.stores_worker import whole as of_one_process
from tests.neighbours.workers import Case, apart, half, report, sharded

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS: dict[str, dict[str, Any]] = {
    "resharded": {},
    "kept": {"reshard_after_forward": False},
    "low": {"mp_policy": LOW},
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fused": (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
}


def whole(steps: int = STEPS) -> dict[str, Tensor]:
    return of_one_process(Model(), steps)


def stored(model: Any, rank: int, steps: int = 1, **options: Any) -> recoup.GradStore:
    store = recoup.GradStore(model.parameters())
    for step in range(steps):
        store.backward(loss_of(model, step, rank), **options)
    return store


def summed_in_place(
    model: Any, rank: int, way: str, bound: float, dtype: torch.dtype | None = None
) -> None:
    """And what is in `.grad` is there again, and each rank counts its part."""
    store = recoup.GradStore(model.parameters(), dtype=dtype)
    for each in model.parameters():
        each.grad = torch.full_like(each, 7.0)
    before, places = [each.grad for each in model.parameters()], []
    for step in range(STEPS):
        collect(store, loss_of(model, step, rank), way)
        places.append([each.to_local().data_ptr() for each in store.values()])
    assert apart(store.named(model), whole()) < bound
    assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
    assert all(bool((g.to_local() == 7).all()) for g in before)
    assert dtype is not None or places[0] == places[-1]
    assert store.nbytes() == sum(each.to_local().nbytes for each in store.values())


def not_reduced_is_not_lost(model: Any, rank: int, way: str, bound: float) -> None:
    """Micro-batches of which only the last is reduced."""
    store = recoup.GradStore(model.parameters())
    for step in range(STEPS):
        is_last = step == STEPS - 1
        model.set_requires_gradient_sync(is_last)
        collect(store, loss_of(model, step, rank), way, allow_empty=not is_last)
    assert apart(store.named(model), whole()) < bound


def gradient_of_the_batch(model: Any, rank: int) -> None:
    x, y = (half(batch(0), rank).requires_grad_() for _ in range(2))
    (got,) = recoup.GradStore(model.parameters()).backward(mean_square(model(x)), inputs=x)
    mean_square(Model()(y)).backward()
    torch.testing.assert_close(got, y.grad, rtol=0, atol=1e-6)
    assert x.grad is None


def numbers_are_those_of_full_gradients(model: Any, rank: int) -> None:
    store = stored(model, rank, STEPS, weight=2.0).mean_()
    flat = torch.cat([value.flatten() for value in whole().values()]) / STEPS
    off = [store.norm(order) - flat.norm(order) for order in (1.0, 2.0)]
    off += [store.dot(store) - flat @ flat, store.cosine(store * 2.0) - 1]
    off += [(store + store * 0.5 - store.to(dtype=torch.float64) * 1.5).norm()]
    off += [store.norm(math.inf) - flat.abs().max()]  # of which a rank may have nothing
    off += [store.clip_norm_(0.1) - flat.norm(), store.norm() - 0.1]
    assert max(abs(float(value)) for value in off) < 1e-5
    assert store.isfinite()


def trained(model: Any, rank: int, name: str) -> None:
    kind, settings = OPTIMIZERS[name]
    train(model, Model(), rank, kind, bound=1e-6, **settings)


def states(model: Any, rank: int) -> None:
    """One is loaded; one of whole gradients is refused, and leaves the store as it was."""
    store, loaded = stored(model, rank), recoup.GradStore(model.parameters())
    loaded.load_state_dict(store.state_dict(model), model)
    with pytest.raises(ValueError, match="plain tensor"):
        loaded.load_state_dict({**store.state_dict(model), "gradients": whole()}, model)
    assert apart(loaded.named(model), whole(1)) < 1e-6


def measured_and_listed(model: Any, rank: int) -> None:
    store = recoup.GradStore(model.parameters())
    run = lambda: store.backward(loss_of(model, 0, rank))  # noqa: E731
    held = recoup.measure(run, device="cpu", repeats=0).held_bytes
    assert held >= sum(each.to_local().nbytes for each in store.values())
    assert recoup.residuals(lambda: [each.exp() for each in model.parameters()]).entries


def not_reduced_at_all(model: Any, rank: int) -> None:
    model.set_requires_gradient_sync(False)
    stored(model, rank)


def mixed(model: Any, rank: int) -> None:
    stored(model, rank).add_(model.a.weight, whole()["a.weight"])


REFUSED: dict[str, tuple[Callable[[Any, int], Any], str]] = {
    "a backward that reduces nothing": (not_reduced_at_all, "allow_empty=True"),
    "ways that pass fsdp by": (
        lambda model, rank: stored(model, rank, mode="grad"),
        '(?s)"grad".*DTensor.*mode="harvest"',
    ),
    "a graph": (
        lambda model, rank: stored(model, rank, create_graph=True),
        "(?s)`create_graph`.*DTensor",
    ),
    "sharded and whole gradients": (mixed, "(?s)DTensor.*plain tensor|plain tensor.*DTensor"),
    "to reduce again": (lambda model, rank: stored(model, rank).all_reduce_(), "`all_reduce_`"),
}


def refused(model: Any, rank: int, name: str) -> None:
    case, words = REFUSED[name]
    with pytest.raises((GradientError, ValueError), match=words):
        case(model, rank)


def run(rank: int, how: str, kind: str, case: Callable[..., None], *args: Any) -> None:
    model = Model()
    parts = [model.a, model.b, model.c] if how == "layers" else []
    case(sharded(model, parts, **KINDS[kind]), rank, *args)


def cases() -> Iterator[tuple[str, Case]]:
    of_kinds = [
        (kind, case, way, 0.01 if kind == "low" else 1e-6)
        for kind in KINDS
        for case, ways in (
            (summed_in_place, ("auto", "harvest", "collecting")),
            (not_reduced_is_not_lost, ("auto", "collecting")),
        )
        for way in ways
    ]
    others = [
        (summed_in_place, "auto", 1e-6, torch.float64),
        *((trained, name) for name in OPTIMIZERS),
        (gradient_of_the_batch,), (numbers_are_those_of_full_gradients,), (states,),
        (measured_and_listed,), *((refused, name) for name in REFUSED),
    ]  # fmt: skip
    given = [*of_kinds, *(("resharded", *each) for each in others)]
    for how, (kind, case, *args) in product(("layers", "whole"), given):
        name = f"{how}, {kind}: {' '.join(map(str, (case.__name__, *args)))}"
        yield name, lambda rank, args=(how, kind, case, *args): run(rank, *args)


CASES = dict(cases())

if __name__ == "__main__":
    report(CASES)
