"""The parts of a model that run in tiles: the output layer with its loss, and MLPs.

NOTE [ Parts in tiles ]

Rule 1. A head is an `nn.Linear` that is called once, after all blocks, and whose output is large.
        Its weight may be computed (a parametrization, weight dropout). What it returns is not
        computed before somebody reads it; a cross entropy is computed in pieces, whose gradients
        are taken at once (See NOTE [ Gradients of a sum ]).
Rule 2. Within a checkpoint that runs the model again, where the compiler looks at frames, and in
        transforms of torch.func the head runs as it is.
Rule 3. A mean is a sum whose summands are divided by their number before they are differentiated,
        as torch does it, so that the gradient of the hidden states has its bits where kernels
        compute rows alike. In float16, where that may underflow, the sums are divided afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recoup._core.call import Call, run_again
from recoup._core.compile import is_watched
from recoup._core.saved_tensors import is_transformed
from recoup._core.summed_gradients import summed_loss
from recoup.memory import format_bytes
from recoup.planning.blocks import Block
from recoup.planning.forwards import Args, Forward, Kwargs, enclosing_checkpoints, own_forward
from recoup.planning.lazy_logits import LazyLogits, LinearCall

ROW_DIM = -2  # of the rows of an MLP: the one before the features
_TINY = 1e-30  # numbers as small as a gradient over the number of targets
_modules = nn.modules.module
_BACKWARD_HOOKS = (
    "_backward_hooks", "_backward_pre_hooks", "_global_backward_hooks",
    "_global_backward_pre_hooks",
)  # fmt: skip


class Head(NamedTuple):
    """The output layer of a model, as the step that is planned calls it.

    Args:
        name: its qualified name.
        module: the layer.
        num_rows: the rows of its output.
        num_features: the features of its input.
        num_bytes: the bytes of its output.
        tile_rows: how many rows a tile has at most.
    """

    name: str
    module: nn.Module
    num_rows: int
    num_features: int
    num_bytes: int
    tile_rows: int = 0


@dataclass
class TiledParts:
    """Parts of a model that run in tiles, which a follower calls in place of their forwards.

    Args:
        head: the output layer, if it does.
        mlps: the names and modules within blocks that do.
        num_tiles: how many tiles these have.

    Attributes:
        eps: the largest machine epsilon of what they have computed.
    """

    head: Head | None
    mlps: Sequence[Block] = ()
    num_tiles: int = 1
    eps: float = 0.0

    @property
    def modules(self) -> list[nn.Module]:
        """The parts."""
        return [*([self.head.module] if self.head else []), *(each for _, each in self.mlps)]

    @property
    def described(self) -> str:
        """A line for each kind of part, that says in how many tiles it runs."""
        lines: list[str] = []
        if self.head is not None:
            name, _, num_rows, _, num_bytes, rows = self.head
            lines.append(
                f"tile: `{name}` with its cross entropy, {math.ceil(num_rows / rows)} tiles of at "
                f"most {rows} rows; its output of {format_bytes(num_bytes)} is computed when it is "
                "read"
            )
        if self.mlps:
            names = dict.fromkeys(f"`{name}`" for name, _ in (self.mlps[0], self.mlps[-1]))
            several = f"{self.num_tiles} tiles, which run once more in backward"
            lines.append(f"tile: {' ... '.join(names)}, {several}")
        return "\n".join(lines)

    def called(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run a part."""
        if is_watched() or len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return forward(*args, **kwargs)
        if self.head is not None and module is self.head.module:
            return self._logits(self.head, forward, args[0])
        if not has_rows(args[0]):
            return forward(args[0])
        pieces = enumerate(args[0].tensor_split(self.num_tiles, ROW_DIM))
        name = next(name for name, each in self.mlps if each is module)
        outputs = [
            run_again(Call(f"tile {place} of `{name}`", forward, (piece,), {}, module))
            for place, piece in pieces
            if piece.shape[ROW_DIM]
        ]
        self.eps = max(self.eps, *(torch.finfo(output.dtype).eps for output in outputs))
        return torch.cat(outputs, ROW_DIM)

    def _logits(self, head: Head, forward: Forward, rows: Tensor) -> Tensor:
        """Return the output of the head, which is computed when somebody reads it."""
        module: Any = head.module
        # Hooks want the gradient of what it returns.
        hooks = [vars(each).get(name) for each in (module, _modules) for name in _BACKWARD_HOOKS]
        is_whole = rows.dim() < 2 or rows.numel() == 0 or is_transformed() or any(hooks)
        if is_whole or enclosing_checkpoints() != (0, None) or not is_linear(module, forward):
            return forward(rows)
        # The weight of this call: `functional_call` puts others in its place for a while.
        loss = partial(self._cross_entropy, head)
        return LinearCall(f"`{head.name}`", rows, module.weight, module.bias, loss).logits()

    def _cross_entropy(
        self,
        head: Head,
        logits: LazyLogits,
        target: Any,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        """Return the loss, computed in tiles, or NotImplemented for the one of the whole."""
        is_plain = weight is None and size_average is None and reduce is None
        is_of_rows = isinstance(target, Tensor) and logits.dim() == 2 and target.dim() == 1
        if not is_plain or reduction not in ("mean", "sum") or not is_of_rows:
            return NotImplemented
        num_rows = logits.shape[0]
        if not num_rows == target.shape[0] > head.tile_rows:
            return NotImplemented
        logits.call.check()
        parts = cast("Sequence[Tensor]", target.split(head.tile_rows))
        counts = torch.stack([(part != ignore_index).sum() for part in parts])
        weights, divisor = [float(n > 0) for n in cast("list[int]", counts.tolist())], 1.0
        if not any(weights):
            return NotImplemented  # a mean or sum of nothing is what torch makes of it
        if reduction == "mean":
            divisor = float(counts.sum())
            if torch.finfo(logits.call.dtype).smallest_normal < _TINY:  # See Rule 3
                weights, divisor = [each / divisor for each in weights], 1.0
        types = (logits.dtype, logits.call.dtype)
        self.eps = max(self.eps, *(torch.finfo(dtype).eps for dtype in types))

        def loss(piece: list[Tensor]) -> Tensor:
            options: Any = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
            return F.cross_entropy(logits.piece(piece[0]), piece[1], reduction="sum", **options)

        name, sizes = f"the loss of `{head.name}` in tiles", [len(part) for part in parts]
        return summed_loss(
            name, loss, [logits.rows, target], sizes, 0, weights, divisor,
            logits.call.weights, "Plan without `tiles`.",
        )  # fmt: skip


def is_linear(module: nn.Module, forward: Forward) -> bool:
    """Whether a module's forward is that of `nn.Linear`, with the weight that it has then."""
    own = getattr(own_forward(forward), "__func__", None)
    return isinstance(module, nn.Linear) and own is nn.Linear.forward


def has_rows(value: Any) -> bool:
    """Whether a value is a tensor of several rows of features."""
    is_numbers = isinstance(value, Tensor) and value.dim() > 1 and value.is_floating_point()
    return is_numbers and value.shape[ROW_DIM] > 1
