"""Sources of randomness that a second run cannot repeat.

NOTE [ Looked at once ]

Rule 1. A region repeats what torch's default generators give. What comes from a `torch.Generator`
        of the caller's, from Python's `random`, from numpy's global generator or from one of theirs
        that is an attribute of a module would be another number in the second run, so that is an
        error, in the first run.
Rule 2. Looking costs a dispatch mode and two generator states. So a piece of code is looked at in
        its first run in each mode (training or not), and taken at its word from then on. Which
        code it is says NOTE [ Told by what is wrapped ]. Where a generator is in sight of a
        function, the function is looked at in every first run: it may be given another one.
Rule 3. Generators of our own are made from a seed that is repeated; they are known here.
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
    """A generator that weak references can be made to."""


# Those of torch 2.11 themselves take none; and the compiler knows torch's own class alone.
_OwnGenerator = torch.Generator if torch.Generator.__weakrefoffset__ else _Referable
_own: weakref.WeakSet[torch.Generator] = weakref.WeakSet()
_own_lock = threading.Lock()
_seen: dict[bool, weakref.WeakSet[Any]] = {False: weakref.WeakSet(), True: weakref.WeakSet()}


def own_generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a generator of `seed`, which a region has written down (See Rule 3)."""
    generator = _OwnGenerator(device)
    generator.manual_seed(seed)
    with _own_lock:  # threads of a draw make them, too
        _own.add(generator)
    return generator


def looked_at(
    code: object, modules: tuple[nn.Module, ...], is_training: bool, name: str
) -> InMode | None:
    """Around a first run: raise if it draws from elsewhere; None if it was looked at before.

    Args:
        code: a module, or the `Codes` of a function.
        modules: what the code uses: the same code may be run with other ones.
        is_training: the mode it runs in.
        name: what an error calls it.
    """
    seen = _seen[is_training]
    codes: list[Any] = code.codes if isinstance(code, Codes) else [code]
    generators: list[Any] = code.generators if isinstance(code, Codes) else []
    if not generators and all(one in seen for one in codes) and all(m in seen for m in modules):
        return None
    return _Looking((*codes, *modules), generators, seen, name)


class _Looking(InMode):
    """Around code that is looked at."""

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
    """Generators of Python and numpy that are attributes of the modules."""
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
    """Raises when an operator draws from a generator that is neither torch's default nor ours."""

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
    # An operator is given a new Python object for the same generator.
    return generator._cdata


def _message(name: str, source: str) -> str:
    return (
        f"{name} draws from {source}, which running it again would not repeat. Draw from torch's "
        'default generator, draw outside and pass the values in, or keep its residuals: "linear".'
    )
