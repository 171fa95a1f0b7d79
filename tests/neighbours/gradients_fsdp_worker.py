"""One of two processes whose gradients a store collects from FSDP2."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import recoup
from tests.neighbours.workers import report, said

STEPS = 3


class Model(nn.Module):
    """Layers whose rows do not divide by two, and one number, of which a rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(3, 3)
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).tanh())) * self.factor


def sharded(how: str, mesh: Any, **settings: Any) -> Any:
    model = Model()
    if how == "layers":
        for layer in (model.a, model.b, model.c):
            fully_shard(layer, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def batch(step: int, rank: int | None = None) -> Tensor:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
    return x if rank is None else x[2 * rank : 2 * rank + 2]


def whole(steps: int = STEPS) -> dict[str, Tensor]:
    """The gradients of all steps, in one process."""
    model = Model()
    for step in range(steps):
        model(batch(step)).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def difference(got: dict[str, Any], want: dict[str, Tensor]) -> float:
    if got.keys() != want.keys():
        return math.inf
    return max(
        float((got[name].detach().full_tensor() - want[name].detach()).abs().max()) for name in want
    )


def collect(store: recoup.GradStore, loss: Tensor, way: str, allow_empty: bool = False) -> None:
    if way == "collecting":
        with store.collecting(allow_empty=allow_empty):
            loss.backward()
    else:
        store.backward(loss, mode=way, allow_empty=allow_empty)


def several(model: Any, rank: int, way: str, dtype: torch.dtype | None = None) -> list[Any]:
    """How far three backwards are, and whether the sum was made in place."""
    store = recoup.GradStore(model.parameters(), dtype=dtype)
    for each in model.parameters():
        each.grad = torch.full_like(each, 7.0)
    before = [each.grad for each in model.parameters()]
    places = []
    for step in range(STEPS):
        collect(store, model(batch(step, rank)).square().mean(), way)
        places.append([each.to_local().data_ptr() for each in store.values()])
    kept = all(p.grad is g for p, g in zip(model.parameters(), before, strict=True))
    kept = kept and all(bool((g.to_local() == 7).all()) for g in before)
    num_bytes = sum(each.to_local().nbytes for each in store.values())
    return [
        difference(store.named(model), whole()),
        kept,
        places[0] == places[-1],
        store.nbytes() == num_bytes,
    ]


def unreduced(model: Any, rank: int, way: str) -> float:
    """Micro-batches of which only the last is reduced."""
    store = recoup.GradStore(model.parameters())
    for step in range(STEPS):
        is_last = step == STEPS - 1
        model.set_requires_gradient_sync(is_last)
        collect(store, model(batch(step, rank)).square().mean(), way, allow_empty=not is_last)
    return difference(store.named(model), whole())


def unreduced_alone(model: Any, rank: int) -> float:
    model.set_requires_gradient_sync(False)
    return several(model, rank, "auto")[0]


def inputs(model: Any, rank: int) -> list[Any]:
    """The gradient of the batch, which is returned."""
    x, single, y = batch(0, rank).requires_grad_(), Model(), batch(0, rank).requires_grad_()
    store = recoup.GradStore(model.parameters())
    (got,) = store.backward(model(x).square().mean(), inputs=x)
    single(y).square().mean().backward()
    return [float((got - y.grad).abs().max()), x.grad is None]


def algebra(model: Any, rank: int) -> dict[str, float]:
    store = recoup.GradStore(model.parameters())
    for step in range(STEPS):
        store.backward(model(batch(step, rank)).square().mean(), weight=2.0)
    store.mean_()
    want = whole()
    flat = torch.cat([value.flatten() for value in want.values()]) / STEPS
    found = {f"norm {order}": store.norm(order) - flat.norm(order) for order in (1.0, 2.0)}
    found["dot"] = store.dot(store) - flat @ flat
    found["cosine"] = store.cosine(store * 2.0) - 1
    found["finite"] = 1 - float(store.isfinite())
    found["sum"] = (store + store * 0.5 - store.to(dtype=torch.float64) * 1.5).norm()
    found["clip"] = store.clip_norm_(0.1) - flat.norm()
    found["clipped"] = store.norm() - 0.1
    return {name: abs(float(value)) for name, value in found.items()}


def largest(model: Any, rank: int) -> float:
    """The norm whose part is undefined where a rank has no entries."""
    store = recoup.GradStore(model.parameters())
    store.backward(model(batch(0, rank)).square().mean())
    return abs(float(store.norm(math.inf) - max(g.abs().max() for g in whole(1).values())))


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
}


def trained(model: Any, rank: int, name: str) -> float:
    """Steps of an optimizer, clipped, each over two micro-batches."""
    kind, settings = OPTIMIZERS[name]
    single = Model()
    ours, theirs = (kind(m.parameters(), lr=0.1, **settings) for m in (model, single))
    store = recoup.GradStore(model.parameters())
    for step in range(4):
        for micro in range(2):
            store.backward(model(batch(10 * step + micro, rank)).square().mean())
            single(batch(10 * step + micro)).square().mean().backward()
        store.clip_norm_(0.05)
        store.step(ours)
        nn.utils.clip_grad_norm_(single.parameters(), 0.05)
        theirs.step()
        theirs.zero_grad()
    return difference(dict(model.named_parameters()), dict(single.named_parameters()))


def mixed(model: Any, rank: int) -> None:
    store = recoup.GradStore(model.parameters())
    store.backward(model(batch(0, rank)).square().mean())
    store.add_(model.a.weight, whole()["a.weight"])


def reduced_again(model: Any, rank: int) -> None:
    store = recoup.GradStore(model.parameters())
    store.backward(model(batch(0, rank)).square().mean())
    store.all_reduce_()


def with_a_graph(model: Any, rank: int) -> None:
    store = recoup.GradStore(model.parameters())
    store.backward(model(batch(0, rank)).square().mean(), create_graph=True)


def saved(model: Any, rank: int) -> list[Any]:
    """A state of sharded gradients, and one of whole ones, which do not fit."""
    store = recoup.GradStore(model.parameters())
    store.backward(model(batch(0, rank)).square().mean())
    loaded = recoup.GradStore(model.parameters())
    loaded.load_state_dict(store.state_dict(model), model)
    words = said(loaded.load_state_dict, {**store.state_dict(model), "gradients": whole()}, model)
    return [difference(loaded.named(model), whole(1)), words]


def measured(model: Any, rank: int) -> bool:
    """Whether the meter and the census see sharded tensors."""
    store = recoup.GradStore(model.parameters())
    held = recoup.measure(
        lambda: store.backward(model(batch(0, rank)).square().mean()), device="cpu", repeats=0
    ).held_bytes
    listed = recoup.residuals(lambda: [each.exp() for each in model.parameters()])
    return held >= sum(each.to_local().nbytes for each in store.values()) and bool(listed.entries)


SINGLE: dict[str, Callable[..., Any]] = {
    "unreduced alone": unreduced_alone,
    "inputs": inputs,
    "algebra": algebra,
    "mixed": mixed,
    "reduced again": reduced_again,
    "with a graph": with_a_graph,
    "saved": saved,
    "measured": measured,
}


def cases_of(how: str, rank: int, mesh: Any) -> dict[str, Any]:
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    kinds = {"": {}, "kept ": {"reshard_after_forward": False}, "low ": {"mp_policy": low}}
    found: dict[str, Any] = {}

    def case(name: str, run: Callable[..., Any], *args: Any, kind: str = "") -> None:
        model = sharded(how, mesh, **kinds[kind])
        found[f"{how} {kind}{name}"] = said(run, model, rank, *args)

    for kind in kinds:
        for way in ("auto", "harvest", "collecting"):
            case(f"several {way}", several, way, kind=kind)
        for way in ("auto", "collecting"):
            case(f"unreduced {way}", unreduced, way, kind=kind)
    case("several in float64", several, "auto", torch.float64)
    case("refused grad", several, "grad")
    for name in OPTIMIZERS:
        case(f"trained {name}", trained, name)
    for name, run in SINGLE.items():
        case(name, run)
    return found


def cases(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    found = {**cases_of("layers", rank, mesh), **cases_of("whole", rank, mesh)}
    # Last, since where a rank raises alone the other one waits.
    found["largest"] = said(largest, sharded("layers", mesh), rank)
    return found


if __name__ == "__main__":
    report(cases)
