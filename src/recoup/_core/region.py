"""The region: a call whose residuals are not kept but made again when autograd needs them.

NOTE [ Regions and slots ]

Rule 1. In the first run of a region a `Slot` takes the place of each tensor that autograd saves. A
        parameter, or a view of one, is kept, since it is alive anyway. Autograd holds the slots,
        the slots hold the region and its owner, and the region holds its slots weakly: a residual
        that autograd has dropped is not made again.
Rule 2. Unpacking the first empty slot makes the region run again; the second run makes the same
        saves in the same order and fills the slots. The owner of the region does that, since it
        alone knows where the inputs come from. Code may take a gradient itself while its first run
        goes on; then the region runs again as far as it has come.
Rule 3. A slot returns its value once and drops it, so that memory falls during backward as it does
        in a plain run, also with retain_graph. If it is unpacked again, the region runs again; if
        that happens in one backward (a function that reads `ctx.saved_tensors` twice), the values
        that this makes once more are dropped when it ends.
Rule 4. Values are detached: the graph of a second run is freed with it. Autograd does not check the
        version of a tensor that went through hooks, so a slot does.
Rule 5. A second run gets the inputs of the first as leaves with the same `requires_grad`, and runs
        with grad mode on: what a module computes may depend on it. A parameter enters as itself.
Rule 6. What a second run makes is compared with the first (NOTE [ What is compared ]) before any of
        it is used.
Rule 7. A second run whose output is not needed stops at the last slot that autograd still holds, by
        an exception. (An `Exception`, since module hooks that are always called, FSDP2's among
        them, are not called for any other.) Code that catches it is stopped at its next save. A
        tensor that nothing has made or written to yet may be filled after it is saved, by the
        kernel that it is given to; the run then goes on to its next save. So it does if draws are
        left to make.
Rule 8. A region may change its input in place, as an in-place activation does. The first run
        changes the tensor of the caller, as plain code does; what is kept for later runs is a copy
        from before, and each of them gets a copy of that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from recoup._core.compile import never_compiled
from recoup._core.outcome import Frontier, Outcome, compare, mismatch
from recoup._core.save_observer import Way, current
from recoup._core.saved_tensors import (
    Kept,
    Pair,
    as_leaves,
    backward_id,
    changed_in_place,
    detached,
    grad_mode,
    num_nodes,
    pair_in_force,
    plain_version,
    pop_down_to,
    pop_pair,
    push_pair,
    requires_grad_of,
    set_grad_enabled,
    storage_id,
    unpack,
    versions_of,
    when_backward_ends,
)
from recoup._core.surroundings import Surroundings
from recoup.errors import ChangedError, RecoupError, ReplayError

__all__ = [
    "Filled",
    "Filling",
    "Owner",
    "Recording",
    "Region",
    "Residuals",
    "Slot",
    "Stage",
    "State",
    "Untaped",
]

State = tuple[Tensor, ...]
# Elements of a residual. Raising an exception takes 15 microseconds; where all residuals are
# smaller than this, the remaining operators take less.
_WORTH_A_STOP = 4096


class Stage(Protocol):
    """A call that a region runs, for the first time and again."""

    @property
    def name(self) -> str:
        """The name of the call in error messages."""
        ...

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules that it uses, as far as they are known."""
        ...

    @property
    def code(self) -> object:
        """The code that it runs: a module, or the code of a function."""
        ...

    @property
    def compares(self) -> bool:
        """Whether what later runs make is compared with the first."""
        ...

    @property
    def is_in_place(self) -> bool:
        """Whether the first thing that it does changes its input in place (See Rule 8)."""
        ...

    def forward(self, state: State) -> tuple[State, Any]:
        """Return the next state, and a second output outside the chain (a log-determinant)."""
        ...

    def inverse(self, state: State) -> State:
        """Return the state before it."""
        ...


class Owner(Protocol):
    """The object that runs regions again: it knows where their inputs come from."""

    @property
    def lock(self) -> threading.RLock:
        """The lock that is held while a region of this owner is filled."""
        ...

    def fill_slots(self, index: int) -> None:
        """Run region `index` again, and fill its slots."""
        ...


class Slot:
    """The object that autograd saves in place of a tensor."""

    __slots__ = (
        "__weakref__",
        "_owner",
        "_residuals",
        "_task",
        "dtype",
        "shape",
        "value",
        "version",
    )

    # `Recording` sets these: a call of `__init__` for each saved tensor would cost too much.
    _residuals: Residuals
    _owner: Owner
    _task: int  # the backward that took the value last
    version: int
    value: Tensor | None
    shape: torch.Size
    dtype: torch.dtype

    @never_compiled
    def get(self) -> Tensor:
        """Return the residual, made again if it is not here (See Rules 2 and 3)."""
        with self._owner.lock:
            if self.value is None:
                if self._task == backward_id() != -1:
                    when_backward_ends(self._residuals.forget)
                self._owner.fill_slots(self._residuals.index)
            value, self.value, self._task = self.value, None, backward_id()
        name = self._residuals.surroundings.name
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


class _KeptParameter:
    """A parameter, or a view of one, that a region has saved."""

    __slots__ = ("surroundings", "tensor", "version")

    surroundings: Surroundings
    tensor: Tensor
    version: int

    @never_compiled
    def get(self) -> Tensor:
        """Return the tensor; raise if it was changed in place since it was saved."""
        if self.tensor._version != self.version:
            name = f"A parameter that {self.surroundings.name} uses"
            raise changed_in_place(name)
        return self.tensor


_new_kept: Callable[[type[_KeptParameter]], _KeptParameter] = object.__new__


class Residuals:
    """The residuals of one run of a call: the slots that stand for them, and what they must be.

    Args:
        surroundings: those of the call.
        index: the number by which the owner of its region knows it.
        way: the way that a census reports, "recompute" or "invert".
    """

    __slots__ = (
        "__weakref__",
        "index",
        "is_worth_a_stop",
        "outcome",
        "slots",
        "surroundings",
        "way",
    )

    def __init__(self, surroundings: Surroundings, index: int, way: Way) -> None:
        self.surroundings = surroundings
        self.index = index
        self.way: Way = way
        self.slots: list[weakref.ref[Slot]] = []
        self.outcome: Outcome | None = None  # None while the first run goes on
        self.is_worth_a_stop = False  # whether any residual is large

    def forget(self) -> None:
        """Drop the values in the slots."""
        for ref in self.slots:
            slot = ref()
            if slot is not None:
                slot.value = None

    def part_from(self, counted: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Copy the values that lie in buffers, which are about to be given other values.

        Args:
            counted: the buffers, with the values that the first run found.
        """
        storages = {storage_id(buffer) for buffer, _ in counted}
        for ref in self.slots:
            slot = ref()
            if slot is not None and slot.value is not None and storage_id(slot.value) in storages:
                slot.value = slot.value.clone()
                slot.version = 0

    @property
    def are_wanted(self) -> bool:
        """Whether autograd still holds any slot."""
        for ref in self.slots:  # noqa: SIM110 - without a generator, for speed
            if ref() is not None:
                return True
        return False


class Region(Residuals):
    """The record of the first run of a call, from which later runs repeat it.

    Args:
        stage: the call.
        state: its input.
        index: the number by which its owner knows it.
        way: the way that a census reports, "recompute" or "invert".
    """

    __slots__ = ("changes_input", "input_versions", "inputs", "requires_grad", "stage")

    def __init__(self, stage: Stage, state: State, index: int = 0, way: Way = "recompute") -> None:
        surroundings = Surroundings(
            stage.name,
            stage.modules,
            stage.code,
            keeps_outputs=way != "invert",  # an inverse decides in another order
        )
        self.surroundings, self.index, self.way = surroundings, index, way
        self.slots, self.outcome, self.is_worth_a_stop = [], None, False
        self.stage = stage
        self.requires_grad = list(map(requires_grad_of, state))
        self.changes_input = False
        self.inputs: State | None = None  # of the last run that filled slots
        self.input_versions: list[int] = []

    # -- the first run ---------------------------------------------------------------------

    def tape(self, state: State) -> tuple[State, Any]:
        """Run the call with its residuals kept, so that it can still be run again."""
        with self.surroundings.first():
            versions = versions_of(state)
            result = self.stage.forward(state)
            self.changes_input = versions_of(state) != versions
        return result

    def record(self, state: State, owner: Owner, *, is_kept: bool = True) -> tuple[State, Any]:
        """Run the call and leave slots where it would have kept residuals; `owner` fills them.

        Args:
            state: the input.
            owner: fills the slots.
            is_kept: whether later runs are given the input itself, not one that is made again.
        """
        stage = self.stage
        kept, given = getattr(stage, "kept_nodes", ()), state if is_kept else ()
        recording = Recording(self, owner, given, kept, follows=stage.compares)
        surroundings = self.surroundings
        try:
            versions = list(map(plain_version, state))
        except RuntimeError:  # inference tensors have none, and are not saved either
            versions = []
        with surroundings.first(), recording:
            try:
                result = stage.forward(state)
            except RuntimeError as error:
                self._explain(error)
                raise
            self.changes_input = bool(versions) and list(map(plain_version, state)) != versions
            if stage.compares:
                self.outcome = recording.ended()
        if surroundings.buffers or surroundings.has_foreign:
            surroundings.has_run()
        return result

    def _explain(self, error: RuntimeError) -> None:
        """Raise an error that says what is wrong, where torch's own does not."""
        if "saved tensor hooks" in str(error) and not isinstance(error, RecoupError):
            raise RecoupError(
                f"{self.stage.name} uses a transform of torch.func (grad, vjp, jacrev), in which "
                "torch has no saved tensor hooks. Use torch.autograd.grad there, call it outside "
                'of the region, or keep its residuals (memory="linear").'
            ) from error

    # -- later runs ------------------------------------------------------------------------

    def inputs_again(self) -> State | None:
        """Return the inputs of the last run that filled slots; None without one."""
        if self.inputs is not None and versions_of(self.inputs) != self.input_versions:
            raise ChangedError(
                f"The input of {self.stage.name} was changed in place between two backwards, so "
                "the second would see other values than forward did. Change a clone."
            )
        return self.inputs

    def advance(self, state: State) -> State:
        """Run the call again from its input, and keep nothing."""

        def fill(residuals: Residuals) -> None:
            self.fill(state, needs_output=False, residuals=residuals)

        dropped = Residuals(self.surroundings, self.index, self.way)
        recording = Recording(dropped, Untaped(dropped, fill))
        with self.surroundings.restored(), grad_mode(True), recording:
            output, _ = self.stage.forward(self._inputs(state))
        return detached(output)

    def fill(
        self, state: State, *, needs_output: bool = True, residuals: Residuals | None = None
    ) -> State:
        """Run the call again from its input, and fill the slots that autograd still holds.

        Args:
            state: the input.
            needs_output: whether the run goes on to its end; else it returns an empty state.
            residuals: those of another run than the first.
        """
        surroundings = self.surroundings
        while True:
            inputs = as_leaves(state, self.requires_grad)
            if self.changes_input or self.stage.is_in_place:  # the first run may go on
                inputs = _copied(inputs)
            filling = Filling(residuals or self, inputs, stops=not needs_output)
            output: State = ()
            try:
                with surroundings.restored(), filling:
                    output, _ = self.stage.forward(inputs)
            except (ReplayError, ChangedError):
                if not surroundings.decides_anew():
                    raise
            else:
                return detached(output) if needs_output else ()

    def _inputs(self, state: State) -> State:
        inputs = as_leaves(state, self.requires_grad)
        return _copied(inputs) if self.changes_input or self.stage.is_in_place else inputs


def _copied(inputs: State) -> State:
    with grad_mode(True):  # autograd allows no change of a leaf
        return tuple([value.clone() for value in inputs])


class Untaped:
    """The owner of the residuals of a run that keeps none: it runs again if code asks for them.

    Args:
        residuals: the residuals.
        fill: runs the call again, and fills their slots.
    """

    __slots__ = ("_fill", "_residuals", "lock")

    def __init__(self, residuals: Residuals, fill: Callable[[Residuals], object]) -> None:
        self._residuals, self._fill = weakref.ref(residuals), fill
        self.lock = threading.RLock()

    def fill_slots(self, index: int) -> None:
        residuals = self._residuals()
        if residuals is not None:
            self._fill(residuals)


class Recording(Frontier):
    """A context for the first run of a region, in which residuals become slots.

    Args:
        residuals: the residuals.
        owner: fills the slots.
        inputs: those of the run.
        kept: the numbers of nodes whose outputs later runs are given.
        follows: whether the run is followed, to be compared with later ones.
    """

    __slots__ = ("_beneath", "_follows", "_owner", "_residuals", "pair")

    _beneath: Pair | None
    pair: Pair | None
    follows_history = True

    def __init__(
        self,
        residuals: Residuals,
        owner: Owner,
        inputs: State = (),
        kept: Container[int] = (),
        *,
        follows: bool = False,
    ) -> None:
        self._residuals = residuals
        self._owner = owner
        self._follows = follows
        self.inputs, self.kept = inputs, kept
        self.outcome, self.waiting, self.seen = {}, {}, set()

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
        self.waiting, self.inputs, self.outcome = {}, (), {}  # the hooks live as long as the graph

    @never_compiled
    def _packed(self, tensor: Tensor) -> Slot | Kept | _KeptParameter:
        residuals = self._residuals
        base = tensor._base
        if (type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)) or (
            base is not None and isinstance(base, nn.Parameter)
        ):
            if self.pair is not None:
                name = f"A parameter that {residuals.surroundings.name} uses"
                return Kept(tensor, name, self.pair)
            kept = _new_kept(_KeptParameter)
            kept.tensor, kept.version = tensor, tensor._version
            kept.surroundings = residuals.surroundings
            return kept
        slot = _new_slot(Slot)
        slot._residuals, slot._owner, slot._task = residuals, self._owner, -1
        slot.value, slot.version = None, 0
        slot.shape, slot.dtype = tensor.shape, tensor.dtype
        if self._follows:
            waiting, node, number = self.waiting, tensor.grad_fn, num_nodes() - 1
            if node is not None and waiting:
                self.follow(node, number)
            version = 0 if tensor.is_inference() else tensor._version
            found = (len(residuals.slots), tensor, version)
            if number in waiting:
                waiting[number].append(found)
            else:
                waiting[number] = [found]
        residuals.slots.append(weakref.ref(slot))
        if tensor.numel() >= _WORTH_A_STOP:
            residuals.is_worth_a_stop = True
        if current.observer is not None:
            current.observer.saved(tensor, slot, residuals.way)
        return slot


class Filled(Exception):  # noqa: N818 - it is no error
    """The exception that ends a second run which has filled its slots (See Rule 7)."""

    def __init__(self, residuals: Residuals) -> None:
        super().__init__(residuals.surroundings.name)
        self.residuals = residuals


class Filling:
    """A context for a second run of a region, which fills its slots.

    Args:
        residuals: the residuals.
        inputs: the inputs of the run.
        stops: whether the run may end when the last slot is filled.
    """

    __slots__ = (
        "_beneath",
        "_grad_mode",
        "_inputs",
        "_last",
        "_made",
        "_num_saves",
        "_residuals",
        "_stops",
    )

    _beneath: Pair | None
    follows_history = True
    pair = None  # that is given what is not of the region: nobody, in a run of its own

    def __init__(self, residuals: Residuals, inputs: State, *, stops: bool = False) -> None:
        self._residuals = residuals
        self._inputs = inputs
        self._num_saves = 0
        self._made: list[tuple[int, Tensor]] = []  # residuals that are compared
        self._last = _last_of(residuals) if stops and residuals.is_worth_a_stop else -1
        self._stops = False  # at the next save
        self._grad_mode = False

    def __enter__(self) -> Self:
        self._grad_mode = torch.is_grad_enabled()
        self._beneath = pair_in_force()
        push_pair(self._packed, _itself)
        set_grad_enabled(True)
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool:
        set_grad_enabled(self._grad_mode)
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
                    raise self._another_number()
                compare(residuals.outcome, made, self._inputs, surroundings)
                if surroundings.has_foreign and not surroundings.has_drawn_all:
                    raise mismatch(surroundings, _DRAWN_ELSEWHERE)
            is_good = kind is None or is_filled
            if is_good and surroundings.counted:
                residuals.part_from(surroundings.counted)
        finally:
            self._inputs = ()  # a copy that was changed in place holds the hooks, and they this
            if not is_good:
                residuals.forget()
        return is_filled

    @never_compiled
    def _packed(self, tensor: Tensor) -> Tensor:
        base = tensor._base
        if (type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)) or (
            base is not None and isinstance(base, nn.Parameter)
        ):
            return tensor
        residuals, place = self._residuals, self._num_saves
        if self._stops:
            raise Filled(residuals)
        self._num_saves = place + 1
        value = tensor.detach()
        # A save too many is counted, and reported when the run has ended.
        slot = residuals.slots[place]() if place < len(residuals.slots) else None
        if slot is not None:
            if slot.shape != tensor.shape or slot.dtype is not tensor.dtype:
                raise self._another(slot, tensor)
            slot.value = value
            slot.version = 0 if value.is_inference() else value._version
        if residuals.outcome is not None and place in residuals.outcome:
            self._made.append((place, tensor))
        if place == self._last and residuals.surroundings.has_drawn_all:
            self._stops = True
            if _is_settled(tensor) or any(tensor is each for each in self._inputs):
                raise Filled(residuals)
        return value

    def _another(self, slot: Slot, tensor: Tensor) -> Exception:
        return mismatch(
            self._residuals.surroundings,
            f"it made a {tensor.dtype} of shape {tuple(tensor.shape)} where the first run made a "
            f"{slot.dtype} of shape {tuple(slot.shape)}",
        )

    def _another_number(self) -> Exception:
        num_first = len(self._residuals.slots)
        what = f"it saved {self._num_saves} values where the first run saved {num_first}"
        return mismatch(self._residuals.surroundings, what)


_DRAWN_ELSEWHERE = (
    "it left torch's default generator elsewhere than the first run. Another thread draws from it "
    "meanwhile, and either's numbers would be wrong: give that thread a torch.Generator of its "
    "own, or let this one wait"
)


def _is_settled(tensor: Tensor) -> bool:
    """Whether an operator has made a tensor, or has written to it (See Rule 7)."""
    return tensor.grad_fn is not None or (not tensor.is_inference() and tensor._version > 0)


def _last_of(residuals: Residuals) -> int:
    """Return the place of the last save that a second run must come to; -1 if there is none."""
    last = max(residuals.outcome) if residuals.outcome else -1
    for place in range(len(residuals.slots) - 1, last, -1):
        if residuals.slots[place]() is not None:
            return place
    return last


def _itself(tensor: Tensor) -> Tensor:
    return tensor
