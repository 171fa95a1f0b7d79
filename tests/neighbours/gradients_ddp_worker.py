"""One of two processes whose gradients a store collects from DistributedDataParallel."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import recoup
from tests.neighbours.workers import report, said

STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "views unused": {"gradient_as_bucket_view": True, "find_unused_parameters": True},
    "views static": {"gradient_as_bucket_view": True, "static_graph": True},
}


class Model(nn.Module):
    """Layers of which the last is used where it is said so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.uses_c = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).tanh())
        return self.c(x) if self.uses_c else x


def model_for(kind: str) -> Model:
    model = Model().double()
    if "unused" not in kind and "static" not in kind:
        model.c = nn.Identity()
    return model


def batch(step: int, rank: int | None = None) -> Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).double()
    return x if rank is None else x[2 * rank : 2 * rank + 2]


def whole(model: nn.Module, steps: int = STEPS) -> dict[str, Tensor]:
    """The gradients of all steps, in one process."""
    model = copy.deepcopy(model)
    model.zero_grad()
    for step in range(steps):
        model(batch(step)).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    if got.keys() != want.keys():
        return math.inf
    return max(float((got[name] - want[name]).detach().abs().max()) for name in want)


# -- DistributedDataParallel -----------------------------------------------------------------------


def collect(store: recoup.GradStore, loss: Tensor, way: str) -> None:
    if way == "collecting":
        with store.collecting():
            loss.backward()
    else:
        store.backward(loss, mode=way)


def several(rank: int, kind: str, way: str) -> dict[str, Any]:
    """Three backwards into one store, with something in `.grad`, and others after that."""
    model = model_for(kind)
    wrapped = DistributedDataParallel(model, **KINDS[kind])
    store = recoup.GradStore(model.parameters())
    for each in model.parameters():
        each.grad = torch.full_like(each, 7.0)
    for step in range(STEPS):
        collect(store, wrapped(batch(step, rank)).square().mean(), way)
    found = {
        "apart": difference(store.named(model), whole(model)),
        ".grad": [float(each.grad.sub(7).abs().max()) for each in model.parameters()],
    }
    before = {name: value.clone() for name, value in store.named(model).items()}
    for _ in range(2):
        wrapped(batch(9, rank)).square().mean().mul(100).backward()
    found["later"] = difference(store.named(model), before)
    return found


def taken(rank: int, kind: str) -> list[float]:
    """What was in `.grad`, taken, while the reducer goes on."""
    model = model_for(kind)
    wrapped = DistributedDataParallel(model, **KINDS[kind])
    want = whole(model)
    for step in range(STEPS):
        wrapped(batch(step, rank)).square().mean().backward()
    store = recoup.GradStore.from_grad(model.parameters())
    before = difference(store.named(model), want)
    wrapped(batch(9, rank)).square().mean().mul(100).backward()
    return [before, difference(store.named(model), want)]


def subset(rank: int, kind: str, way: str) -> float | str:
    """A store over some of the parameters; `.grad` of the others is put back."""
    model = model_for(kind)
    wrapped = DistributedDataParallel(model, **KINDS[kind])
    store = recoup.GradStore(model.b.parameters(), ddp=wrapped)
    for step in range(STEPS):
        collect(store, wrapped(batch(step, rank)).square().mean(), way)
    if way != "collecting" and any(each.grad is not None for each in model.a.parameters()):
        return "left something in `.grad`"
    want = {name: value for name, value in whole(model).items() if name.startswith("b.")}
    return difference(store.named(model), want)


def unlike(rank: int, kind: str) -> float:
    """A layer that each rank uses at other steps."""
    model = model_for(kind)
    wrapped = DistributedDataParallel(model, **KINDS[kind])
    store = recoup.GradStore(model.parameters())
    want = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(STEPS):
        model.uses_c = rank == step % 2
        store.backward(wrapped(batch(step, rank)).square().mean())
        for other in range(2):
            single = copy.deepcopy(model)
            single.uses_c = other == step % 2
            single(batch(step, other)).square().mean().backward()
            for name, p in single.named_parameters():
                want[name] += 0 if p.grad is None else p.grad / 2
    return difference(store.named(model), want)


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def unreduced(
    rank: int, way: str, end: str, dtype: torch.dtype | None = None, ddp: bool | None = True
) -> float | str:
    """Backwards within `no_sync`; then one more that is reduced, after `all_reduce_` or alone."""
    model = model_for("plain")
    wrapped = DistributedDataParallel(model)
    given = wrapped if ddp else ddp
    store = recoup.GradStore(model.parameters(), dtype=dtype, ddp=given)
    for step in range(STEPS):
        is_reduced = step == STEPS - 1
        if is_reduced and end == "all_reduce_":
            store.all_reduce_()
        with nullcontext() if is_reduced else wrapped.no_sync():
            if way == "segments":
                recoup.segments_backward([wrapped], batch(step, rank), mean_square, store)
                continue
            loss = mean_square(wrapped(batch(step, rank)))
            collect(store, loss, "auto" if is_reduced else way)
    return difference(store.named(model), whole(model))


def taken_unreduced(rank: int) -> float | str:
    """What was collected within `no_sync` in a store that knows no reducer, merged into another."""
    model = model_for("plain")
    wrapped = DistributedDataParallel(model)
    store = recoup.GradStore(model.parameters(), dtype=torch.float32, ddp=wrapped)
    with wrapped.no_sync():
        mean_square(wrapped(batch(0, rank))).backward()
    store.extend_(recoup.GradStore.from_grad(model.parameters()).clone())
    store.backward(mean_square(wrapped(batch(1, rank))))
    return difference(store.named(model), whole(model, 2))


def partly_unreduced(rank: int) -> float | str:
    """Some gradients are collected within `no_sync`, others reduced, and then all."""
    model = model_for("plain")
    wrapped = DistributedDataParallel(model)
    store = recoup.GradStore(model.parameters(), dtype=torch.float32, ddp=wrapped)
    with wrapped.no_sync():
        store.backward(mean_square(wrapped(batch(0, rank))), params=model.a.parameters())
    for params in (model.b.parameters(), None):
        store.backward(mean_square(wrapped(batch(1, rank))), params=params)
    return max(float(each.abs().max()) for each in store.values())


def trained(rank: int) -> float:
    """Steps of AdamW, clipped by the norm that all have."""
    model, single = model_for("plain"), model_for("plain")
    wrapped = DistributedDataParallel(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, single))
    store = recoup.GradStore(model.parameters())
    for step in range(4):
        for micro in range(2):
            store.backward(wrapped(batch(10 * step + micro, rank)).square().mean())
            single(batch(10 * step + micro)).square().mean().backward()
        store.clip_norm_(0.05)
        store.step(ours)
        nn.utils.clip_grad_norm_(single.parameters(), 0.05)
        theirs.step()
        theirs.zero_grad()
    return difference(dict(model.named_parameters()), dict(single.named_parameters()))


def with_a_graph(rank: int, is_known: bool) -> float | str:
    """What no reducer sees; of a model that is not wrapped, it may be had if that is said."""
    model = model_for("plain")
    ddp = DistributedDataParallel(model) if is_known else False
    store = recoup.GradStore(model.parameters(), ddp=ddp)
    store.backward(model(batch(0, rank)).square().mean(), create_graph=True)
    store.detach_().all_reduce_()
    return difference(store.named(model), whole(model, 1))


class Words(nn.Module):
    """An embedding whose gradient is sparse, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(9, 4, sparse=True)
        self.layer = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.words(ids))


def of_words(rank: int, end: str) -> float | str:
    """Three backwards, all reduced, or only those or the sum that `end` says."""
    model = Words().double()
    wrapped = DistributedDataParallel(model)
    single = copy.deepcopy(model)
    store = recoup.GradStore(model.parameters(), ddp=wrapped)
    model.words.weight.grad = torch.ones(9, 4).double().to_sparse(1)
    before = model.words.weight.grad
    for step in range(STEPS):
        ids = torch.tensor([[step, 1, 2], [3, step + 4, 3]])
        is_reduced = end == "all" or (end == "backward" and step == STEPS - 1)
        with nullcontext() if is_reduced else wrapped.no_sync():
            store.backward(wrapped(ids[rank : rank + 1]).square().mean())
        single(ids).square().mean().backward()
    if end == "all_reduce_":
        store.all_reduce_()
    if model.words.weight.grad is not before or before.to_dense().sub(1).any():
        return "changed `.grad`"
    want = {name: p.grad.to_dense() for name, p in single.named_parameters()}
    return difference({name: g.to_dense() for name, g in store.named(model).items()}, want)


def cases(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        for way in ("auto", "harvest", "collecting"):
            found[f"several {kind} {way}"] = said(several, rank, kind, way)
        found[f"taken {kind}"] = said(taken, rank, kind)
    for kind in ("plain", "views"):
        for way in ("auto", "collecting"):
            found[f"subset {kind} {way}"] = said(subset, rank, kind, way)
    for kind in ("unused", "views unused"):
        found[f"unlike {kind}"] = said(unlike, rank, kind)
    for way in ("auto", "grad", "collecting", "segments"):
        for end in ("all_reduce_", "backward"):
            found[f"unreduced {way} {end}"] = said(unreduced, rank, way, end)
    for end in ("all_reduce_", "backward"):
        found[f"float32 {end}"] = said(unreduced, rank, "auto", end, torch.float32)
    for end in ("all", "all_reduce_", "backward"):
        found[f"sparse {end}"] = said(of_words, rank, end)
    found["trained"] = said(trained, rank)
    found["unknown segments"] = said(unreduced, rank, "segments", "backward", None, None)
    # Last, since what goes wrong here may leave a reducer waiting.
    found["refused grad"] = said(subset, rank, "plain", "grad")
    found["refused graph"] = said(with_a_graph, rank, True)
    found["nobody asked"] = said(with_a_graph, rank, False)
    found["taken unreduced"] = said(taken_unreduced, rank)
    found["partly unreduced"] = said(partly_unreduced, rank)
    found["unknown"] = said(unreduced, rank, "auto", "backward", torch.float32, None)
    return found


if __name__ == "__main__":
    report(cases)
