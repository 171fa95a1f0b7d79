"""Stores of gradients under DistributedDataParallel and FSDP2, and `all_reduce_`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import recoup
from recoup.errors import GradientError
from recoup.gradients import transfer
from tests.neighbours.planned import loss_of as mean_square
from tests.neighbours.workers import (
    Case,
    apart,
    half,
    is_refused,
    named_gradients,
    run_cases,
    sharded,
)

STEPS = 3
VIEWS, UNUSED = {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}
KINDS = {
    "plain": {}, "unused": UNUSED, "views": VIEWS, "views unused": VIEWS | UNUSED,
    "views static": VIEWS | {"static_graph": True},
}  # fmt: skip
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FSDP_KINDS: dict[str, dict[str, Any]] = {
    "resharded": {}, "kept": {"reshard_after_forward": False}, "low": {"mp_policy": LOW}
}  # fmt: skip
NO_SYNC = r"(?s)`no_sync\(\)`.*`all_reduce_`"


class Model(nn.Module):
    """Layers whose rows do not divide by two, and one number, of which a rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 3)
        self.factor, self.uses_c = nn.Parameter(torch.ones(1)), True

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).tanh()) * self.factor
        return self.c(x) if self.uses_c else x


def model_for(kind: str = "plain") -> tuple[Model, DistributedDataParallel]:
    model = Model().double()
    model.uses_c = kind in ("plain", "views")
    return model, DistributedDataParallel(model, **KINDS[kind])


def batch(step: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    """The loss of a step: of a rank, or of the whole batch."""
    x = batch(step).to(next(model.parameters()).dtype)
    return mean_square(model(x if rank is None else half(x, rank)))


def whole(model: nn.Module, steps: int = STEPS) -> dict[str, Tensor]:
    """The gradients of all steps, in one process."""
    model = copy.deepcopy(model)
    model.zero_grad()
    for step in range(steps):
        loss_of(model, step).backward()
    return named_gradients(model)


def collect(store: recoup.GradStore, loss: Tensor, way: str, **options: Any) -> None:
    if way == "collecting":
        with store.collecting(**options):
            loss.backward()
    else:
        store.backward(loss, mode=way, **options)


def trained(rank: int, ours: Any, theirs: Any, kind: Any, bound=1e-12, **settings: Any) -> None:
    """Steps of an optimizer, clipped by the norm that all have, each over two micro-batches."""
    theirs = copy.deepcopy(theirs)
    optimizers = [kind(each.parameters(), lr=0.1, **settings) for each in (ours, theirs)]
    ddp = ours if isinstance(ours, DistributedDataParallel) else None
    store = recoup.GradStore(ours.parameters(), ddp=ddp)
    for step in range(4):
        for micro in range(2):
            store.backward(loss_of(ours, 10 * step + micro, rank))
            loss_of(theirs, 10 * step + micro).backward()
        store.clip_norm_(0.05)
        store.step(optimizers[0])
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        optimizers[1].step()
        optimizers[1].zero_grad()
    found = {n.removeprefix("module."): p for n, p in ours.named_parameters()}
    assert apart(found, dict(theirs.named_parameters())) < bound


# -- DistributedDataParallel -----------------------------------------------------------------------


def several_backwards(rank: int, kind: str, way: str) -> None:
    """With something in `.grad`, which is there again; later backwards write to no store."""
    model, wrapped = model_for(kind)
    store = recoup.GradStore(model.parameters(), ddp=wrapped)
    for each in model.parameters():
        each.grad = torch.full_like(each, 7.0)
    for step in range(STEPS):
        collect(store, loss_of(wrapped, step, rank), way)
    assert all(bool((each.grad == 7).all()) for each in model.parameters())
    loss_of(wrapped, 9, rank).backward()
    taken = recoup.GradStore.from_grad(model.parameters())
    values = {name: value.clone() for name, value in taken.named(model).items()}
    loss_of(wrapped, 9, rank).mul(100).backward()
    assert apart(store.named(model), whole(model)) < 1e-12
    assert apart(taken.named(model), values) == 0


def ranks_that_use_other_layers(rank: int, kind: str) -> None:
    model, wrapped = model_for(kind)
    store, single = recoup.GradStore(model.parameters(), ddp=wrapped), copy.deepcopy(model)
    for step in range(STEPS):
        model.uses_c = rank == step % 2
        store.backward(loss_of(wrapped, step, rank))
        for other in range(2):
            single.uses_c = other == step % 2
            (loss_of(single, step, other) / 2).backward()
    assert apart(store.named(model), named_gradients(single)) < 1e-12


def unreduced(rank: int, way: str, end: str = "all_reduce_", **settings: Any) -> None:
    """Backwards within `no_sync`; then one more that is reduced, after `all_reduce_` or alone."""
    model, wrapped = model_for()
    store = recoup.GradStore(model.parameters(), **{"ddp": wrapped} | settings)
    for step in range(STEPS):
        is_reduced = step == STEPS - 1
        if is_reduced and end == "all_reduce_":
            store.all_reduce_()
        with nullcontext() if is_reduced else wrapped.no_sync():
            if way == "segments":
                given = half(batch(step).double(), rank)
                recoup.segments_backward([wrapped], given, mean_square, store)
            else:
                collect(store, loss_of(wrapped, step, rank), "auto" if is_reduced else way)
    assert apart(store.named(model), whole(model)) < (1e-6 if "dtype" in settings else 1e-12)


def taken_unreduced(rank: int) -> None:
    """Collected within `no_sync` in a store that knows no reducer, and merged into another."""
    model, wrapped = model_for()
    store = recoup.GradStore(model.parameters(), dtype=torch.float32, ddp=wrapped)
    with wrapped.no_sync():
        loss_of(wrapped, 0, rank).backward()
    store.extend_(recoup.GradStore.from_grad(model.parameters()).clone())
    store.backward(loss_of(wrapped, 1, rank))


def with_a_graph(rank: int, is_known: bool) -> None:
    """What no reducer sees; of a model that is not wrapped, it may be had if that is said."""
    model, wrapped = model_for()
    store = recoup.GradStore(model.parameters(), ddp=wrapped if is_known else False)
    store.backward(loss_of(model, 0, rank), create_graph=True)
    store.detach_().all_reduce_()
    assert apart(store.named(model), whole(model, 1)) < 1e-12


def sparse_of_a_layer(rank: int, is_reduced: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)).double()
    single, wrapped = copy.deepcopy(model), DistributedDataParallel(model)
    store = recoup.GradStore(model.parameters(), ddp=wrapped)
    before = model[0].weight.grad = torch.ones(9, 4).double().to_sparse(1)
    for step in range(STEPS):
        ids = torch.tensor([[step, 1, 2], [3, step + 4, 3]])
        with nullcontext() if is_reduced else wrapped.no_sync():
            store.backward(mean_square(wrapped(half(ids, rank))))
        mean_square(single(ids)).backward()
    store = store if is_reduced else store.all_reduce_()
    assert model[0].weight.grad is before
    assert not before.to_dense().sub(1).any()
    assert apart(store.named(model), named_gradients(single)) < 1e-12


# -- FSDP2 -----------------------------------------------------------------------------------------


def stored(rank: int, model: Any, steps: int = 1, **options: Any) -> recoup.GradStore:
    store = recoup.GradStore(model.parameters())
    for step in range(steps):
        store.backward(loss_of(model, step, rank), **options)
    return store


def summed_in_place(rank: int, model: Any, way: str, bound: float, dtype: Any = None) -> None:
    store, places = recoup.GradStore(model.parameters(), dtype=dtype), set()
    before = {each: torch.full_like(each, 7.0) for each in model.parameters()}
    for each, gradient in before.items():
        each.grad = gradient
    for step in range(STEPS):
        collect(store, loss_of(model, step, rank), way)
        places.add(tuple(each.to_local().data_ptr() for each in store.values()))
    assert apart(store.named(model), whole(Model())) < bound
    assert all(p.grad is g and bool((g.to_local() == 7).all()) for p, g in before.items())
    assert dtype is not None or len(places) == 1
    assert store.nbytes() == sum(each.to_local().nbytes for each in store.values())


def not_reduced_is_not_lost(rank: int, model: Any, way: str, bound: float) -> None:
    store = recoup.GradStore(model.parameters())
    for step in range(STEPS):
        model.set_requires_gradient_sync(step == STEPS - 1)
        collect(store, loss_of(model, step, rank), way, allow_empty=step < STEPS - 1)
    assert apart(store.named(model), whole(Model())) < bound


def numbers_are_those_of_full_gradients(rank: int, model: Any) -> None:
    """Those of a state that is loaded, too; and each rank has the gradient of its rows."""
    store, loaded = stored(rank, model, STEPS, weight=2.0), recoup.GradStore(model.parameters())
    loaded.load_state_dict(store.state_dict(model), model)
    store, flat = loaded.mean_(), torch.cat([v.flatten() for v in whole(Model()).values()]) / STEPS
    off = [store.norm(order) - flat.norm(order) for order in (1.0, 2.0, math.inf)]
    off += [store.dot(store) - flat @ flat, store.cosine(store * 2.0) - 1]
    off += [(store + store * 0.5 - store.to(dtype=torch.float64) * 1.5).norm()]
    off += [store.clip_norm_(0.1) - flat.norm(), store.norm() - 0.1]
    assert max(abs(float(value)) for value in off) < 1e-5
    assert store.isfinite()
    x, y = (half(batch(0), rank).requires_grad_() for _ in range(2))
    (got,) = store.backward(mean_square(model(x)), inputs=x)
    mean_square(Model()(y)).backward()
    torch.testing.assert_close(got, y.grad, rtol=0, atol=1e-6)
    assert x.grad is None


def not_reduced_at_all(rank: int, model: Any) -> None:
    model.set_requires_gradient_sync(False)
    stored(rank, model)


def a_whole_state(rank: int, model: Any) -> None:
    store = stored(rank, model)
    store.load_state_dict({**store.state_dict(model), "gradients": whole(Model())}, model)


REFUSED: tuple[tuple[Callable[..., Any], str], ...] = (
    (not_reduced_at_all, "allow_empty=True"),
    (partial(stored, mode="grad"), '(?s)"grad".*DTensor.*mode="harvest"'),
    (partial(stored, create_graph=True), "(?s)`create_graph`.*DTensor"),
    (lambda rank, model: stored(rank, model).add_(model.a.weight, whole(Model())["a.weight"]),
     "(?s)DTensor.*plain tensor|plain tensor.*DTensor"),
    (a_whole_state, "plain tensor"),
    (lambda rank, model: stored(rank, model).all_reduce_(), "`all_reduce_`"),
)  # fmt: skip


def under_fsdp(rank: int, how: str, kind: str, case: Callable[..., None], *args: Any) -> None:
    model = Model()
    parts = [model.a, model.b, model.c] if how == "layers" else []
    case(rank, sharded(model, parts, **FSDP_KINDS[kind]), *args)


# -- all_reduce_ -----------------------------------------------------------------------------------


def several_types(rank: int, absent: list[int], bucket: int) -> None:
    """Of which each rank lacks some, and one that nobody has stays absent."""
    single = torch.float32
    kinds = single, torch.bfloat16, torch.float64, torch.complex64, single, single
    params = [nn.Parameter(torch.zeros(3, 2 + k, dtype=kind)) for k, kind in enumerate(kinds)]
    torch.manual_seed(7)
    store, want = recoup.GradStore(params), {}
    for place, each in enumerate(params[:-1]):
        values = [torch.randn(each.shape).to(each.dtype) for _ in range(2)]  # alike on all ranks
        parts = [value for other, value in enumerate(values) if place != absent[other]]
        kind = single if each.dtype is torch.bfloat16 else each.dtype
        want[each] = sum(part.to(kind) for part in parts) / 2
        if place != absent[rank]:
            store.add_(each, values[rank])
    with mock.patch.object(transfer, "_BUCKET_BYTES", bucket):
        store.all_reduce_()
    assert [each in store for each in params] == [True] * 5 + [False]
    assert all(torch.equal(store[each].to(value.dtype), value) for each, value in want.items())


def sparse_layouts(rank: int, *layouts: str) -> None:
    weight = nn.Parameter(torch.zeros(20, 3))
    store, values = recoup.GradStore([weight]), [torch.zeros(20, 3) for _ in layouts]
    for other, layout in enumerate(layouts):
        if layout != "absent":
            values[other][[1, 5, 6 + other]] = 1.0 + other
    if layouts[rank] != "absent":
        mine = values[rank]
        store.add_(weight, mine.to_sparse(1) if layouts[rank] == "sparse" else mine)
    store.all_reduce_()
    assert torch.equal(store[weight], sum(values) / 2)


def few_messages(rank: int, alike: bool) -> None:
    """No more than buckets fill; and a large gradient is not copied."""
    params = [nn.Parameter(torch.zeros(size)) for size in [1000] * 50 + [100_000]]
    store = recoup.GradStore(params)
    for place, each in enumerate(params):
        if alike or place % 2 == rank:
            store.add_(each, torch.ones_like(each))
    bucket = mock.patch.object(transfer, "_BUCKET_BYTES", 30_000)
    of_tensors = mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)
    of_objects = mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object)
    with bucket, of_tensors as reduced, of_objects as gathered:
        peak = recoup.measure(store.all_reduce_, device="cpu", repeats=0).peak_bytes
    num_buckets = math.ceil(sum(each.nbytes for each in params) / 30_000)
    assert reduced.call_count + gathered.call_count <= num_buckets + 1
    assert not alike or peak < 200_000  # the largest is of 400 kB, the buckets of 30


def numbers_of_a_store(rank: int) -> None:
    """A mean is over the batches of all ranks, a sum may be too large, and a scale is known."""
    weight = nn.Parameter(torch.zeros(2))
    store = recoup.GradStore([weight], ddp=False)
    for factor, length in ([(2, 3), (4, 5)], [(8, 2)])[rank]:
        store.backward((weight * factor).sum(), weight=length)
    store.all_reduce_().mean_()
    assert store[weight].tolist() == pytest.approx([(3 * 2 + 5 * 4 + 2 * 8) / 10] * 2)
    store = recoup.GradStore([weight], dtype=torch.float16, ddp=False)
    store.add_(weight, torch.full_like(weight, 40_000))
    assert float(store.all_reduce_()[weight].max()) == 40_000.0
    store = recoup.GradStore([weight], ddp=False)
    if rank == 0:
        store.backward(weight.sum(), scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    store.all_reduce_()
    with pytest.raises(GradientError, match="scaled by 8"):
        store.step(torch.optim.SGD([weight], 0.1))


# What rank 1 has otherwise; and what all say, or what rank 1 does while the others name it.
STRANGERS = {
    "nobody": None, "number": "another number", "order": "same order", "scale": "one scale",
}  # fmt: skip
CULPRITS = {"extra": "`params`", "graph": r"`detach_\(\)`", "damage": r"`clear\(\)`"}


def processes_that_differ(rank: int, what: str) -> None:
    """All raise, nobody waits, and the next reduction is in order."""
    params = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3, 2))]
    own = what if rank else "nobody"
    given = {"number": params[:1], "order": params[::-1]}.get(own, params)
    store = recoup.GradStore(given, ddp=False)
    if own == "scale":
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        store.backward(given[0].sum(), scaler=scaler)
    else:
        store.backward(sum(each.square().sum() for each in given))
    if own == "extra":
        store.add_(nn.Parameter(torch.ones(2)), torch.ones(2))
    elif own == "graph":
        store.backward(given[0].pow(3).sum(), create_graph=True)
    elif own == "damage":
        late = given[1] * 1  # whose turn comes when the other gradient is there already
        late.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.backward(late.sum() + given[0].square().sum())
    before = {} if what == "damage" else {each: value.clone() for each, value in store.items()}
    words = STRANGERS[what] if what in STRANGERS else (CULPRITS[what] if rank else "Process 1")
    errors = (GradientError, ValueError)
    with nullcontext() if words is None else pytest.raises(errors, match=words):
        store.all_reduce_()
    assert what == "nobody" or all(torch.equal(store[each], v) for each, v in before.items())
    again = recoup.GradStore(params)
    again.add_(params[0], torch.full((2, 3), float(rank)))
    assert float(again.all_reduce_()[params[0]].max()) == 0.5


# -- the table -------------------------------------------------------------------------------------


def over(case: Callable[..., None], *values: Any) -> Iterator[tuple[str, Case]]:
    for given in product(*values):
        name = f"{case.__name__} {' '.join(map(str, given))}"
        yield name, lambda rank, given=given: case(rank, *given)


def of_reducers() -> Iterator[tuple[str, Case]]:
    ways, single = ("auto", "collecting"), torch.float32
    yield from over(several_backwards, KINDS, (*ways, "harvest"))
    yield from over(ranks_that_use_other_layers, ("unused", "views unused"))
    yield from over(unreduced, (*ways, "grad", "segments"))
    yield "unreduced in single precision", partial(unreduced, way="auto", dtype=single)
    yield from over(sparse_of_a_layer, (True, False))
    yield from over(several_types, ([-1, -1], [0, 3], [4, 1]), (1, 40, 2**20))
    yield from over(sparse_layouts, ("sparse", "dense", "absent"), ("sparse", "dense"))
    yield from over(few_messages, (True, False))
    yield from over(processes_that_differ, (*STRANGERS, *CULPRITS))
    yield "numbers of a store", numbers_of_a_store
    yield "trained", lambda rank: trained(rank, model_for()[1], model_for()[0], torch.optim.AdamW)
    # Last, since what goes wrong here may leave a reducer waiting.
    ddp_or_not = r"(?s)GradStore\(params, ddp=model\).*ddp=False"
    reduced_alone = partial(unreduced, end="backward")
    for run, words in (
        (partial(several_backwards, kind="plain", way="grad"), f'(?s)mode="grad".*{NO_SYNC[4:]}'),
        (partial(with_a_graph, is_known=True), NO_SYNC),
        (taken_unreduced, NO_SYNC),
        (partial(reduced_alone, way="auto"), NO_SYNC),
        (partial(reduced_alone, way="segments"), NO_SYNC),
        (partial(reduced_alone, way="auto", dtype=single, ddp=None), ddp_or_not),
    ):
        yield f"refused: {run}", partial(is_refused, run=run, words=words)
    yield "a graph where nobody reduces", partial(with_a_graph, is_known=False)


def of_fsdp() -> Iterator[tuple[str, Case]]:
    ways = [(summed_in_place, way) for way in ("auto", "harvest", "collecting")]
    ways += [(not_reduced_is_not_lost, way) for way in ("auto", "collecting")]
    given: list[tuple[Any, ...]] = [
        (kind, *way, 0.01 if kind == "low" else 1e-6) for kind in FSDP_KINDS for way in ways
    ]
    fused = partial(trained, weight_decay=0.1, fused=True)
    nesterov = partial(trained, momentum=0.9, nesterov=True, foreach=True)
    given += [
        ("resharded", summed_in_place, "auto", 1e-6, torch.float64),
        ("resharded", numbers_are_those_of_full_gradients),
        ("resharded", fused, Model(), torch.optim.AdamW, 1e-6),
        ("resharded", nesterov, Model(), torch.optim.SGD, 1e-6),
    ]
    for place, (how, args) in enumerate(product(("layers", "whole"), given)):
        yield f"fsdp {place}, {how}", lambda rank, args=(how, *args): under_fsdp(rank, *args)
    for name, (run, words) in enumerate(REFUSED):
        args = "layers", "resharded", run
        refused = partial(is_refused, run=under_fsdp, words=words, args=args)
        yield f"fsdp refused: {name}", refused


CASES = {f"ddp, {name}": case for name, case in of_reducers()} | dict(of_fsdp())

if __name__ == "__main__":
    run_cases(CASES)
