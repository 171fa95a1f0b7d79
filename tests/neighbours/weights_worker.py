"""Reparametrized weights under DDP and FSDP2: the gradients of the whole batch in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup.weights import same_draw
from tests.neighbours.workers import Case, half, named_gradients, report, sharded
from tests.weight_zoo import Way

STEPS = 3


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
    "torch": functools.partial(torch_checkpoint, use_reentrant=False),
    "reentrant": functools.partial(torch_checkpoint, use_reentrant=True),
    "ours": recoup.checkpoint,
}


class Model(nn.Module):
    """Words, blocks that may be checkpointed, a layer over time, and the words once more."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.time = nn.GRU(8, 8, batch_first=True) if recurrent else nn.Conv1d(5, 5, 1)
        self.call = "plainly"

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = CALLS[self.call](block, x)
        x = self.time(x)
        return (x[0] if isinstance(x, tuple) else x) @ self.words.weight.t()


ALL, LAYERS = r"(.*\.)?(weight|in_proj_weight|weight_hh_l0)", r"blocks\.\d\.linear\.weight"
WAYS = {
    "rows": (Way(dropout={"p": 0.5, "axes": (1,)}), r"words\.weight"),
    "both": (Way(dropout={"p": 0.3}, noise={"std": 0.1}), ALL),
    "stacked": (Way({}, {"p": 0.3}, {"std": 0.1}), LAYERS),
    "learned": (Way(noise={"std": 0.1, "learned": "row"}), ALL),
}
ADDING = ("stacked", "learned")  # parameters, which a wrapper has to know


def apply(way: str, model: nn.Module, prefix: str = "") -> Any:
    apply_to, pattern = WAYS[way]
    return apply_to(model, prefix + pattern)


def build(way: str | None = None, *, recurrent: bool = False) -> Model:
    torch.manual_seed(0)
    model = Model(recurrent)
    return model if way is None else apply(way, model)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, target = (torch.randint(12, (4, 5), generator=generator) for _ in range(2))
    return ids, target


def loss_of(model: nn.Module, ids: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), target.flatten())


def seeded(seed: int) -> Any:
    """The same draw on every rank, of the default generator."""
    torch.manual_seed(100 + seed)
    return nullcontext()


def whole_batch(
    rank: int, way: str, wrap: Callable[[], Any], call: str = "plainly", draw: Any = seeded
) -> None:
    """With the same noise on every rank; a reentrant checkpoint sums in another order."""
    model = wrap()
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    plain = build(way, recurrent=isinstance(inner.time, nn.GRU))
    assert list(inner.state_dict()) == list(plain.state_dict())
    for step in range(STEPS):
        found = []
        for net, given in ((plain, batch(step)), (model, half(batch(step), rank))):
            net.zero_grad()
            inner.call = "plainly" if net is plain else call
            with draw(step):
                loss = loss_of(net, *given)
            loss.backward()
            found.append({n: g.float().clone() for n, g in named_gradients(net).items()})
        want, got = found
        assert got.keys() == want.keys()
        scale = max(float(g.abs().max()) for g in want.values())
        assert all(float((got[n] - g).abs().max()) < 3e-6 * scale for n, g in want.items())


def ddp(way: str, when: str = "before") -> nn.Module:
    if when == "before":
        return DistributedDataParallel(build(way, recurrent=True))
    model = DistributedDataParallel(build(recurrent=True))
    apply(way, *((model, r"module\.") if when == "after" else (model.module,)))
    return model


def fsdp(way: str, how: str = "layers", *, late: bool = False, **settings: Any) -> Model:
    model = build(None if late else way)
    parts = [part for block in model.blocks for part in (block.linear, block)]
    model = sharded(model, [*parts, model.time] if how == "layers" else [], **settings)
    return apply(way, model) if late else model


def is_refused(run: Callable[..., Any], words: str, *args: Any, **settings: Any) -> None:
    with pytest.raises((RuntimeError, ValueError), match=words):
        run(*args, **settings)


def parameters_that_ddp_does_not_know(rank: int, added: Way) -> None:
    """They would not be reduced."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8)))

    def late() -> None:
        added(model, r"module\.0\.weight")
        model(torch.randn(4, 8)).square().sum().backward()

    is_refused(late, "DistributedDataParallel")


def a_twin_under_ddp(rank: int, when: str) -> None:
    """It is the model in evaluation, after each step of the wrapped model."""
    inner = build("stacked", recurrent=True)
    twin = recoup.weights.twin(inner) if when == "before" else None
    model = DistributedDataParallel(inner)
    twin = twin or recoup.weights.twin(model.module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model.train(), *half(batch(step), rank)).backward()
        optimizer.step()
        ids, _ = batch(step)
        assert torch.equal(twin(ids), model.eval()(ids))
        assert not twin.training


def a_twin_of_a_sharded_model(rank: int, when: str, words: str) -> None:
    model = build("both")
    twin = recoup.weights.twin(model) if when == "before" else None
    sharded(model, model.blocks)
    is_refused(lambda: (twin or recoup.weights.twin(model))(batch(0)[0]), words)


def cases() -> Iterator[tuple[str, Case]]:
    for way in WAYS:
        near = partial(whole_batch, way=way)
        for when in ("before", "after", "inside") if way not in ADDING else ("before",):
            yield f"ddp {way} {when}", partial(near, wrap=partial(ddp, way, when))
        for call in CALLS:
            of_call = partial(near, wrap=partial(ddp, way), call=call, draw=same_draw)
            yield f"ddp {way} {call}", of_call
        for how in ("layers", "root"):
            yield f"fsdp {way} {how}", partial(near, wrap=partial(fsdp, way, how))
            late = partial(near, wrap=partial(fsdp, way, how, late=True))
            if way in ADDING:
                late = lambda rank, run=late: is_refused(run, "before", rank)  # noqa: E731
            yield f"fsdp {way} {how} late", late
        for call in ("torch", "ours"):
            yield f"fsdp {way} {call}", partial(near, wrap=partial(fsdp, way), call=call)
        kept = partial(fsdp, way, reshard_after_forward=False)
        yield f"fsdp {way} kept", partial(near, wrap=kept)
    for name, added in (("norm", Way({})), ("learned", Way(noise={"learned": "row"}))):
        yield f"ddp {name} late", partial(parameters_that_ddp_does_not_know, added=added)
    for when in ("before", "after"):
        yield f"ddp twin {when}", partial(a_twin_under_ddp, when=when)
    for when, words in (("before", "mixed torch.Tensor and DTensor"), ("after", "a sharded model")):
        yield f"fsdp twin {when}", partial(a_twin_of_a_sharded_model, when=when, words=words)


CASES = dict(cases())

if __name__ == "__main__":
    report(CASES)
