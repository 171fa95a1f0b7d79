"""Stores of gradients under DistributedDataParallel and FSDP2."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import recoup
from recoup.errors import GradientError
from tests.neighbours.workers import Case, apart, half, named_gradients, over, report, sharded

STEPS = 3
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
DDP: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, unused": {"find_unused_parameters": True},
    "ddp, views": {"gradient_as_bucket_view": True},
    "ddp, views, unused": {"gradient_as_bucket_view": True, "find_unused_parameters": True},
    "ddp, views, static": {"gradient_as_bucket_view": True, "static_graph": True},
}
OF_FSDP: dict[str, dict[str, Any]] = {
    "": {}, ", kept": {"reshard_after_forward": False}, ", low": {"mp_policy": LOW},
}  # fmt: skip
FSDP = {
    f"fsdp, {how}{kind}": settings
    for how, (kind, settings) in product(("layers", "whole"), OF_FSDP.items())
}
NO_SYNC = r"(?s)`no_sync\(\)`.*`all_reduce_`"


class Model(nn.Module):
    """Layers whose rows do not divide by two, and one number, of which a rank has nothing."""

    def __init__(self, *, uses_c: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 3)
        self.factor, self.uses_c = nn.Parameter(torch.ones(1)), uses_c

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).tanh())
        return (self.c(x) if self.uses_c else x) * self.factor


def plain_for(kind: str) -> Model:
    """The model in one process; where the wrapper asks which layers are used, the last is not."""
    return Model(uses_c="unused" not in kind and "static" not in kind).double()


def model_for(kind: str = "ddp") -> tuple[Model, Any]:
    """The model, and how it is called."""
    model = plain_for(kind)
    if kind in DDP:
        return model, DistributedDataParallel(model, **DDP[kind])
    parts = [model.a, model.b, model.c] if "layers" in kind else []
    return model, sharded(model, parts, **FSDP[kind])


def bound_for(kind: str, dtype: torch.dtype | None = None) -> float:
    return 0.01 if "low" in kind else 1e-12 if dtype is None else 1e-6


def batch(step: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).double()


def mean_square(output: Tensor) -> Tensor:
    return output.double().square().mean()


def whole(kind: str = "ddp", steps: int = STEPS) -> dict[str, Tensor]:
    """The gradients of all steps, in one process."""
    model = plain_for(kind)
    for step in range(steps):
        mean_square(model(batch(step))).backward()
    return named_gradients(model)


def losses(call: nn.Module, rank: int, *steps: int) -> Iterator[Tensor]:
    """The loss of a rank in each step."""
    for step in steps or range(STEPS):
        yield mean_square(call(half(batch(step), rank)))


def collect(store: recoup.GradStore, loss: Tensor, way: str, **options: Any) -> None:
    if way == "collecting":
        with store.collecting(**options):
            loss.backward()
    else:
        store.backward(loss, mode=way, **options)


@contextmanager
def unsynchronized(call: Any) -> Iterator[None]:
    """A context whose backwards are not reduced."""
    if isinstance(call, DistributedDataParallel):
        with call.no_sync():
            yield
        return
    call.set_requires_gradient_sync(False)
    yield
    call.set_requires_gradient_sync(True)


def local(tensor: Any) -> Tensor:
    """The part of a tensor that this rank has."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# -- both ------------------------------------------------------------------------------------------


def several_backwards(rank: int, kind: str, way: str, dtype: torch.dtype | None = None) -> None:
    """With something in `.grad`, which is there again; later backwards write to no store."""
    model, call = model_for(kind)
    store = recoup.GradStore(model.parameters(), dtype=dtype)
    for each in model.parameters():
        each.grad = torch.full_like(each, 7.0)
    before, places = [each.grad for each in model.parameters()], []
    for loss in losses(call, rank):
        collect(store, loss, way)
        places.append([local(each).data_ptr() for each in store.values()])
    want, bound = whole(kind), bound_for(kind, dtype)
    assert apart(store.named(model), want) < bound
    assert all(bool((local(each.grad) == 7).all()) for each in model.parameters())
    assert store.nbytes() == sum(local(each).nbytes for each in store.values())
    if kind in FSDP:
        assert all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
        assert dtype is not None or places[0] == places[-1]
        return
    next(losses(call, rank, 9)).backward()
    taken = recoup.GradStore.from_grad(model.parameters())
    values = {name: value.clone() for name, value in taken.named(model).items()}
    next(losses(call, rank, 9)).mul(100).backward()
    assert apart(store.named(model), want) < bound
    assert apart(taken.named(model), values) == 0


def unreduced(
    rank: int,
    kind: str,
    way: str,
    end: str = "backward",
    dtype: torch.dtype | None = None,
    ddp: bool | None = True,
) -> None:
    """Backwards that are not reduced; then one more that is, after `all_reduce_` or alone."""
    model, call = model_for(kind)
    known = {} if kind in FSDP else {"ddp": call if ddp else ddp}
    store = recoup.GradStore(model.parameters(), dtype=dtype, **known)
    for step in range(STEPS):
        is_last = step == STEPS - 1
        if is_last and end == "all_reduce_":
            store.all_reduce_()
        with nullcontext() if is_last else unsynchronized(call):
            if way == "segments":
                given = half(batch(step), rank)
                recoup.segments_backward([call], given, mean_square, store)
                continue
            options = {"allow_empty": not is_last} if kind in FSDP else {}
            used = "auto" if is_last and kind in DDP else way
            collect(store, next(losses(call, rank, step)), used, **options)
    assert apart(store.named(model), whole(kind)) < bound_for(kind, dtype)


def trained(rank: int, kind: str, optimizer: Any, **settings: Any) -> None:
    """Steps of an optimizer, clipped by the norm that all have, each over two micro-batches."""
    (ours, call), theirs = model_for(kind), plain_for(kind)
    optimizers = [optimizer(each.parameters(), lr=0.1, **settings) for each in (ours, theirs)]
    store = recoup.GradStore(ours.parameters())
    for step in range(4):
        for micro in range(2):
            store.backward(next(losses(call, rank, 10 * step + micro)))
            mean_square(theirs(batch(10 * step + micro))).backward()
        store.clip_norm_(0.05)
        store.step(optimizers[0])
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        optimizers[1].step()
        optimizers[1].zero_grad()
    assert apart(dict(ours.named_parameters()), dict(theirs.named_parameters())) < 1e-12


# -- DistributedDataParallel -----------------------------------------------------------------------


def some_parameters(rank: int, kind: str, way: str) -> None:
    """`.grad` of the others is put back."""
    model, wrapped = model_for(kind)
    store = recoup.GradStore(model.b.parameters(), ddp=wrapped)
    for loss in losses(wrapped, rank):
        collect(store, loss, way)
    assert way == "collecting" or all(each.grad is None for each in model.a.parameters())
    want = {name: value for name, value in whole(kind).items() if name.startswith("b.")}
    assert apart(store.named(model), want) < 1e-12


def ranks_that_use_other_layers(rank: int, kind: str) -> None:
    (model, wrapped), single = model_for(kind), plain_for(kind)
    store = recoup.GradStore(model.parameters())
    for step in range(STEPS):
        model.uses_c = rank == step % 2
        store.backward(next(losses(wrapped, rank, step)))
        for other in range(2):
            single.uses_c = other == step % 2
            (mean_square(single(half(batch(step), other))) / 2).backward()
    assert apart(store.named(model), named_gradients(single)) < 1e-12


def taken_unreduced(rank: int) -> None:
    """Collected within `no_sync` in a store that knows no reducer, and merged into another."""
    model, wrapped = model_for()
    store = recoup.GradStore(model.parameters(), dtype=torch.float32, ddp=wrapped)
    with wrapped.no_sync():
        next(losses(wrapped, rank, 0)).backward()
    store.extend_(recoup.GradStore.from_grad(model.parameters()).clone())
    store.backward(next(losses(wrapped, rank, 1)))


def partly_unreduced(rank: int) -> None:
    """Some gradients are collected within `no_sync`, others reduced, and then all."""
    model, wrapped = model_for()
    store = recoup.GradStore(model.parameters(), dtype=torch.float32, ddp=wrapped)
    with wrapped.no_sync():
        store.backward(next(losses(wrapped, rank, 0)), params=model.a.parameters())
    for params in (model.b.parameters(), None):
        store.backward(next(losses(wrapped, rank, 1)), params=params)


def with_a_graph(rank: int, is_known: bool) -> None:
    """What no reducer sees; of a model that is not wrapped, it may be had if that is said."""
    model, wrapped = model_for()
    store = recoup.GradStore(model.parameters(), ddp=wrapped if is_known else False)
    store.backward(next(losses(model, rank, 0)), create_graph=True)
    store.detach_().all_reduce_()
    assert apart(store.named(model), whole(steps=1)) < 1e-12


def sparse_of_a_layer(rank: int, end: str) -> None:
    """Three backwards, all reduced, or only those or the sum that `end` says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)).double()
    single, weight = copy.deepcopy(model), model[0].weight
    wrapped = DistributedDataParallel(model)
    store = recoup.GradStore(model.parameters(), ddp=wrapped)
    before = weight.grad = torch.ones(9, 4).double().to_sparse(1)
    for step in range(STEPS):
        ids = torch.tensor([[step, 1, 2], [3, step + 4, 3]])
        is_reduced = end == "all" or (end == "backward" and step == STEPS - 1)
        with nullcontext() if is_reduced else wrapped.no_sync():
            store.backward(mean_square(wrapped(half(ids, rank))))
        mean_square(single(ids)).backward()
    if end == "all_reduce_":
        store.all_reduce_()
    assert weight.grad is before
    assert not before.to_dense().sub(1).any()
    assert apart(store.named(model), named_gradients(single)) < 1e-12


# -- FSDP2 -----------------------------------------------------------------------------------------


def stored(rank: int, kind: str, steps: int = 1, **options: Any) -> recoup.GradStore:
    model, call = model_for(kind)
    store = recoup.GradStore(model.parameters())
    for loss in losses(call, rank, *range(steps)):
        store.backward(loss, **options)
    return store


def gradient_of_the_batch(rank: int, kind: str) -> None:
    (model, call), plain = model_for(kind), plain_for(kind)
    x, y = (half(batch(0), rank).requires_grad_() for _ in range(2))
    (got,) = recoup.GradStore(model.parameters()).backward(mean_square(call(x)), inputs=x)
    mean_square(plain(y)).backward()
    torch.testing.assert_close(got, y.grad, rtol=0, atol=1e-12)
    assert x.grad is None


def numbers_are_those_of_full_gradients(rank: int, kind: str) -> None:
    """And so is the largest entry, of a parameter of which a rank has nothing."""
    store = stored(rank, kind, STEPS, weight=2.0).mean_()
    flat = torch.cat([value.flatten() for value in whole(kind).values()]) / STEPS
    off = [store.norm(order) - flat.norm(order) for order in (1.0, 2.0, math.inf)]
    off += [store.dot(store) - flat @ flat, store.cosine(store * 2.0) - 1]
    off += [(store + store * 0.5 - store.to(dtype=torch.float64) * 1.5).norm()]
    off += [store.clip_norm_(0.1) - flat.norm(), store.norm() - 0.1]
    assert max(abs(float(value)) for value in off) < 1e-6
    assert store.isfinite()


def states(rank: int, kind: str) -> None:
    """One is loaded; one of whole gradients is refused, and leaves the store as it was."""
    model, call = model_for(kind)
    store, loaded = (recoup.GradStore(model.parameters()) for _ in range(2))
    store.backward(next(losses(call, rank, 0)))
    loaded.load_state_dict(store.state_dict(model), model)
    with pytest.raises(ValueError, match="plain tensor"):
        loaded.load_state_dict({**store.state_dict(model), "gradients": whole(kind)}, model)
    assert apart(loaded.named(model), whole(kind, 1)) < 1e-12


def measured_and_listed(rank: int, kind: str) -> None:
    model, call = model_for(kind)
    store = recoup.GradStore(model.parameters())
    run = lambda: store.backward(next(losses(call, rank, 0)))  # noqa: E731
    held = recoup.measure(run, device="cpu", repeats=0).held_bytes
    assert held >= sum(local(each).nbytes for each in store.values())
    assert recoup.residuals(lambda: [each.exp() for each in model.parameters()]).entries


def not_reduced_at_all(rank: int, kind: str) -> None:
    model, call = model_for(kind)
    with unsynchronized(call):
        recoup.GradStore(model.parameters()).backward(next(losses(call, rank, 0)))


def sharded_and_whole(rank: int, kind: str) -> None:
    store = stored(rank, kind)
    store.add_(next(iter(store)), whole(kind)["a.weight"])


# -- the table -------------------------------------------------------------------------------------


def is_refused(rank: int, words: str, run: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises((GradientError, ValueError), match=words):
        run(rank, *args, **options)


# What a reducer cannot take over would stay a part of this process.
REFUSED = {
    "way": (f'(?s)"grad".*mode="harvest".*{NO_SYNC[4:]}', some_parameters, "ddp", "grad"),
    "graph": (NO_SYNC, with_a_graph, True),
    "taken": (NO_SYNC, taken_unreduced),
    "part": (NO_SYNC, partly_unreduced),
    "single precision": (NO_SYNC, unreduced, "ddp", "auto", "backward", torch.float32),
    "sparse": (NO_SYNC, sparse_of_a_layer, "backward"),
    "unknown": ("(?s)GradStore\\(params, ddp=model\\).*ddp=False", unreduced, "ddp", "auto",
                "backward", torch.float32, None),
}  # fmt: skip
REFUSED_SHARDED: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "a backward that reduces nothing": ("allow_empty=True", not_reduced_at_all, {}),
    "ways that pass fsdp by": ('(?s)"grad".*DTensor.*mode="harvest"', stored, {"mode": "grad"}),
    "a graph": ("(?s)`create_graph`.*DTensor", stored, {"create_graph": True}),
    "sharded and whole gradients": (
        "(?s)DTensor.*plain tensor|plain tensor.*DTensor", sharded_and_whole, {},
    ),
    "to reduce again": ("`all_reduce_`", lambda rank, kind: stored(rank, kind).all_reduce_(), {}),
}  # fmt: skip


def cases() -> Iterator[tuple[str, Case]]:
    ways, single = ("auto", "collecting"), torch.float32
    yield from over(several_backwards, (*DDP, *FSDP), (*ways, "harvest"))
    yield from over(some_parameters, ("ddp", "ddp, views"), ways)
    yield from over(ranks_that_use_other_layers, ("ddp, unused", "ddp, views, unused"))
    yield from over(unreduced, ["ddp"], (*ways, "grad", "segments"), ("all_reduce_", "backward"))
    yield from over(unreduced, ["ddp"], ["auto"], ["all_reduce_"], [single])
    # Where segments are collected apart, the rest alone would be reduced.
    yield from over(unreduced, ["ddp"], ["segments"], ["backward"], [None], [None])
    yield "ddp trained", partial(trained, kind="ddp", optimizer=torch.optim.AdamW)
    for end in ("all", "all_reduce_"):
        yield f"ddp sparse, {end}", partial(sparse_of_a_layer, end=end)
    yield from over(unreduced, FSDP, ways)
    for kind in ("fsdp, layers", "fsdp, whole"):
        yield from over(several_backwards, [kind], ["auto"], [single])
        for case in (
            gradient_of_the_batch, numbers_are_those_of_full_gradients, states, measured_and_listed,
        ):  # fmt: skip
            yield from over(case, [kind])
        fused = partial(trained, optimizer=torch.optim.AdamW, weight_decay=0.1, fused=True)
        nesterov = partial(trained, optimizer=torch.optim.SGD, momentum=0.9, nesterov=True)
        yield f"{kind}, fused", partial(fused, kind=kind)
        yield f"{kind}, nesterov", partial(nesterov, kind=kind, foreach=True)
        for name, (words, run, options) in REFUSED_SHARDED.items():
            yield (
                f"{kind}, refused: {name}",
                partial(is_refused, words=words, run=run, kind=kind, **options),
            )
    # Last, since what goes wrong here may leave a reducer waiting.
    for name, given in REFUSED.items():
        yield f"ddp refused: {name}", lambda rank, given=given: is_refused(rank, *given)
    yield "ddp, a graph where nobody reduces", partial(with_a_graph, is_known=False)


CASES = dict(cases())

if __name__ == "__main__":
    report(CASES)
