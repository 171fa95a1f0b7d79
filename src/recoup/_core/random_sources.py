"""Code that draws random numbers, and the sources that a second run cannot repeat.

NOTE [ Checked once ]

Rule 1. A region repeats draws from torch's default generators. A draw from a `torch.Generator` of
        the user, from Python's `random`, from numpy's global generator, or from a Python or numpy
        generator that is an attribute of a module would give another number in the second run, so
        it is an error in the first run.
Rule 2. The check costs a dispatch mode and two generator states. So code is checked in its first
        run in each mode (training or not), and trusted from then on. For how code is recognized
        see NOTE [ Code is recognized by what it wraps ]. A function that can reach a generator is
        checked in every first run, since it may be given another generator.
Rule 3. Generators that recoup makes come from a seed that is repeated; they are registered here.
Rule 4. Whether a network may draw follows from the network itself, never from its earlier runs: a
        resumed training does not know those, and has to draw the same numbers.
"""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import nn

from recoup._core.compile import never_compiled
from recoup._core.dispatch_modes import DispatchMode, InMode
from recoup.errors import ReplayError

__all__ = [
    "DETERMINISTIC",
    "draws_nothing",
    "generator_at_hand",
    "own_generator",
    "sources_checked",
]


class _Referable(torch.Generator):
    """A generator that supports weak references."""


# torch.Generator supports no weak references in torch 2.11. Where it does, it is used itself: the
# compiler knows only torch's own class.
_OwnGenerator = torch.Generator if torch.Generator.__weakrefoffset__ else _Referable
_own: weakref.WeakSet[torch.Generator] = weakref.WeakSet()
_own_lock = threading.Lock()
# Sets of references, since a WeakSet runs Python code at each look-up.
_checked: tuple[set[weakref.ref[Any]], set[weakref.ref[Any]]] = (set(), set())

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


def draws_nothing(module: nn.Module) -> bool:
    """Whether each module in `module` is known to draw nothing in its current mode (See Rule 4)."""
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
    def __init__(self) -> None:
        self.generators: dict[torch.device, torch.Generator] = {}


_local = _Local()


def generator_at_hand(device: torch.device, seed: int) -> torch.Generator:
    """Return a generator of this thread seeded with `seed`, to draw with at once (See Rule 3)."""
    generator = _local.generators.get(device)
    if generator is None:
        _local.generators[device] = generator = own_generator(device, seed)
    return generator.manual_seed(seed)


def own_generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a generator seeded with `seed`, which a region has recorded (See Rule 3)."""
    generator = _OwnGenerator(device)
    generator.manual_seed(seed)
    with _own_lock:  # the threads of one draw make generators, too
        _own.add(generator)
    return generator


def sources_checked(
    parts: Sequence[weakref.ref[Any]],
    name: str,
    *,
    is_training: bool,
    generators: Sequence[Any] = (),
) -> InMode | None:
    """Return a context that raises if a first run draws from elsewhere; None if checked before.

    Args:
        parts: weak references to what runs, all of it alive: the codes of functions, and the
            modules that they use, since the same code may run with other modules later.
        name: the name of the call in error messages.
        is_training: whether the code runs in training mode.
        generators: the generators other than torch's default ones that the code can reach.
    """
    checked = _checked[is_training]
    if not generators and checked.issuperset(parts):
        return None
    return _SourceCheck(tuple(part() for part in parts), generators, checked, name)


# The code that is checked may be the first that uses numpy's generators, which numpy imports only
# then. These are the positions of a generator that has drawn nothing yet.
_UNUSED = (623, 624)


class _SourceCheck(InMode):
    """A context that raises if the code within draws from a source that is not repeated."""

    def __init__(
        self,
        codes: tuple[Any, ...],
        generators: Sequence[Any],
        checked: set[weakref.ref[Any]],
        name: str,
    ) -> None:
        super().__init__(_Generators(name))
        self._codes = codes
        self._generators = [*generators]
        self._checked = checked
        self._name = name
        self._before: list[tuple[str, Any]] = []

    def __enter__(self) -> None:
        self._generators += _generators_in(self._codes)
        self._before = list(self._states())
        super().__enter__()

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        super().leave(kind, value, traceback)
        if kind is None:
            states = list(self._states())
            for (source, before), (_, now) in zip(self._before, states, strict=False):
                if now != before:
                    raise ReplayError(_message(self._name, source))
            if len(states) > len(self._before) and states[-1][1][1] not in _UNUSED:
                raise ReplayError(_message(self._name, states[-1][0]))
            self._checked.update(weakref.ref(code, self._checked.discard) for code in self._codes)

    def _states(self) -> Generator[tuple[str, Any]]:
        """Yield the sources that are not of torch, and their states."""
        yield "Python's `random`", random.getstate()
        for generator in self._generators:
            if isinstance(generator, random.Random):
                yield "a random.Random of its own", generator.getstate()
            elif hasattr(generator, "bit_generator"):
                yield "a numpy Generator of its own", repr(generator.bit_generator.state)
            elif not isinstance(generator, torch.Generator):  # a RandomState of numpy
                yield "a numpy Generator of its own", _numpy_state(generator)
        numpy = sys.modules.get("numpy.random")  # last, since the code may import it
        if numpy is not None:
            yield "numpy's global generator", _numpy_state(numpy)


def _generators_in(codes: tuple[Any, ...]) -> Generator[Any]:
    """Yield the generators of Python and numpy that are attributes of modules in `codes`."""
    numpy = sys.modules.get("numpy.random")
    kinds = (random.Random,) if numpy is None else (random.Random, numpy.Generator)
    for code in codes:
        for module in code.modules() if isinstance(code, nn.Module) else ():
            yield from (value for value in vars(module).values() if isinstance(value, kinds))


def _numpy_state(generator: Any) -> tuple[bytes, int, int]:
    _, words, position, has_normal, _ = generator.get_state()
    return words.tobytes(), position, has_normal


class _Generators(DispatchMode):
    """A mode that raises if an operator draws from another generator than torch's or ours."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._known = {_address(torch.default_generator)}
        if torch.cuda.is_initialized():
            self._known |= {_address(generator) for generator in torch.cuda.default_generators}

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        for value in (kwargs.get("generator"), *args):
            if isinstance(value, torch.Generator) and not self._is_known(value):
                raise ReplayError(_message(self._name, "a torch.Generator of its own"))
        return func(*args, **kwargs)

    def _is_known(self, generator: torch.Generator) -> bool:
        address = _address(generator)
        with _own_lock:
            return address in self._known or any(address == _address(mine) for mine in _own)


def _address(generator: Any) -> int:
    # An operator receives a new Python object for the same generator.
    return generator._cdata


def _message(name: str, source: str) -> str:
    return (
        f"{name} draws from {source}, which running it again would not repeat. Draw from torch's "
        'default generator, draw outside and pass the values in, or keep its residuals: "linear".'
    )
