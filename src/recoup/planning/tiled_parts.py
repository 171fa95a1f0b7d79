"""The parts of a model that run in tiles: the output layer with its loss, and MLPs.

NOTE [ Parts in tiles ]

Rule 1. A head is an `nn.Linear` outside of all blocks, called once, after them, whose output is
        large. So it is known to treat rows independently. What it returns is not computed before
        somebody reads it (See NOTE [ Lazy logits ]); a cross entropy is computed in pieces, whose
        gradients are taken at once (See NOTE [ Gradients of a sum ]).
Rule 2. Within a checkpoint that runs the model again, where the compiler looks at frames, and in
        transforms of torch.func the head runs as it is.
Rule 3. A mean is a sum whose summands are divided by their number before they are differentiated,
        as torch does it, so that the gradient of the hidden states has its bits where kernels
        compute rows alike. In float16, where that may underflow, the sums are divided afterwards.
Rule 4. An MLP is a module within a block, with parts of its own, that is called once in each call
        of the block with one tensor, and returns one with the same rows. Of nested ones the
        outermost is taken. Each tile is a region, as in `recoup.tiled`, so backward pays one run.
Rule 5. An MLP must treat rows independently (See NOTE [ Rows that do not know each other ]), also
        with other parameters, since one that begins at zero may hide that rows are mixed. It must
        draw nothing, since tiles would draw other numbers, and set no attributes: the last tile
        alone would say what they are. What that does not show, the comparison of rehearsals with
        the plain step does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recoup._core.call import Call, run_again
from recoup._core.compile import is_compiled, is_watched
from recoup._core.generators import own_generator
from recoup._core.row_check import Found, RowCheck, few_of
from recoup._core.saved_tensors import is_transformed
from recoup._core.summed_gradients import summed_loss
from recoup.memory import format_bytes
from recoup.planning.blocks import Block
from recoup.planning.forwards import enclosing_checkpoints, own_forward
from recoup.planning.lazy_logits import LazyLogits, RowCall
from recoup.planning.step import Observer, Step

__all__ = ["Head", "TiledParts", "find_parts"]

_LEAST_ROWS = 64  # of a tile: a product of fewer is slow
_MOST_ROWS = 1024
_MOST_TILES = 8  # of an MLP
_DIM = -2  # of the rows of an MLP: the one before the features
_TINY = 1e-30  # numbers as small as a gradient over the number of targets


class Head(NamedTuple):
    """The output layer of a model, as the step that is planned calls it.

    Args:
        name: its qualified name.
        module: the layer.
        num_rows: the rows of its output.
        num_bytes: the bytes of its output.
        tile_rows: how many rows a tile has at most.
    """

    name: str
    module: nn.Linear
    num_rows: int
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
            name, _, num_rows, num_bytes, rows = self.head
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

    def called(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a part."""
        if is_watched() or len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return forward(*args, **kwargs)
        if self.head is not None and module is self.head.module:
            return self._logits(self.head, forward, args[0])
        if not _has_rows(args[0]):
            return forward(args[0])
        pieces = enumerate(args[0].tensor_split(self.num_tiles, _DIM))
        name = next(name for name, each in self.mlps if each is module)
        outputs = [
            run_again(Call(f"tile {place} of `{name}`", forward, (piece,), {}, module))
            for place, piece in pieces
            if piece.shape[_DIM]
        ]
        self.eps = max(self.eps, *(torch.finfo(output.dtype).eps for output in outputs))
        return torch.cat(outputs, _DIM)

    def _logits(self, head: Head, forward: Callable[..., Any], rows: Tensor) -> Tensor:
        """Return the output of the head, which is computed when somebody reads it."""
        module: Any = head.module
        hooks = [vars(each) for each in (module, nn.modules.module)]
        if (
            rows.dim() < 2
            or rows.numel() == 0
            or enclosing_checkpoints() != (0, None)
            or is_transformed()
            or type(module) is not nn.Linear
            or getattr(own_forward(forward), "__func__", None) is not nn.Linear.forward
            # Hooks want the gradient of what it returns.
            or any(own.get(name) for own in hooks for name in _BACKWARD_HOOKS)
        ):
            return forward(rows)
        # Those of this call: `functional_call` puts others in their place for a while.
        both: list[Any] = [module.weight, module.bias]
        weights = [each for each in both if each is not None]
        loss = partial(self._cross_entropy, head)
        run = partial(_linear, weights)
        return RowCall(f"`{head.name}`", run, rows, weights, loss).logits()

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
        if reduction == "mean":
            divisor = float(counts.sum())
            if not divisor:
                return NotImplemented  # a mean of nothing is what torch makes of it
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


_BACKWARD_HOOKS = (
    "_backward_hooks", "_backward_pre_hooks", "_global_backward_hooks",
    "_global_backward_pre_hooks",
)  # fmt: skip


def _linear(weights: list[Tensor], rows: Tensor) -> Tensor:
    return F.linear(rows, *weights)


def find_parts(step: Step, blocks: Iterable[Block], tiles: int | None) -> TiledParts:
    """Return the parts of a model that can run in tiles (See Rules 1 and 4).

    One forward is run, and modules within blocks on a few of their rows.

    Args:
        step: the step.
        blocks: the names and modules of the blocks.
        tiles: how many tiles the head has; None to choose.
    """
    blocks, parts = list(blocks), dict[nn.Module, str]()
    for name, block in blocks:
        for path, each in cast("Iterator[Block]", block.named_modules()):
            if each is not block and next(each.children(), None) is not None:
                parts[each] = f"{name}.{path}"
    within = {each for _, block in blocks for each in block.modules()}
    linears: dict[nn.Module, str] = {
        module: name
        for name, module in cast("Iterator[Block]", step.model.named_modules())
        if type(module) is nn.Linear and module not in within and not is_compiled(module)
    }
    if any(map(is_compiled, step.model.modules())):
        parts = {}
    with step.rehearsed():
        called = [*(block for _, block in blocks), *parts, *linears]
        found = step.observe_forward(called, partial(_Finder, linears, parts))
    modules = [each.module for each in found.calls]
    heads = [each for each in found.calls if modules.count(each.module) == 1]
    head = max(heads, key=lambda each: each.num_bytes, default=None)
    if head is not None:
        # As large as the gradient of the weight, which is there at any time, are the logits of as
        # many rows as there are features; they are there up to four times.
        rows = min(max(head.module.in_features // 4, _LEAST_ROWS), _MOST_ROWS)
        rows = rows if tiles is None else math.ceil(head.num_rows / tiles)
        is_large = head.module.out_features > head.module.in_features and head.num_rows > rows
        head = head._replace(tile_rows=rows) if is_large else None
    sizes = {part: size for part, size in found.sizes.items() if size is not None}
    inner = {each for part in sizes for each in part.modules() if each is not part}
    mlps = [(name, part) for part, name in parts.items() if part in sizes and part not in inner]
    num_rows, length = (min((size[i] for size in sizes.values()), default=0) for i in (0, 1))
    num_tiles = min(_MOST_TILES, num_rows // _LEAST_ROWS, length)
    return TiledParts(head, mlps if num_tiles > 1 else (), num_tiles)


class _Finder(Observer):
    """An observer of linear layers after the last block, and of parts of blocks, which it checks.

    Args:
        linears: the names of linear layers outside of blocks.
        parts: the modules within blocks; others are blocks.
    """

    def __init__(self, linears: dict[nn.Module, str], parts: Iterable[nn.Module]) -> None:
        self._linears, self._parts, self._is_trying = linears, set(parts), False
        self.calls: list[Head] = []
        # The rows, and the length, of parts; None for those that do not qualify.
        self.sizes: dict[nn.Module, tuple[int, int] | None] = {}

    def ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note a call."""
        if self._is_trying:
            return
        is_plain = len(args) == 1 and not kwargs and isinstance(output, Tensor)
        x: Any = args[0] if is_plain else None
        if module in self._linears:
            if x is not None and output.dim() > 1:
                name, num_rows = self._linears[module], math.prod(output.shape[:-1])
                self.calls.append(Head(name, cast("Any", module), num_rows, output.nbytes))
        elif module not in self._parts:
            self.calls.clear()  # a block: the head is after all of them
        elif module in self.sizes or not _has_rows(x) or output.shape[:-1] != x.shape[:-1]:
            self.sizes[module] = None
        else:
            self._is_trying = True
            try:
                is_local = _is_row_local(module, x)
            finally:
                self._is_trying = False
            self.sizes[module] = (x.numel() // x.shape[-1], x.shape[_DIM]) if is_local else None


def _has_rows(value: Any) -> bool:
    is_numbers = isinstance(value, Tensor) and value.dim() > 1 and value.is_floating_point()
    return is_numbers and value.shape[_DIM] > 1


def _is_row_local(module: nn.Module, x: Tensor) -> bool:
    """Whether a module treats rows independently, and leaves no trace (See Rule 5)."""
    dim, found = x.dim() + _DIM, list[str | None]()
    before = [value for each in module.modules() for value in vars(each).values()]
    for call in _calls_of(module):

        def run(rows: Sequence[int], own: dict[int, Tensor], call: Any = call) -> Found:
            twice = torch.cat([own[id(x)]] * 2, dim)  # a tile is a view, and not contiguous
            return [("output", call(twice.narrow(dim, 0, len(rows))), False)]

        check = RowCheck(module, [x], dim, run, takes_gradients=True)
        try:
            found.append(check.mixes(few_of(range(x.shape[dim]), x.shape[dim])))
        except Exception:  # noqa: BLE001  # whatever it raises, it cannot run on fewer rows
            return False
        if found[-1] or check.draws:
            return False
    after = [value for each in module.modules() for value in vars(each).values()]
    is_same = len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))
    return is_same and "" in found  # parameters that begin at zero tell nothing


def _calls_of(module: nn.Module) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield the call of a module, and one with parameters none of which is zero (See Rule 5)."""
    yield module
    others: dict[str, Tensor] = {}
    for name, parameter in cast("Iterator[tuple[str, Tensor]]", module.named_parameters()):
        if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
            return
        generator = own_generator(parameter.device, len(others))
        noise = torch.empty(parameter.shape, device=parameter.device).normal_(generator=generator)
        noise /= max(1, *parameter.shape[-1:]) ** 0.5
        others[name] = parameter.detach() + noise.to(parameter.dtype)
    yield partial(torch.func.functional_call, module, others)
