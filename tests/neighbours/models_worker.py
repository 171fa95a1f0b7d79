"""Chains, tiles and flows under DDP and FSDP2: the gradients of the whole batch in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import recoup
from recoup.flows import NICE, Glow, RealNVP
from recoup.invertible import ActNorm, AdditiveCoupling, Chain
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

# A model that computes its loss from a batch, the same to be run in some way, and a batch.
Built = tuple[nn.Module, nn.Module, tuple[Tensor, ...]]


class Cost(nn.Module):
    """A model with the loss that it is trained by: DDP calls `forward`."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.loss(self.model, *inputs)


# -- chains ----------------------------------------------------------------------------------------


class Skips(nn.Module):
    """Leaves one parameter out of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def first_squared(chain: nn.Module, x: Tensor) -> Tensor:
    output = chain(x)
    return (output[0] if isinstance(output, tuple) else output).square().mean()


def chain(memory: Any, case: str) -> Built:
    kind: Any = Chain if memory == "constant" else recoup.Sequential
    if memory == "constant":
        blocks: list[nn.Module] = [AdditiveCoupling(network(), network()) for _ in range(4)]
    else:
        blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)]
    if case == "unused" and memory == "constant":
        blocks[1].register_module("unused", nn.Linear(2, 2))
    elif case == "unused":
        blocks[1] = Skips()
    elif case == "shared":
        blocks[3] = blocks[0]
    plain = Cost(kind(*blocks, memory="linear"), first_squared).double()
    ours = copy.deepcopy(plain)
    ours.model.memory = memory
    return plain, ours, (torch.randn(8, 6).double(),)


# -- tiles -----------------------------------------------------------------------------------------


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


# -- flows: without levels, since the noise of each rank would be its own --------------------------

FLOWS: dict[str, Callable[..., Any]] = {
    "nice": lambda **o: NICE((1, 4, 4), exact=True, **o),
    "realnvp": lambda **o: RealNVP((1, 4, 4), num_steps=2, **o),
    "glow": lambda **o: Glow((1, 4, 4), num_levels=2, num_steps=2, **o),
    "conditional": lambda **o: RealNVP((1, 4, 4), num_steps=2, num_classes=3, **o),
}


def bits(flow: Any, *inputs: Tensor) -> Tensor:
    return -flow.log_prob(*inputs).mean()


def flow(name: str) -> Built:
    ours = Cost(FLOWS[name](levels=None, width=8, memory="constant"), bits).double()
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.2)
    for module in ours.modules():
        if isinstance(module, ActNorm):
            module.started = True
    ours.model.chain.drift = "raise"  # so that nothing mends a wrong inverse
    plain = copy.deepcopy(ours)
    plain.model.memory = "linear"
    labels = (torch.arange(8) % 3,) if name == "conditional" else ()
    return plain, ours, (torch.randn(8, 1, 4, 4).double(), *labels)


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
    """Check that two steps on a half each have the gradients of the whole batch."""
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
    def case(build: Callable[..., Built], *args: Any, wrapper: str, bound: float) -> Case:
        made = partial(build, *args)
        return partial(the_whole_batch, build=made, wrapper=wrapper, bound=bound)

    for memory in ("sqrt", 1, "constant"):
        for what in ("plain", "unused", "shared"):
            wrapper = "ddp, unused" if what == "unused" else "ddp"
            made = case(chain, memory, what, wrapper=wrapper, bound=1e-12)
            yield f"chain in memory {memory}, {what}", made
        for wrapper in ("fsdp", "fsdp, each"):
            made = case(chain, memory, "plain", wrapper=wrapper, bound=1e-12)
            yield f"chain in memory {memory}, {wrapper}", made
    for way in ("tiled", "tiled_loss"):
        for wrapper in ("ddp", "fsdp, each", "fsdp"):
            yield f"tiles by {way}, {wrapper}", case(tiles, way, wrapper=wrapper, bound=1e-6)
    for name in FLOWS:
        for wrapper in ("ddp", "ddp, unused"):
            yield f"flow {name}, {wrapper}", case(flow, name, wrapper=wrapper, bound=1e-9)
    for name in ("zuko_spline", "nflows_affine", "freia_sequence"):
        yield f"flow {name}", case(foreign, name, wrapper="ddp", bound=1e-9)
    yield "flow after a first step is that of the other rank", a_first_step_leaves_the_ranks_alike


CASES = dict(cases())

if __name__ == "__main__":
    report(CASES)
