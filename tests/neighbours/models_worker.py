"""Models in every way under DDP and FSDP2: the gradients of the whole batch in one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import recoup
from recoup.invertible import AdditiveCoupling, Chain
from recoup.weights import same_draw
from tests.neighbours.planned import Net, peak_of, plan_for
from tests.neighbours.planned import loss_of as mean_square
from tests.neighbours.workers import (
    NUM_RANKS,
    Case,
    apart,
    half,
    is_refused,
    named_gradients,
    of_all_ranks,
    run_cases,
    sharded,
)
from tests.plan_oracle import Made
from tests.programs.flows import build as foreign_flow
from tests.unit.flows.models import SMALL, built, classes, filled
from tests.weight_zoo import Way
from tests.zoo import Fn

# A model that computes its loss from a batch, the same to be run in some way, and a batch.
Built = tuple[Any, Any, tuple[Tensor, ...]]
Wrap = Callable[[Any, tuple[Tensor, ...]], Any]  # of a model, for the rows of a rank


class Cost(nn.Module):
    """A model with the loss that it is trained by: DDP calls `forward`."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.loss(self.model, *inputs)


def parts_of(model: Any) -> Any:
    """What FSDP2 may shard one by one."""
    return getattr(model, "blocks", None) or (model.model if isinstance(model, Cost) else [])


WRAPPERS: dict[str, Wrap] = {
    "ddp": lambda model, _: DistributedDataParallel(model),
    "ddp, unused": lambda model, _: DistributedDataParallel(model, find_unused_parameters=True),
    "fsdp": lambda model, _: sharded(model),
    "fsdp, each": lambda model, _: sharded(model, parts_of(model)),
    "fsdp, kept": lambda model, _: sharded(model, parts_of(model), reshard_after_forward=False),
}


def the_whole_batch(
    rank: int, build: Callable[[], Built], wrap: Wrap, bound: float, draw: Any = None
) -> None:
    """Steps on a half each have the gradients of the whole batch, with the same draws."""
    torch.manual_seed(0)
    plain, ours, batch = build()
    call = wrap(ours, half(batch, rank))
    assert list(ours.state_dict()) == list(plain.state_dict())
    for step in range(1, 3):
        given = tuple(x * step if x.is_floating_point() else x for x in batch)
        for model, rows in ((plain, given), (call, half(given, rank))):
            model.zero_grad()
            torch.manual_seed(step)
            with nullcontext() if draw is None else draw(step):
                loss = model(*rows)
            loss.backward()
        want, got = named_gradients(plain), named_gradients(ours)
        # What nobody uses has no gradient, or zeros of the wrapper.
        assert not any(got.pop(name).any() for name in got.keys() - want.keys())
        assert apart(got, want) < bound * max(float(each.abs().max()) for each in want.values())


# -- chains, tiles and flows -----------------------------------------------------------------------


def layer(width: int, *unused: nn.Module) -> nn.Module:
    return Fn(lambda x, linear, *_: linear(x).tanh(), nn.Linear(width, width), *unused)


def first_squared(chain: nn.Module, x: Tensor) -> Tensor:
    output = chain(x)
    return (output[0] if isinstance(output, tuple) else output).square().mean()


def chain(memory: Any, case: str) -> Built:
    """One of whose layers may have parameters outside of the graph."""
    inverts = memory == "constant"
    blocks = []
    for place in range(4):
        unused = [nn.Linear(3, 3)] if case == "unused" and place == 1 else []
        made = layer(3 if inverts else 6, *unused)
        blocks.append(AdditiveCoupling(made, layer(3)) if inverts else made)
    if case == "shared":
        blocks[3] = blocks[0]
    kind: Any = Chain if inverts else recoup.Sequential
    plain = Cost(kind(*blocks, memory="linear"), first_squared).double()
    ours = copy.deepcopy(plain)
    ours.model.memory = memory
    return plain, ours, (torch.randn(8, 6).double(),)


def tiles(way: str) -> Built:
    """A body and a head, which return the loss, as a model with labels does."""

    def loss(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())

    def in_tiles(model: Any, x: Tensor, labels: Tensor) -> Tensor:
        body, of_head = recoup.tiled(model[0], tiles=3), partial(loss, model[1])
        if way == "tiled":
            return recoup.tiled(of_head, tiles=3, reduction="mean")(body(x), labels)
        return recoup.tiled_loss(of_head, tiles=3)(body(x), labels)

    body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    model = nn.Sequential(body, nn.Linear(8, 12)).double()
    plain = Cost(model, lambda model, x, labels: loss(model[1], model[0](x), labels))
    batch = torch.randn(4, 7, 8).double(), torch.randint(12, (4, 7))
    return plain, Cost(copy.deepcopy(model), in_tiles), batch


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


# -- reparametrized weights ------------------------------------------------------------------------


def attending(block: Any, x: Tensor) -> Tensor:
    x = x + block.attention(x, x, x, need_weights=False)[0]
    return x + block.linear(x).tanh()


def block() -> nn.Module:
    """Attention, whose projections are read by itself, and a layer."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return Made(attending, attention=attention, linear=nn.Linear(8, 8))


CALLS: dict[str, Callable[..., Any]] = {
    "plainly": lambda module, x: module(x),
    "torch": partial(torch_checkpoint, use_reentrant=False),
    "reentrant": partial(torch_checkpoint, use_reentrant=True),
    "ours": recoup.checkpoint,
}


class Words(nn.Module):
    """Words, blocks that may be checkpointed, a layer over time, and the words once more."""

    def __init__(self, call: str, *, recurrent: bool) -> None:
        super().__init__()
        self.words, self.call = nn.Embedding(12, 8), CALLS[call]
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.time = nn.GRU(8, 8, batch_first=True) if recurrent else nn.Conv1d(5, 5, 1)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = self.call(block, x)
        x = self.time(x)
        scores = (x[0] if isinstance(x, tuple) else x) @ self.words.weight.t()
        return F.cross_entropy(scores.flatten(0, 1), target.flatten())


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


def words(way: str, call: str = "plainly", *, recurrent: bool = True, late: bool = False) -> Built:
    plain = Words("plainly", recurrent=recurrent)
    ours = copy.deepcopy(plain)
    ours.call = CALLS[call]
    batch = torch.randint(12, (4, 5)), torch.randint(12, (4, 5))
    return apply(way, plain), ours if late else apply(way, ours), batch


def ddp_then(way: str, prefix: str, model: Any, _: Any) -> Any:
    call = DistributedDataParallel(model)
    apply(way, call if prefix else model, prefix)
    return call


def fsdp_then(way: str, wrapper: str, model: Any, given: Any) -> Any:
    return apply(way, WRAPPERS[wrapper](model, given))


def parameters_that_ddp_does_not_know(rank: int, added: Way) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8)))
    added(model, r"module\.0\.weight")
    model(torch.randn(4, 8)).square().sum().backward()


def a_twin_under_ddp(rank: int, when: str) -> None:
    """It is the model in evaluation, after each step of the wrapped model."""
    _, inner, batch = words("stacked")
    twin = recoup.weights.twin(inner) if when == "before" else None
    model = DistributedDataParallel(inner)
    twin = twin or recoup.weights.twin(model.module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model.train()(*half(batch, rank)).backward()
        optimizer.step()
        assert torch.equal(twin(*batch), model.eval()(*batch))
        assert not twin.training


def a_sharded_twin(rank: int) -> None:
    _, model, batch = words("both", recurrent=False)
    recoup.weights.twin(sharded(model, model.blocks))(*batch)


# -- plans -----------------------------------------------------------------------------------------


class Plain(Net):
    """Has no norm over the batch, whose halves two processes see, and no draws."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
        for block in self.blocks:
            block.drop = nn.Identity()


class Squared(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return mean_square(super().forward(x))


def squared() -> Built:
    torch.manual_seed(0)
    model = Squared()
    return model, copy.deepcopy(model), (torch.randn(512, 32),)


def late_bytes(model: Any) -> int:
    """What gloo's own threads may hold for a moment longer than FSDP2: two collectives."""
    return 2 * max(sum(p.nbytes for p in block.parameters()) for block in model.blocks)


def planned(share: float, wrapper: str, is_before: bool, model: Any, given: Any) -> Any:
    more_bytes = late_bytes(model) if "fsdp" in wrapper else 0
    call = None if is_before else WRAPPERS[wrapper](model, given)
    plan_for(model, *given, loss=None, share=share, more_bytes=more_bytes).apply()
    return call or WRAPPERS[wrapper](model, given)


def accumulated(rank: int) -> None:
    plain, ours, (x,) = squared()
    call = planned(0.5, "ddp", False, ours, (half(x, rank),))
    for scale in (1, 2):
        plain(scale * x).backward()
        with call.no_sync() if scale == 1 else nullcontext():
            call(scale * half(x, rank)).backward()
    assert apart(named_gradients(ours), named_gradients(plain)) < 1e-6


def budget_of_ddp(rank: int) -> None:
    """Kept to without the buckets of gradients, which come about in the first steps."""
    _, model, (x,) = squared()
    call, x = DistributedDataParallel(model), half(x, rank)
    plan = plan_for(model, x, loss=None).apply()
    for _ in range(4):
        peak = peak_of(lambda: call(x).backward())
        model.zero_grad()
    assert peak <= plan.budget_bytes


def ranks_that_hold_parts_of_one_model_make_one_plan(rank: int) -> None:
    """That of the larger batch; else one would wait for a rehearsal that the other does not run."""
    model, late = Plain(), late_bytes(Plain())
    x = torch.randn(100 + 300 * rank, 32)
    plan = plan_for(sharded(model, model.blocks), x, more_bytes=late)
    assert plan.least_bytes <= plan.rehearsed_peak_bytes <= plan.budget_bytes
    ways = [row.way for row in plan.blocks]
    mine = [plan.budget_bytes, plan.least_bytes, plan.rehearsed_peak_bytes, ways]
    assert of_all_ranks(mine) == [mine] * 2


def stages_of_a_pipeline(rank: int, share: float) -> None:
    """Under 1F1B: gradients as without a plan, each stage within its budget."""
    torch.manual_seed(rank)
    model, num = Plain(), 6
    batch, targets = torch.randn(2, num * 64, 32)

    def step() -> None:
        stage = PipelineStage(model, rank, NUM_RANKS, torch.device("cpu"))
        schedule = Schedule1F1B(stage, num, loss_fn=F.mse_loss)
        schedule.step(batch) if rank == 0 else schedule.step(target=targets)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        step()
        return {name: gradient.clone() for name, gradient in named_gradients(model).items()}

    example = batch[:64].clone().requires_grad_(rank > 0)
    loss = partial(F.mse_loss, target=targets[:64]) if rank else None
    frontier = recoup.plan(model, example, loss=loss)
    most = frontier.plan("1 GiB", pending=1 - rank)
    budget = most.least_bytes + int(share * (most.most_bytes - most.least_bytes))
    wanted = gradients()
    with frontier.plan(budget, pending=1 - rank).applied() as plan:
        found = gradients()
        model.zero_grad()
        dist.barrier()
        peak = peak_of(step)
    assert apart(found, wanted) == 0.0
    assert {row.way for row in plan.blocks} != {"keep"}
    own = (2 * num + 2) * example.nbytes  # what the pipeline itself receives, sends and returns
    assert peak <= budget + own


# -- the table -------------------------------------------------------------------------------------


def cases() -> Iterator[tuple[str, Case]]:
    def case(bound: float, build: Any, *args: Any, wrapper: str) -> tuple[str, Case]:
        name = f"{build.__name__} {' '.join(map(str, args))}, {wrapper}"
        made = partial(build, *args)
        return name, partial(the_whole_batch, build=made, wrap=WRAPPERS[wrapper], bound=bound)

    of_chains = [("plain", "ddp"), ("unused", "ddp, unused"), ("shared", "ddp"), ("plain", "fsdp"),
                 ("plain", "fsdp, each")]  # fmt: skip
    for memory, (what, wrapper) in product(("sqrt", 1, "constant"), of_chains):
        yield case(1e-12, chain, memory, what, wrapper=wrapper)
    for way, wrapper in product(("tiled", "tiled_loss"), ("ddp", "fsdp, each", "fsdp")):
        yield case(1e-12, tiles, way, wrapper=wrapper)
    for name, num in (("nice", None), ("realnvp", None), ("glow", None), ("realnvp", 3)):
        yield case(1e-9, flow, name, num, wrapper="ddp")
    for name in ("zuko_spline", "nflows_affine", "freia_sequence"):
        yield "flow of others, " + name, case(1e-9, foreign, name, wrapper="ddp")[1]
    yield from cases_of_weights()
    yield from cases_of_plans()


def cases_of_weights() -> Iterator[tuple[str, Case]]:
    """A reentrant checkpoint sums in another order."""

    def case(wrap: Wrap, way: str, draw: Any = None, **options: Any) -> Case:
        build = partial(words, way, **options)
        return partial(the_whole_batch, build=build, wrap=wrap, bound=3e-6, draw=draw)

    for way in WAYS:
        for call in CALLS:
            draw = None if call == "plainly" else same_draw
            yield f"weights ddp {way} {call}", case(WRAPPERS["ddp"], way, draw, call=call)
            if call != "reentrant":
                each = case(WRAPPERS["fsdp, each"], way, draw, call=call, recurrent=False)
                yield f"weights fsdp {way} {call}", each
        for prefix in (r"module\.", "") if way not in ADDING else ():
            late = case(partial(ddp_then, way, prefix), way, late=True)
            yield f"weights ddp {way} late {prefix}", late
        for wrapper in ("fsdp", "fsdp, each"):
            late = case(partial(fsdp_then, way, wrapper), way, recurrent=False, late=True)
            if way in ADDING:
                late = partial(is_refused, run=late, words="before")
            yield f"weights {wrapper} {way} late", late
        for wrapper in ("fsdp", "fsdp, kept"):
            yield f"weights {wrapper} {way}", case(WRAPPERS[wrapper], way, recurrent=False)
    for name, added in (("norm", Way({})), ("learned", Way(noise={"learned": "row"}))):
        late = partial(parameters_that_ddp_does_not_know, added=added)
        refused = partial(is_refused, run=late, words="DistributedDataParallel")
        yield f"weights ddp {name} late", refused
    for when in ("before", "after"):
        yield f"weights ddp twin {when}", partial(a_twin_under_ddp, when=when)
    yield "weights fsdp twin", partial(is_refused, run=a_sharded_twin, words="a sharded model")


def cases_of_plans() -> Iterator[tuple[str, Case]]:
    kinds = [("ddp", True, 0.5), ("ddp", False, 0.5), ("ddp", False, 0.0), ("fsdp", False, 0.5),
             ("fsdp, each", False, 0.5), ("fsdp, each", False, 0.0)]  # fmt: skip
    for wrapper, is_before, share in kinds:
        wrap = partial(planned, share, wrapper, is_before)
        name = f"plans {wrapper} {'before' if is_before else 'after'} {share}"
        yield name, partial(the_whole_batch, build=squared, wrap=wrap, bound=1e-5)

    def a_wrapped_model(rank: int) -> None:
        plan_for(DistributedDataParallel(Plain()), half(torch.randn(512, 32), rank))

    words = "`model` is a DistributedDataParallel"
    yield "plans of a wrapped model", partial(is_refused, run=a_wrapped_model, words=words)
    for share in (0.5, 0.0):
        yield f"plans of stages {share}", partial(stages_of_a_pipeline, share=share)
    for promise in (accumulated, budget_of_ddp, ranks_that_hold_parts_of_one_model_make_one_plan):
        yield f"plans {promise.__name__}", promise


CASES = dict(cases())

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run_cases(CASES)
