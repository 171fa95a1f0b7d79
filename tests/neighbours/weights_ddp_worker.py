"""One of two processes with reparametrized weights under DistributedDataParallel and FSDP2."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup.weights import same_draw
from tests.neighbours.workers import report, said
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


class Model(nn.Module):
    """Words, blocks that may be checkpointed, a layer over time, and the words once more."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.time = nn.GRU(8, 8, batch_first=True) if recurrent else nn.Conv1d(5, 5, 1)
        self.call: Callable[..., Any] = CALLS["plainly"]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = self.call(block, x)
        x = self.time(x)
        return (x[0] if isinstance(x, tuple) else x) @ self.words.weight.t()


CALLS: dict[str, Callable[..., Any]] = {
    "plainly": lambda module, x: module(x),
    "torch": functools.partial(torch_checkpoint, use_reentrant=False),
    "reentrant": functools.partial(torch_checkpoint, use_reentrant=True),
    "ours": recoup.checkpoint,
}
ALL, LAYERS = r"(.*\.)?(weight|in_proj_weight|weight_hh_l0)", r"blocks\.\d\.linear\.weight"
WAYS = {
    "rows": (Way(dropout={"p": 0.5, "axes": (1,)}), r"words\.weight"),
    "both": (Way(dropout={"p": 0.3}, noise={"std": 0.1}), ALL),
    "stacked": (Way({}, {"p": 0.3}, {"std": 0.1}), LAYERS),
    "learned": (Way(noise={"std": 0.1, "learned": "row", "relative": True}), ALL),
}
ADDING = ("stacked", "learned")  # parameters, which a wrapper has to know


def apply(way: str, model: nn.Module, prefix: str = "") -> nn.Module:
    apply_to, pattern = WAYS[way]
    return apply_to(model, prefix + pattern)


def build(way: str | None = None, *, recurrent: bool = False) -> Model:
    torch.manual_seed(0)
    model: Any = Model(recurrent)
    return model if way is None else apply(way, model)


def batch(step: int, which: slice = slice(None)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, target = (torch.randint(12, (4, 5), generator=generator) for _ in range(2))
    return ids[which], target[which]


def loss_of(model: nn.Module, ids: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), target.flatten())


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def seeded(step: int) -> Any:
    """The same draw on every rank: the default generator at the step."""
    torch.manual_seed(100 + step)
    return nullcontext()


def steps_of(model: nn.Module, draw: Callable[[int], Any], which: slice) -> list[dict[str, Tensor]]:
    """The gradients of a part of each batch, as they are reduced."""
    found = []
    for step in range(STEPS):
        model.zero_grad()
        with draw(step):
            loss = loss_of(model, *batch(step, which))
        loss.backward()
        named = model.named_parameters()
        found.append({n.removeprefix("module."): whole(p.grad).clone() for n, p in named})
    return found


def difference(
    plain: Model, model: nn.Module, call: str, draw: Callable[[int], Any], rank: int
) -> float:
    """The largest difference of gradients from those of the whole batch in one process.

    It is relative to the largest entry of all gradients of a step.
    """
    want, worst = steps_of(plain, draw, slice(None)), 0.0
    (model.module if isinstance(model, DistributedDataParallel) else model).call = CALLS[call]
    for mine, theirs in zip(
        steps_of(model, draw, slice(2 * rank, 2 * rank + 2)), want, strict=True
    ):
        assert set(mine) == set(theirs), (sorted(mine), sorted(theirs))
        scale = max(float(value.abs().max()) for value in theirs.values())
        apart = [float((mine[n].float() - value).abs().max()) for n, value in theirs.items()]
        worst = max(worst, *(each / scale for each in apart))
    return worst


def ddp(way: str, when: str) -> nn.Module:
    if when == "before":
        return DistributedDataParallel(build(way, recurrent=True))
    model = DistributedDataParallel(build(recurrent=True))
    if when == "after":
        apply(way, model, r"module\.")
    else:
        apply(way, model.module)
    return model


def ddp_of_what_comes_late(added: str, rank: int) -> str:
    """A parameter that the wrapper does not know would not be reduced."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8)))
    way = Way({}) if added == "weight_g" else Way(noise={"learned": "row"})
    way(model, r"module\.0\.weight")
    model(torch.randn(4, 8) + rank).square().sum().backward()
    mine = model.module[0].get_parameter(added).grad
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    return "reduced" if torch.equal(*both) else "silently not reduced"


def sharded(model: Model, how: str, mesh: Any, **settings: Any) -> Model:
    blocks = [part for block in model.blocks for part in (block.linear, block)]
    for part in [*blocks, model.time] if how == "layers" else []:
        fully_shard(part, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def fsdp(way: str, how: str, when: str, call: str, rank: int, mesh: Any) -> float:
    settings = {"reshard_after_forward": call != "kept"}
    if when == "before":
        model = sharded(build(way), how, mesh, **settings)
    else:
        model = apply(way, sharded(build(), how, mesh, **settings))
    assert list(model.state_dict()) == list(build(way).state_dict())
    return difference(build(way), model, "plainly" if call == "kept" else call, seeded, rank)


def ddp_with_a_twin(when: str, rank: int) -> bool:
    """Whether the twin is the model in evaluation, after each step of the wrapped model."""
    inner = build("stacked", recurrent=True)
    twin = recoup.weights.twin(inner) if when == "before" else None
    model = DistributedDataParallel(inner)
    twin = twin or recoup.weights.twin(model.module)
    optimizer, is_equal = torch.optim.SGD(model.parameters(), 0.1), True
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model.train(), *batch(step, slice(rank, None, 2))).backward()
        optimizer.step()
        ids, _ = batch(step)
        is_equal &= torch.equal(twin(ids), model.eval()(ids)) and not twin.training
    return is_equal


def fsdp_with_a_twin(when: str, mesh: Any) -> str:
    """What is said where a model is sharded, and its twin cannot be."""
    model = build("both")
    twin = recoup.weights.twin(model) if when == "before" else None
    sharded(model, "layers", mesh)
    (twin or recoup.weights.twin(model))(batch(0)[0])
    return "nothing"


def cases(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, Any] = {}
    for way in WAYS:
        plain = build(way, recurrent=True)
        for when in ("before", "after", "inside"):
            if way not in ADDING or when == "before":
                model = ddp(way, when)
                name = f"ddp {way} {when}"
                found[name] = said(difference, plain, model, "plainly", seeded, rank)
        for call in CALLS:
            model = ddp(way, "before")
            found[f"ddp {way} {call}"] = said(difference, plain, model, call, same_draw, rank)
        for how in ("layers", "root"):
            for when, suffix in (("before", ""), ("after", " late")):
                run = said(fsdp, way, how, when, "plainly", rank, mesh)
                found[f"fsdp {way} {how}{suffix}"] = run
        for call in ("torch", "ours", "kept"):
            found[f"fsdp {way} {call}"] = said(fsdp, way, "layers", "before", call, rank, mesh)
    for added in ("weight_g", "weight_std"):
        found[f"ddp late {added}"] = said(ddp_of_what_comes_late, added, rank)
    for when in ("before", "after"):
        found[f"ddp twin {when}"] = ddp_with_a_twin(when, rank)
        found[f"fsdp twin {when}"] = said(fsdp_with_a_twin, when, mesh)
    return found


if __name__ == "__main__":
    report(cases)
