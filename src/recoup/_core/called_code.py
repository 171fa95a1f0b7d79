"""The code that a call runs, as far as it can be found without running it.

NOTE [ Code is recognized by what it wraps ]

Rule 1. A `functools.partial`, a lambda or a bound method may be a new object in every call. It is
        recognized by what it wraps: a function by its code object, a module by itself, an object by
        the code of its class. The same holds for the functions in closures, defaults, arguments and
        attributes, since they decide what runs as well.
Rule 2. A generator of random numbers is not code: the next call may use another one, or none. It is
        reported, so that such a call can be checked every time.
Rule 3. This module keeps no reference to the codes it found. A caller that stores codes must hold
        them weakly.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._core.closure_values import MAX_DEPTH, MAX_ENTRIES

__all__ = ["CalledCode", "called_code", "captured_by"]

_WRAPPERS = (types.FunctionType, types.MethodType, functools.partial)
# Objects that outlive a call, so that each stands for itself.
_ITSELF = (type, types.BuiltinFunctionType, torch._ops.OperatorBase)


class CalledCode:
    """The codes that a call runs, and the generators of random numbers that it can reach.

    Attributes:
        codes: modules, code objects, classes and builtin functions.
        generators: generators of torch, Python and numpy, other than torch's default ones.
    """

    __slots__ = ("_kinds", "_seen", "codes", "generators")

    def __init__(self) -> None:
        self.codes: list[Any] = []
        self.generators: list[Any] = []
        self._seen: set[int] = set()  # the ids of codes and functions
        self._kinds = _kinds_of_generators("numpy.random" in sys.modules)

    def call(self, fn: Any, depth: int = 0) -> None:
        """Note the codes that calling `fn` runs (See Rule 1)."""
        if isinstance(fn, functools.partial):
            partial = cast("functools.partial[Any]", fn)
            self.call(partial.func, depth)
            self.values((*partial.args, *partial.keywords.values()), depth)
        elif isinstance(fn, types.MethodType):
            self.call(fn.__func__, depth)
            if isinstance(fn.__self__, type):
                self._note(fn.__self__)  # a class method: all of `autograd.Function` share one code
            else:
                self.values((fn.__self__,), depth)
        elif isinstance(fn, types.FunctionType):
            self._note(fn.__code__)
            # Two functions made by one decorator share a code, and hold different functions.
            captures = fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__
            if captures and id(fn) not in self._seen:
                self._seen.add(id(fn))
                self.values(captured_by(fn), depth)
        elif isinstance(fn, nn.Module):
            self._note(fn)
        elif isinstance(fn, _ITSELF):
            self._note(fn)
            self.values((getattr(fn, "__self__", None),), depth)
        else:
            kind = cast("type[Any]", type(fn))
            self._note(getattr(kind.__call__, "__code__", kind))
            self._attributes(fn, depth)

    def values(self, values: Iterable[Any], depth: int) -> None:
        """Note the callables and generators among `values`."""
        for value in values:
            if value is None or isinstance(value, (Tensor, str, int, float)):
                continue
            if isinstance(value, nn.Module):
                if depth < MAX_DEPTH:
                    self._note(value)
            elif isinstance(value, self._kinds):
                if not _is_default(value):
                    self.generators.append(value)
            elif depth >= MAX_DEPTH:
                continue
            elif isinstance(value, (tuple, list)):
                self.values(cast("list[Any]", value)[:MAX_ENTRIES], depth + 1)
            elif isinstance(value, dict):
                entries = list(cast("dict[Any, Any]", value).values())
                self.values(entries[:MAX_ENTRIES], depth + 1)
            elif callable(value):
                self.call(value, depth + 1)
            else:
                self._attributes(value, depth)

    def _attributes(self, value: Any, depth: int) -> None:
        kinds = (*_WRAPPERS, nn.Module, *self._kinds)
        entries = list(getattr(value, "__dict__", {}).values())[:MAX_ENTRIES]
        self.values([entry for entry in entries if isinstance(entry, kinds)], depth + 1)

    def _note(self, code: Any) -> None:
        if id(code) not in self._seen:
            self._seen.add(id(code))
            self.codes.append(code)


@functools.cache
def _kinds_of_generators(with_numpy: bool) -> tuple[type, ...]:
    own = (random.Random, torch.Generator)
    if not with_numpy:
        return own
    numpy = sys.modules["numpy.random"]
    return (*own, numpy.Generator, numpy.RandomState)


def called_code(fn: Any, arguments: Sequence[Any] = ()) -> CalledCode:
    """Return the codes that calling `fn` runs.

    Args:
        fn: the function, module or other callable.
        arguments: its arguments other than tensors.
    """
    found = CalledCode()
    found.call(fn)
    if arguments:
        found.values(arguments, 0)
    return found


def captured_by(fn: types.FunctionType) -> Iterator[Any]:
    """Yield what is in the closure and among the defaults of a function."""
    for cell in fn.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue
    yield from fn.__defaults__ or ()
    yield from (fn.__kwdefaults__ or {}).values()


def _is_default(generator: Any) -> bool:
    if not isinstance(generator, torch.Generator):
        return False
    known: list[Any] = [torch.default_generator]
    if torch.cuda.is_initialized():
        known.extend(torch.cuda.default_generators)
    # An operator receives a new Python object for the same generator.
    return any(cast("Any", generator)._cdata == each._cdata for each in known)
