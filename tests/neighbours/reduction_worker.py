"""`GradStore.all_reduce_` of stores that differ, or of processes that do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import recoup
from recoup.errors import GradientError
from tests.neighbours.workers import Case, over, report


def several_types(rank: int, op: str, absent: list[int], bucket: int | str) -> None:
    """Of which each rank lacks some, and one that nobody has stays absent."""
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float32]
    kinds.append(torch.float32)
    params = [nn.Parameter(torch.zeros(3, 2 + k, dtype=kind)) for k, kind in enumerate(kinds)]
    torch.manual_seed(7)
    store, want = recoup.GradStore(params), {}
    for place, each in enumerate(params[:-1]):
        values = [torch.randn(each.shape).to(each.dtype) for _ in range(2)]  # alike on all ranks
        parts = [value for other, value in enumerate(values) if place != absent[other]]
        kind = torch.float32 if each.dtype is torch.bfloat16 else each.dtype
        want[each] = sum(part.to(kind) for part in parts) / (2 if op == "mean" else 1)
        if place != absent[rank]:
            store.add_(each, values[rank])
    store.all_reduce_(op=op, bucket_bytes=bucket)
    assert [each in store for each in params] == [True] * 5 + [False]
    assert all(torch.equal(store[each].to(value.dtype), value) for each, value in want.items())


def sparse_layouts(rank: int, layouts: list[str]) -> None:
    """The rows of an embedding, as each rank has them."""
    weight = nn.Parameter(torch.zeros(20, 3))
    store, values = recoup.GradStore([weight]), [torch.zeros(20, 3) for _ in layouts]
    for other, layout in enumerate(layouts):
        if layout != "absent":
            values[other][[1, 5, 6 + other]] = 1.0 + other
    if layouts[rank] != "absent":
        mine = values[rank]
        store.add_(weight, mine.to_sparse(1) if layouts[rank] == "sparse" else mine)
    store.all_reduce_(op="sum")
    assert store[weight].is_sparse == ("dense" not in layouts)
    assert torch.equal(store[weight].to_dense(), sum(values))


def few_messages(rank: int, alike: bool) -> None:
    """No more than buckets fill; and a large gradient is not copied."""
    params = [nn.Parameter(torch.zeros(1000)) for _ in range(50)]
    params.append(nn.Parameter(torch.zeros(100_000)))
    store = recoup.GradStore(params)
    for place, each in enumerate(params):
        if alike or place % 2 == rank:
            store.add_(each, torch.ones_like(each))
    messages: list[str] = []

    def counting(name: str) -> Any:
        own = getattr(dist, name)
        run = lambda *args, **kwargs: messages.append(name) or own(*args, **kwargs)  # noqa: E731
        return mock.patch.object(dist, name, run)

    run = lambda: store.all_reduce_(bucket_bytes=30_000)  # noqa: E731
    with counting("all_reduce"), counting("all_gather_object"):
        peak = recoup.measure(run, device="cpu", repeats=0).peak_bytes
    num_buckets = math.ceil(sum(each.nbytes for each in params) / 30_000)
    assert len(messages) <= num_buckets + 1
    assert not alike or peak < 200_000  # the largest is of 400 kB, the buckets of 30


def batches_of_unequal_length(rank: int, op: str) -> None:
    """The mean is over those of all ranks, on each."""
    weight = nn.Parameter(torch.zeros(2))
    store = recoup.GradStore([weight])
    for factor, length in ([(2, 3), (4, 5)], [(8, 2)])[rank]:
        store.backward((weight * factor).sum(), weight=length)
    store.all_reduce_(op=op).mean_()
    assert store[weight].tolist() == pytest.approx([(3 * 2 + 5 * 4 + 2 * 8) / 10] * 2)


def a_mean_of_large_numbers(rank: int) -> None:
    """Their sum is too large for their type."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    store = recoup.GradStore([weight], dtype=torch.float16)
    store.add_(weight, torch.full_like(weight, 40_000))
    assert float(store.all_reduce_()[weight].max()) == 40_000.0


def a_rank_without_gradients_learns_their_scale(rank: int) -> None:
    weight = nn.Parameter(torch.zeros(2))
    store = recoup.GradStore([weight])
    if rank == 0:
        store.backward(weight.sum(), scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    store.all_reduce_()
    with pytest.raises(GradientError, match="scaled by 8"):
        store.step(torch.optim.SGD([weight], 0.1))


# What rank 1 has otherwise; and what all say, or what rank 1 does while the others name it.
STRANGERS = {
    "nobody": None, "number": "another number", "order": "same order", "op": "`op`",
    "bucket": "`bucket_bytes`", "scale": "one scale",
}  # fmt: skip
CULPRITS = {"extra": "`params`", "graph": r"`detach_\(\)`", "damage": r"`clear\(\)`"}


def processes_that_differ(rank: int, what: str) -> None:
    """All raise, nobody waits, and the next reduction is in order."""
    params = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3, 2))]
    own = what if rank else "nobody"
    given = {"number": params[:1], "order": params[::-1]}.get(own, params)
    settings: Any = {"op": {"op": "sum"}, "bucket": {"bucket_bytes": 100}}.get(own, {})
    store = recoup.GradStore(given, ddp=False)
    store.backward(sum(each.square().sum() for each in given))
    if own == "extra":
        store.add_(nn.Parameter(torch.ones(2)), torch.ones(2))
    elif own == "graph":
        store.backward(given[0].pow(3).sum(), create_graph=True)
    elif own == "scale":
        store.clear()
        store.backward(given[0].sum(), scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    elif own == "damage":
        late = given[1] * 1  # whose turn comes when the other gradient is there already
        late.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            store.backward(late.sum() + given[0].square().sum())
    before = {} if what == "damage" else {each: value.clone() for each, value in store.items()}
    words = STRANGERS[what] if what in STRANGERS else (CULPRITS[what] if rank else "Process 1")
    errors = (GradientError, ValueError)
    with nullcontext() if words is None else pytest.raises(errors, match=words):
        store.all_reduce_(**settings)
    assert what == "nobody" or all(torch.equal(store[each], v) for each, v in before.items())
    again = recoup.GradStore(params)
    again.add_(params[0], torch.full((2, 3), float(rank)))
    assert float(again.all_reduce_()[params[0]].max()) == 0.5


def cases() -> Iterator[tuple[str, Case]]:
    absent, buckets = ([-1, -1], [0, 3], [4, 1]), (1, 40, "25 MiB")
    layouts = [list(each) for each in product(("sparse", "dense", "absent"), ("sparse", "dense"))]
    yield from over(several_types, ("mean", "sum"), absent, buckets)
    yield from over(sparse_layouts, layouts)
    yield from over(few_messages, (True, False))
    yield from over(batches_of_unequal_length, ("mean", "sum"))
    yield from over(processes_that_differ, (*STRANGERS, *CULPRITS))
    yield from over(a_mean_of_large_numbers)
    yield from over(a_rank_without_gradients_learns_their_scale)


CASES = dict(cases())

if __name__ == "__main__":
    report(CASES)
