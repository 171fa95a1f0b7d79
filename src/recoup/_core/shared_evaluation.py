"""Evaluations that forward, inverse and backward share.

NOTE [ One evaluation ]

Rule 1. The inverse of a coupling runs its networks on the same inputs as forward did.
        So in backward one inverse both finds the input of the coupling and, by running each
        network as a region of its own, makes that network's residuals.
Rule 2. The residuals of the coupling itself are made by running its forward once more over the
        network outputs that the inverse remembered: elementwise work only.
Rule 3. A network is recognized by identity. A network that one forward evaluates twice is
        ambiguous, since an inverse may evaluate in another order; then nothing is shared, and
        backward runs inverse and forward in full.
Rule 4. The draws of a network come from a seed of its own, in every memory mode, so that they
        do not depend on which direction runs first. They are made in the order of memory, so a
        network that runs again gets its inputs in the memory layout of forward.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from recoup._core.closures import ClosureGuard
from recoup._core.filling import Filling
from recoup._core.inner_gradients import Advancing, FirstRun
from recoup._core.memory_layout import in_order, strides_of
from recoup._core.pytree import Tree, flatten
from recoup._core.random_sources import draws_nothing
from recoup._core.region import Region
from recoup._core.restoring import Restoring
from recoup._core.rng import SeededCall
from recoup._core.saved_tensors import as_leaves, detached, requires_grad_of, versions_of
from recoup.errors import ReplayError

__all__ = ["Evaluations", "answer_with", "evaluate", "is_answered", "unshared"]

Inputs = tuple[Tensor, ...]
Then = Callable[[Any], Any] | None
_Answer = Callable[[nn.Module, Inputs, Then], Any]


class _Local(threading.local):
    def __init__(self) -> None:
        self.answer: _Answer | None = None


_local = _Local()


class _InGraph:
    """The answer to evaluations in code that the compiler traces, together with its changes."""

    def __init__(self) -> None:
        self.answer: _Answer | None = None


_in_graph = _InGraph()


def evaluate(network: nn.Module, inputs: Inputs, then: Then = None) -> Any:
    """Return the output of `network`, shared by the running region if any (Rules 1 and 2).

    Args:
        network: the network.
        inputs: its inputs.
        then: computes from its output what is returned instead, as a part of the evaluation.
    """
    if torch.compiler.is_compiling():
        if _in_graph.answer is not None:
            return _in_graph.answer(network, inputs, then)
        return _called(network, inputs, then)  # compiled draws belong to the graph anyway
    answer = _local.answer
    if answer is None:
        if draws_nothing(network):
            return _called(network, inputs, then)
        return _run(network, inputs, then, SeededCall())
    _local.answer = None  # networks within this one are its own
    try:
        return answer(network, inputs, then)
    finally:  # if this line is cut off, the context that set `answer` restores what was before
        _local.answer = answer


def is_answered() -> bool:
    """Whether evaluations on this thread belong to a stage that is inverted."""
    return _local.answer is not None


def _called(network: nn.Module, inputs: Inputs, then: Then) -> Any:
    output = network(*inputs)
    return output if then is None else then(output)


def _run(network: nn.Module, inputs: Inputs, then: Then, call: SeededCall) -> Any:
    if not call.is_known and draws_nothing(network):
        call.draws_nothing()
    if call.is_plain:
        return _called(network, inputs, then)
    return call.run(lambda: _called(network, inputs, then))  # See Rule 4


def _run_untaped(network: nn.Module, inputs: Inputs, then: Then, evaluation: _Evaluation) -> Any:
    inputs = evaluation.leaves(inputs)
    first_run = FirstRun((weakref.ref(network),), is_training=network.training)
    with Advancing(f"a {type(network).__name__} that is evaluated", first_run):
        return _run(network, inputs, then, evaluation.call)


class _Answering(Restoring):
    """A context in which `answer` makes every evaluation.

    Args:
        answer: returns what a network returns for its inputs.
        around: a context that is entered before it and left after it, by hand: a `with` statement
            for both is cheaper.
    """

    __slots__ = ("_answer", "_around", "_before", "_is_entered")

    def __init__(self, answer: _Answer, around: Restoring | None = None) -> None:
        self._answer = answer
        self._around = around
        self._before: _Answer | None = None
        self._is_entered = False

    def __enter__(self) -> None:
        if self._around is not None:
            self._around.__enter__()
        self._before = _local.answer
        self._is_entered = True
        _local.answer = self._answer

    def _restore_answer(self) -> None:
        if self._is_entered:
            _local.answer = self._before
            self._is_entered = False

    def restore(self) -> None:
        self._restore_answer()
        if self._around is not None:
            self._around.restore()

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        self._restore_answer()
        if self._around is not None:
            self._around.leave(kind, value, traceback)


def unshared() -> Restoring:
    """Return a context in which evaluations are plain calls, or as `answer_with` says."""
    return _Answering(_called)


def answer_with(answer: _Answer | None) -> None:
    """Let `answer` make the evaluations from here on, in a graph or a context of `unshared`."""
    if torch.compiler.is_compiling():
        _in_graph.answer = answer
    else:
        _local.answer = _called if answer is None else answer


class _Evaluation:
    """One evaluation: its region, its seeded call, and its output while that is needed."""

    __slots__ = (
        "_requires_grad",
        "_strides",
        "call",
        "output",
        "region",
        "tree",
        "versions",
        "wants_grad",
    )

    def __init__(self, inputs: Inputs, region: Region) -> None:
        self._requires_grad = list(map(requires_grad_of, inputs))
        self._strides = strides_of(inputs)
        self.call = SeededCall()
        self.region = weakref.ref(region)
        self.output: tuple[Tensor, ...] | None = None
        self.versions: list[int] = []
        self.wants_grad: list[bool] = []
        self.tree: Tree | None = None

    def leaves(self, inputs: Inputs) -> Inputs:
        """Return the inputs of a later run, as those of the first (See Rule 4)."""
        return as_leaves(in_order(inputs, self._strides), self._requires_grad)

    def returned(self, output: tuple[Tensor, ...]) -> Any:
        """Return `output` as the network returned it, with its structure and `requires_grad`."""
        values = as_leaves(output, self.wants_grad)
        return values[0] if self.tree is None else self.tree.unflatten(values)


_content: Callable[[types.CellType], object] = attrgetter("cell_contents")
_checked: set[tuple[types.CodeType | None, ...]] = set()


def _check_reads(then: Callable[[Any], Any], name: str) -> None:
    """Raise if `then` reads a tensor that may be another one in the inverse; once for its code."""
    # A coupling wraps the function of a subclass, whose code counts, too.
    cells = getattr(then, "__closure__", None) or ()
    codes = tuple([getattr(fn, "__code__", None) for fn in (then, *map(_content, cells))])
    if codes in _checked:
        return
    guard = ClosureGuard(then)
    own = {id(each) for module in guard.modules for each in _tensors_of(module)}
    for value in guard.tensors:
        if id(value) not in own and not isinstance(value, nn.Parameter):
            raise ReplayError(
                f"`then` of an evaluation in {name} reads a tensor of shape {tuple(value.shape)} "
                "beside its argument, which may be another one in the inverse. Let it read "
                "parameters and buffers of the module only, and do the rest after `evaluate`."
            )
    _checked.add(codes)


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


class Evaluations:
    """The evaluations of one call of an invertible module.

    Args:
        name: the name of the module in error messages.
    """

    __slots__ = ("_by_network", "_cursor", "_name", "_num_evaluations")

    def __init__(self, name: str) -> None:
        self._name = name
        self._by_network: dict[nn.Module, list[_Evaluation]] = {}
        self._cursor: dict[nn.Module, int] = {}
        self._num_evaluations = 0

    @property
    def are_shared(self) -> bool:
        """Whether the inverse can make the residuals (See Rule 3)."""
        return len(self._by_network) == self._num_evaluations

    @property
    def are_wanted(self) -> bool:
        """Whether autograd still holds any residual of a network."""
        regions = (one.region() for same in self._by_network.values() for one in same)
        return any(region is not None and region.is_wanted for region in regions)

    def recording(self, region: Region, around: Restoring) -> Restoring:
        """Return a context for the first forward: each evaluation is a region beside `region`.

        Args:
            region: the region of the whole call.
            around: a context that is entered before it and left after it.
        """
        return _Answering(partial(self._record, region), around)

    def inverting(self, fills: bool, around: Restoring) -> Restoring:
        """Return a context for the inverse.

        Args:
            fills: whether it fills slots and remembers outputs (See Rule 1).
            around: a context that is entered before it and left after it.
        """
        return _Answering(self._fill_and_remember if fills else self._only_run, around)

    def answering(self, recall: bool, around: Restoring) -> Restoring:
        """Return a context for a second forward.

        Args:
            recall: whether it uses the outputs that the inverse remembered (See Rule 2); or else
                networks run again (See Rule 3).
            around: a context that is entered before it and left after it.
        """
        self._cursor = {}
        return _Answering(self._recall if recall else self._fill_in_order, around)

    def forget(self) -> None:
        """Release the remembered outputs."""
        for same in self._by_network.values():
            for evaluation in same:
                evaluation.output = None

    def _record(self, around: Region, network: nn.Module, inputs: Inputs, then: Then) -> Any:
        if then is not None:
            _check_reads(then, self._name)
        region = Region(around.name, around.owner, around.index, around.first_run, around.way)
        evaluation = _Evaluation(inputs, region)
        self._by_network.setdefault(network, []).append(evaluation)
        self._num_evaluations += 1
        with region.recording():
            output = _run(network, inputs, then, evaluation.call)
        values, evaluation.tree = flatten(output)
        evaluation.wants_grad = list(map(requires_grad_of, values))
        return output

    def _only(self, network: nn.Module) -> _Evaluation:
        found = self._by_network.get(network)
        if found is None:
            raise ReplayError(
                f"{self._name} evaluates {type(network).__name__} in one direction and not in the "
                "other. Call it through `evaluate` in both `forward` and `inverse`, or in neither."
            )
        return found[0]

    def _fill_and_remember(self, network: nn.Module, inputs: Inputs, then: Then) -> Any:
        evaluation = self._only(network)
        output = self._fill(evaluation, network, inputs, then)
        evaluation.output = output
        evaluation.versions = versions_of(output)
        return output[0] if evaluation.tree is None else evaluation.tree.unflatten(output)

    def _fill(
        self, evaluation: _Evaluation, network: nn.Module, inputs: Inputs, then: Then
    ) -> tuple[Tensor, ...]:
        region = evaluation.region()
        if region is None or not region.is_wanted:
            return detached(flatten(_run_untaped(network, inputs, then, evaluation))[0])
        taped = evaluation.leaves(inputs)
        with Filling(region, taped):
            output = flatten(_run(network, taped, then, evaluation.call))[0]
        return detached(output)

    def _only_run(self, network: nn.Module, inputs: Inputs, then: Then) -> Any:
        evaluation = self._only(network)
        if len(self._by_network[network]) > 1 and evaluation.call.draws:
            raise ReplayError(
                f"{self._name} evaluates one {type(network).__name__} twice in a forward, and it "
                "draws random numbers: which draw belongs to which evaluation cannot be told in "
                'the inverse. Use two networks, or memory="sqrt".'
            )
        values, tree = flatten(_run_untaped(network, inputs, then, evaluation))
        return tree.unflatten(detached(values))

    def _recall(self, network: nn.Module, inputs: Inputs, then: Then) -> Any:
        del inputs, then
        evaluation = self._only(network)
        output = evaluation.output
        if output is None or versions_of(output) != evaluation.versions:
            raise ReplayError(
                f"The inverse of {self._name} did not evaluate {type(network).__name__}, or "
                "changed its output in place. Evaluate it once in each direction, and do not "
                "change the output in place."
            )
        return evaluation.returned(output)

    def _fill_in_order(self, network: nn.Module, inputs: Inputs, then: Then) -> Any:
        self._only(network)
        place = self._cursor.get(network, 0)
        self._cursor[network] = place + 1
        evaluation = self._by_network[network][place]
        return evaluation.returned(self._fill(evaluation, network, inputs, then))
