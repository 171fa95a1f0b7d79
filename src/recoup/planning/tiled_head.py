"""The output layer of a model, which runs with its loss in tiles.

NOTE [ A head in tiles ]

Rule 1. A head is an `nn.Linear` outside of all blocks, called once, after them, whose output is
        large. So it is known to treat rows independently, and its rows are those of its input.
Rule 2. What it returns is not computed before somebody reads it (See NOTE [ Values that nobody
        read ]). A cross entropy is computed in pieces, whose gradients are taken at once (See
        NOTE [ Gradients of a sum ]); any other reader gets the whole, as without tiles.
Rule 3. A plan with a head in tiles is another kind of blocks: it is measured, rehearsed, and
        compared with the plain step. Where no cross entropy reads the head, there is none.
Rule 4. Within a checkpoint that runs the model again, where the compiler looks at frames, and in
        transforms of torch.func the head runs as it is.
Rule 5. A mean is a sum whose summands are divided by their number before they are differentiated,
        as torch does it, so that the gradient of the hidden states has its bits where kernels
        compute rows alike. In float16, where that may underflow, the sums are divided afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recoup._core.compile import is_compiled, is_watched
from recoup._core.saved_tensors import is_transformed, without_pairs
from recoup._core.summed_gradients import SummedGradients
from recoup.memory import format_bytes
from recoup.planning.blocks import Block
from recoup.planning.forwards import enclosing_checkpoints, own_forward
from recoup.planning.step import Observer, Step
from recoup.planning.unread_values import RowCall, Unread, unread

__all__ = ["TiledHead", "find_head"]

_LEAST_ROWS = 64  # of a tile: a product of fewer is slow
_MOST_ROWS = 1024
_TINY = 1e-30  # numbers as small as a gradient over the number of targets


class TiledHead:
    """The head of a model, which a follower calls in place of its forward.

    Args:
        name: its qualified name.
        module: the head.
        rows: how many rows a tile has at most.
        logits_bytes: the bytes of its output in the step that was planned.
        num_tiles: how many tiles there were then.
    """

    def __init__(
        self, name: str, module: nn.Linear, rows: int, logits_bytes: int, num_tiles: int
    ) -> None:
        self.name, self.module, self.rows = name, module, rows
        self.logits_bytes, self.num_tiles = logits_bytes, num_tiles
        self.eps = 0.0

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The head."""
        return (self.module,)

    @property
    def described(self) -> str:
        """A line that says in how many tiles it runs."""
        return (
            f"tile: `{self.name}` with its cross entropy, {self.num_tiles} tiles of at most "
            f"{self.rows} rows; its output of {format_bytes(self.logits_bytes)} is computed when "
            "it is read"
        )

    def called(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the output of the head, which is computed when somebody reads it."""
        if (
            len(args) != 1
            or kwargs
            or not isinstance(args[0], Tensor)
            or args[0].dim() < 2
            or args[0].numel() == 0
            or enclosing_checkpoints() != (0, None)
            or is_transformed()
            or is_watched()  # See Rule 4
            or type(module) is not nn.Linear
            or getattr(own_forward(forward), "__func__", None) is not nn.Linear.forward
            or _has_backward_hooks(module)
        ):
            return forward(*args, **kwargs)
        # Those of this call: `functional_call` puts others in their place for a while.
        weight, bias = module.weight, module.bias

        def run(rows: Tensor) -> Tensor:
            return F.linear(rows, weight, bias)

        weights = [each for each in (weight, bias) if isinstance(each, Tensor)]  # pyright: ignore[reportUnnecessaryIsInstance]
        call = RowCall(f"`{self.name}`", run, weights, {F.cross_entropy: self._cross_entropy})
        return unread(args[0], call)

    def _cross_entropy(
        self,
        logits: Unread,
        target: Any,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        """Return the loss, computed in tiles, or NotImplemented (See Rule 2)."""
        is_plain = weight is None and size_average is None and reduce is None
        if not is_plain or reduction not in ("mean", "sum") or not self._may_cut(logits, target):
            return NotImplemented
        logits.check()
        tiles = cast("Sequence[Tensor]", target.split(self.rows))
        weights, divisor, of_tile = [1.0] * len(tiles), 1.0, reduction
        if reduction == "mean":
            counts = torch.stack([(tile != ignore_index).sum() for tile in tiles])
            weights = cast("list[float]", counts.to(torch.float64).tolist())
            divisor = sum(weights)
            if not divisor:
                return NotImplemented  # a mean of nothing is what torch makes of it
            if torch.finfo(logits.made_in).smallest_normal < _TINY:  # See Rule 5
                weights = [float(weight > 0) / divisor for weight in weights]
                divisor, of_tile = 1.0, "sum"

        def loss(rows: Tensor, target: Tensor) -> Tensor:
            piece = logits.piece(rows)
            self.eps = max(self.eps, torch.finfo(piece.dtype).eps, torch.finfo(logits.made_in).eps)
            return F.cross_entropy(
                piece, target, ignore_index=ignore_index, reduction=of_tile,
                label_smoothing=label_smoothing,
            )  # fmt: skip

        return self._in_tiles(loss, logits.rows, tiles, weights, divisor)

    def _may_cut(self, logits: Tensor, target: Any) -> bool:
        """Whether these are rows of logits, each with the index of a class."""
        return (
            isinstance(target, Tensor)
            and logits.dim() == 2
            and target.dim() == 1
            and target.shape[0] == logits.shape[0] > self.rows
        )

    def _in_tiles(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        rows: Tensor,
        targets: Iterable[Tensor],
        weights: Iterable[float],
        divisor: float,
    ) -> Tensor:
        """Return the weighted sum of the losses of tiles, over `divisor`."""
        name = f"the loss of `{self.name}` in tiles"
        sums = SummedGradients(name, (), "Plan without `tiles`.")
        total = torch.empty_like(rows) if rows.requires_grad else None
        start = 0
        for target, weight in zip(targets, weights, strict=True):
            own = rows.detach().narrow(0, start, len(target)).requires_grad_(total is not None)
            found = None
            if weight:
                with without_pairs():
                    asked = [own] if total is not None else []
                    (found,) = sums.add(loss(own, target), weight, asked) or (None,)
            if total is not None:
                part = total.narrow(0, start, len(target))
                part.zero_() if found is None else part.copy_(found)
            start += len(target)
        others = [] if total is None else [(rows, total)]
        return sums.of(divisor, others)


def _has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks want the gradient of what the head returns."""
    own, everywhere = cast("Any", module), cast("Any", torch.nn.modules.module)
    return bool(
        own._backward_hooks
        or own._backward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    )


class _Called(NamedTuple):
    name: str
    module: nn.Linear
    num_rows: int
    output_bytes: int


def find_head(step: Step, blocks: Iterable[Block], tiles: int | None) -> TiledHead | None:
    """Return the head of a model, if it has one that can run in tiles (See Rule 1).

    One forward is run.

    Args:
        step: the step.
        blocks: the names and modules of the blocks.
        tiles: how many tiles there are; None to choose.
    """
    calls = _calls_after(step, blocks)
    if not calls:
        return None
    name, head, num_rows, output_bytes = max(calls, key=lambda call: call.output_bytes)
    if head.out_features <= head.in_features:
        return None
    if tiles is None:
        # As large as the gradient of the weight, which is there at any time, are the logits of as
        # many rows as there are features; they are there up to four times.
        rows = min(max(head.in_features // 4, _LEAST_ROWS), _MOST_ROWS)
    else:
        rows = math.ceil(num_rows / tiles)
    num_tiles = math.ceil(num_rows / rows)
    if num_tiles < 2:
        return None
    return TiledHead(name, head, rows, output_bytes, num_tiles)


def _calls_after(step: Step, blocks: Iterable[Block]) -> list[_Called]:
    """Return the calls of linear layers after the last block, of those that are called once."""
    planned = [module for _, module in blocks]
    within = {id(each) for module in planned for each in module.modules()}
    names = {
        id(module): name
        for name, module in cast("Iterable[Block]", step.model.named_modules())
        if type(module) is nn.Linear and id(module) not in within and not is_compiled(module)
    }
    linears = [m for m in step.model.modules() if id(m) in names]
    with step.rehearsed():
        found = step.observe_forward([*planned, *linears], partial(_HeadObserver, names))
    calls = found.calls
    called = [call.module for call in calls]
    return [call for call in calls if called.count(call.module) == 1]


class _HeadObserver(Observer):
    """An observer of linear layers after the last block.

    Args:
        names: the names of linear layers, by id; other modules are blocks.
    """

    def __init__(self, names: dict[int, str]) -> None:
        self.calls: list[_Called] = []
        self._names = names

    def ends(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if id(module) not in self._names:
            self.calls.clear()  # a block: the head is after all of them
        elif len(args) == 1 and not kwargs and isinstance(output, Tensor) and output.dim() > 1:
            num_rows = math.prod(output.shape[:-1])
            self.calls.append(_Called(self._names[id(module)], module, num_rows, output.nbytes))
