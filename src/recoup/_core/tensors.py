"""Tensors as recoup looks at them: values, layouts in memory, copies, and the graph behind them.

Masks are drawn, and kernels are chosen, in the order of memory: the same numbers in another layout
get other masks, and are rounded otherwise. So a second run must find the layouts of the first.

NOTE [ Steps without values ]

Rule 1. Under a FakeTensorMode operators run without memory, and what reads a number fails. So
        nothing is compared there, every seed is 0, and no buffer has values to give back.
Rule 2. Bytes are those of the tensors that operators return. What a kernel allocates for a moment
        is not seen.
Rule 3. Times are counted instead of measured: the bytes that operators move and the operations of
        their products.

NOTE [ Copies in another type ]

Autocast makes them. Only the nodes of the graph show the origin of a copy: it has a storage of its
own, and torch may have made the view and the copy unseen, within one operator. If a node on the way
is not known here, the copy is kept, which costs its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from recoup._arguments import check_type, shown
from recoup._core.pytree import flatten
from recoup._core.saved_tensors import version_of

# The classes of tensors that operators compute with as they are.
PLAIN = frozenset((Tensor, nn.Parameter, FakeTensor))
_C: Any = torch._C
_plain_dispatch: Any = getattr(Tensor, "__torch_dispatch__")  # noqa: B009


def is_without_values() -> bool:
    """Whether a FakeTensorMode is in force."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE) is not None


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has numbers, which operators can read here."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor) or is_without_values())


def wraps_others(kind: type[Tensor]) -> bool:
    """Whether tensors of a class run operators on others that they wrap (a DTensor)."""
    return getattr(kind, "__torch_dispatch__") is not _plain_dispatch  # noqa: B009


def check_is_in_its_mode(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError if a tensor has no values, and the mode that it is of is not in force."""
    if not is_without_values() and any(isinstance(tensor, FakeTensor) for tensor in tensors):
        raise ValueError(
            "Tensors of a FakeTensorMode take no memory that could be counted outside of it. "
            "Measure, or plan, within that mode; or use recoup.estimate."
        )


Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
Strides = tuple[int, ...]
_strides: Callable[[Tensor], Strides] = methodcaller("stride")


def strided(tensor: Tensor, stride: Strides) -> Tensor:
    """Return `tensor`, or a copy, with these strides; an expanded one is left as it is."""
    if tensor.stride() == stride or 0 in stride:
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def laid_out(tensor: Tensor, geometry: Geometry) -> Tensor:
    """Return `tensor` with the memory layout `geometry`, since slots are views of its storage."""
    if geometry_of(tensor) == geometry:
        return tensor
    size, stride, offset = geometry
    length = offset + 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    storage = tensor.new_empty(max(length, 0) if tensor.numel() else 0)
    return storage.as_strided(size, stride, offset).copy_(tensor)


def geometry_of(tensor: Tensor) -> Geometry:
    """Return the size, stride and storage offset of `tensor`."""
    return tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())


def strides_of(tensors: Sequence[Tensor]) -> list[Strides]:
    """Return the strides of each tensor; empty for one that has none (a sparse tensor)."""
    try:
        return list(map(_strides, tensors))
    except RuntimeError:
        return [each.stride() if each.layout is torch.strided else () for each in tensors]


def in_order(tensors: tuple[Tensor, ...], strides: list[Strides]) -> tuple[Tensor, ...]:
    """Return `tensors` with the dimensions in the order of `strides`, as copies where needed.

    Gaps between the entries (of a slice) make no difference to what is made of a tensor.
    """
    if strides_of(tensors) == strides:
        return tensors
    return tuple(map(_in_order, tensors, strides))


def _in_order(tensor: Tensor, strides: Strides) -> Tensor:
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return tensor
    dims, now = range(tensor.dim()), tensor.stride()
    if 0 not in (*strides, *now) and (
        sorted(dims, key=strides.__getitem__) == sorted(dims, key=now.__getitem__)
    ):
        return tensor
    dense = _dense(tensor.shape, strides)
    if dense == _dense(tensor.shape, now):
        return tensor
    return strided(tensor, dense)


def _dense(shape: Sequence[int], strides: Strides) -> Strides:
    """Return the strides of what torch makes of such a tensor: without gaps, and not expanded."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def check_tensors(**given: object) -> None:
    """Raise ValueError unless each argument is a tensor."""
    check_type(Tensor, "a tensor", **given)


def check_modules(**given: object) -> None:
    """Raise ValueError unless each argument is an `nn.Module`."""
    check_type(nn.Module, "an nn.Module", **given)


def check_place(device: Any = None, dtype: Any = None, *, is_real: bool = False) -> None:
    """Raise ValueError unless the device is there, and the type is one of floating-point numbers.

    If `is_real`, complex types are left out.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise ValueError(
            f'`device` is {shown(device)}, but must be a device that is there, such as "cpu".'
        ) from error
    is_type = isinstance(dtype, torch.dtype)
    if dtype is not None and not (
        is_type and (dtype.is_floating_point or (dtype.is_complex and not is_real))
    ):
        raise ValueError(
            f"`dtype` is {shown(dtype)}, but must be a floating-point type such as torch.float32."
        )


Cast = Callable[[Tensor], Tensor]  # makes the copy again of the value
T = TypeVar("T", bound=Tensor)
_MOST_VIEWS = 8
_RESHAPES = ("ViewBackward0", "ReshapeAliasBackward0")  # they do not record the shape of the view


def cast_of(tensor: Tensor, values: Sequence[T]) -> tuple[T, Cast] | None:
    """Return the value of which `tensor` is a copy, or a view of one, and its cast; or None."""
    copy = tensor if tensor._base is None else tensor._base
    node: Any = copy.grad_fn
    if node is None or node.name() != "ToCopyBackward0" or version_of(copy):
        return None
    path: list[tuple[Any, int]] = []
    while node.next_functions and len(path) <= _MOST_VIEWS:
        node, nr = node.next_functions[0]
        for value in values:  # the parts of a split share a node, and are different outputs of it
            if value.grad_fn is node and value.output_nr == nr and value.device == copy.device:
                view = _viewed(value.detach(), path, copy.shape)
                if view is None:
                    return None
                size, stride, _ = geometry_of(copy)
                return value, partial(_cast, geometry_of(view), size, stride, copy.dtype)
        if node is None:
            return None
        path.append((node, nr))
    return None


def _cast(
    before: Geometry, size: Strides, stride: Strides, dtype: torch.dtype, made: Tensor
) -> Tensor:
    copy = made.new_empty_strided(size, stride, dtype=dtype)
    return copy.copy_(made.as_strided(*before))


def _viewed(view: Tensor, path: list[tuple[Any, int]], shape: torch.Size) -> Tensor | None:
    """Return the view at the end of `path`, whose last node comes first; None if unknown."""
    for num_left, (node, nr) in zip(reversed(range(len(path))), reversed(path), strict=True):
        if num_left == 0 and node.name() in _RESHAPES:
            return view.view(shape)
        if node.name() not in _STEPS:
            return None
        view = _STEPS[node.name()](view, node, nr)
    return view if view.shape == shape else None


def _axis(saved: int) -> int:
    return saved if saved < 2**63 else saved - 2**64  # nodes store it unsigned


_STEPS: dict[str, Callable[[Tensor, Any, int], Tensor]] = {
    "TBackward0": lambda view, _, __: view.t(),
    "TransposeBackward0": lambda view, node, _: view.transpose(
        _axis(node._saved_dim0), _axis(node._saved_dim1)
    ),
    "PermuteBackward0": lambda view, node, _: view.permute(*map(_axis, node._saved_dims)),
    "UnsqueezeBackward0": lambda view, node, _: view.unsqueeze(_axis(node._saved_dim)),
    "SplitBackward0": lambda view, node, nr: torch.split(
        view, node._saved_split_size, _axis(node._saved_dim)
    )[nr],
    "SplitWithSizesBackward0": lambda view, node, nr: torch.split(
        view, [*node._saved_split_sizes], _axis(node._saved_dim)
    )[nr],
}


# -- the graph, and its ends: the leaves that can be found from outputs ----------------------------

_ACCUMULATES = "AccumulateGrad"


class Ends(NamedTuple):
    """The ends of a graph."""

    leaves: list[Tensor]  # in which a plain backward would accumulate gradients
    # Nodes of checkpoints of the reentrant kind, whose leaves cannot be seen before they run, and
    # which run only in a plain backward.
    checkpoints: list[Any]


def ends_of(outputs: Sequence[Tensor]) -> Ends:
    """Return the ends of the graph of `outputs`; a node takes about a microsecond."""
    leaves = [each for each in outputs if each.grad_fn is None and each.requires_grad]
    checkpoints: list[Any] = []
    for node in nodes_of(outputs):
        kind: str = type(node).__name__
        if kind == _ACCUMULATES:
            leaves.append(node.variable)
        elif "CheckpointFunction" in kind:
            checkpoints.append(node)
    return Ends(leaves, checkpoints)


def nodes_of(outputs: Iterable[Tensor]) -> list[Any]:
    """Return the nodes of the graph of `outputs`, each once."""
    nodes: list[Any] = list(dict.fromkeys(e.grad_fn for e in outputs if e.grad_fn is not None))
    seen = set(nodes)
    for node in nodes:  # which grows
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return nodes


def when_node_runs(node: Any, call: Callable[[int], None]) -> None:
    """Call `call` whenever a backward comes to a node, with the number of nodes made before it.

    Nodes that accumulate gradients have no such number, and call nothing.
    """
    if type(node).__name__ == _ACCUMULATES:
        return
    num_before: int = node._sequence_nr()

    def begins(gradients: object) -> None:
        del gradients
        call(num_before)

    node.register_prehook(begins)


@contextmanager
def hidden_leaves(
    checkpoints: Iterable[Any], found: Callable[[list[Tensor]], None]
) -> Generator[None]:
    """Return a context that calls `found` with the leaves of each reentrant checkpoint that reruns.

    That is before gradients are accumulated in them. The nodes are restored at the end.
    """
    nodes = [node for node in checkpoints if hasattr(node, "run_function")]
    functions = [node.run_function for node in nodes]
    try:
        _listen(nodes, found)
        yield
    finally:
        for node, function in zip(nodes, functions, strict=True):
            node.run_function = function


def _listen(nodes: Iterable[Any], found: Callable[[list[Tensor]], None]) -> None:
    for node in nodes:
        if hasattr(node, "run_function"):
            node.run_function = _telling(node.run_function, found)


def _telling(run: Callable[..., Any], found: Callable[[list[Tensor]], None]) -> Callable[..., Any]:
    def run_and_tell(*args: Any) -> Any:
        outputs = run(*args)
        ends = ends_of(flatten(outputs)[0])
        given = {each for each in args if isinstance(each, Tensor)}  # it reads `.grad` of these
        found([each for each in ends.leaves if each not in given])
        _listen(ends.checkpoints, found)  # of a graph that is freed when its backward ends
        return outputs

    return run_and_tell
