"""The slots: what autograd holds in the place of residuals, and the runs that leave and fill them.

NOTE [ Slots ]

Rule 1. In the first run of a region a `Slot` takes the place of each tensor that autograd saves. A
        parameter, or a view of one, is kept, since it is alive anyway. (Not if such a view is given
        to the region: a later run is given another tensor, which is no view. So in both runs each
        view of that parameter has a slot.) The slots hold the region and its owner, the region its
        slots weakly: a residual that autograd has dropped is not made again.
Rule 2. Unpacking the first empty slot makes the owner run the region again, with the same saves in
        the same order, which fill the slots. Code may take a gradient itself while its first run
        goes on; then the region runs again as far as it has come.
Rule 3. A slot returns its value once and drops it, so that memory falls as in a plain run, also
        with retain_graph. If it is unpacked again, the region runs again; if that happens in one
        backward (a function that reads `ctx.saved_tensors` twice), the values that this makes once
        more are dropped when it ends.
Rule 4. Values are detached: the graph of a second run is freed with it, and what is left of it
        cannot be differentiated. A slot checks versions, since autograd does not with hooks.
Rule 5. What a second run makes is compared with the first (NOTE [ What is compared ]) before any of
        it is used.
Rule 6. A second run whose output is not needed stops at the last slot that autograd still holds, by
        an exception. (An `Exception`, since module hooks that are always called, FSDP2's among
        them, are not called for any other.) Code that catches it is stopped at its next save. A
        tensor that nothing has made or written to yet may be filled after it is saved, by the
        kernel that it is given to; the run then goes on to its next save. So it does if draws are
        left to make. (A mask counts as made: that of a dropout on CUDA has no history.)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.devices import generator_states, hash_of
from recoup._core.outcome import Frontier, Outcome, compare, mismatch
from recoup._core.saved_tensors import (
    GraphOfRun,
    Kept,
    Pair,
    Way,
    backward_id,
    current,
    grad_mode,
    num_nodes,
    pair_in_force,
    pop_down_to,
    pop_pair,
    push_pair,
    set_grad_enabled,
    storage_id,
    unpack,
    versions_of,
    when_backward_ends,
)
from recoup._core.surroundings import Surroundings
from recoup.errors import ChangedError, ReplayError

T = TypeVar("T")
State = tuple[Tensor, ...]
# Elements of a residual. Raising an exception takes 15 microseconds; where all residuals are
# smaller than this, the remaining operators take less.
_WORTH_A_STOP = 4096
_MOST_HELD = 2**14  # elements, if the largest residual has fewer, until the graph is followed


class Owner(Protocol):
    """The object that runs regions again: it knows where their inputs come from."""

    lock: threading.RLock  # held while a region of this owner is filled

    def fill_slots(self, index: int) -> None:
        """Run region `index` again, and fill its slots."""
        ...


class Slot:
    """The object that autograd saves in place of a tensor."""

    __slots__ = (
        "__weakref__", "_owner", "_task", "dtype", "inputs", "residuals", "shape", "value",
        "version",
    )  # fmt: skip
    # `Recording` sets these: a call of `__init__` for each saved tensor would cost too much.
    residuals: Residuals
    _owner: Owner
    _task: int  # the backward that took the value last
    inputs: Inputs | None  # of the run that filled it
    version: int
    value: Tensor | None
    shape: torch.Size
    dtype: torch.dtype

    @never_compiled
    def get(self) -> Tensor:
        """Return the residual, made again if it is not here (See Rules 2 and 3)."""
        value = self.value
        if value is None:
            with self._owner.lock:
                if self.value is None:
                    if self._task == backward_id() != -1:
                        when_backward_ends(self.residuals.forget)
                    self._owner.fill_slots(self.residuals.index)
                value = self.value
        self.value, self._task = None, backward_id()
        name = self.residuals.surroundings.name
        if value is None:
            raise ReplayError(
                f"Running {name} again did not save a tensor of shape {tuple(self.shape)} that the "
                "first run saved. A region must do the same when it runs again: look for outside "
                "state that it reads, such as a counter or a cache."
            )
        if not value.is_inference() and value._version != self.version:
            raise ChangedError(
                f"A tensor of shape {tuple(self.shape)} that {name} saved for backward was changed "
                "in place by a later operator in it, so that its gradient would be wrong. Use an "
                "operator that is not in place (for an activation, inplace=False)."
            )
        return value


_new_slot: Callable[[type[Slot]], Slot] = object.__new__
_new_kept: Callable[[type[Kept]], Kept] = object.__new__


def _no_slot() -> None:
    """The reference to the slot of a residual that is held, and so has none."""


class Inputs:
    """The input of a run that fills slots, which hold it: it is freed with the last of them."""

    __slots__ = ("__weakref__", "state", "versions")

    state: State | None
    versions: list[int]  # of its tensors, before that run


class Residuals:
    """The residuals of one run of a call: the slots that stand for them, and what they must be."""

    inputs: weakref.ref[Inputs] | None = None  # of the last run that filled slots
    bases: Container[int] = ()  # ids of the parameters of which it is given views (See Rule 1)
    # Hashes of the random states where a save comes before one that is held, by its place: a later
    # run may end there, with the draws left out that only held ones need.
    drawn: Mapping[int, int] = MappingProxyType({})

    def __init__(self, surroundings: Surroundings, index: int, way: Way) -> None:
        self.surroundings = surroundings
        self.index = index
        self.way: Way = way
        self.slots: list[Callable[[], Slot | None]] = []  # weak references
        self.outcome: Outcome | None = None  # None while the first run goes on
        self.is_worth_a_stop = False  # whether any residual is large

    def forget(self) -> None:
        """Drop the values in the slots."""
        for ref in self.slots:
            slot = ref()
            if slot is not None:
                slot.value = None

    def part_from(self, counted: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Copy the values that lie in buffers, which are about to be given other values."""
        storages = {storage_id(buffer) for buffer, _ in counted}
        for slot in filter(None, (ref() for ref in self.slots)):
            if slot.value is not None and storage_id(slot.value) in storages:
                slot.value, slot.version = slot.value.clone(), 0

    @property
    def are_wanted(self) -> bool:
        """Whether autograd still holds any slot."""
        for ref in self.slots:  # noqa: SIM110 - without a generator, for speed
            if ref() is not None:
                return True
        return False


class Recording(Frontier):
    """A context for the first run of a region, in which residuals become slots.

    Later runs are given the outputs of the nodes `kept`. The residuals `held` are not made again.
    If it `follows` the run, later ones can be compared with it.
    """

    _beneath: Pair | None
    pair: Pair | None
    follows_history = True

    def __init__(
        self,
        residuals: Residuals,
        owner: Owner,
        inputs: State = (),
        kept: Container[int] = (),
        held: Container[int] = (),
        *,
        follows: bool = False,
    ) -> None:
        self._residuals, self._owner = residuals, owner
        self._held, self._follows = held, follows
        if follows:
            super().__init__(inputs, kept)

    @never_compiled
    def __enter__(self) -> None:
        self._beneath = pair = pair_in_force()
        outer: Any = None if pair is None else getattr(pair[0], "__self__", None)
        # A region around this one passes what is not its own to the pair beneath it.
        self.pair = outer.pair if type(outer) in (Recording, Filling) else pair
        push_pair(self._packed, unpack)

    @never_compiled
    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            pop_pair()
        else:
            pop_down_to(self._beneath)
        # The hooks live as long as the graph.
        self.waiting, self.saved, self.small, self.inputs, self.outcome = {}, [], [], (), {}

    @never_compiled
    def _packed(self, tensor: Tensor) -> Slot | Kept:
        residuals = self._residuals
        base = tensor._base
        if (type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)) or (
            base is not None and isinstance(base, nn.Parameter) and id(base) not in residuals.bases
        ):
            name = f"A parameter that {residuals.surroundings.name} uses"
            if self.pair is not None:
                return Kept(tensor, name, self.pair)
            kept = _new_kept(Kept)  # as it is: a view that is detached would be no view of it
            kept._packed, kept._name, kept._unpack = tensor, name, None
            kept._version = tensor._version
            return kept
        if len(residuals.slots) in self._held:
            residuals.slots.append(_no_slot)
            return Kept(tensor, f"What {residuals.surroundings.name} saved", self.pair)
        slot = _new_slot(Slot)
        slot.residuals, slot._owner, slot._task = residuals, self._owner, -1
        slot.value, slot.version = None, 0
        slot.shape, slot.dtype, num = tensor.shape, tensor.dtype, tensor.numel()
        if self._follows:
            number, version = num_nodes() - 1, 0 if tensor.is_inference() else tensor._version
            found = (len(residuals.slots), tensor, version)
            self.saved.append((number, tensor.grad_fn, found))
            self.num_held += num
            self.largest = max(self.largest, num)
            if self.num_held > max(_MOST_HELD, self.largest):
                self.follow(number)
        residuals.slots.append(weakref.ref(slot))
        if self._held and len(residuals.slots) in self._held:
            now = hash_of(generator_states())
            residuals.drawn = {**residuals.drawn, len(residuals.slots) - 1: now}
        if num >= _WORTH_A_STOP:
            residuals.is_worth_a_stop = True
        if current.observer is not None:
            current.observer.saved(tensor, slot, residuals.way)
        return slot


class Filled(Exception):  # noqa: N818 - it is no error
    """The exception that ends a second run which has filled its slots (See Rule 6)."""

    def __init__(self, residuals: Residuals) -> None:
        super().__init__(residuals.surroundings.name)
        self.residuals = residuals


class Filling:
    """A context for a second run of a region, which fills its slots.

    Its inputs were made of `state`, which slots hold for another run. If it `stops`, the run ends
    when the last slot is filled.
    """

    _beneath: Pair | None
    _grad_mode: bool  # that was in force
    follows_history = True
    pair = None  # a run of its own passes nothing on: all that it saves is of the region

    def __init__(
        self,
        residuals: Residuals,
        inputs: State,
        state: State | None = None,
        *,
        stops: bool = False,
    ) -> None:
        self._residuals, self._inputs = residuals, inputs
        self._graph = GraphOfRun()
        self._graph.name = residuals.surroundings.name
        self._lent: Inputs | None = None
        if state is not None:
            self._lent = lent = Inputs()  # without a call of `__init__`
            lent.state, lent.versions = state, versions_of(state)
            residuals.inputs = weakref.ref(lent)
        self._num_saves = 0
        self._made: list[tuple[int, Tensor]] = []  # residuals that are compared
        self._last = _last_of(residuals) if stops and residuals.is_worth_a_stop else -1
        self._stops = False  # at the next save

    def __enter__(self) -> None:
        self._grad_mode = torch.is_grad_enabled()
        self._beneath = pair_in_force()
        push_pair(self._packed, self._graph)
        set_grad_enabled(True)

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool:
        set_grad_enabled(self._grad_mode)
        self._graph.is_over = True
        if kind is None:
            pop_pair()
        else:
            pop_down_to(self._beneath)
        residuals, made, self._made = self._residuals, self._made, []  # their graph holds the hooks
        surroundings = residuals.surroundings
        is_filled = isinstance(value, Filled) and value.residuals is residuals
        is_good = False
        try:
            if (kind is None or is_filled) and residuals.outcome is not None:
                if kind is None and not self._stops and self._num_saves != len(residuals.slots):
                    what = f"it saved {self._num_saves} values where the first run saved"
                    raise mismatch(surroundings, f"{what} {len(residuals.slots)}")
                compare(residuals.outcome, made, self._inputs, surroundings)
                has_drawn = is_filled or not surroundings.has_foreign or surroundings.has_drawn_all
                if not has_drawn:
                    raise mismatch(surroundings, _DRAWN_ELSEWHERE)
            is_good = kind is None or is_filled
            if is_good and surroundings.counted:
                residuals.part_from(surroundings.counted)
        finally:
            # A copy that was changed in place holds the hooks, and they this.
            self._inputs, self._lent = (), None
            if not is_good:
                residuals.forget()
        return is_filled

    @never_compiled
    def _packed(self, tensor: Tensor) -> Tensor:
        residuals, place, base = self._residuals, self._num_saves, tensor._base
        if (type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)) or (
            base is not None and isinstance(base, nn.Parameter) and id(base) not in residuals.bases
        ):
            return tensor
        if self._stops:
            raise Filled(residuals)
        self._num_saves = place + 1
        value = tensor.detach()
        # A save too many is counted, and reported when the run has ended.
        slot = residuals.slots[place]() if place < len(residuals.slots) else None
        if slot is not None:
            if slot.shape != tensor.shape or slot.dtype is not tensor.dtype:
                raise mismatch(
                    residuals.surroundings,
                    f"it made a {tensor.dtype} of shape {tuple(tensor.shape)} where the first run "
                    f"made a {slot.dtype} of shape {tuple(slot.shape)}",
                )
            slot.value, slot.inputs = value, self._lent
            slot.version = 0 if value.is_inference() else value._version
        if residuals.outcome is not None and place in residuals.outcome:
            self._made.append((place, tensor))
        if 0 <= self._last <= place and (
            residuals.surroundings.has_drawn_all
            or residuals.drawn.get(place) == hash_of(generator_states())
        ):
            self._stops = True
            if _is_settled(tensor) or any(tensor is each for each in self._inputs):
                raise Filled(residuals)
        return value


class _Untaped:
    """The owner of the residuals of a run that keeps none: it runs again if code asks for them."""

    def __init__(self, residuals: Residuals, run: Callable[[], Any]) -> None:
        self._residuals, self._run = weakref.ref(residuals), run
        self.lock = threading.RLock()

    def fill_slots(self, index: int) -> None:
        residuals = self._residuals()
        if residuals is not None:
            with Filling(residuals, ()):
                self._run()


def untaped(first: Residuals, run: Callable[[], T]) -> T:
    """Run a call again with grad mode on, and keep nothing; code within may take a gradient."""
    dropped = Residuals(first.surroundings, first.index, first.way)
    dropped.bases = first.bases
    with grad_mode(True), Recording(dropped, _Untaped(dropped, run)):
        return run()


_DRAWN_ELSEWHERE = (
    "it left torch's default generator elsewhere than the first run. Another thread draws from it "
    "meanwhile, and either's numbers would be wrong: give that thread a torch.Generator of its "
    "own, or let this one wait"
)


def _is_settled(tensor: Tensor) -> bool:
    """Whether an operator has made a tensor, or has written to it (See Rule 6)."""
    if tensor.grad_fn is not None or tensor.dtype is torch.bool:
        return True
    return not tensor.is_inference() and tensor._version > 0


def _last_of(residuals: Residuals) -> int:
    """Return the place of the last save that a second run must come to; -1 if there is none."""
    last = max(residuals.outcome) if residuals.outcome else -1
    for place in range(len(residuals.slots) - 1, last, -1):
        if residuals.slots[place]() is not None:
            return place
    return last
