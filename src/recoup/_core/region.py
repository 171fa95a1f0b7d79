"""The region: a call whose residuals are not kept but made again when autograd needs them.

NOTE [ A region ]

Rule 1. A second run gets the inputs of the first as leaves with the same `requires_grad`, the same
        class and what users have set on them, and runs with grad mode on: what a module computes
        may depend on it. A parameter enters as itself.
Rule 2. A region may change its input in place, as an in-place activation does. The first run
        changes the tensor of the caller, as plain code does; what is kept for later runs is a copy
        from before, and each of them gets a copy of that.
Rule 3. A tensor that is there twice is one tensor in a later run too, since code may ask (an
        attention does, whether its query is its key).

NOTE [ An inverted call ]

Rule 4. An inverse runs without a graph; each network that it evaluates is a region beside this one,
        and fills its own slots (NOTE [ One evaluation ]).
Rule 5. Draws in an inverted call that no seed repeats come from the generators' state, and its
        networks run again, in the order of forward. If the inverse draws in another order, it
        returns another input, which the drift guard sees. Without one, the output of the second
        forward is compared with that of the first.
Rule 6. An inverse may return the input of forward in another memory layout. It is then copied to
        the layout of forward, in which the second forward draws the same masks.
Rule 7. Residuals that are made from what an inverse returned differ by more than rounding. So they
        are not compared; the state is, by the drift guard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recoup._core.devices import explain_lack
from recoup._core.lazy_values import Value
from recoup._core.operators import explain_higher_order
from recoup._core.rng import draws_here
from recoup._core.saved_tensors import (
    Way,
    as_leaves,
    base_of,
    detached,
    grad_mode,
    is_there,
    plain_version,
    requires_grad_of,
    versions_of,
)
from recoup._core.shared_evaluation import Evaluations
from recoup._core.slots import Filled, Filling, Owner, Recording, Residuals, State, untaped
from recoup._core.surroundings import Surroundings, values_of
from recoup._core.tensors import in_order, strides_of, wraps_others
from recoup.errors import ChangedError, RecoupError, ReplayError

_is_floating: Callable[[torch.dtype], bool] = attrgetter("is_floating_point")
# A class of tensors, and the attributes that a user has set on one of them.
Subclass = tuple[type[Tensor], dict[str, Any]]


def subclass_of(tensor: Tensor) -> Subclass | None:
    """Return the class of a tensor and its attributes; None for a plain tensor without any.

    A tensor that wraps others is None, too: its own `detach` returns one of its class.
    """
    kind, attributes = type(tensor), dict(vars(tensor))  # a copy: an output may be set on it later
    is_known = isinstance(tensor, (nn.Parameter, Value)) or wraps_others(kind)
    return None if is_known or (kind is Tensor and not attributes) else (kind, attributes)


def as_subclass(plain: Tensor, subclass: Subclass | None) -> Tensor:
    """Return a plain tensor as one of a class, with attributes."""
    if subclass is not None:
        plain.__class__, attributes = subclass
        vars(plain).update(attributes)
    return plain


class Stage(Protocol):
    """A call that a region runs, for the first time and again."""

    name: str  # in error messages
    compares: bool  # whether what later runs make is compared with the first
    is_in_place: bool  # whether the first thing that it does changes its input (See Rule 2)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules that it uses, as far as they are known."""
        ...

    @property
    def code(self) -> object:
        """The code that it runs: a module, or the code of a function."""
        ...

    def forward(self, state: State) -> tuple[State, Any]:
        """Return the next state, and a second output outside the chain (a log-determinant)."""
        ...

    def inverse(self, state: State) -> State:
        """Return the state before it."""
        ...


class Region(Residuals):
    """The record of the first run of a call, from which later runs repeat it.

    Its owner knows it by `index`; a census reports its `way`.
    """

    def __init__(self, stage: Stage, state: State, index: int = 0, way: Way = "recompute") -> None:
        surroundings = Surroundings(
            stage.name,
            stage.modules,
            stage.code,
            getattr(stage, "products", None),
            keeps_outputs=way != "invert",  # an inverse decides in another order
        )
        self.surroundings, self.index, self.way = surroundings, index, way
        self.slots, self.outcome, self.is_worth_a_stop = [], None, False
        bases = list(filter(is_there, map(base_of, state)))
        if bases:
            self.bases = [id(base) for base in bases if isinstance(base, nn.Parameter)]
        self.stage = stage
        self.requires_grad = list(map(requires_grad_of, state))
        self._subclasses: list[Subclass | None] = []
        for value in state:  # written out, for speed
            if type(value) is not Tensor or value.__dict__:
                self._subclasses = list(map(subclass_of, state))
                break
        ids = list(map(id, state))
        # Where each tensor is first, if one is there twice (See Rule 3).
        self._places = list(map(ids.index, ids)) if len(set(ids)) < len(ids) else None
        self.changes_input = False

    def tape(self, state: State) -> tuple[State, Any]:
        """Run the call with its residuals kept, so that it can still be run again."""
        with self.surroundings.first():
            return self._forward(state)

    def _forward(self, state: State) -> tuple[State, Any]:
        versions = versions_of(state)
        result = self.stage.forward(state)
        if getattr(self.stage, "changes_object", False):
            raise self._changed_object()
        self.changes_input = versions_of(state) != versions
        return result

    def record(self, state: State, owner: Owner, *, is_kept: bool = True) -> tuple[State, Any]:
        """Run the call and leave slots where it would have kept residuals; `owner` fills them.

        If `is_kept`, later runs are given the input itself, not one that is made again.
        """
        stage, given = self.stage, state if is_kept else ()
        outputs = self.surroundings.kept_outputs
        kept = getattr(stage, "kept_nodes", None) or (() if outputs is None else outputs.nodes)
        # Within a second run of a region around, which is compared itself, it need not be.
        follows = stage.compares and not draws_here.num_replayed
        products = getattr(stage, "products", None)
        held = () if products is None else products.held
        recording = Recording(self, owner, given, kept, held, follows=follows)
        surroundings = self.surroundings
        try:
            versions = list(map(plain_version, state))
        except RuntimeError:  # inference tensors have none, and are not saved either
            versions = []
        with surroundings.first(), recording:
            try:
                result = stage.forward(state)
            except Exception as error:
                self._explain(error)
                raise
            if getattr(stage, "changes_object", False):
                raise self._changed_object()
            self.changes_input = bool(versions) and list(map(plain_version, state)) != versions
            if follows:
                self.outcome = recording.ended()
        versions = surroundings.versions
        held = chain.from_iterable(map(values_of, surroundings.held))
        is_changed = surroundings.found != list(map(id, held)) or (
            bool(versions) and versions_of(surroundings.parameters) != versions
        )
        if is_changed or surroundings.buffer_versions or surroundings.has_foreign:
            surroundings.has_run()
        return result

    def _changed_object(self) -> ReplayError:
        """Return the error for a call that has changed a tensor in an object that it was given."""
        return ReplayError(
            f"{self.stage.name} changes a tensor in place that is in an object among its "
            "arguments (a state, a cache), and a second run would change it again. Let it put "
            "a new tensor there (`state.seen = state.seen + 1`), or change it outside."
        )

    def _explain(self, error: Exception) -> None:
        """Raise an error that says what is wrong, where torch's own does not."""
        explain_higher_order(self.stage.name, error)
        if "saved tensor hooks" in str(error) and not isinstance(error, RecoupError):
            raise RecoupError(
                f"{self.stage.name} uses a transform of torch.func (grad, vjp, jacrev), in which "
                "torch has no saved tensor hooks. Use torch.autograd.grad there, call it outside "
                'of the region, or keep its residuals (memory="linear").'
            ) from error

    # -- later runs ------------------------------------------------------------------------

    def inputs_again(self) -> State | None:
        """Return the input of the last run that filled slots; None if nothing holds it."""
        inputs = None if self.inputs is None else self.inputs()
        state = None if inputs is None else inputs.state
        if inputs is not None and state is not None and versions_of(state) != inputs.versions:
            raise ChangedError(
                f"The input of {self.stage.name} was changed in place between two backwards, so "
                "the second would see other values than forward did. Change a clone."
            )
        return state

    def advance(self, state: State) -> State:
        """Run the call again from its input, and keep nothing."""

        def run() -> tuple[State, Any]:
            with self.surroundings.restored():
                return self.stage.forward(self._inputs(state))

        output, _ = untaped(self, run)
        return detached(output)

    def fill(self, state: State, *, needs_output: bool = True) -> State:
        """Run the call again from its input, and fill the slots that autograd still holds.

        If the output is not needed, it may end before, and returns an empty state.
        """
        surroundings = self.surroundings
        while True:
            inputs = self._inputs(state)
            # Nothing but its end shows that a run which is not compared has decided less.
            is_compared = self.stage.compares or surroundings.kept_outputs is None
            stops = is_compared and not needs_output
            filling = Filling(self, inputs, state, stops=stops)
            output: State = ()
            try:
                with surroundings.restored(), filling:
                    output, _ = self.stage.forward(inputs)
            except Filled:  # of a region around
                raise
            except torch.OutOfMemoryError as error:
                explain_lack(error)
                raise
            except Exception:  # code may fail on what is of another call
                if not surroundings.decides_anew():
                    raise
            else:
                if is_compared or not surroundings.decides_anew():
                    return detached(output) if needs_output else ()

    def forget_inputs(self) -> None:
        """Free that input although autograd holds slots, of a graph that is retained."""
        inputs = None if self.inputs is None else self.inputs()
        if inputs is not None:
            inputs.state = None

    def _inputs(self, state: State) -> State:
        inputs = as_leaves(state, self.requires_grad)
        if self.changes_input or self.stage.is_in_place:
            with grad_mode(True):  # autograd allows no change of a leaf
                inputs = tuple([value.clone() for value in inputs])
        if self._subclasses:
            inputs = tuple(map(as_subclass, inputs, self._subclasses))
        if self._places is not None:
            inputs = tuple([inputs[place] for place in self._places])
        return inputs


class InvertedRegion(Region):
    """The record of the first run of a call, from which later runs repeat and invert it."""

    def __init__(self, stage: Stage, state: State, index: int) -> None:
        super().__init__(stage, state, index, "invert")
        self._evaluations = Evaluations(stage.name)
        self._shapes = [value.shape for value in state]
        self._dtypes = [value.dtype for value in state]
        self._has_others = not all(map(_is_floating, self._dtypes))
        self._strides = strides_of(state)

    def record(self, state: State, owner: Owner, *, is_kept: bool = True) -> tuple[State, Any]:
        """Run the call and leave slots where it and its networks would have kept residuals."""
        recording = Recording(self, owner)
        with self.surroundings.first(), recording, self._evaluations.recording(self, owner):
            result = self._forward(state)
        if self.surroundings.buffer_versions:
            self.surroundings.has_run()
        return result

    @property
    def are_wanted(self) -> bool:
        """Whether autograd still holds any residual of the call, or of a network in it."""
        return super().are_wanted or self._evaluations.are_wanted

    def fill(self, state: State, *, needs_output: bool = True) -> State:
        """Run the call again from its input, and fill its slots."""
        return self._filled(state, recall=False, needs_output=needs_output)

    def _filled(self, state: State, *, recall: bool, needs_output: bool) -> State:
        inputs = self._inputs(state)
        output: State = ()
        answering = self._evaluations.answering(recall)
        # The evaluations are regions of their own, and a stop would leave some of them empty.
        filling = Filling(self, inputs, state, stops=recall and not needs_output)
        with self.surroundings.restored(), filling, answering:
            output, _ = self.stage.forward(inputs)
        return detached(output) if needs_output else ()

    def invert(self, after: State, *, is_taped: bool, is_compared: bool) -> State:
        """Return the input for an output; fill slots if `is_taped`.

        If `is_compared`, the drift guard compares it with that of forward.
        """
        evaluations = self._evaluations
        has_foreign = self.surroundings.has_foreign
        recall = is_taped and evaluations.are_shared and not has_foreign
        try:
            with self.surroundings.restored(), grad_mode(False), evaluations.inverting(recall):
                state = self._inverse(after)
            if has_foreign and not is_compared:  # See Rule 5
                self._check_same(self._filled(state, recall=False, needs_output=True), after)
            elif is_taped and (not recall or super().are_wanted):
                del after  # a whole state, which `_filled` does not need
                self._filled(state, recall=recall, needs_output=False)
        finally:
            evaluations.forget()
        return state

    def _inverse(self, after: State) -> State:
        name = self.stage.name
        versions = versions_of(after)
        before = detached(self.stage.inverse(after))
        if versions_of(after) != versions:
            raise ReplayError(
                f"`inverse` of {name} changed its input in place, which is the output that forward "
                "gave to the caller. Change a clone."
            )
        shapes = [value.shape for value in before]
        if shapes != self._shapes:
            raise ReplayError(
                f"`inverse` of {name} made shapes {[tuple(s) for s in shapes]} where forward was "
                f"given {[tuple(s) for s in self._shapes]}. An inverse must undo forward."
            )
        # Under autocast an inverse may return another type than forward was given.
        if self._has_others:
            before = tuple(map(_rounded, before, self._dtypes))
        before = tuple(map(Tensor.to, before, self._dtypes))
        return in_order(before, self._strides)  # See Rule 6

    def _check_same(self, again: State, after: State) -> None:
        for value, expected in zip(again, after, strict=True):
            off = (value - expected).abs().max() / (1 + expected.abs().max())
            if float(off) > torch.finfo(value.dtype).eps ** 0.5:
                raise ReplayError(
                    f"The inverse of {self.stage.name} draws random numbers in another order than "
                    "forward, so it does not undo it. Call the networks that draw through "
                    "`self.evaluate(network, x)` in `forward` and `inverse`, or choose "
                    'memory="sqrt".'
                )


def _rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what an inverse makes of integers, which is off by a rounding, as a whole number."""
    is_whole = value.is_floating_point() and not (dtype.is_floating_point or dtype.is_complex)
    return value.round() if is_whole else value


def changes_kept_input(stage: Stage) -> ReplayError:
    """Return the error of a stage that changes an input which is kept for later runs."""
    return ReplayError(
        f"{stage.name} changes its input in place, but the schedule keeps that input. "
        "Let it change a clone (for an activation, set inplace=False)."
    )
