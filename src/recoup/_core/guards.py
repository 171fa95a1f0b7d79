"""The guard of a region: the state of its modules, which a second run must find unchanged.

NOTE [ Correct or an error ]

Rule 1. Parameters, buffers and the training mode of a region's modules are compared before it
        runs again: the same tensors, unchanged since the end of the first run. (A first run may
        change them itself: a data-dependent start does.)
Rule 2. Batch and instance norms update their statistics in the first run only. Numbers that are
        attributes of modules (a counter, the probability of a dropout) have in a second run the
        values from before the first run, and are put back after it. A flag has the value that the
        first run left, since most flags record that something has been done once.
Rule 3. Any other buffer that a first run changes may change the result of a second run, so it is
        an error in the first run.
Rule 4. Sharded modules (FSDP2) replace their parameters while they run, so those are not compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from types import CellType
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from recoup._core.random_sources import DETERMINISTIC
from recoup._core.restoring import Restoring
from recoup._core.saved_tensors import storage_address, version_of
from recoup.errors import ChangedError, ReplayError

__all__ = [
    "LOCK",
    "Location",
    "ModuleGuard",
    "Replaced",
    "Replacement",
    "is_in_place",
    "mark_of",
]

_NUMBERS = frozenset((bool, int, float, complex, str))
_MISSING = object()
_PLAIN = frozenset((nn.Parameter, Tensor))
_Entry = tuple[dict[str, Any], str, Tensor]
_Mark = tuple[int, int]
LOCK = threading.RLock()  # held while values are replaced: threads may share a module


class ModuleGuard:
    """The parameters, buffers, modes and numbers of modules, as a first run leaves them.

    Args:
        roots: the modules.
        name: the name of the call in error messages.
        part_names: the name of each root in error messages, if they are those of several calls.

    Attributes:
        is_training: whether any of the modules is in training mode.
        has_norms: whether a norm updates its statistics, so that no second run may run meanwhile.
    """

    __slots__ = (
        "_buffers",
        "_children",
        "_entries",
        "_marks",
        "_modes",
        "_name",
        "_norms",
        "_numbers",
        "_part_names",
        "_roots",
        "has_norms",
        "is_training",
    )

    def __init__(
        self, roots: tuple[nn.Module, ...], name: str = "", part_names: Sequence[str] = ()
    ) -> None:
        self._roots = roots
        self._name = name
        self._part_names = part_names
        self._entries: list[_Entry] = []  # of parameters, tensors that are attributes, and buffers
        self._buffers: list[_Entry] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        self._children: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []
        self._norms: list[nn.Module] = []
        self._numbers: list[tuple[dict[str, Any], str, Any]] = []
        self.is_training = False
        self._walk()
        self.has_norms = bool(self._norms)
        self._entries += self._buffers
        self._marks = _marks_of(self._entries)

    def _walk(self) -> None:
        # nn.Module.modules() builds names and a set of those seen; this takes a tenth of its time.
        # A module that is met twice is compared twice.
        pending = [(root, hasattr(type(root), "unshard")) for root in self._roots]
        seen: set[int] = set()  # ids of those with children, which may contain themselves
        for module, is_sharded in pending:
            self._modes.append((module, module.training))
            self.is_training |= module.training
            if not is_sharded:  # See Rule 4
                own: dict[str, Any] = module._parameters
                for key, value in own.items():
                    if value is not None:
                        self._entries.append((own, key, value))
            if isinstance(module, _NormBase) and module.training and module.track_running_stats:
                self._norms.append(module)
            else:
                own = module._buffers
                for key, value in own.items():
                    if value is not None:
                        self._buffers.append((own, key, value))
            if type(module) not in DETERMINISTIC:  # those do not change their attributes
                self._note_attributes(module.__dict__)
            children = module._modules
            if not children or id(module) in seen:
                continue
            seen.add(id(module))
            for key, child in children.items():
                if child is not None:
                    self._children.append((children, key, child))
                    pending.append((child, is_sharded or hasattr(type(child), "unshard")))

    def _note_attributes(self, own: dict[str, Any]) -> None:
        for key, value in own.items():
            if type(value) in _NUMBERS:
                if key != "training":
                    self._numbers.append((own, key, value))
            elif type(value) is Tensor and value.grad_fn is None:
                self._entries.append((own, key, value))

    def first_run_ended(self) -> None:
        """Record the versions that the first run left; raise if it changed a buffer."""
        # A flag that the first run has set says that something was done once (an initialization).
        for index, (own, key, value) in enumerate(self._numbers):
            if type(value) is bool:
                self._numbers[index] = (own, key, own.get(key))
        marks = _marks_of(self._entries)
        if marks == self._marks:
            return
        num_tensors = len(self._entries) - len(self._buffers)
        if marks[num_tensors:] != self._marks[num_tensors:]:
            key, name = self._first_changed(marks, num_tensors)
            raise ReplayError(
                f"{name} changes its buffer `{key}` in forward, so running it again would not "
                "compute the same. Keep its residuals: "
                'memory="linear", a schedule that tapes it in the sweep, or a plan whose '
                "`blocks` leave it out."
            )
        # A tensor that the first run has replaced (a cache) is replaced by a second run too.
        left = [pair for pair in zip(self._entries, marks, strict=True) if pair[1] is not None]
        self._entries = [entry for entry, _ in left]
        self._marks = [mark for _, mark in left]

    def check(self) -> None:
        """Raise if anything was changed or replaced since the first run ended."""
        marks = _marks_of(self._entries)
        if marks != self._marks:
            what = "`{}` of {}".format(*self._first_changed(marks))
            if None in marks:
                raise ChangedError(
                    f"{what} was replaced between forward and backward, so running it again would "
                    "compute something else. Run backward before it is replaced (with "
                    "`torch.func.functional_call`: within the call)."
                )
            raise ChangedError(
                f"{what} was changed in place between forward and backward, so running it again "
                "would compute something else. Step the optimizer after backward has passed every "
                "use of it."
            )
        for own, key, child in self._children:
            if own.get(key) is not child:
                name = self._name_around(lambda module, own=own: module._modules is own)
                raise ChangedError(
                    f"`{key}`, a {type(child).__name__} in {name}, was replaced between forward "
                    "and backward, so running it again would compute something else. Replace it "
                    "after backward."
                )
        for module, training in self._modes:
            if module.training is not training:
                name = self._name_around(lambda part, module=module: part is module)
                raise ChangedError(
                    f"{name} was in {'training' if training else 'evaluation'} mode in "
                    f"forward, but {type(module).__name__} within it no longer is, so running it "
                    "again would compute something else. Call train() or eval() after backward."
                )

    def to_replace(self) -> list[Replacement]:
        """Return the values that a second run must have, where they are not there (See Rule 2)."""
        found: list[Replacement] = []
        for own, key, value in self._numbers:
            if own.get(key) != value:
                found.append((Location(own, key), value))
        for norm in self._norms:
            found.append((Location(norm, "momentum"), 0.0))
            found.append((Location(norm._buffers, "num_batches_tracked"), None))
        return found

    def modules_with_attributes(self) -> list[nn.Module]:
        """Return the modules whose forward may set attributes."""
        return [module for module, _ in self._modes if type(module) not in DETERMINISTIC]

    def _first_changed(self, marks: list[_Mark | None], start: int = 0) -> tuple[str, str]:
        """Return the name of the first tensor that was replaced, or else changed, and its call."""
        changed = [n for n in range(start, len(marks)) if marks[n] != self._marks[n]]
        own, key, _ = self._entries[min(changed, key=lambda n: marks[n] is not None)]

        def has_it(module: nn.Module) -> bool:
            return any(own is each for each in (module._parameters, module._buffers, vars(module)))

        for root in self._roots:
            for prefix, module in cast("Iterable[tuple[str, nn.Module]]", root.named_modules()):
                if has_it(module):
                    return f"{prefix}.{key}" if prefix else key, self._name_around(has_it)
        return key, self._name

    def _name_around(self, is_meant: Callable[[nn.Module], bool]) -> str:
        """Return the name of the first call that uses such a module."""
        for root, name in zip(self._roots, self._part_names, strict=False):
            if any(map(is_meant, root.modules())):
                return name
        return self._name


def is_in_place(module: nn.Module) -> bool:
    """Whether `module` says that the first thing it does changes its input in place."""
    while isinstance(module, nn.Sequential) and module._modules:
        module = next(iter(module._modules.values()))
    return bool(mark_of(module, "inplace"))


def mark_of(fn: Any, name: str) -> Any:
    """Return an attribute that marks a module, of its own or of its class; False without one."""
    kind = cast("Any", type(fn))
    if getattr(kind, "__getattr__", None) is nn.Module.__getattr__:  # it would look in vain, slowly
        return fn.__dict__.get(name, getattr(kind, name, False))
    return getattr(fn, name, False)


def _marks_of(entries: list[_Entry]) -> list[_Mark | None]:
    """Return marks that differ after a change in place or of the memory (``.data``).

    The mark of a tensor that was replaced is None.
    """
    try:
        return [
            (tensor._version, tensor.data_ptr() if type(tensor) in _PLAIN else 0)
            if own.get(key) is tensor
            else None
            for own, key, tensor in entries
        ]
    except RuntimeError:  # an inference tensor has no version, a sparse one no address
        return [
            (version_of(tensor), storage_address(tensor)) if own.get(key) is tensor else None
            for own, key, tensor in entries
        ]


class Location(NamedTuple):
    """The location of a value (its container and key), to read it or put it back."""

    owner: Any  # a closure cell, a dict, a list, or an object with attributes
    key: Any

    def get(self) -> Any:
        """Return the value at this location."""
        if isinstance(self.owner, CellType):
            return self.owner.cell_contents
        if isinstance(self.owner, dict):
            return cast("dict[Any, Any]", self.owner).get(self.key, _MISSING)
        if isinstance(self.owner, list):
            return cast("list[Any]", self.owner)[self.key]
        return getattr(self.owner, self.key)

    def put(self, value: Any) -> None:
        """Put `value` at this location."""
        if isinstance(self.owner, CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, (dict, list)):
            if value is _MISSING:
                cast("Any", self.owner).pop(self.key, None)
            else:
                cast("Any", self.owner)[self.key] = value
        else:
            setattr(self.owner, self.key, value)


Replacement = tuple[Location, Any]


class Replaced(Restoring):
    """A context in which locations have other values; it puts back those that they had.

    The caller holds `LOCK` around it.
    """

    __slots__ = ("_before", "_values")

    def __init__(self, values: list[Replacement]) -> None:
        self._values = values
        self._before: list[Replacement] = []

    def __enter__(self) -> None:
        self._before = [(location, location.get()) for location, _ in self._values]
        for location, value in self._values:
            location.put(value)

    def restore(self) -> None:
        # In reverse, since a norm that is met twice is there twice.
        for location, value in reversed(self._before):
            location.put(value)
        self._before = []
