"""What a second run of a module must find as the first one left it.

NOTE [ Correct or an error ]

Rule 1. Parameters, buffers and the training mode of a region's modules are compared before it
        runs again: the same tensors, unchanged since the end of the first run. (A first run may
        change them itself: a data-dependent start does.)
Rule 2. Statistics of batch and instance norms are counted in the first run only.
Rule 3. Any other buffer that a first run changes may change what a second run computes, so that
        is an error at once, in the first run.
Rule 4. Sharded modules (FSDP2) put other parameters in place of their own for the time of a run,
        so theirs are not compared.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from recoup.errors import ChangedError, ReplayError

__all__ = ["Guard", "is_in_place"]

_NOTHING = nullcontext()
_norms_lock = threading.RLock()  # threads may share a norm, and holding still changes it


class Guard:
    """The parameters, buffers and modes of `modules`, compared before a second run."""

    __slots__ = ("_buffers", "_modes", "_norms", "_parameters", "_roots")

    def __init__(self, roots: tuple[nn.Module, ...]) -> None:
        self._roots = roots
        self._parameters: list[tuple[dict[str, Any], str, Tensor, int]] = []
        self._buffers: list[tuple[dict[str, Any], str, Tensor, int]] = []
        self._modes: list[tuple[nn.Module, bool]] = []
        self._norms: list[Any] = []
        for root in roots:
            self._walk(root)

    def _walk(self, module: nn.Module, is_sharded: bool = False) -> None:
        # nn.Module.modules() builds names and a set of the seen; this is a tenth of its time.
        # A module that is met twice is compared twice.
        self._modes.append((module, module.training))
        counts = isinstance(module, _NormBase) and module.training and module.track_running_stats
        if counts:
            self._norms.append(module)
        is_sharded = is_sharded or hasattr(module, "unshard")
        entries = module._parameters
        for key, value in entries.items():
            if value is not None and not is_sharded:  # See Rule 4
                self._parameters.append((entries, key, value, value._version))
        if not counts:
            entries = module._buffers
            for key, value in entries.items():
                if value is not None:
                    self._buffers.append((entries, key, value, value._version))
        entries = module.__dict__  # a tensor that is neither, as an attribute
        for key, value in entries.items():
            if type(value) is Tensor:
                self._parameters.append((entries, key, value, value._version))
        for child in module._modules.values():
            if child is not None:
                self._walk(child, is_sharded)

    @property
    def is_training(self) -> bool:
        """Whether any of the modules is in training mode."""
        return any(training for _, training in self._modes)

    def first_run_ended(self, name: str) -> None:
        """Take the versions that the first run left; raise if it changed a buffer."""
        for entries, key, value, version in self._buffers:
            if entries.get(key) is not value or value._version != version:
                raise ReplayError(
                    f"{name} changes its buffer `{self._name_of(entries, key)}` in forward, "
                    "so running it again would not compute the same. Keep its residuals: "
                    'memory="linear", or a schedule that tapes this stage in the sweep.'
                )
        parameters = self._parameters
        for place, (entries, key, value, version) in enumerate(parameters):
            if value._version != version:
                parameters[place] = (entries, key, value, value._version)

    def check(self, name: str) -> None:
        """Raise if anything is not as the first run left it."""
        for entries, key, value, version in (*self._parameters, *self._buffers):
            if entries.get(key) is not value:
                raise ChangedError(
                    f"`{self._name_of(entries, key)}` of {name} was replaced between forward "
                    "and backward, so running it again would compute something else. Run "
                    "backward before replacing it (inside `functional_call`, for instance)."
                )
            if value._version != version:
                raise ChangedError(
                    f"`{self._name_of(entries, key)}` of {name} was changed in place between "
                    "forward and backward, so running it again would compute something "
                    "else. Step the optimizer after backward has passed every use of it."
                )
        for module, training in self._modes:
            if module.training is not training:
                raise ChangedError(
                    f"{name} was in {'training' if training else 'evaluation'} mode in "
                    f"forward and {type(module).__name__} in it is not any more, so running it "
                    "again would compute something else. Call train() or eval() after backward."
                )

    def counted(self) -> AbstractContextManager[object]:
        """Around a first run, in which norms count: no other thread holds them still meanwhile."""
        return _norms_lock if self._norms else _NOTHING

    def uncounted(self) -> AbstractContextManager[None]:
        """Hold the running statistics of norms still (See Rule 2)."""
        return _held_still(self._norms) if self._norms else _NOTHING

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


@contextmanager
def _held_still(norms: list[Any]) -> Generator[None]:
    with _norms_lock:
        yield from _still(norms)


def _still(norms: list[Any]) -> Generator[None]:
    saved = [(norm, norm.momentum, norm._buffers["num_batches_tracked"]) for norm in norms]
    try:
        for norm in norms:
            norm.momentum = 0.0
            norm._buffers["num_batches_tracked"] = None
        yield
    finally:
        # In reverse, since a norm that is met twice was saved twice.
        for norm, momentum, count in reversed(saved):
            norm.momentum = momentum
            norm._buffers["num_batches_tracked"] = count
