"""The outcome of a region: the residuals by which a second run is compared with the first.

NOTE [ What is compared ]

Rule 1. The gradient of a region depends on its graph, which is that of the first run, and on its
        residuals. So a second run that makes the same residuals is right, whatever else differs.
Rule 2. Not every residual is sketched: what one is made of would show in it. A residual is covered
        by a later one that the graph leads from to the node that saved it. Sketched are those that
        are not covered at the end of the run: the last of each branch.
Rule 3. Some nodes cover nothing beneath them, and what is saved there is sketched at once: one that
        combines a tensor with another without history, which may cancel it (a straight-through
        estimator adds ``(q - z).detach()`` to ``z``; a product may not); one whose output a later
        run is given rather than computes (a product that a plan keeps); and a function of the
        user's, of which nothing covers what it saves itself, either: its result need not depend on
        that. And nothing covers a mask or an index: another one may choose the same values at a
        tie, and send gradients elsewhere. (What a dropout multiplies by shows in the product.)
        Nor is a residual covered by what was made of a part of it; or one that is much smaller than
        others: a norm divides by a deviation, so that a factor of its input shows in that alone. Of
        those the norms are compared, many in one sketch, in 16 bits where the run has any: rounding
        may come from there. (A weight that is only converted is no deviation.)
Rule 4. The graph is followed from the nodes that made residuals down, as residuals are saved; each
        node is visited once. Held is the memory of what is not covered yet, of the largest one (to
        follow the graph at each takes a GPU's host too long), and a megabyte of small ones.
Rule 5. A kernel may write to a tensor after autograd has saved it. So the last residuals are
        sketched when the run has ended, or where it is stopped. One that was changed in place since
        is an error in backward anyway, if it is used.
Rule 6. An input that is given back, or a view of all of it, must be one in the second run, too. An
        input that is made again, as most states of a chain are, is a residual like any other.
Rule 7. On CPU sketches are compared at once. Elsewhere they are compared when backward ends, before
        it returns, since a comparison waits for the device.
Rule 8. What this cannot see: a difference below the tolerance; one that comes to nothing on its way
        to a residual that is sketched (a factor from elsewhere, times a weight that is zero; the
        sign before a square; a shift, or an order, before all is averaged); and what kernels may
        leave unwritten: bytes (uint8), a workspace, and where there is an accelerator single
        integers, in which its attention returns the seed of a dropout, if there is one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from recoup._core.devices import accelerator
from recoup._core.saved_tensors import backward_id, num_nodes, version_of
from recoup._core.sketch import (
    HALVES,
    Sketch,
    are_equal,
    difference,
    difference_of_norms,
    norms_of,
    sketch_of,
    tolerance_of,
)
from recoup._core.surroundings import Surroundings
from recoup._core.tensors import strided
from recoup.errors import ChangedError, ReplayError


class Compared(NamedTuple):
    """A residual that is compared."""

    sketch: Sketch | int  # or the place of the input that it is
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    address: int
    version: int


Outcome = dict[int, Compared]  # small residuals have one in common: their norms


Residual = tuple[int, Tensor, int]  # with its place, and its version when it was saved
# By the number of the node that saves them.
Waiting = dict[int, list[Residual]]
# Types of what a result computes with; others choose what it computes with (See Rule 3).
_OF_NUMBERS = frozenset((
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
))  # fmt: skip
_OF_SEEDS_OR_BYTES = frozenset((torch.int64, torch.uint64, torch.uint8))
# Nodes whose result shows a difference in one factor, whatever the other is (zeros: See Rule 8).
_SCALES = frozenset(("MulBackward0", "DivBackward0"))
# Nodes whose result has the entries of their operand, and no others.
_CONVERSIONS = frozenset(("TBackward0", "ToCopyBackward0", "TransposeBackward0", "ViewBackward0"))
_DROPOUT = "NativeDropoutBackward0"
# Nodes whose result is made of a part of their operand.
_PARTS = frozenset(
    f"{name}Backward{place}"
    for place in range(2)
    for name in (
        "Amax", "Amin", "AsStrided", "ConstantPadNd", "Diagonal", "Embedding", "Gather", "Index",
        "IndexSelect", "Kthvalue", "MaskedFill", "MaskedSelect", "Max", "Maximum",
        "MaxPool2DWithIndices", "MaxPool3DWithIndices", "Median", "Min", "Minimum",
        "MkldnnMaxPool2D", "NllLoss", "Select", "Slice", "Split", "SplitWithSizes", "Take", "Topk",
        "Unbind", "Unfold", "UnsafeSplit", "UnsafeSplitWithSizes",
    )
) | {"DiagonalBackward0_copy"}  # fmt: skip
_SMALLER = 8  # times at least: reading them costs little
_MOST_PINNED = 2**20  # bytes
_NORMS = -1  # in the place of a version
# The nodes of functions that users write.
_OfPython: Any = getattr(torch._C, "_FunctionBase")  # noqa: B009


class Frontier:
    """The residuals of a run that are not covered by later ones, as it goes on."""

    def __init__(self, inputs: Sequence[Tensor], kept: Container[int]) -> None:
        self.inputs = inputs
        self.kept = kept
        self.outcome: Outcome = {}  # of what is sketched already
        self.small: list[Residual] = []  # of which the norms are compared
        self.num_pinned = 0  # the bytes of their memory
        self.has_halves = False
        self.waiting: Waiting = {}  # results of the node itself: by the inverted number
        # Those that were saved since the graph was followed: the node that saves it, and its maker.
        self.saved: list[tuple[int, Any, Residual]] = []
        self.num_held = 0  # their elements
        self.largest = 0  # the elements of the largest one so far
        self.seen: set[int] = set()  # the nodes that were visited
        self.start = num_nodes()  # those before it are not of this run

    def follow(self, saver: int = -1) -> None:
        """Cover what is beneath the nodes that made residuals (See Rules 2 to 4).

        The node with the number `saver` may save more; -1 when the run has ended.
        """
        waiting, seen, start, kept = self.waiting, self.seen, self.start, self.kept
        # With whether it covers what is saved beneath it, and whether a residual is its result that
        # another node saved.
        nodes: list[tuple[Any, bool, bool]] = []
        for number, node, residual in self.saved:
            if residual[1].dtype in HALVES:
                self.has_halves = True
            if node is not None:
                is_own = node._sequence_nr() == number
                nodes.append((node, True, not is_own))
                number = ~number if is_own else number
            if number in waiting:
                waiting[number].append(residual)
            else:
                waiting[number] = [residual]
        self.saved, self.num_held = [], 0
        nodes.reverse()
        now: list[Residual] = []  # what nothing covers
        for node, covers, is_above in nodes:  # which grows
            number = node._sequence_nr()
            if number < start:
                continue
            found = waiting.pop(~number, None) if is_above else None
            is_new = number not in seen
            if is_new:
                if number != saver:
                    seen.add(number)
                if number in waiting:
                    found = waiting.pop(number) if found is None else found + waiting.pop(number)
            elif found is None:
                continue
            kind = type(node).__name__
            is_kept, is_part = number in kept, kind in _PARTS
            if found is not None:
                if not covers or is_kept or is_part or isinstance(node, _OfPython):
                    now += found
                else:
                    small: Residual | None = None  # after a mean, the deviation
                    for each in found:
                        if each[1].dtype in _OF_NUMBERS:
                            is_small = _SMALLER * each[1].numel() <= self.largest
                            if is_small and not _is_of_a_leaf(each[1].grad_fn):
                                small = each
                        elif kind != _DROPOUT:
                            now.append(each)
                    if small is not None:
                        self._keep_small(small)
            if is_new and waiting:
                following = node.next_functions
                if is_kept or is_part or ((None, 0) in following and kind not in _SCALES):
                    covers = False
                for each, _ in following:
                    if each is not None:
                        nodes.append((each, covers, True))
        if now:
            self.outcome.update(outcome_of(now, self.inputs))

    def ended(self) -> Outcome:
        """Return what later runs must make again, when the run has ended."""
        self.follow()
        for residuals in self.waiting.values():
            self.outcome.update(outcome_of(residuals, self.inputs))
        if self.small:
            self._compare_norms()
        return self.outcome

    def _keep_small(self, residual: Residual) -> None:
        """Keep a small residual until its norm is taken, with those of others."""
        tensor = residual[1]
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        if not is_plain or not tensor.data_ptr():
            self.outcome.update(outcome_of((residual,), self.inputs))
            return
        if self.small and tensor.device != self.small[0][1].device:
            self._compare_norms()
        self.small.append(residual)
        self.num_pinned += tensor.untyped_storage().nbytes()
        if self.num_pinned > _MOST_PINNED:
            self._compare_norms()

    def _compare_norms(self) -> None:
        """Let the norms of small residuals be compared, which takes one sketch for all."""
        small, self.small, self.num_pinned = sorted(self.small), [], 0
        small = [each for each in small if version_of(each[1]) == each[2]]  # See Rule 5
        if small:
            dtypes = [torch.bfloat16] if self.has_halves else [each[1].dtype for each in small]
            tensors = [tensor for _, tensor, _ in small]
            kind = max(dtypes, key=tolerance_of), tensors[-1].shape, (), 0, _NORMS
            norms = Compared(norms_of(tensors), *kind)
            self.outcome.update((place, norms) for place, _, _ in small)


def outcome_of(residuals: Iterable[Residual], inputs: Sequence[Tensor]) -> Outcome:
    """Return what later runs must make again, by the places of the residuals."""
    found: Outcome = {}
    seen: set[object] = set()
    for place, tensor, version in residuals:
        now = 0 if tensor.is_inference() else tensor._version
        if now != version or (tensor.dtype in _OF_SEEDS_OR_BYTES and _may_be_unwritten(tensor)):
            continue  # See Rules 5 and 8
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
        address = tensor.data_ptr() if is_plain else 0
        key = (address, tensor.shape, tensor.dtype)
        if address and key in seen:
            continue  # a tensor that an operator has saved twice
        seen.add(key)
        at = _input_at(tensor, inputs)
        sketch = sketch_of(tensor) if at is None else at
        if sketch is not None:
            stride = tensor.stride() if is_plain else ()
            found[place] = Compared(sketch, tensor.dtype, tensor.shape, stride, address, version)
    return found


def _is_of_a_leaf(node: Any) -> bool:
    """Whether the result of a node is a leaf that is only converted."""
    while type(node).__name__ in _CONVERSIONS:
        node = node.next_functions[0][0]
    return type(node).__name__ == "AccumulateGrad"


def _may_be_unwritten(tensor: Tensor) -> bool:
    """Whether a kernel may have left a residual of integers as its memory was (See Rule 8)."""
    if tensor.dtype is torch.uint8:
        return True
    is_seed = tensor.dim() == 0 if tensor.dtype is torch.int64 else tensor.numel() <= 2
    return is_seed and accelerator() is not None


def compare(
    outcome: Outcome,
    again: Iterable[tuple[int, Tensor]],
    inputs: Sequence[Tensor],
    surroundings: Surroundings,
) -> None:
    """Raise if residuals of a second run, with their places, are not those of the first."""
    small: dict[int, tuple[Compared, list[Tensor]]] = {}
    for place, tensor in again:
        first = outcome[place]
        if first.version == _NORMS:
            small.setdefault(id(first), (first, []))[1].append(tensor)
            continue
        if isinstance(first.sketch, int):
            if _input_at(tensor, inputs) != first.sketch:
                raise mismatch(surroundings, _different(first, tensor, None))
            continue
        if first.stride and tensor.stride() != first.stride:  # hooks around may lay it out anew
            tensor = strided(tensor.detach(), first.stride)
        second = sketch_of(tensor)
        if isinstance(first.sketch, list) and isinstance(second, list):
            if first.sketch != second:
                _check(first, second, tensor, surroundings)
        elif second is not None:
            _check_later(first, second, tensor, surroundings)
    for first, tensors in small.values():
        second = norms_of(tensors)
        if not isinstance(second, list):
            _check_later(first, second, None, surroundings)
        elif first.sketch != second:
            _check(first, second, None, surroundings)


def _input_at(tensor: Tensor, inputs: Sequence[Tensor]) -> int | None:
    """Return the place of the input that a tensor is, or is a view of all of; or None."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    found: int | None = None
    for place, value in enumerate(inputs):
        if tensor is value:
            return place
        if not is_plain or type(value) is not Tensor or value.layout is not torch.strided:
            continue
        if tensor.data_ptr() != value.data_ptr() or not value.numel():
            continue
        is_same = tensor.shape == value.shape and tensor.stride() == value.stride()
        is_whole = tensor.numel() == value.numel() and tensor.is_contiguous()
        if is_same or (is_whole and value.is_contiguous()):
            found = place
    return found


def _check(
    first: Compared, second: Sketch, tensor: Tensor | None, surroundings: Surroundings
) -> None:
    if first.version == _NORMS:
        found = difference_of_norms(first.sketch, second)  # type: ignore[arg-type]
    else:
        length = 0.0  # a sketch of integers is a hash
        if tensor is not None and (tensor.is_floating_point() or tensor.is_complex()):
            length = float(cast("Any", torch).linalg.vector_norm(tensor.detach()))
        found = difference(first.sketch, second, length)  # type: ignore[arg-type]
    if found > tolerance_of(first.dtype):
        raise mismatch(surroundings, _different(first, tensor, found))


def _different(first: Compared, tensor: Tensor | None, found: float | None) -> str:
    what = f"a {first.dtype} of shape {tuple(first.shape)}"
    if tensor is not None and first.address:
        is_same = tensor.data_ptr() == first.address
        if is_same and version_of(tensor) != first.version:
            return f"{what} that it reads from outside was changed in place since forward"
    off = "" if found is None else f", off by {found:.1e} of its length"
    return f"it made {what} with other values than the first run{off}"


def mismatch(surroundings: Surroundings, what: str) -> ReplayError | ChangedError:
    """Return the error of a second run that differs from its first: it says what is different."""
    surroundings.look_again()
    culprit = surroundings.culprit()
    because = f" Since forward, {culprit}." if culprit else ""
    kind = ChangedError if culprit or "changed in place" in what else ReplayError
    return kind(
        f"Running {surroundings.name} again in backward did not repeat its first run: {what}."
        f"{because} Gradients would be wrong. Let it compute the same from its arguments, "
        "parameters and torch's random numbers (pass in what changes: a clock, a counter, draws of "
        "numpy or of Python's random), and change what it reads after backward only. If its "
        "kernels are not deterministic, compare=False takes what they make as it is. Or keep its "
        'residuals (memory="linear", or no region).'
    )


class _Later:
    """The comparisons that a backward leaves to its end, and its callback, which holds them."""

    def __init__(self) -> None:
        self.pending: list[tuple[Compared, Sketch, Surroundings]] = []

    def __call__(self) -> None:
        """Compare all (See Rule 7)."""
        if not are_equal((first.sketch, second) for first, second, _ in self.pending):  # type: ignore[misc]
            for first, second, surroundings in self.pending:
                _check(first, second, None, surroundings)


# By the number of the backward: a thread of a device compares, and another one may end it.
_later: weakref.WeakValueDictionary[int, _Later] = weakref.WeakValueDictionary()
_starting = threading.Lock()


def _check_later(
    first: Compared, second: Sketch, tensor: Tensor | None, surroundings: Surroundings
) -> None:
    task = backward_id()
    if task == -1:
        _check(first, second, tensor, surroundings)
        return
    with _starting:
        later = _later.get(task)
        if later is None:
            later = _later[task] = _Later()
            torch.autograd.Variable._execution_engine.queue_callback(later)
    later.pending.append((first, second, surroundings))
