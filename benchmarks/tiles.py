"""A head with its loss, and MLPs, in tiles: peak bytes and time beside other ways to cut them.

`RECOUP_QUICK=1 python benchmarks/run.py tiles` is a small size of everything, in seconds.
"""

import gc
import os
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from couplings import peak_and_held
from timing import in_turn
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import recoup

QUICK = bool(os.environ.get("RECOUP_QUICK"))
# GPT-2 small, four sequences of 1024 tokens.
SHAPE = (4, 128, 64, 4096) if QUICK else (4, 1024, 768, 50_257)
ROUNDS = 2 if QUICK else 4
TILES = (8, 16, 32)
TOLERANCE = 1e-4  # of the norm of all gradients: sums in float32, in another order
IGNORED = 0.1  # of the targets
Way = Callable[[nn.Module, Tensor, Tensor], Tensor]


# -- other ways ------------------------------------------------------------------------------------


def plain(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).flatten(0, -2), labels.flatten())


def chunked(tiles: int) -> Way:
    """As TRL's and torchtune's chunked losses do: a checkpoint for each chunk of tokens."""

    def part(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden), labels, reduction="sum")

    def loss(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
        hidden, labels = hidden.flatten(0, 1), labels.flatten()
        pairs = zip(hidden.chunk(tiles), labels.chunk(tiles), strict=True)
        sums = [checkpoint(part, head, h, y, use_reentrant=False) for h, y in pairs]
        return torch.stack(sums).sum() / (labels != -100).sum()

    return loss


class _FusedLogitsLoss(torch.autograd.Function):
    """As DeepSpeed's tiled logits loss (ALST) does: forward accumulates into `.grad`."""

    @staticmethod
    def forward(ctx, head, tiles, hidden, labels):
        leaf = hidden.detach().flatten(0, 1)
        gradient, total, targets = torch.zeros_like(leaf), 0.0, labels.flatten()
        count = (targets != -100).sum()
        start = 0
        for h, y in zip(leaf.chunk(tiles), targets.chunk(tiles), strict=True):
            h = h.detach().requires_grad_()
            h.grad = gradient.narrow(0, start, h.shape[0])
            with torch.enable_grad():
                loss = F.cross_entropy(head(h), y, reduction="sum") / count
            loss.backward()
            total, start = total + loss.detach(), start + h.shape[0]
        ctx.save_for_backward(gradient.view_as(hidden))
        return total

    @staticmethod
    def backward(ctx, factor):  # what it accumulated in the weight knows nothing of `factor`
        (gradient,) = ctx.saved_tensors
        return None, None, gradient * factor, None


def fused_logits_loss(tiles: int) -> Way:
    return lambda head, hidden, labels: _FusedLogitsLoss.apply(head, tiles, hidden, labels)


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """As Liger's fused linear cross entropy does, in torch's operators: gradients by hand."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, tiles):
        rows, targets = hidden.detach().flatten(0, 1), labels.flatten()
        count = (targets != -100).sum()
        gradient, of_weight = torch.empty_like(rows), torch.zeros_like(weight)
        start, total = 0, 0.0
        for h, y in zip(rows.chunk(tiles), targets.chunk(tiles), strict=True):
            logs = F.log_softmax(h @ weight.t(), dim=1)
            total = total + F.nll_loss(logs, y, reduction="sum")
            logs = logs.exp_()
            kept = y != -100
            logs[kept.nonzero().squeeze(1), y[kept]] -= 1
            logs *= (kept / count).unsqueeze(1)
            torch.mm(logs, weight, out=gradient.narrow(0, start, h.shape[0]))
            of_weight += logs.t() @ h
            start += h.shape[0]
        ctx.save_for_backward(gradient.view_as(hidden), of_weight)
        return total / count

    @staticmethod
    def backward(ctx, factor):
        gradient, of_weight = ctx.saved_tensors
        return gradient.mul_(factor), of_weight.mul_(factor), None, None


def fused_linear_cross_entropy(tiles: int) -> Way:
    apply = _FusedLinearCrossEntropy.apply
    return lambda head, hidden, labels: apply(hidden, head.weight, labels, tiles)


class _TiledMLP(torch.autograd.Function):
    """As DeepSpeed's TiledMLP (ALST) does: backward runs each shard again, into `.grad`."""

    @staticmethod
    def forward(ctx, mlp, tiles, x):
        ctx.mlp, ctx.tiles = mlp, tiles
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([mlp(part) for part in x.chunk(tiles, 1)], 1)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        found = []
        pairs = zip(x.chunk(ctx.tiles, 1), gradient.chunk(ctx.tiles, 1), strict=True)
        for part, of_part in pairs:
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.mlp(part)
            torch.autograd.backward(y, of_part)
            found.append(part.grad)
        return None, None, torch.cat(found, 1)


# -- ours ------------------------------------------------------------------------------------------


def ours(tiles: int, *, in_forward: bool) -> Way:
    def loss(head: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
        def call(h: Tensor, y: Tensor) -> Tensor:
            return plain(head, h, y)

        rows = hidden.flatten(0, 1), labels.flatten()  # as the others do
        if in_forward:
            return recoup.tiled_loss(call, dim=0, tiles=tiles)(*rows)
        return recoup.tiled(call, dim=0, tiles=tiles, reduction="mean")(*rows)

    return loss


def heads() -> Iterator[tuple[str, int, Way]]:
    """Yield the name, the number of tiles and the code of each way; the first one is plain."""
    yield "plain", 1, plain
    for tiles in TILES:
        yield "checkpointed chunks (TRL)", tiles, chunked(tiles)
        yield "fused logits loss (ALST)", tiles, fused_logits_loss(tiles)
        yield "fused linear cross entropy (Liger)", tiles, fused_linear_cross_entropy(tiles)
        yield "recoup.tiled", tiles, ours(tiles, in_forward=False)
        yield "recoup.tiled_loss", tiles, ours(tiles, in_forward=True)


def mlps() -> Iterator[tuple[str, int, Callable[[nn.Module, Tensor], Tensor]]]:
    """Yield the same for an MLP along the sequence."""
    yield "plain", 1, lambda mlp, x: mlp(x)
    yield "checkpoint", 1, lambda mlp, x: checkpoint(mlp, x, use_reentrant=False)
    for tiles in TILES[:2]:
        yield "TiledMLP (ALST)", tiles, lambda mlp, x, n=tiles: _TiledMLP.apply(mlp, n, x)
        yield "recoup.tiled", tiles, lambda mlp, x, n=tiles: recoup.tiled(mlp, 1, n)(x)


# -- measuring -------------------------------------------------------------------------------------


def rows(
    steps: dict[tuple[str, int], Callable[[], None]], leaves: list[Tensor], device: str
) -> list[dict]:
    """Check the gradients, measure the peaks, and time all in turn; the first one is plain.

    Args:
        steps: forward and backward in each way, by its name and number of tiles.
        leaves: what has the gradients.
        device: the device.
    """

    def clear() -> None:
        for leaf in leaves:
            leaf.grad = None

    def gradients(step: Callable[[], None]) -> list[Tensor]:
        step()
        found = [leaf.grad for leaf in leaves]
        clear()
        return found

    def cleared(step: Callable[[], None]) -> None:
        step()
        clear()

    wanted = gradients(next(iter(steps.values())))
    norm = sum(float(want.norm()) ** 2 for want in wanted) ** 0.5
    found = []
    for (name, tiles), step in steps.items():
        pairs = zip(gradients(step), wanted, strict=True)
        error = sum(float((got - want).norm()) ** 2 for got, want in pairs) ** 0.5 / norm
        assert error <= TOLERANCE, f"{name}, {tiles}: gradients differ by {error:.1e}."
        gc.collect()
        peak = peak_and_held(step, device)[0]
        clear()
        row = {"name": name, "tiles": tiles, "gradient_error": error, "peak_bytes": peak}
        print("  ", *(f"{k}={v}" for k, v in row.items()), flush=True)
        found.append(row)
    del wanted
    times = in_turn({way: partial(cleared, step) for way, step in steps.items()}, ROUNDS, device)
    seconds = [min(taken) for taken in times.values()]
    return [
        row
        | {
            "bytes_over_plain": row["peak_bytes"] / found[0]["peak_bytes"],
            "seconds": least,
            "over_plain": least / seconds[0],
        }
        for row, least in zip(found, seconds, strict=True)
    ]


def head_rows(device: str) -> list[dict]:
    torch.manual_seed(0)
    batch, length, units, vocabulary = SHAPE
    head = nn.Linear(units, vocabulary, bias=False, device=device)
    hidden = torch.randn(batch, length, units, device=device).requires_grad_()
    labels = torch.randint(vocabulary, (batch, length), device=device)
    labels[torch.rand(batch, length, device=device) < IGNORED] = -100

    def step(way: Way) -> None:
        way(head, hidden, labels).backward()

    steps = {(name, tiles): partial(step, way) for name, tiles, way in heads()}
    return rows(steps, [hidden, head.weight], device)


def mlp_rows(device: str) -> list[dict]:
    torch.manual_seed(0)
    batch, length, units, _ = SHAPE
    layers = nn.Linear(units, 4 * units), nn.GELU(), nn.Linear(4 * units, units)
    mlp = nn.Sequential(*layers).to(device)
    x = torch.randn(batch, length, units, device=device).requires_grad_()

    def step(way: Callable[..., Tensor]) -> None:
        way(mlp, x).square().sum().backward()

    steps = {(name, tiles): partial(step, way) for name, tiles, way in mlps()}
    return rows(steps, [x, *mlp.parameters()], device)


def suite(device: str) -> Iterator[tuple[str, object]]:
    names = ("batch", "length", "units", "vocabulary")
    yield "shape", dict(zip(names, SHAPE, strict=True))
    yield "head", head_rows(device)
    yield "mlp", mlp_rows(device)
