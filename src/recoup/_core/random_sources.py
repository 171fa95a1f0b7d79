"""Sources of randomness that a second run cannot repeat.

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
"""

from __future__ import annotations

import random
import sys
import threading
import weakref
from collections.abc import Generator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from recoup._core.code_keys import Codes
from recoup._core.dispatch_modes import InMode
from recoup.errors import ReplayError

__all__ = ["looked_at", "own_generator"]


class _Referable(torch.Generator):
    """A generator that supports weak references."""


# torch.Generator supports no weak references in torch 2.11. Where it does, it is used itself: the
# compiler knows only torch's own class.
_OwnGenerator = torch.Generator if torch.Generator.__weakrefoffset__ else _Referable
_own: weakref.WeakSet[torch.Generator] = weakref.WeakSet()
_own_lock = threading.Lock()
_seen: dict[bool, weakref.WeakSet[Any]] = {False: weakref.WeakSet(), True: weakref.WeakSet()}


def own_generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a generator seeded with `seed`, which a region has recorded (See Rule 3)."""
    generator = _OwnGenerator(device)
    generator.manual_seed(seed)
    with _own_lock:  # the threads of one draw make generators, too
        _own.add(generator)
    return generator


def looked_at(
    code: object, modules: tuple[nn.Module, ...], is_training: bool, name: str
) -> InMode | None:
    """Return a context that raises if a first run draws from elsewhere; None if checked before.

    Args:
        code: a module, or the `Codes` of a function.
        modules: the modules that the code uses; the same code may run with other modules later.
        is_training: whether the code runs in training mode.
        name: the name of the call in error messages.
    """
    seen = _seen[is_training]
    codes: list[Any] = code.codes if isinstance(code, Codes) else [code]
    generators: list[Any] = code.generators if isinstance(code, Codes) else []
    if not generators and all(one in seen for one in codes) and all(m in seen for m in modules):
        return None
    return _Looking((*codes, *modules), generators, seen, name)


class _Looking(InMode):
    """A context that raises if the code within draws from a source that is not repeated."""

    def __init__(
        self, codes: tuple[Any, ...], generators: list[Any], seen: weakref.WeakSet[Any], name: str
    ) -> None:
        super().__init__(_Generators(name))
        self._codes = codes
        self._generators = generators
        self._seen = seen
        self._name = name
        self._python_before: Any = None
        self._numpy_before: Any = None
        self._own_before: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        numpy = sys.modules.get("numpy.random")
        self._python_before = random.getstate()
        self._numpy_before = None if numpy is None else _numpy_state(numpy)
        own: list[Any] = [g for g in self._generators if not isinstance(g, torch.Generator)]
        own.extend(_generators_in(self._codes))
        self._own_before = [(generator, _own_state(generator)) for generator in own]
        super().__enter__()

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        super().leave(kind, value, traceback)
        if kind is None:
            self._check()
            self._seen.update(self._codes)

    def _check(self) -> None:
        if random.getstate() != self._python_before:
            raise ReplayError(_message(self._name, "Python's `random`"))
        numpy = sys.modules.get("numpy.random")
        if self._numpy_before is not None and _numpy_state(numpy) != self._numpy_before:
            raise ReplayError(_message(self._name, "numpy's global generator"))
        for generator, before in self._own_before:
            if _own_state(generator) != before:
                kind = (
                    "random.Random" if isinstance(generator, random.Random) else "numpy Generator"
                )
                raise ReplayError(_message(self._name, f"a {kind} of its own"))


def _generators_in(codes: tuple[Any, ...]) -> Generator[Any]:
    """Yield the generators of Python and numpy that are attributes of modules in `codes`."""
    numpy = sys.modules.get("numpy.random")
    kinds = (random.Random,) if numpy is None else (random.Random, numpy.Generator)
    for code in codes:
        for module in code.modules() if isinstance(code, nn.Module) else ():
            yield from (value for value in vars(module).values() if isinstance(value, kinds))


def _own_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if not hasattr(generator, "bit_generator"):  # a RandomState of numpy
        return _numpy_state(generator)
    return repr(generator.bit_generator.state)


def _numpy_state(numpy: Any) -> tuple[bytes, int, int]:
    _, words, position, has_normal, _ = numpy.get_state()
    return words.tobytes(), position, has_normal


class _Generators(TorchDispatchMode):
    """A mode that raises if an operator draws from another generator than torch's or ours."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._known = {_address(torch.default_generator)}
        if torch.cuda.is_initialized():
            self._known |= {_address(generator) for generator in torch.cuda.default_generators}

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
