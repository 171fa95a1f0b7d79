"""One of two processes with reparametrized weights under DistributedDataParallel and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup.weights import disabled, same_draw
from tests.neighbours.workers import report

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
        self.call: Callable[..., Any] = plainly

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = self.call(block, x)
        x = self.time(x)
        return (x[0] if isinstance(x, tuple) else x) @ self.words.weight.t()


def plainly(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


def of_torch(module: nn.Module, x: Tensor) -> Tensor:
    return torch_checkpoint(module, x, use_reentrant=False)


def reentrantly(module: nn.Module, x: Tensor) -> Tensor:
    return torch_checkpoint(module, x, use_reentrant=True)


CALLS = {
    "plainly": plainly,
    "torch": of_torch,
    "reentrant": reentrantly,
    "ours": recoup.checkpoint,
}


def stacked(module: nn.Module, prefix: str = "") -> None:
    recoup.weight_norm(module, prefix + r"blocks\.\d\.linear\.weight")
    recoup.weight_noise(module, prefix + PATTERN, std=0.1)
    recoup.weight_dropout(module, prefix + PATTERN, p=0.3)


WAYS: dict[str, Callable[..., Any]] = {
    "dropout": lambda m, prefix="": recoup.weight_dropout(m, prefix + PATTERN, p=0.3),
    "noise": lambda m, prefix="": recoup.weight_noise(m, prefix + PATTERN, std=0.1),
    "rows": lambda m, prefix="": recoup.weight_dropout(
        m, prefix + r"words\.weight", p=0.5, axes=(1,)
    ),
    "stacked": stacked,
    "learned": lambda m, prefix="": recoup.weight_noise(
        m, prefix + PATTERN, std=0.1, learned="row", relative=True
    ),
}
ADDING = ("stacked", "learned")  # parameters, which a wrapper has to know


def build(way: str | None = None, *, recurrent: bool = False) -> Model:
    torch.manual_seed(0)
    model = Model(recurrent)
    if way is not None:
        WAYS[way](model)
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
            WAYS[way](model, r"module\.")
        else:
            WAYS[way](model.module)
    model.module.call = CALLS[call]
    return difference(my_steps(model, rank, DRAWS[draw]), want)


def ddp_with_noise_of_each_rank(rank: int) -> tuple[float, float]:
    """The mean of what both draws give; and how far both draws are from each other."""
    parts = []
    for other in range(2):
        single = build("dropout")
        found = []
        for step in range(STEPS):
            single.zero_grad()
            mine = tuple(part[2 * other : 2 * other + 2] for part in batch(step))
            with same_draw(seed=2 * step + other):
                loss_of(single, *mine).backward()
            found.append({name: p.grad.clone() for name, p in single.named_parameters()})
        parts.append(found)
    want = [{n: (a[n] + b[n]) / 2 for n in a} for a, b in zip(*parts, strict=True)]
    model = DistributedDataParallel(build("dropout"))
    got = my_steps(model, rank, lambda step: same_draw(seed=2 * step + rank))
    return difference(got, want), difference(parts[0], parts[1])


def ddp_generators_that_differ(rank: int) -> bool:
    """Whether the ranks have noise of their own, where their generators differ."""
    layer = nn.Linear(8, 8)
    model = DistributedDataParallel(recoup.weight_dropout(layer))
    torch.manual_seed(rank)
    y = model(torch.eye(8)).detach()
    both = [torch.empty_like(y) for _ in range(2)]
    dist.all_gather(both, y.contiguous())
    return not torch.equal(*both)


def ddp_accumulates(rank: int) -> float:
    """Micro batches of which only the last is reduced, in one draw, some without noise."""
    single = build("stacked")
    model = DistributedDataParallel(build("stacked"))
    worst = 0.0
    for step in range(2):
        single.zero_grad()
        model.zero_grad()
        for micro in range(3):
            ids, target = batch(10 * step + micro)
            for run, who, part in (
                (single, single, slice(None)),
                (model, model.module, slice(2 * rank, 2 * rank + 2)),
            ):
                off = disabled(who) if micro == 1 else nullcontext()
                waits = run is model and micro < 2
                with off, same_draw(seed=step), model.no_sync() if waits else nullcontext():
                    loss_of(run, ids[part], target[part]).backward()
        got = {name: p.grad for name, p in model.module.named_parameters()}
        want = {name: p.grad for name, p in single.named_parameters()}
        worst = max(worst, difference([got], [want]))
    return worst


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
        WAYS[way](model)
    names = list(model.state_dict())
    assert names == list(build(way).state_dict()), names
    model.call = CALLS.get(call, plainly)
    return difference(my_steps(model, rank, DRAWS[draw]), want)


def fsdp_of_a_recurrent_layer(how: str, rank: int, mesh: Any) -> float:
    """As the others; a recurrent layer has ways of its own to take a parameter."""
    want = whole_steps(build("dropout", recurrent=True), by_seed)
    model = sharded(build("dropout", recurrent=True), how, mesh)
    return difference(my_steps(model, rank, by_seed), want)


def fsdp_in_bfloat16(rank: int, mesh: Any) -> float:
    """Gathered in bfloat16, where the noise is made: close to the same model in bfloat16."""
    want = whole_steps(build("noise").bfloat16(), by_seed)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = sharded(build("noise"), "layers", mesh, mp_policy=policy)
    got = my_steps(model, rank, by_seed)
    return difference(got, [{n: g.float() for n, g in each.items()} for each in want])


def fsdp_trains(rank: int, mesh: Any) -> float:
    """Some steps of an optimizer, and the weights after them."""
    single, model = build("stacked"), sharded(build("stacked"), "layers", mesh)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (single, model)]
    for step in range(STEPS):
        ids, target = batch(step)
        pairs = ((single, slice(None)), (model, slice(2 * rank, 2 * rank + 2)))
        for (run, part), optimizer in zip(pairs, optimizers, strict=True):
            optimizer.zero_grad()
            with same_draw(seed=step):
                loss_of(run, ids[part], target[part]).backward()
            optimizer.step()
    got = {name: whole(p) for name, p in model.named_parameters()}
    return difference([got], [dict(single.named_parameters())])


def fsdp_with_a_twin(when: str, rank: int, mesh: Any) -> str:
    """What is said where a model is sharded, and its twin cannot be."""
    model = build("dropout")
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
            for draw in DRAWS:
                found[f"ddp {way} {call} {draw}"] = said(ddp, way, "before", draw, call, rank)
    of_each, apart = ddp_with_noise_of_each_rank(rank)
    found["ddp noise of each rank"] = of_each
    found["ddp noises apart"] = apart
    found["ddp generators differ"] = ddp_generators_that_differ(rank)
    found["ddp accumulates"] = ddp_accumulates(rank)
    for added in ("weight_g", "weight_std"):
        found[f"ddp late {added}"] = ddp_of_what_comes_late(added, rank)
    for when in ("before", "after"):
        found[f"ddp twin {when}"] = ddp_with_a_twin(when, rank)
        found[f"fsdp twin {when}"] = fsdp_with_a_twin(when, rank, mesh)
    for way in WAYS:
        for how in ("layers", "root"):
            for draw in DRAWS:
                name = f"fsdp {way} {how} {draw}"
                found[name] = said(fsdp, way, how, "before", draw, "plainly", rank, mesh)
            late = said(fsdp, way, how, "after", "manual_seed", "plainly", rank, mesh)
            found[f"fsdp {way} {how} late"] = late
        for call in ("torch", "ours", "kept"):
            name = f"fsdp {way} {call}"
            found[name] = said(fsdp, way, "layers", "before", "manual_seed", call, rank, mesh)
    for how in ("layers", "root"):
        found[f"fsdp recurrent {how}"] = said(fsdp_of_a_recurrent_layer, how, rank, mesh)
    found["fsdp bfloat16"] = fsdp_in_bfloat16(rank, mesh)
    found["fsdp trains"] = fsdp_trains(rank, mesh)
    return found


if __name__ == "__main__":
    report(cases)
