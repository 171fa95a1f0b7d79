"""Reparametrized weights under DDP and FSDP2: the gradients of the whole batch in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from tests.neighbours.workers import Built, Case, half, report, sharded, the_whole_batch
from tests.weight_zoo import Way


class Block(nn.Module):
    """Attention, whose projections are read by itself, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.linear(x).tanh()


CALLS: dict[str, Callable[..., Any]] = {
    "plainly": lambda module, x: module(x),
    "torch": partial(torch_checkpoint, use_reentrant=False),
    "reentrant": partial(torch_checkpoint, use_reentrant=True),
    "ours": recoup.checkpoint,
}


class Model(nn.Module):
    """Words, blocks that may be checkpointed, a layer over time, and the words; and the loss."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.time = nn.GRU(8, 8, batch_first=True) if recurrent else nn.Conv1d(5, 5, 1)
        self.call = "plainly"

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = CALLS[self.call](block, x)
        x = self.time(x)
        logits = (x[0] if isinstance(x, tuple) else x) @ self.words.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


ALL, LAYERS = r"(.*\.)?(weight|in_proj_weight|weight_hh_l0)", r"blocks\.\d\.linear\.weight"
WAYS = {
    "rows": (Way(dropout={"p": 0.5, "axes": (1,)}), r"words\.weight"),
    "both": (Way(dropout={"p": 0.3}, noise={"std": 0.1}), ALL),
    "stacked": (Way({}, {"p": 0.3}, {"std": 0.1}), LAYERS),
    "learned": (Way(noise={"std": 0.1, "learned": "row", "relative": True}), ALL),
}
ADDING = ("stacked", "learned")  # parameters, which a wrapper has to know


def apply(way: str, model: nn.Module, prefix: str = "") -> Any:
    apply_to, pattern = WAYS[way]
    return apply_to(model, prefix + pattern)


def build(way: str, *, recurrent: bool = False, late: bool = False, call: str = "plainly") -> Built:
    """The noisy model, the same for a wrapper, which it may be made noisy after, and a batch."""
    plain = Model(recurrent).double()
    ours = copy.deepcopy(plain)
    ours.call = call
    ids, target = torch.randint(12, (2, 4, 5))
    return apply(way, plain), ours if late else apply(way, ours), (ids, target)


def fsdp(model: Any, how: str = "layers", **settings: Any) -> Any:
    parts = [part for block in model.blocks for part in (block.linear, block)]
    return sharded(model, [*parts, model.time] if how == "layers" else [], **settings)


def within(way: str) -> Callable[[Any], Any]:
    """DDP around a model that is made noisy later."""

    def wrap(model: Any) -> Any:
        wrapped = DistributedDataParallel(model)
        apply(way, model)
        return wrapped

    return wrap


def is_refused(run: Callable[..., Any], words: str, *args: Any) -> None:
    with pytest.raises((RuntimeError, ValueError), match=words):
        run(*args)


def parameters_that_ddp_does_not_know(rank: int, added: Way) -> None:
    """They would not be reduced."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8)))

    def late() -> None:
        added(model, r"module\.0\.weight")
        model(torch.randn(4, 8)).square().sum().backward()

    is_refused(late, "DistributedDataParallel")


def a_twin_under_ddp(rank: int, when: str) -> None:
    """It is the model in evaluation, after each step of the wrapped model."""
    _, inner, batch = build("stacked", recurrent=True)
    twin = recoup.weights.twin(inner) if when == "before" else None
    model = DistributedDataParallel(inner)
    twin = twin or recoup.weights.twin(model.module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model.train()(*half(batch, rank)).backward()
        optimizer.step()
        assert torch.equal(twin(*batch), model.eval()(*batch))
        assert not twin.training


def a_twin_of_a_sharded_model(rank: int, when: str, words: str) -> None:
    _, model, batch = build("both")
    twin = recoup.weights.twin(model) if when == "before" else None
    sharded(model, model.blocks)
    is_refused(lambda: (twin or recoup.weights.twin(model))(*batch), words)


def cases() -> Iterator[tuple[str, Case]]:
    def case(way: str, wrap: Any, **options: Any) -> Case:
        made = partial(build, way, **options)
        return partial(the_whole_batch, build=made, wrap=wrap, bound=1e-9)

    for way in WAYS:
        yield f"ddp {way}", case(way, DistributedDataParallel, recurrent=True)
        if way not in ADDING:
            after = lambda model, way=way: apply(way, DistributedDataParallel(model), r"module\.")  # noqa: E731
            yield f"ddp {way} after", case(way, after, recurrent=True, late=True)
            yield f"ddp {way} inside", case(way, within(way), recurrent=True, late=True)
        for call in CALLS:
            yield f"ddp {way} {call}", case(way, DistributedDataParallel, recurrent=True, call=call)
        for how in ("layers", "root"):
            yield f"fsdp {way} {how}", case(way, partial(fsdp, how=how))
            late = case(
                way, lambda model, way=way, how=how: apply(way, fsdp(model, how)), late=True
            )
            if way in ADDING:
                late = partial(is_refused, late, "before")
            yield f"fsdp {way} {how} late", late
        for call in ("torch", "ours"):
            yield f"fsdp {way} {call}", case(way, fsdp, call=call)
        yield f"fsdp {way} kept", case(way, partial(fsdp, reshard_after_forward=False))
    for name, added in (("norm", Way({})), ("learned", Way(noise={"learned": "row"}))):
        yield f"ddp {name} late", partial(parameters_that_ddp_does_not_know, added=added)
    for when in ("before", "after"):
        yield f"ddp twin {when}", partial(a_twin_under_ddp, when=when)
    for when, words in (("before", "mixed torch.Tensor and DTensor"), ("after", "a sharded model")):
        yield f"fsdp twin {when}", partial(a_twin_of_a_sharded_model, when=when, words=words)


CASES = dict(cases())

if __name__ == "__main__":
    report(CASES)
