"""A call as a stage of a chain, with arguments and a result of any structure.

NOTE [ The inputs and outputs of a call ]

Rule 1. The state of a stage is a tuple of tensors: the arguments that the stage before made, or all
        tensors for a call that begins a chain. Other tensor arguments are kept with the call.
Rule 2. The first run gets the caller's own objects, and the caller what it returned. A later run
        gets other tensors, and copies from before the first run of objects that a run may change (a
        cache). Only these copies are held: what the run puts into a cache has a graph, which holds
        the call, and no collector ends such a cycle.
Rule 3. A later run returns the tensors that this stage passes to the next one.
Rule 4. A call of a module can be inverted if the module has an inverse of its first argument, and
        the stage before made all tensors in that. The inverse gets the other arguments as forward
        does; what the call returned beside its state (an early latent), but no log-determinant, is
        kept for it.
Rule 5. The result of a single call may be a value that is not kept, either: a later run makes it
        together with the residuals.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recoup._core.captured import copied, is_left_alone, parts_of
from recoup._core.compile import is_watched, uncompiled
from recoup._core.kept_products import Products
from recoup._core.lazy_values import Source, as_value, keep
from recoup._core.modules import are_in_place, check_pair, has_inverse, mark_of
from recoup._core.outcome import Outcome, compare, outcome_of
from recoup._core.pytree import BARE, Tree, flatten, flatten_arguments
from recoup._core.region import Region, Subclass, as_subclass, changes_kept_input, subclass_of
from recoup._core.saved_tensors import (
    Kept,
    Packed,
    as_leaves,
    check_hooks_work,
    copies_of,
    is_transformed,
    pair_in_force,
    storage_id,
    unpack,
    versions_of,
)
from recoup._core.shared_evaluation import answers
from recoup._core.slots import State
from recoup._core.tensors import PLAIN, geometry_of, laid_out
from recoup.errors import ReplayError, ScheduleError


class Call:
    """One call of a function or module, or of `fn` as the forward of a module.

    Later runs are given the outputs of the operators in `products`.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module | None = None,
        *,
        products: Products | None = None,
        compares: bool = True,
    ) -> None:
        self.name, self.products, self.compares = name, products, compares
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self.tensors, self._tree = flatten_arguments(args, kwargs)
        self.has_run = self.changes_object = False
        self._linked: Sequence[int] | None = None
        self._outside: list[tuple[int, Packed, bool, Subclass | None]] = []
        self.picks: Sequence[int] | None = None
        self.output: Any = None
        self._returned: tuple[list[weakref.ref[Tensor]], Tree] | None = None  # if it is inverted
        self._passed_by: list[Packed | None] = []  # of these tensors; None if in the state
        self._has_copies = False  # of what a run may change
        given = () if self._tree.is_flat else self._tree.others()
        self.code, self.modules = parts_of(fn if module is None else module, given)
        self.is_in_place = isinstance(self.code, nn.Module) and are_in_place((self.code,))[0]

    def link(self, places: Sequence[int], *, may_run_again: bool) -> State:
        """Return the state: the tensor arguments at `places` (See Rule 1)."""
        self._linked = places
        if may_run_again:
            pair = pair_in_force()
            for place, value in enumerate(self.tensors):
                if place not in places:
                    kept = keep(value, f"An argument of {self.name}", pair)
                    outside = (place, kept, value.requires_grad, subclass_of(value))
                    self._outside.append(outside)
        return tuple(self.tensors[place] for place in places)

    def is_invertible_from(self, places: Sequence[int]) -> bool:
        """Whether an inverse gives all tensors at these `places` (See Rule 4), before any run."""
        if not self._args or not isinstance(self.code, nn.Module):
            return False
        num = len(flatten(self._args[0])[0])
        own = list(map(id, self.tensors[:num]))
        return (
            num > 0
            and tuple(places) == tuple(range(num))
            and len(set(map(id, self.tensors))) == len(self.tensors)
            and not any(id(value) in own for value in self.tensors[num:])
            and getattr(self.code, "inverts_in_backward", True)
            and has_inverse(self.code)
        )

    def expect_inverse(self) -> None:
        """Let the first run keep what an inverse needs beside the state (See Rule 4)."""
        self._returned = ([], BARE)

    def hand_on(self, picks: Sequence[int]) -> None:
        """Note which outputs are the state of the next stage; before those are freed."""
        self.picks = picks
        if self._returned is None:
            return
        refs, _ = self._returned
        pair = pair_in_force()
        for place, ref in enumerate(refs):
            value = None if place in picks else ref()
            if value is None and place not in picks:
                raise ReplayError(
                    f"{self.name} returns a tensor that its inverse needs and that nobody holds. "
                    "Return it as a part of the state, or set `inverts_in_backward = False` on the "
                    "class of the block."
                )
            name = f"A result of {self.name}"
            self._passed_by.append(None if value is None else keep(value, name, pair))

    def take_output(self, state: State) -> Any:
        """Return the result of the first run with the tensors of `state`, and drop it here."""
        # The result may hold a reference to this call.
        output, self.output = self.output, None
        tensors, tree = flatten(output)
        if self._returned is not None:
            value = output[0] if mark_of(self.modules[0], "returns_log_det") else output
            mapped, of_value = flatten(value)  # a log-determinant comes after them
            self._returned = (list(map(weakref.ref, state[: len(mapped)])), of_value)
        return output if all(map(operator.is_, tensors, state)) else tree.unflatten(state)

    # -- the stage interface, called by the executor ---------------------------------------

    def forward(self, state: State) -> tuple[State, Tensor | None]:
        """Run the call, for the first time or again."""
        if not self.has_run:
            return self._first(state), None
        tensors = state if self._linked is None else self._with_outside(state)
        output = self._called(tensors if self._tree.is_flat else self._again(tensors))
        outputs = (output,) if type(output) is Tensor else flatten(output)[0]
        return outputs if self.picks is None else tuple(outputs[i] for i in self.picks), None

    def inverse(self, state: State) -> State:
        """Return the tensors of the first argument, from the state after the call."""
        if self._returned is None:
            raise ScheduleError(f"{self.name} did not run as a call to be inverted.")
        refs, tree = self._returned
        if self.picks is None:
            tensors = state[: len(refs)]
        else:
            own = dict(zip(self.picks, state, strict=True))
            tensors = tuple(
                own[place] if kept is None else kept.get().detach()
                for place, kept in enumerate(self._passed_by)
            )
        num = len(self._linked or ())
        given: Any = self._again(self._with_outside(state[:1] * num))
        args: tuple[Any, ...] = given if self._tree.is_flat else given[0]
        kwargs: dict[str, Any] = {} if self._tree.is_flat else given[1]
        module: Any = self.modules[0]
        try:
            returned = module.inverse(tree.unflatten(tensors), *args[1:], **kwargs)
        except Exception as error:
            error.add_note(
                f"It is the inverse of {self.name}. If it is no inverse of forward, set "
                "`inverts_in_backward = False` on the class of the block, which is then recomputed."
            )
            raise
        if mark_of(module, "returns_log_det"):
            returned, _ = check_pair(returned, len(tensors[0]), "inverse", self.name)
        before = flatten(returned)[0]
        if len(before) != num:
            raise ReplayError(
                f"`inverse` of {self.name} returned {len(before)} tensors, but `forward` was given "
                f"{num}. An inverse must undo forward, from what forward returns to its first "
                "argument."
            )
        return before

    def _called(self, given: Any) -> Any:
        return self._fn(*given) if self._tree.is_flat else self._fn(*given[0], **given[1])

    def _with_outside(self, state: State) -> State:
        tensors: list[Tensor | None] = [None] * (len(state) + len(self._outside))
        for place, value in zip(self._linked or (), state, strict=True):
            tensors[place] = value
        for place, kept, requires_grad, subclass in self._outside:
            (leaf,) = as_leaves((kept.get(),), (requires_grad,))
            tensors[place] = as_subclass(leaf, subclass)
        return tuple(value for value in tensors if value is not None)

    def _first(self, state: State) -> State:
        self.has_run = True
        own, self.tensors = self.tensors, ()
        tensors = state
        if self._linked is not None:
            placed = list(own)
            for place, value in zip(self._linked, state, strict=True):
                placed[place] = value
            tensors = tuple(placed)
        args, kwargs = self._args, self._kwargs
        self._args, self._kwargs = (), {}
        within: list[Tensor] = []
        tree = self._tree
        if not tree.is_flat and not all(map(is_left_alone, tree.others())):
            self._tree, self._has_copies = tree.mapped(partial(copied, tensors=within)), True
        versions = versions_of(within) if within else []
        if all(map(operator.is_, tensors, own)):
            given: Any = args if tree.is_flat else (args, kwargs)  # See Rule 2
        else:
            given = tree.unflatten(tensors)
        self.output = output = self._called(given)
        self.changes_object = bool(within) and versions_of(within) != versions
        return (output,) if type(output) is Tensor else flatten(output)[0]

    def _again(self, tensors: State) -> Any:
        """Return the arguments of a later run (See Rule 2)."""
        tree = self._tree.mapped(copied) if self._has_copies else self._tree
        return tree.unflatten(tensors)


class LoneRegion(Region):
    """The region of a single call: it keeps its input, and needs no schedule to run again.

    If it `stops`, a later run may end with the last residual.
    """

    def __init__(self, call: Call, *, stops: bool) -> None:
        super().__init__(call, call.tensors)
        self._stops = stops
        self.lock = threading.RLock()
        self._values: list[tuple[int, weakref.ref[_Output]]] = []  # among the outputs
        self._kept: list[Packed] = []
        name, pair = f"The input of {call.name}", pair_in_force()
        for value in copies_of(call.tensors) if call.is_in_place else call.tensors:
            is_plain = type(value) is Tensor
            self._kept.append(Kept(value, name, pair) if is_plain else keep(value, name, pair))

    def run(self, call: Call, *, keeps_output: bool) -> Any:
        """Run the call for the first time, and return its result."""
        given = set[int]() if keeps_output else set(map(storage_id, call.tensors))
        state, _ = self.record(call.tensors, self)
        if self.changes_input and not call.is_in_place:
            raise changes_kept_input(call)
        if keeps_output:
            output, call.output = call.output, None  # it may hold a reference to the call
            return output
        values = [self._as_value(place, each, given) for place, each in enumerate(state)]
        return call.take_output(tuple(values))

    def _as_value(self, place: int, tensor: Tensor, given: set[int]) -> Tensor:
        """Return an output as a value, if it is a plain tensor with new memory (See Rule 5)."""
        if type(tensor) not in PLAIN or tensor.is_sparse or storage_id(tensor) in given:
            return tensor
        if tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
            return tensor  # memory alone does not tell it from what it is the conjugate of
        source = _Output(self, tensor)
        self._values.append((place, weakref.ref(source)))
        # An alias: user code may hold the returned tensor, so it must not be marked itself.
        return as_value(torch.ops.aten.alias(tensor), source)

    def fill_slots(self, index: int) -> None:
        """Run the call again from its input."""
        state = None if self.inputs is None else self.inputs_again()
        if state is None:
            # The pair beneath may give them once only (torch's checkpoint does).
            state = tuple(map(unpack, self._kept))
        wanted = [pair for pair in self._values if pair[1]() is not None] if self._values else []
        output = self.fill(state, needs_output=bool(wanted) or not self._stops)
        for place, ref in wanted:
            source = ref()
            if source is not None:
                source.take(output[place])


class _Output(Source):
    """An output of a call, made by running it again (See Rule 5)."""

    def __init__(self, region: LoneRegion, output: Tensor) -> None:
        super().__init__(f"What {region.stage.name} returned", region.lock)
        self._region = region
        self._geometry = geometry_of(output)
        self._outcome: Outcome = {}
        if region.stage.compares:
            self._outcome = outcome_of([(0, output, output._version)], ())

    def take(self, output: Tensor) -> None:
        """Take what a later run has made."""
        # Outer hooks may have returned the inputs in another memory layout.
        output = laid_out(output, self._geometry)
        if self._outcome:
            compare(self._outcome, [(0, output)], (), self._region.surroundings)
        self.give(output)

    def make(self) -> None:
        self._region.fill_slots(0)


def run_again(call: Call, *, stops: bool = True, keeps_output: bool = True) -> Any:
    """Run `call` without keeping its residuals; backward runs it again.

    If it `stops`, that may end with the last residual. If operators may not keep the result, it is
    a value (See Rule 5).
    """
    if is_transformed():
        check_hooks_work()
    if answers.answer is not None:  # the region around it owns every residual
        call.forward(call.tensors)
        return call.output
    if is_watched():
        return uncompiled(run_again)(call, stops=stops, keeps_output=keeps_output)
    return LoneRegion(call, stops=stops).run(call, keeps_output=keeps_output)
