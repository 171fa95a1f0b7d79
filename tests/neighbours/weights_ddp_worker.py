"""One of two processes with reparametrized weights under DistributedDataParallel and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.neighbours.workers import report
from tests.weight_zoo import Way

PATTERN = r"(.*\.)?(weight|in_proj_weight|weight_hh_l0)"
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
    "torch": lambda module, x: torch_checkpoint(module, x, use_reentrant=False),
    "reentrant": lambda module, x: torch_checkpoint(module, x, use_reentrant=True),
    "ours": recoup.checkpoint,
}
WAYS = {
    "rows": Way(dropout={"p": 0.5, "axes": (1,)}),
    "both": Way(dropout={"p": 0.3}, noise={"std": 0.1}),
    "stacked": Way({}, {"p": 0.3}, {"std": 0.1}),
    "learned": Way(noise={"std": 0.1, "learned": "row", "relative": True}),
}
ADDING = ("stacked", "learned")  # parameters, which a wrapper has to know


def apply(way: str, model: nn.Module, prefix: str = "") -> None:
    pattern = r"words\.weight" if way == "rows" else PATTERN
    pattern = r"blocks\.\d\.linear\.weight" if way == "stacked" else pattern
    WAYS[way](model, prefix + pattern)


def build(way: str | None = None, *, recurrent: bool = False) -> Model:
    torch.manual_seed(0)
    model = Model(recurrent)
    if way is not None:
        apply(way, model)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(12, (4, 5), generator=generator)
    return ids, torch.randint(12, (4, 5), generator=generator)


def loss_of(model: nn.Module, ids: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), target.flatten())


def whole_steps(model: nn.Module, draw: Callable[[int], Any]) -> list[dict[str, Tensor]]:
    """The gradients of the whole batch, in one process."""
    found = []
    for step in range(STEPS):
        model.zero_grad()
        with draw(step):
            loss_of(model, *batch(step)).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found


def my_steps(model: nn.Module, rank: int, draw: Callable[[int], Any]) -> list[dict[str, Tensor]]:
    """The gradients of the half of the batch that belongs to this rank, as they are reduced."""
    found = []
    for step in range(STEPS):
        model.zero_grad()
        mine = tuple(part[2 * rank : 2 * rank + 2] for part in batch(step))
        with draw(step):
            loss = loss_of(model, *mine)
        loss.backward()
        found.append(
            {
                name.removeprefix("module."): whole(p.grad).clone()
                for name, p in model.named_parameters()
            }
        )
    return found


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def difference(got: list[dict[str, Tensor]], want: list[dict[str, Tensor]]) -> float:
    """The largest difference, relative to the largest entry of each gradient."""
    worst = 0.0
    for mine, theirs in zip(got, want, strict=True):
        assert set(mine) == set(theirs), (sorted(mine), sorted(theirs))
        scale = max(float(value.detach().abs().max()) for value in theirs.values())
        for name, value in theirs.items():
            apart = (mine[name].detach().float() - value.detach()).abs().max()
            worst = max(worst, float(apart) / scale)
    return worst


class Seeded:
    """The same draw on every rank: the default generator at the step."""

    def __init__(self, step: int) -> None:
        torch.manual_seed(100 + step)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def by_seed(step: int) -> Any:
    return same_draw(seed=step)


DRAWS: dict[str, Callable[[int], Any]] = {"manual_seed": Seeded, "same_draw": by_seed}


def said(case: Callable[..., float], *args: Any) -> float | str:
    """What a case finds, or the error that it ends with on every rank."""
    try:
        return case(*args)
    except (ValueError, RuntimeError) as error:
        return str(error)


# -- DistributedDataParallel -----------------------------------------------------------------------


def ddp(way: str, when: str, draw: str, call: str, rank: int) -> float:
    """How far gradients are from those of the whole batch with the same noise."""
    want = whole_steps(build(way, recurrent=True), DRAWS[draw])
    if when == "before":
        model = DistributedDataParallel(build(way, recurrent=True))
    else:
        model = DistributedDataParallel(build(recurrent=True))
        if when == "after":
            apply(way, model, r"module\.")
        else:
            apply(way, model.module)
    model.module.call = CALLS[call]
    return difference(my_steps(model, rank, DRAWS[draw]), want)


def ddp_of_what_comes_late(added: str, rank: int) -> str:
    """A parameter that the wrapper does not know would not be reduced."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8)))
    try:
        if added == "weight_g":
            recoup.weight_norm(model, r"module\.0\.weight")
        else:
            recoup.weight_noise(model, r"module\.0\.weight", learned="row")
    except ValueError as error:
        return str(error)
    model(torch.randn(4, 8) + rank).square().sum().backward()
    mine = model.module[0].get_parameter(added).grad
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    return "reduced" if torch.equal(*both) else "silently not reduced"


# -- FSDP2 -----------------------------------------------------------------------------------------


def sharded(model: Model, how: str, mesh: Any, **settings: Any) -> Model:
    if how == "layers":
        for block in model.blocks:
            fully_shard(block.linear, mesh=mesh, **settings)
            fully_shard(block, mesh=mesh, **settings)
        fully_shard(model.time, mesh=mesh, **settings)
    return fully_shard(model, mesh=mesh, **settings)


def fsdp(way: str, how: str, when: str, draw: str, call: str, rank: int, mesh: Any) -> float:
    """How far gradients are from those of the whole batch with the same noise."""
    want = whole_steps(build(way), DRAWS[draw])
    settings = {"reshard_after_forward": call != "kept"}
    if when == "before":
        model = sharded(build(way), how, mesh, **settings)
    else:
        model = sharded(build(), how, mesh, **settings)
        apply(way, model)
    names = list(model.state_dict())
    assert names == list(build(way).state_dict()), names
    model.call = CALLS.get(call, CALLS["plainly"])
    return difference(my_steps(model, rank, DRAWS[draw]), want)


def ddp_with_a_twin(when: str, rank: int) -> bool:
    """Whether the twin is the model in evaluation, after each step of the wrapped model."""
    inner = build("stacked", recurrent=True)
    twin = recoup.weights.twin(inner) if when == "before" else None
    model = DistributedDataParallel(inner)
    twin = twin or recoup.weights.twin(model.module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    is_equal = True
    for step in range(STEPS):
        ids, target = batch(step)
        optimizer.zero_grad()
        loss_of(model, ids[rank::2], target[rank::2]).backward()
        optimizer.step()
        got = twin(ids)
        is_equal &= torch.equal(got, model.eval()(ids)) and not twin.training
        model.train()
    return is_equal


def fsdp_with_a_twin(when: str, rank: int, mesh: Any) -> str:
    """What is said where a model is sharded, and its twin cannot be."""
    model = build("both")
    try:
        if when == "before":
            twin = recoup.weights.twin(model)
            sharded(model, "layers", mesh)
        else:
            twin = recoup.weights.twin(sharded(model, "layers", mesh))
        twin(batch(0)[0])
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def cases(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    found: dict[str, Any] = {}
    for way in WAYS:
        for when in ("before", "after", "inside"):
            if way in ADDING and when != "before":
                continue
            found[f"ddp {way} {when}"] = said(ddp, way, when, "manual_seed", "plainly", rank)
        for call in CALLS:
            found[f"ddp {way} {call}"] = said(ddp, way, "before", "same_draw", call, rank)
    for added in ("weight_g", "weight_std"):
        found[f"ddp late {added}"] = ddp_of_what_comes_late(added, rank)
    for when in ("before", "after"):
        found[f"ddp twin {when}"] = ddp_with_a_twin(when, rank)
        found[f"fsdp twin {when}"] = fsdp_with_a_twin(when, rank, mesh)
    for way in WAYS:
        for how in ("layers", "root"):
            seeded = said(fsdp, way, how, "before", "manual_seed", "plainly", rank, mesh)
            found[f"fsdp {way} {how}"] = seeded
            late = said(fsdp, way, how, "after", "manual_seed", "plainly", rank, mesh)
            found[f"fsdp {way} {how} late"] = late
        for call in ("torch", "ours", "kept"):
            name = f"fsdp {way} {call}"
            found[name] = said(fsdp, way, "layers", "before", "manual_seed", call, rank, mesh)
    return found


if __name__ == "__main__":
    report(cases)
