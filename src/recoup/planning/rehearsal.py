"""A training step that leaves no trace.

NOTE [ A rehearsal ]

Rule 1. Backward runs as in training and accumulates into an empty `.grad`, so that gradients take
        the same memory. The previous `.grad` is restored, also that of leaves outside the model.
Rule 2. Hooks of parameters do not run: one that steps an optimizer would train.
Rule 3. Buffers, the attributes of modules (lists and dicts included), and the random streams of
        torch, Python and numpy are restored, and the parameters that are known to be written to. If
        another parameter has changed, that is an error.
Rule 4. The garbage collector is disabled. It would free reference cycles at different moments on
        different ranks, so that the peaks would differ, and with them the plans.

NOTE [ Restored state ]

Rule 5. Of a module, its class, its attributes (hooks, buffers and children among them) and the
        `requires_grad` of its parameters are restored. Submodules are found through `modules()` and
        through attributes that hold them.
Rule 6. Of lists, dicts, sets and deques, and of the attributes of users' objects, the entries are
        restored, a few levels deep. The containers stay the same objects: other code refers to
        them.
Rule 7. Of tensors and numpy arrays on the way, other than parameters, the values are restored, and
        of tensors the version counter too. Values are compared, because a version counter does not
        show every change (numpy, `.data` and views with a counter of their own write past it).
Rule 8. Other parameters are not copied, since a copy of all of them may not fit. A parameter that
        was given other memory gets its own back; a write to one is detected by a sum of its values.
Rule 9. Of generators of torch, Python and numpy found on the way the states are restored.
"""

from __future__ import annotations

import gc
import operator
import random
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from recoup._core.captured import captured_by
from recoup._core.compile import never_compiled
from recoup._core.devices import generators_restored
from recoup._core.modules import is_gathered
from recoup._core.operators import DispatchMode, has_schema, traits_of
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import set_versions, version_of
from recoup._core.storage_tracking import storages_of
from recoup._core.tensors import check_is_in_its_mode, ends_of, is_without_values
from recoup.errors import ReplayError

Undo = Callable[[], object]


class ChangedParameterError(ReplayError):
    """A step changed a parameter in a way that planning cannot undo."""


class _Here(threading.local):
    num_rehearsals = 0  # that are in progress


_here = _Here()


def is_in_rehearsal() -> bool:
    """Whether the current code is part of a rehearsal, of any model."""
    return _here.num_rehearsals > 0


@contextmanager
def rehearsal(
    module: nn.Module, values: Iterable[object] = (), undo: Iterable[Undo] = ()
) -> Generator[None]:
    """Return a context in which steps of `module` leave no trace.

    Args:
        module: the model.
        values: the arguments of the step, and functions that it calls: of these the modules,
            tensors and generators that they hold themselves are restored.
        undo: what restores the parameters that are written to, called at the end.
    """
    parameters = list({id(p): p for p in module.parameters()}.values())
    check_is_in_its_mode(parameters)
    values = list(values)
    arguments = [value for value in values if not _is_function(value)]
    found = StateSnapshot([module, *arguments], _held_by(values))
    torch.clear_autocast_cache()  # earlier casts would not be counted
    with generators_restored(), streams_restored(), without_gradients(parameters), uncollected():
        _here.num_rehearsals += 1
        try:
            yield
        finally:
            _here.num_rehearsals -= 1
            _reshard(module)
            found.restore()
            with torch.no_grad():
                for call in undo:
                    call()
            torch.clear_autocast_cache()
            _check_unchanged(module, found)


def _check_unchanged(module: nn.Module, before: StateSnapshot) -> None:
    """Raise if a parameter has changed, also where a step has failed otherwise."""
    changed = set(map(id, before.changed_parameters()))
    for name, parameter in module.named_parameters():
        if id(parameter) in changed:
            raise ChangedParameterError(
                f"Parameter `{name}` of {type(module).__name__} was changed by a step that recoup "
                "measured, past the operators of torch that it watches (through numpy, or in "
                "compiled code), so that it has another value now. Load its value again, and let "
                "the forward write to it by operators of torch, or make it a buffer."
            )


def _reshard(model: nn.Module) -> None:
    """Let FSDP2 free what it has gathered for a backward, which a forward alone does not have."""
    for module in cast("Iterable[Any]", model.modules()):
        if is_gathered(module):
            module.reshard()


def _held_by(values: Iterable[object], num_levels: int = 2) -> Iterator[object]:
    """Yield what functions hold, two levels deep: a loss is held by a function of ours."""
    for value in values:
        if not _is_function(value):
            yield value
        elif num_levels:
            yield from _held_by(captured_by(value), num_levels - 1)


def _is_function(value: object) -> TypeGuard[Callable[..., Any]]:
    return callable(value) and not isinstance(value, nn.Module)


def foreign_leaves(model: nn.Module, losses: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves of the graph of a step that are not parameters of the model."""
    own = set(map(id, model.parameters()))
    return [leaf for leaf in ends_of(losses).leaves if id(leaf) not in own]


@contextmanager
def uncollected() -> Generator[None]:
    """Return a context that collects garbage first, and then disables the collector (See Rule 4).

    If the collector is disabled already (within another such context), the youngest generation
    alone is collected, which takes a hundredth of the time.
    """
    gc.collect(2 if gc.isenabled() else 0)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def without_gradients(leaves: Sequence[Tensor]) -> Generator[Sequence[Tensor]]:
    """Return a context in which leaves have neither gradients nor hooks (See Rules 1 and 2)."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    gradients = [(leaf, leaf.grad) for leaf in leaves]
    hooks = [(leaf, name, dict(getattr(leaf, name) or {})) for leaf in leaves for name in names]
    for leaf, _ in gradients:
        leaf.grad = None
    _refill_hooks((leaf, name, {}) for leaf, name, _ in hooks)
    try:
        yield leaves
    finally:
        for leaf, gradient in gradients:
            leaf.grad = gradient
        _refill_hooks(hooks)


def _refill_hooks(hooks: Iterable[tuple[Tensor, str, dict[int, Any]]]) -> None:
    """Let tensors have these hooks, and none that were added meanwhile."""
    for leaf, name, found in hooks:
        own = getattr(leaf, name)
        if own is not None:
            own.clear()
            own.update(found)


@contextmanager
def streams_restored() -> Generator[None]:
    """Return a context that restores the random streams of Python and numpy."""
    numpy = sys.modules.get("numpy.random")
    of_python = random.getstate()
    of_numpy = None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.set_state(of_numpy)


_DEEPEST = 5
_MOST_ENTRIES = 4096  # entries of larger containers are restored, but not searched
# A step cannot change these.
_ALONE = (
    bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, types.FunctionType,
    types.MethodType, types.BuiltinFunctionType, torch.dtype, torch.device, range, slice,
)  # fmt: skip
# The attributes of objects from these packages are not part of a step's state.
_OF_NOBODY = frozenset((
    "builtins", "collections", "torch", "numpy", "threading", "recoup", "weakref", "_weakrefset",
    "concurrent", "asyncio", "multiprocessing", "queue", "io", "logging",
))  # fmt: skip


class StateSnapshot:
    """A copy of the state that can be reached from roots, but for parameters.

    Of `others`, only modules, tensors and generators are restored.
    """

    def __init__(self, roots: Iterable[object], others: Iterable[object] = ()) -> None:
        self._seen: dict[int, object] = {}  # by id; alive, so that ids are not used again
        self._undo: list[Undo] = []  # each restores something
        self._parameters: list[tuple[nn.Parameter, int, float]] = []
        for root in roots:
            self._note(root, 0)
        for other in others:
            self._note(other, _DEEPEST)

    def restore(self) -> None:
        """Restore the state (See NOTE [ Restored state ]), also where the user interrupts that."""
        try:
            with torch.no_grad():
                for undo in self._undo:
                    undo()
        except KeyboardInterrupt:
            self.restore()  # from the first on: each sets what was there
            raise

    def changed_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that were written to (See Rule 8)."""
        return [
            parameter
            for parameter, version, total in self._parameters
            if version_of(parameter) != version or _total(parameter) != total
        ]

    def _note(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or isinstance(value, _ALONE):
            return
        undo = _restoring(value)
        is_searched = undo is not None or isinstance(value, (nn.Module, Tensor))
        if depth >= _DEEPEST and not is_searched:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            (module,) = islice(value.modules(), 1)  # of a weak reference that stands in for it
            self._note_module(module)
        elif isinstance(value, Tensor):
            if not value.is_meta and not value.is_inference():
                self._note_tensor(value)
        elif undo is not None:
            self._undo.append(undo)
        else:
            if _is_a(value, list, dict, set, deque, tuple):
                self._note_entries(value, depth)
            is_users = type(value).__module__.partition(".")[0] not in _OF_NOBODY
            if is_users and hasattr(value, "__dict__"):
                self._note(vars(value), depth)

    def _note_module(self, module: nn.Module) -> None:
        self._undo.append(partial(object.__setattr__, module, "__class__", type(module)))
        if is_gathered(module):  # FSDP2 remembers elsewhere which hooks it has added
            hooks = [value for key, value in vars(module).items() if key.endswith("_hooks")]
            self._seen.update((id(each), each) for each in hooks)
        self._note(vars(module), 0)
        for child in module.children():
            self._note(child, 0)

    def _note_tensor(self, tensor: Tensor) -> None:
        if not isinstance(tensor, nn.Parameter):
            self._undo.append(restoring(tensor))
            return
        self._parameters.append((tensor, version_of(tensor), _total(tensor)))
        before = (tensor.detach(), tensor.requires_grad)
        self._undo.append(partial(_put_parameter_back, tensor, *before))
        self._note(vars(tensor), 0)

    def _note_entries(self, container: Any, depth: int) -> None:
        entries = _entries_of(container)
        if not _is_a(container, tuple):
            self._undo.append(partial(_refill, container, entries))
        if len(entries) <= _MOST_ENTRIES and not _is_a(container, set):
            for item in entries.values() if isinstance(entries, dict) else entries:
                self._note(item, depth + 1)


def _is_a(value: Any, *kinds: type[Any]) -> bool:
    """Like isinstance, without narrowing the type to one whose entries are unknown."""
    return isinstance(value, kinds)


def _entries_of(container: Any) -> dict[Any, Any] | list[Any]:
    return dict(container) if _is_a(container, dict) else list(container)


def _refill(container: Any, entries: dict[Any, Any] | list[Any]) -> None:
    """Restore the entries of a container if they have changed."""
    now = _entries_of(container)
    is_same = len(now) == len(entries) and all(map(operator.is_, now, entries))
    if isinstance(now, dict) and isinstance(entries, dict):
        if is_same and all(map(operator.is_, now.values(), entries.values())):
            return
        kind: Any = OrderedDict if _is_a(container, OrderedDict) else dict
        kind.clear(container)
        kind.update(container, entries)
    elif not is_same:
        container.clear()
        (container.update if _is_a(container, set) else container.extend)(entries)


def _restoring(value: Any) -> Undo | None:
    """Return what restores an array, or the state of a generator (See Rule 9); None for others."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if _is_a(value, random.Random) and not _is_a(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if type(value) is numpy.ndarray and value.flags.writeable:
        return partial(value.__setitem__, ..., value.copy())
    if isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    return None


def _is_plain(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not is_without_values()


def _put_parameter_back(parameter: nn.Parameter, data: Tensor, requires_grad: bool) -> None:
    if _is_plain(parameter) and parameter.data_ptr() != data.data_ptr():
        parameter.data = data
    if parameter.requires_grad is not requires_grad:
        parameter.requires_grad_(requires_grad)


def restoring(tensor: Tensor) -> Undo:
    """Return what puts back the values that a tensor has now, and its version (See Rule 7)."""
    return partial(_put_back, tensor, tensor.detach().clone(), version_of(tensor))


def _put_back(tensor: Tensor, content: Tensor, version: int) -> None:
    if not _is_plain(tensor):
        if version_of(tensor) != version:
            tensor.copy_(content)
        return
    if tensor.shape != content.shape or tensor.dtype is not content.dtype:
        tensor.data = content
    elif not torch.equal(tensor, content):  # never equal where there are NaNs
        tensor.detach().copy_(content)
    if version_of(tensor) != version:
        set_versions((tensor,), (version,))


def _total(tensor: Tensor) -> float:
    """Return the absolute sum of a plain tensor, computed without a copy; infinity if it is NaN."""
    if not _is_plain(tensor):
        return 0.0
    kind = torch.complex128 if tensor.is_complex() else torch.float64
    total = float(abs(torch.sum(tensor.detach(), dtype=kind)))
    return total if total == total else float("inf")


class WriteWatch(DispatchMode):
    """A mode that copies the parameters of a model that operators write to, before they do.

    So a copy of all parameters, which may not fit, is not needed. Operators show every write, also
    one through `.data`, which leaves the version as it was. `written` are these parameters, in the
    order of the first writes, and `undo` puts the copies back.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.written: list[nn.Parameter] = []
        self.undo: list[Undo] = []
        self._untouched: dict[torch.UntypedStorage, list[nn.Parameter]] = {}
        for parameter in model.parameters():
            for storage in storages_of([parameter]):
                self._untouched.setdefault(storage, []).append(parameter)

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        writes = traits_of(func).writes if has_schema(func) else ()
        given = (*enumerate(args), *kwargs.items())
        for storage in storages_of(tensors_in([each for key, each in given if key in writes])):
            for parameter in self._untouched.pop(storage, ()):
                self.written.append(parameter)
                self.undo.append(restoring(parameter))
        return func(*args, **kwargs)
