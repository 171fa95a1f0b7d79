"""One of two processes whose stores of gradients are summed over both."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import recoup
from tests.neighbours.workers import report, said


def tensors(dtypes: list[torch.dtype]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(3, 2 + place, dtype=d)) for place, d in enumerate(dtypes)]


def reduced(rank: int, op: str, absent: list[int], bucket: int | str) -> float | str:
    """Gradients of several types, of which each rank lacks some, and one that nobody has."""
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float32]
    params = tensors([*kinds, torch.float32])
    torch.manual_seed(7)
    store = recoup.GradStore(params)
    want = {}
    for place, each in enumerate(params[:-1]):
        values = [torch.randn(each.shape).to(each.dtype) for _ in range(2)]  # alike on all ranks
        parts = [value for other, value in enumerate(values) if place != absent[other]]
        kind = torch.float32 if each.dtype is torch.bfloat16 else each.dtype
        want[each] = sum(part.to(kind) for part in parts) / (2 if op == "mean" else 1)
        if place != absent[rank]:
            store.add_(each, values[rank])
    store.all_reduce_(op=op, bucket_bytes=bucket)
    if [each in store for each in params] != [True] * 5 + [False]:
        return "other keys"
    return max(float((store[each] - value).abs().max()) for each, value in want.items())


def sparse(rank: int, layouts: list[str]) -> float | str:
    """The rows of an embedding, as each rank has them."""
    weight = nn.Parameter(torch.zeros(20, 3))
    store = recoup.GradStore([weight])
    values = [torch.zeros(20, 3) for _ in layouts]
    for other, layout in enumerate(layouts):
        if layout != "absent":
            values[other][[1, 5, 6 + other]] = 1.0 + other
    mine = values[rank]
    if layouts[rank] != "absent":
        store.add_(weight, mine.to_sparse(1) if layouts[rank] == "sparse" else mine)
    store.all_reduce_(op="sum")
    if store[weight].is_sparse == ("dense" in layouts):
        return "another layout"
    return float((store[weight].to_dense() - sum(values)).abs().max())


def counted(rank: int, alike: bool) -> list[float]:
    """The messages of a reduction, the buckets that its bytes fill, and its peak."""
    params = [nn.Parameter(torch.zeros(1000)) for _ in range(50)]
    params.append(nn.Parameter(torch.zeros(100_000)))
    store = recoup.GradStore(params)
    for place, each in enumerate(params):
        if alike or place % 2 == rank:
            store.add_(each, torch.ones_like(each))
    num_bytes = sum(each.nbytes for each in params)
    names = ("all_reduce", "all_gather_object")
    before = {name: getattr(dist, name) for name in names}
    num_messages = 0

    def counting(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_messages
            num_messages += 1
            return call(*args, **kwargs)

        return run

    for name in names:
        setattr(dist, name, counting(before[name]))
    try:
        found = recoup.measure(
            lambda: store.all_reduce_(bucket_bytes=30_000), device="cpu", repeats=0
        )
    finally:
        for name in names:
            setattr(dist, name, before[name])
    return [num_messages, math.ceil(num_bytes / 30_000), found.peak_bytes]


def weighted(rank: int, op: str) -> list[float]:
    """Batches of unequal length on the ranks: the mean over all, on each."""
    weight = nn.Parameter(torch.zeros(2))
    store = recoup.GradStore([weight])
    if rank == 0:
        store.backward((weight * 2).sum(), weight=3)
        store.backward((weight * 4).sum(), weight=5)
    else:
        store.backward((weight * 8).sum(), weight=2)
    store.all_reduce_(op=op).mean_()
    return [*store[weight].tolist(), (3 * 2 + 5 * 4 + 2 * 8) / 10]


def large(rank: int) -> float:
    """A mean of numbers whose sum is too large for their type."""
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    store = recoup.GradStore([weight], dtype=torch.float16)
    store.add_(weight, torch.full_like(weight, 40_000))
    return float(store.all_reduce_()[weight].max())


def scaled(rank: int) -> str:
    """One rank has nothing, and the others something scaled: it may not be applied as it is."""
    weight = nn.Parameter(torch.zeros(2))
    store = recoup.GradStore([weight])
    if rank == 0:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        store.backward(weight.sum(), scaler=scaler)
    store.all_reduce_()
    return said(store.step, torch.optim.SGD([weight], 0.1))


# -- all_reduce_, when the processes do not agree --


def stranger(rank: int, what: str) -> str:
    """What a rank says when one of them differs; then, that the next reduction is in order."""
    params = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3, 2))]
    given = params
    if rank == 1:
        given = {"number": params[:1], "order": params[::-1]}.get(what, params)
    store = recoup.GradStore(given, ddp=False)
    settings: dict[str, Any] = {}
    if rank == 1:
        settings = {"op": {"op": "sum"}, "bucket": {"bucket_bytes": 100}}.get(what, {})
    store.backward(sum(each.square().sum() for each in given))
    if rank == 1 and what == "extra":
        store.add_(nn.Parameter(torch.ones(2)), torch.ones(2))
    if rank == 1 and what == "graph":
        store.backward(given[0].pow(3).sum(), create_graph=True)
    if rank == 1 and what == "scale":
        store.clear()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        store.backward(given[0].sum(), scaler=scaler)
    if rank == 1 and what == "damage":
        late = given[1] * 1  # whose turn comes when the other gradient is there already
        late.register_hook(fail)
        said(store.backward, late.sum() + given[0].square().sum())
    before = {} if what == "damage" else {each: value.clone() for each, value in store.items()}
    words = said(_reduce, store, settings)
    if any(not torch.equal(store[each], value) for each, value in before.items()):
        return f"changed something: {words}"
    again = recoup.GradStore(params)
    again.add_(params[0], torch.full((2, 3), float(rank)))
    return words if float(again.all_reduce_()[params[0]].max()) == 0.5 else "out of step"


def _reduce(store: recoup.GradStore, settings: dict[str, Any]) -> str:
    store.all_reduce_(**settings)
    return "nothing"


def fail(gradient: Tensor) -> None:
    raise RuntimeError("no gradient today")


def cases(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for op in ("mean", "sum"):
        for absent in ([-1, -1], [0, -1], [0, 3], [4, 1]):
            for bucket in (1, 40, "25 MiB"):
                found[f"reduced {op} {absent} {bucket}"] = said(reduced, rank, op, absent, bucket)
        found[f"weighted {op}"] = said(weighted, rank, op)
    for mine in ("sparse", "dense", "absent"):
        for other in ("sparse", "dense"):
            found[f"sparse {mine} {other}"] = said(sparse, rank, [mine, other])
    for alike in (True, False):
        found[f"counted {alike}"] = said(counted, rank, alike)
    found["large"] = said(large, rank)
    found["scaled"] = said(scaled, rank)
    for what in ("nobody", "number", "order", "op", "bucket", "extra", "graph", "scale", "damage"):
        found[f"stranger {what}"] = said(stranger, rank, what)
    return found


if __name__ == "__main__":
    report(cases)
