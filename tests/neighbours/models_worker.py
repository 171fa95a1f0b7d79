"""Chains, tiles and flows under DDP and FSDP2: the gradients of the whole batch in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import recoup
from recoup.flows import RealNVP
from recoup.invertible import AdditiveCoupling, Chain
from tests.neighbours.workers import (
    Case,
    apart,
    half,
    named_gradients,
    of_all_ranks,
    report,
    sharded,
)
from tests.programs.flows import build as foreign_flow
from tests.unit.flows.models import SMALL, built, classes, filled

# A model that computes its loss from a batch, the same to be run in some way, and a batch.
Built = tuple[nn.Module, nn.Module, tuple[Tensor, ...]]
FLOWS = [("nice", None), ("realnvp", None), ("glow", None), ("realnvp", 3)]  # and classes


class Cost(nn.Module):
    """A model with the loss that it is trained by: DDP calls `forward`."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.loss(self.model, *inputs)


class Layer(nn.Module):
    """A layer that may have a parameter outside of the graph."""

    def __init__(self, width: int, *, has_unused: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        if has_unused:
            self.unused = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def first_squared(chain: nn.Module, x: Tensor) -> Tensor:
    output = chain(x)
    return (output[0] if isinstance(output, tuple) else output).square().mean()


def chain(memory: Any, case: str) -> Built:
    def block(*, has_unused: bool) -> nn.Module:
        layer = Layer(3 if memory == "constant" else 6, has_unused=has_unused)
        return AdditiveCoupling(layer, Layer(3)) if memory == "constant" else layer

    blocks = [block(has_unused=case == "unused" and place == 1) for place in range(4)]
    if case == "shared":
        blocks[3] = blocks[0]
    kind: Any = Chain if memory == "constant" else recoup.Sequential
    plain = Cost(kind(*blocks, memory="linear"), first_squared).double()
    ours = copy.deepcopy(plain)
    ours.model.memory = memory
    return plain, ours, (torch.randn(8, 6).double(),)


class Tiled(nn.Module):
    """A body and a head; it returns the loss, as a model with labels does."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.head, self.way = nn.Linear(8, 12), way

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.way == "plain":
            return self.loss(self.body(x), labels)
        hidden = recoup.tiled(self.body, tiles=3)(x)
        if self.way == "tiled":
            return recoup.tiled(self.loss, tiles=3, reduction="mean")(hidden, labels)
        return recoup.tiled_loss(self.loss, tiles=3)(hidden, labels)


def tiles(way: str) -> Built:
    plain = Tiled("plain")
    ours = copy.deepcopy(plain)
    ours.way = way
    return plain, ours, (torch.randn(4, 7, 8), torch.randint(12, (4, 7)))


def bits(flow: Any, *inputs: Tensor) -> Tensor:
    return -flow.log_prob(*inputs).mean()


def flow(name: str, num_classes: int | None) -> Built:
    """Without levels, since the noise of each rank would be its own."""
    options = {} if num_classes is None else {"num_classes": num_classes}
    made = built(name, SMALL, levels=None, memory="constant", **options)
    made.chain.drift = "raise"  # so that nothing mends a wrong inverse
    ours = Cost(filled(made, 0.2), bits)
    plain = copy.deepcopy(ours)
    plain.model.memory = "linear"
    labels = () if num_classes is None else (classes(8, num_classes),)
    return plain, ours, (torch.randn(8, *SMALL).double(), *labels)


def foreign(name: str) -> Built:
    made, log_prob = foreign_flow(name)
    plain = Cost(made, lambda flow, *inputs: -log_prob(flow, *inputs).mean()).eval()
    batch = torch.randn(16, 4).double(), torch.randn(16, 3).double()
    plain(*batch)  # layers start
    return plain, recoup.train_in(copy.deepcopy(plain), drift="raise"), batch


def a_first_step_leaves_the_ranks_alike(rank: int) -> None:
    """Of a flow whose ActNorms start under DDP, each rank from data of its own."""
    torch.manual_seed(0)
    made = Cost(RealNVP((2,), levels=None, num_steps=2, width=8, memory="constant"), bits).double()
    wrapped, optimizer = DistributedDataParallel(made), torch.optim.SGD(made.parameters(), lr=0.1)
    torch.manual_seed(10 + rank)
    wrapped(torch.randn(8, 2).double() + rank).backward()
    optimizer.step()
    first, second = of_all_ranks([p.detach() for p in made.parameters()])
    assert all(map(torch.equal, first, second))


# -- the comparison --------------------------------------------------------------------------------

WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "ddp": DistributedDataParallel,
    "ddp, unused": partial(DistributedDataParallel, find_unused_parameters=True),
    "fsdp": sharded,
    "fsdp, each": lambda model: sharded(
        model, model.model if isinstance(model, Cost) else [model.body, model.head]
    ),
}


def the_whole_batch(rank: int, build: Callable[[], Built], wrapper: str, bound: float) -> None:
    """Two steps on a half each have the gradients of the whole batch."""
    torch.manual_seed(0)
    plain, ours, batch = build()
    call = WRAPPERS[wrapper](ours)
    for step in range(2):
        given = tuple(x * (1 + step) if x.is_floating_point() else x for x in batch)
        plain.zero_grad()
        ours.zero_grad()
        plain(*given).backward()
        call(*half(given, rank)).backward()
        want, got = named_gradients(plain), named_gradients(ours)
        # What nobody uses has no gradient, or zeros of the wrapper.
        assert not any(got.pop(name).any() for name in got.keys() - want.keys())
        assert apart(got, want) < bound


def cases() -> Iterator[tuple[str, Case]]:
    def case(what: str, bound: float, build: Any, *args: Any, wrapper: str) -> tuple[str, Case]:
        made = partial(the_whole_batch, build=partial(build, *args), wrapper=wrapper, bound=bound)
        return f"{what} {' '.join(map(str, args))}, {wrapper}", made

    of_chains = [("plain", "ddp"), ("unused", "ddp, unused"), ("shared", "ddp"), ("plain", "fsdp"),
                 ("plain", "fsdp, each")]  # fmt: skip
    for memory, (what, wrapper) in product(("sqrt", 1, "constant"), of_chains):
        yield case("chain", 1e-12, chain, memory, what, wrapper=wrapper)
    for way, wrapper in product(("tiled", "tiled_loss"), ("ddp", "fsdp, each", "fsdp")):
        yield case("tiles", 1e-6, tiles, way, wrapper=wrapper)
    for (name, num), wrapper in product(FLOWS, ("ddp", "ddp, unused")):
        yield case("flow", 1e-9, flow, name, num, wrapper=wrapper)
    for name in ("zuko_spline", "nflows_affine", "freia_sequence"):
        yield case("flow", 1e-9, foreign, name, wrapper="ddp")
    yield "flow after a first step is that of the other rank", a_first_step_leaves_the_ranks_alike


CASES = dict(cases())

if __name__ == "__main__":
    report(CASES)
