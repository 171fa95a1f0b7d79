"""Evaluations that forward, inverse and backward share.

NOTE [ One evaluation ]

Rule 1. The inverse of a coupling runs its networks on the same inputs as forward did. So in
        backward one inverse both finds the input of the coupling and, by running each network as a
        region of its own, makes that network's residuals.
Rule 2. The residuals of the coupling itself are made by running its forward once more over the
        network outputs that the inverse remembered: elementwise work only.
Rule 3. A network is recognized by identity. If one forward evaluates it twice, nothing is shared,
        since an inverse may do so in another order: backward runs inverse and forward in full.
Rule 4. The draws of a network come from a seed of its own, in every memory mode, whichever
        direction runs first. They are made in the order of memory, so a network that runs again
        gets its inputs in the memory layout of forward.
Rule 5. A network that is known to draw nothing needs no seed. That follows from the network itself,
        never from its earlier runs: a resumed training has to draw the same numbers.
Rule 6. A network of another library (`Borrowed`) has no seed of its own: it draws what it does
        without a chain. If it draws, it runs again in the order of forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from recoup._core.modules import REPLACED_FORWARDS
from recoup._core.pytree import Tree, flatten
from recoup._core.rng import SeededCall
from recoup._core.saved_tensors import as_leaves, detached, requires_grad_of, versions_of
from recoup._core.settings import replaced
from recoup._core.slots import Filling, Owner, Recording, Residuals, untaped
from recoup._core.tensors import in_order, strides_of
from recoup.errors import ReplayError

Inputs = tuple[Tensor, ...]
Then = Callable[[Any], Any] | None


class Borrowed(NamedTuple):
    """The forward of a network of another library, given tensors and None (See Rule 6)."""

    network: nn.Module
    are_tensors: tuple[bool, ...]

    def __call__(self, *tensors: Tensor) -> Any:
        """Run the network, with None in the places where it was given None."""
        given = iter(tensors)
        args = [next(given) if each else None for each in self.are_tensors]
        return type(self.network).forward(self.network, *args)


Network = nn.Module | Borrowed
_Answer = Callable[[Network, Inputs, Then], Any]


# Modules of torch whose forward computes from input, parameters and buffers alone.
DETERMINISTIC: frozenset[type[nn.Module]] = frozenset((
    nn.Sequential, nn.Identity, nn.Flatten, nn.Unflatten, nn.Linear, nn.Bilinear, nn.Embedding,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d,
    nn.InstanceNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid,
    nn.Hardswish, nn.Softmax, nn.LogSoftmax, nn.GLU, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
    nn.Upsample, nn.PixelShuffle, nn.PixelUnshuffle,
))  # fmt: skip
_DROPOUTS: frozenset[type[nn.Module]] = frozenset((
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
))  # fmt: skip


@contextmanager
def lending(networks: Sequence[nn.Module]) -> Generator[None]:
    """A context in which the running region shares the evaluations of these networks (Rule 6).

    The `forward` of each is hidden on the instance: code around it may look at the network.
    """
    if answers.answer is None or not networks:
        yield
        return
    with _LENDING:
        # Nobody else hides the forwards of these.
        own = [each for each in networks if REPLACED_FORWARDS.isdisjoint(vars(each))]
        try:
            for network in own:
                vars(network)["forward"] = lent = partial(_lent, network)
                cast("Any", lent).is_lent = True  # so that it is no culprit
            yield
        finally:
            for network in own:
                vars(network).pop("forward", None)


def _lent(network: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if kwargs or not all(each is None or isinstance(each, Tensor) for each in args):
        return type(network).forward(network, *args, **kwargs)
    are_tensors = tuple([each is not None for each in args])
    output = evaluate(Borrowed(network, are_tensors), tuple([a for a in args if a is not None]))
    # Such code may change the output in place, which is remembered.
    return output.clone() if isinstance(output, Tensor) else output


def draws_nothing(module: Network) -> bool:
    """Whether each module in `module` is known to draw nothing in its current mode (See Rule 5)."""
    if isinstance(module, Borrowed):
        return True
    own = module.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"]:
        return False
    kind = type(module)
    if kind in _DROPOUTS:
        return not module.training or own.get("p") == 0
    # A subclass may do anything, except a sequence that does not override forward, and a class that
    # itself (not through a base class) declares that only the modules within may draw.
    if (
        kind not in DETERMINISTIC
        and kind.forward is not nn.Sequential.forward
        and not vars(kind).get("draws_only_in_modules", False)
    ):
        return False
    for child in module._modules.values():  # a loop: this runs at every evaluation of a network
        if child is not None and not draws_nothing(child):
            return False
    return True


class _Local(threading.local):
    answer: _Answer | None = None


# Who makes the evaluations of this thread: a region that is inverted, or nobody.
answers = _Local()
_LENDING = threading.RLock()  # threads may share a network


def evaluate(network: Network, inputs: Inputs, then: Then = None) -> Any:
    """Return the output of `network`, shared by the running region if any (Rules 1 and 2).

    Or what `then` computes from it, as a part of the evaluation.
    """
    if torch.compiler.is_compiling():
        return _called(network, inputs, then)  # compiled draws belong to the graph anyway
    answer = answers.answer
    if answer is None:
        if draws_nothing(network):
            return _called(network, inputs, then)
        return _run(network, inputs, then, SeededCall())
    answers.answer = None  # networks within this one are its own
    try:
        return answer(network, inputs, then)
    finally:
        answers.answer = answer


def _called(network: Network, inputs: Inputs, then: Then) -> Any:
    output = network(*inputs)
    return output if then is None else then(output)


def _run(network: Network, inputs: Inputs, then: Then, call: SeededCall) -> Any:
    if not call.is_known and draws_nothing(network):
        call.draws_nothing()
    if call.is_plain:
        return _called(network, inputs, then)
    return call.run(lambda: _called(network, inputs, then))  # See Rule 4


class _Evaluation:
    """One evaluation: its region, its seeded call, and its output while that is needed."""

    def __init__(self, inputs: Inputs, residuals: Residuals) -> None:
        self._requires_grad = list(map(requires_grad_of, inputs))
        self._strides = strides_of(inputs)
        self.call = SeededCall()
        self.residuals = residuals
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


class Evaluations:
    """The evaluations of one call of an invertible module."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._by_network: dict[Network, list[_Evaluation]] = {}
        self._cursor: dict[Network, int] = {}
        self._num_evaluations = 0

    @property
    def are_shared(self) -> bool:
        """Whether the inverse can make the residuals (See Rule 3)."""
        return len(self._by_network) == self._num_evaluations

    @property
    def are_wanted(self) -> bool:
        """Whether autograd still holds any residual of a network."""
        return any(one.residuals.are_wanted for same in self._by_network.values() for one in same)

    def recording(self, region: Residuals, owner: Owner) -> AbstractContextManager[None]:
        """Return a context for the first forward: each evaluation has residuals of its own."""
        return replaced(answers, "answer", partial(self._record, region, owner))

    def inverting(self, fills: bool) -> AbstractContextManager[None]:
        """Return a context for the inverse, which may fill slots and remember outputs (Rule 1)."""
        return replaced(answers, "answer", self._fill_and_remember if fills else self._only_run)

    def answering(self, recall: bool) -> AbstractContextManager[None]:
        """Return a context for a second forward.

        It may recall the outputs of the inverse (Rule 2); else networks run again (Rule 3).
        """
        self._cursor = {}
        return replaced(answers, "answer", self._recall if recall else self._fill_in_order)

    def forget(self) -> None:
        """Release the remembered outputs."""
        for same in self._by_network.values():
            for evaluation in same:
                evaluation.output = None

    def _record(
        self, region: Residuals, owner: Owner, network: Network, inputs: Inputs, then: Then
    ) -> Any:
        residuals = Residuals(region.surroundings, region.index, region.way)
        evaluation = _Evaluation(inputs, residuals)
        self._by_network.setdefault(network, []).append(evaluation)
        self._num_evaluations += 1
        with Recording(residuals, owner):
            output = _run(network, inputs, then, evaluation.call)
        values, evaluation.tree = flatten(output)
        evaluation.wants_grad = list(map(requires_grad_of, values))
        return output

    def _only(self, network: Network) -> _Evaluation:
        found = self._by_network.get(network)
        if found is None:
            raise ReplayError(
                f"{self._name} evaluates {type(network).__name__} in one direction and not in the "
                "other. Call it through `evaluate` in both `forward` and `inverse`, or in neither."
            )
        return found[0]

    def _fill_and_remember(self, network: Network, inputs: Inputs, then: Then) -> Any:
        evaluation = self._only(network)
        evaluation.output = output = self._fill(evaluation, network, inputs, then)
        evaluation.versions = versions_of(output)
        return output[0] if evaluation.tree is None else evaluation.tree.unflatten(output)

    def _fill(
        self, evaluation: _Evaluation, network: Network, inputs: Inputs, then: Then
    ) -> tuple[Tensor, ...]:
        if not evaluation.residuals.are_wanted:
            return detached(flatten(self._untaped(network, inputs, then, evaluation))[0])
        taped, output = evaluation.leaves(inputs), tuple[Tensor, ...]()
        with Filling(evaluation.residuals, taped):
            output = flatten(_run(network, taped, then, evaluation.call))[0]
        return detached(output)

    def _untaped(
        self, network: Network, inputs: Inputs, then: Then, evaluation: _Evaluation
    ) -> Any:
        run = partial(_run, network, evaluation.leaves(inputs), then, evaluation.call)
        return untaped(evaluation.residuals, run)

    def _only_run(self, network: Network, inputs: Inputs, then: Then) -> Any:
        evaluation = self._only(network)
        if len(self._by_network[network]) > 1 and evaluation.call.draws:
            raise ReplayError(
                f"{self._name} evaluates one {type(network).__name__} twice in a forward, and it "
                "draws random numbers: which draw belongs to which evaluation cannot be told in "
                'the inverse. Use two networks, or memory="sqrt".'
            )
        values, tree = flatten(self._untaped(network, inputs, then, evaluation))
        return tree.unflatten(detached(values))

    def _recall(self, network: Network, inputs: Inputs, then: Then) -> Any:
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

    def _fill_in_order(self, network: Network, inputs: Inputs, then: Then) -> Any:
        self._only(network)
        place = self._cursor.get(network, 0)
        self._cursor[network] = place + 1
        evaluation = self._by_network[network][place]
        return evaluation.returned(self._fill(evaluation, network, inputs, then))
