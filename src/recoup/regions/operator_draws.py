"""Draws of operators, repeated one operator at a time and independent of any later draw.

NOTE [ One operator, one state ]

Rule 1. An operator draws from the generator that it is given, or from the default one of the device
        that it works on. It has drawn if the state of that generator has changed.
Rule 2. A stream stands for a generator that a block draws from. Its state is kept where it is not
        the one that the previous draw left: at the first draw, and where other code seeded it or
        drew from it in between. A generator that was only seeded is kept as its seed, 8 bytes.
Rule 3. The numbers come from a private generator in the same state, in forward too, since other
        threads may draw from the original one. An operator that takes no generator draws from the
        default one; a replay sets that one to the kept state and restores it afterwards.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from recoup._core.generators import same_states
from recoup._core.pytree import tensors_in
from recoup._core.random_sources import own_generator
from recoup.errors import ReplayError

__all__ = ["Draw", "DrawRecorder", "DrawReplayer"]

# Overloads that take a generator, by the names of those that take none.
_WITH_GENERATOR = {
    "default": "generator",
    "low": "low_generator",
    "low_dtype": "low_generator_dtype",
    "Tensor": "Tensor_generator",
}
_lock = threading.RLock()  # blocks of several threads draw one after the other


class _Stream:
    """A generator that a block draws from."""

    __slots__ = ("device",)

    def __init__(self, device: torch.device) -> None:
        self.device = device


class Draw(NamedTuple):
    """The stream that an operator drew from, and its state if it is kept (See Rule 2)."""

    stream: _Stream
    state: Tensor | int | None


class DrawRecorder:
    """The generators that the operators of a block draw from, as it runs."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[_Stream, torch.Generator, Tensor]] = {}

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Draw | None]:
        """Run an operator that may draw; return its result, and a `Draw` if it drew (Rule 1)."""
        generator = kwargs.get("generator")
        if generator is None:
            generator = _default(_device_of(func, args, kwargs))
        if generator is None:
            return func(*args, **kwargs), None
        with _lock:
            before = generator.get_state()
            with_generator = _with_generator(func)
            if with_generator is None:
                result = func(*args, **kwargs)
                after = generator.get_state()
            else:
                ours = own_generator(generator.device, 0)
                ours.set_state(before)
                result = with_generator(*args, **kwargs | {"generator": ours})
                after = ours.get_state()
                generator.set_state(after)
        if same_states((before,), (after,)):
            return result, None
        return result, self._noted(generator, before, after)

    def _noted(self, generator: torch.Generator, before: Tensor, after: Tensor) -> Draw:
        # Operators get a new Python object for the same generator.
        key: int = cast("Any", generator)._cdata
        seen = self._seen.get(key)
        stream = _Stream(generator.device) if seen is None else seen[0]
        self._seen[key] = (stream, generator, after)
        if seen is not None and same_states((seen[2],), (before,)):
            return Draw(stream, None)
        return Draw(stream, _as_seed(generator, before))


def _as_seed(generator: torch.Generator, state: Tensor) -> Tensor | int:
    seed = generator.initial_seed()
    fresh = own_generator(generator.device, seed)
    return seed if same_states((fresh.get_state(),), (state,)) else state


def _device_of(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device:
    device = kwargs.get("device")
    if device is None:
        given = tensors_in((args, kwargs))
        device = given[0].device if given else torch.device("cpu")
    if device.type not in ("cpu", "cuda", "meta"):
        raise ReplayError(
            f"{func} draws on {device.type}, whose generators recoup does not know, so the draw "
            "could not be repeated in backward. Draw before the block, or on the CPU."
        )
    return device


def _default(device: torch.device) -> torch.Generator | None:
    if device.type == "cuda":
        torch.cuda.init()
        return torch.cuda.default_generators[device.index]
    return torch.default_generator if device.type == "cpu" else None


class DrawReplayer:
    """The generators of one replay (See Rule 3)."""

    def __init__(self) -> None:
        self._generators: dict[_Stream, torch.Generator] = {}

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], draw: Draw) -> Any:
        """Run an operator so that it repeats `draw`."""
        generator = self._generators.get(draw.stream)
        if generator is None:
            generator = self._generators[draw.stream] = own_generator(draw.stream.device, 0)
        if isinstance(draw.state, int):
            generator.manual_seed(draw.state)
        elif draw.state is not None:
            generator.set_state(draw.state)
        with_generator = _with_generator(func)
        if with_generator is not None:
            return with_generator(*args, **kwargs | {"generator": generator})
        default = cast("torch.Generator", _default(generator.device))
        with _lock:
            before = default.get_state()
            try:
                default.set_state(generator.get_state())
                result = func(*args, **kwargs)
                generator.set_state(default.get_state())
            finally:
                default.set_state(before)
        return result


@functools.cache
def _with_generator(func: Any) -> Any:
    """Return the overload of `func` that takes a generator, if there is one."""
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    name = _WITH_GENERATOR.get(func._overloadname, "")
    return getattr(func.overloadpacket, name, None) if name else None
