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
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from recoup._core.deterministic import QUIET
from recoup._core.restoring import Restoring
from recoup.errors import ChangedError, ReplayError

__all__ = ["LOCK", "Guard", "is_in_place"]

_NOTHING = nullcontext()
_NUMBERS = frozenset((bool, int, float, complex, str))
_Mark = tuple[int, int]
_Entry = tuple[dict[str, Any], str, Tensor, _Mark]
LOCK = threading.RLock()  # threads may share a module whose state is put back


class Guard:
    """The parameters, buffers, modes and numbers of modules, as a first run leaves them."""

    __slots__ = ("_buffers", "_children", "_modes", "_norms", "_numbers", "_roots", "_tensors")

    def __init__(self, roots: tuple[nn.Module, ...]) -> None:
        self._roots = roots
        self._tensors: list[_Entry] = []
        self._buffers: list[_Entry] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        self._children: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []
        self._norms: list[Any] = []
        self._numbers: list[tuple[dict[str, Any], str, Any]] = []
        for root in roots:
            self._walk(root, is_sharded=False)

    def _walk(self, module: nn.Module, *, is_sharded: bool) -> None:
        # nn.Module.modules() builds names and a set of those seen; this takes a tenth of its time.
        # A module that is met twice is compared twice.
        self._modes.append((module, module.training))
        counts = isinstance(module, _NormBase) and module.training and module.track_running_stats
        if counts:
            self._norms.append(module)
        is_sharded = is_sharded or hasattr(type(module), "unshard")
        if module._parameters and not is_sharded:  # See Rule 4
            _note(module._parameters, self._tensors)
        if module._buffers and not counts:
            _note(module._buffers, self._buffers)
        if type(module) not in QUIET:  # torch's own modules do not change their attributes
            self._note_attributes(module.__dict__)
        own = module._modules
        for key, child in own.items():
            if child is not None:
                self._children.append((own, key, child))
                self._walk(child, is_sharded=is_sharded)

    def _note_attributes(self, own: dict[str, Any]) -> None:
        for key, value in own.items():
            kind = cast("type[Any]", type(value))
            if kind in _NUMBERS:
                if key != "training":
                    self._numbers.append((own, key, value))
            elif kind is Tensor and value.grad_fn is None:
                self._tensors.append((own, key, value, _mark_of(value)))

    @property
    def is_training(self) -> bool:
        """Whether any of the modules is in training mode."""
        return any(training for _, training in self._modes)

    def first_run_ended(self, name: str) -> None:
        """Record the versions that the first run left; raise if it changed a buffer."""
        for entries, key, value, mark in self._buffers:
            if entries.get(key) is not value or _mark_of(value) != mark:
                raise ReplayError(
                    f"{name} changes its buffer `{self._name_of(entries, key)}` in forward, so "
                    "running it again would not compute the same. Keep its residuals: "
                    'memory="linear", a schedule that tapes it in the sweep, or a plan whose '
                    "`blocks` leave it out."
                )
        # A flag that the first run has set says that something was done once (an initialization).
        if self._numbers:
            self._numbers = [
                (own, key, own.get(key) if type(value) is bool else value)
                for own, key, value in self._numbers
            ]
        # A tensor that the first run has replaced (a cache) is replaced by a second run too.
        for entries, key, value, mark in self._tensors:
            if entries.get(key) is not value or _mark_of(value) != mark:
                self._tensors = [
                    (entries, key, value, _mark_of(value))
                    for entries, key, value, _ in self._tensors
                    if entries.get(key) is value
                ]
                break

    def check(self, name: str) -> None:
        """Raise if anything was changed or replaced since the first run ended."""
        for entries, key, value, mark in (*self._tensors, *self._buffers):
            if entries.get(key) is not value:
                raise ChangedError(
                    f"`{self._name_of(entries, key)}` of {name} was replaced between forward "
                    "and backward, so running it again would compute something else. Run "
                    "backward before replacing it (inside `functional_call`, for instance)."
                )
            if _mark_of(value) != mark:
                raise ChangedError(
                    f"`{self._name_of(entries, key)}` of {name} was changed in place between "
                    "forward and backward, so running it again would compute something "
                    "else. Step the optimizer after backward has passed every use of it."
                )
        for own, key, child in self._children:
            if own.get(key) is not child:
                raise ChangedError(
                    f"`{key}`, a {type(child).__name__} in {name}, was replaced between forward "
                    "and backward, so running it again would compute something else. Replace it "
                    "after backward."
                )
        for module, training in self._modes:
            if module.training is not training:
                raise ChangedError(
                    f"{name} was in {'training' if training else 'evaluation'} mode in "
                    f"forward and {type(module).__name__} in it is not any more, so running it "
                    "again would compute something else. Call train() or eval() after backward."
                )

    def as_it_was(self) -> _AsItWas | None:
        """Return a context that restores numbers and stops norm statistics; None if not needed."""
        moved = [entry for entry in self._numbers if entry[0].get(entry[1]) != entry[2]]
        return _AsItWas(self._norms, moved) if self._norms or moved else None

    def counted(self) -> AbstractContextManager[object]:
        """Return a context for a first run: with norms, the lock that keeps second runs out."""
        return LOCK if self._norms else _NOTHING

    def _name_of(self, entries: dict[str, Any], key: str) -> str:
        for root in self._roots:
            for prefix, module in cast("Iterable[tuple[str, nn.Module]]", root.named_modules()):
                if any(
                    entries is own for own in (module._parameters, module._buffers, vars(module))
                ):
                    return f"{prefix}.{key}" if prefix else key
        return key


def is_in_place(module: nn.Module) -> bool:
    """Whether `module` says that the first thing it does changes its input in place."""
    while isinstance(module, nn.Sequential) and len(module):
        module = module[0]
    return bool(getattr(module, "inplace", False))


def _note(entries: dict[str, Any], found: list[_Entry]) -> None:
    for key, value in entries.items():
        if value is not None:
            found.append((entries, key, value, _mark_of(value)))


def _mark_of(tensor: Tensor) -> _Mark:
    """Return a mark that differs after a change in place or of the memory (``.data``)."""
    version = 0 if tensor.is_inference() else tensor._version
    kind = type(tensor)
    is_plain = (kind is nn.Parameter or kind is Tensor) and tensor.layout is torch.strided
    return version, tensor.data_ptr() if is_plain else 0


class _AsItWas(Restoring):
    lock = LOCK  # the caller holds it around the context

    __slots__ = ("_moved", "_norms", "_numbers", "_saved")

    def __init__(self, norms: list[Any], numbers: list[tuple[dict[str, Any], str, Any]]) -> None:
        super().__init__()
        self._norms = norms
        self._numbers = numbers
        self._saved: list[tuple[Any, Any, Any]] = []
        self._moved: list[tuple[dict[str, Any], str, Any]] = []

    def __enter__(self) -> None:
        self._saved = [(n, n.momentum, n._buffers["num_batches_tracked"]) for n in self._norms]
        self._moved = [(own, key, own.get(key)) for own, key, _ in self._numbers]
        for own, key, value in self._numbers:
            own[key] = value
        for norm in self._norms:
            norm.momentum = 0.0
            norm._buffers["num_batches_tracked"] = None

    def restore(self) -> None:
        # In reverse, since a norm that is met twice was saved twice.
        for norm, momentum, count in reversed(self._saved):
            norm.momentum = momentum
            norm._buffers["num_batches_tracked"] = count
        for own, key, value in self._moved:
            own[key] = value
        self._saved, self._moved = [], []
