"""Two ranks of four that are not there, with plans of sharded models: what holds of them."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import recoup
from recoup.planning import priced_blocks
from tests.counted_times import times_of
from tests.neighbours.planned import Language, Logits, Net, loss_of, peak_of

NUM_RANKS = 4
RANKS = (0, 3)  # that are run, one after the other


class Collectives(TorchDispatchMode):
    """Counts collectives, those of second runs too."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "from_local") for kind in types):
            return NotImplemented  # a DTensor, which calls operators on its local tensors
        is_wait = func.overloadpacket.__name__ in ("wait_tensor", "_wrap_tensor_autograd")
        self.num += func.namespace in ("c10d", "_c10d_functional") and not is_wait
        return func(*args, **(kwargs or {}))


def sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_parallel(model, mesh):
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def row(parallelize, mesh, num_samples):
    """The least bytes, the peak of a step in them, and collectives of a plain step and of this."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(num_samples, 32)
    for block in model.blocks:
        block.drop = nn.Identity()
    model = parallelize(model, mesh)

    def step():
        loss_of(model(x)).backward()
        model.zero_grad()

    step()
    with Collectives() as plain:
        step()
    frontier = recoup.plan(model, x, loss=loss_of)
    plan = frontier.plan(frontier.least_bytes)
    with plan.applied(), Collectives() as planned:
        step()
    with plan.applied():
        peak = peak_of(step)
    assert sum(each.num_forwards for each in plan.blocks) > len(plan.blocks)
    return frontier.least_bytes, peak, plain.num, planned.num


def in_tiles(mesh, kind, **options):
    """A language model with its head in tiles: how far its gradients are off, and its bytes."""
    torch.manual_seed(0)
    tokens = torch.randint(2048, (4, 100))
    model = kind()
    for each in (*model.blocks, *options.pop("alone", lambda _: ())(model)):
        fully_shard(each, mesh=mesh)
    fully_shard(model, mesh=mesh, **options)
    loss = None if kind is Language else partial(F.cross_entropy, target=tokens.flatten())

    def gradients():
        model.zero_grad()
        output = model(tokens)
        (output if loss is None else loss(output)).backward()
        return {name: each.grad.to_local() for name, each in model.named_parameters()}

    plain = recoup.plan(model, tokens, loss=loss)
    tiled = recoup.plan(model, tokens, loss=loss, tiles=True)
    plan, wanted = tiled.plan(tiled.least_bytes), gradients()
    with plan.applied():
        found = gradients()
    off = {name: float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in found}
    return plan.least_bytes / plain.least_bytes, {name: each for name, each in off.items() if each}


def of_rank(rank):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    # Each rank has a batch of its own where the model is sharded.
    found = row(sharded, mesh, 200 + 50 * rank), row(in_parallel, mesh, 256)
    if rank == 0:
        share, off = in_tiles(mesh, Language)
        assert share < 0.6
        assert off.keys() <= {"head.weight", "head.bias"}
        assert max(off.values(), default=0.0) < 1e-6
        # A head whose weight or output is not there for tiles runs whole.
        assert not in_tiles(mesh, Language, alone=lambda model: [model.head])[1]
        assert not in_tiles(mesh, Logits)[1]
        assert not in_tiles(mesh, Logits, reshard_after_forward=True)[1]
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    priced_blocks.times_of = times_of
    (first, *in_parallel_first), (last, *in_parallel_last) = map(of_rank, RANKS)
    assert in_parallel_first == in_parallel_last
    assert first[0] < last[0]
    assert max(first[1], last[1]) <= last[0]
    # FSDP2 gathers for backward anyway; in tensor parallelism collectives are code of blocks.
    assert 0 < first[2] == first[3] == last[2] == last[3]
    ((least, peak, plain, planned),) = in_parallel_first
    assert peak <= least
    assert plain < planned
