"""Draws that an operator repeats on its own, whatever was drawn since, and by whom.

NOTE [ One operator, one state ]

Rule 1. Around an operator that may draw, the generators that it may draw from are looked at. One
        that has moved was drawn from.
Rule 2. A stream is a generator as a block saw it. Its state is kept where it is not what the draw
        before has left: at the first draw, and where somebody seeded or drew in between. A
        generator that was only seeded is kept as its seed, 8 bytes.
Rule 3. A repeated draw comes from a generator of our own. Where an operator takes none, it finds
        the default one in that state, which is then put back; one operator at a time does that.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from recoup.errors import ReplayError
from recoup.residuals import seeds
from recoup.residuals.arguments import tensors_in

__all__ = ["Draw", "Redrawing", "Streams"]

_REPEATED = ("cpu", "cuda", "meta")
# Overloads that take a generator, by the names of those that take none.
_WITH_GENERATOR = {
    "default": "generator",
    "low": "low_generator",
    "low_dtype": "low_generator_dtype",
    "Tensor": "Tensor_generator",
}
_lock = threading.RLock()  # around the default generators


class _Stream:
    """A generator as a block saw it."""

    __slots__ = ("device",)

    def __init__(self, device: torch.device) -> None:
        self.device = device


class Draw(NamedTuple):
    """What an operator drew from, and where that stood if it does not follow (See Rule 2)."""

    stream: _Stream
    state: Tensor | int | None


class Streams:
    """The generators that the operators of a block draw from, as it runs."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[_Stream, torch.Generator, Tensor]] = {}

    def watch(
        self, name: str, run: Callable[[], Any], generator: torch.Generator | None
    ) -> tuple[Any, Draw | None]:
        """Run an operator that may draw; return its result, and what it drew (See Rule 1)."""
        watched = seeds._generators() if generator is None else (generator,)
        before = [each.get_state() for each in watched]
        result = run()
        moved = [
            (each, state)
            for each, state in zip(watched, before, strict=True)
            if not _same(state, each.get_state())
        ]
        if len(moved) > 1:
            raise ReplayError(
                f"{name} draws from two generators at once, which cannot be repeated. Call it "
                "before the block."
            )
        if moved:
            return result, self._draw(*moved[0])
        _check_device(name, result)
        return result, None

    def _draw(self, generator: torch.Generator, before: Tensor) -> Draw:
        key: int = cast(
            "Any", generator
        )._cdata  # operators get a new Python object for the same generator
        seen = self._seen.get(key)
        stream = _Stream(generator.device) if seen is None else seen[0]
        self._seen[key] = (stream, generator, generator.get_state())
        if seen is not None and _same(seen[2], before):
            return Draw(stream, None)
        return Draw(stream, _as_seed(generator, before))


def _same(a: Tensor, b: Tensor) -> bool:
    return seeds._bytes(a) == seeds._bytes(b)


def _as_seed(generator: torch.Generator, state: Tensor) -> Tensor | int:
    seed = generator.initial_seed()
    fresh = torch.Generator(generator.device).manual_seed(seed)
    return seed if _same(fresh.get_state(), state) else state


def _check_device(name: str, result: Any) -> None:
    """Raise where the generators are out of our sight."""
    first = next(tensors_in(result), None)
    if first is not None and first.device.type not in _REPEATED:
        raise ReplayError(
            f"{name} draws on {first.device.type}, whose generators are not known here, so it "
            "cannot be repeated. Draw before the block, or on the CPU."
        )


class Redrawing:
    """The generators of one repetition (See Rule 3)."""

    def __init__(self) -> None:
        self._generators: dict[_Stream, torch.Generator] = {}

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], draw: Draw) -> Any:
        """Run an operator that draws what it drew."""
        generator = self._generators.get(draw.stream)
        if generator is None:
            generator = self._generators[draw.stream] = torch.Generator(draw.stream.device)
        if isinstance(draw.state, int):
            generator.manual_seed(draw.state)
        elif draw.state is not None:
            generator.set_state(draw.state)
        with_generator = _with_generator(func)
        if with_generator is not None:
            return with_generator(*args, **kwargs | {"generator": generator})
        return _with_default(generator, lambda: func(*args, **kwargs))


@functools.cache
def _with_generator(func: Any) -> Any:
    """Return the overload of `func` that takes a generator, if there is one."""
    if any(argument.name == "generator" for argument in func._schema.arguments):
        return func
    name = _WITH_GENERATOR.get(func._overloadname, "")
    return getattr(func.overloadpacket, name, None) if name else None


def _with_default(generator: torch.Generator, run: Callable[[], Any]) -> Any:
    device = generator.device
    is_cuda = device.type == "cuda"
    default = torch.cuda.default_generators[device.index] if is_cuda else torch.default_generator
    with _lock:
        before = default.get_state()
        try:
            default.set_state(generator.get_state())
            result = run()
            generator.set_state(default.get_state())
        finally:
            default.set_state(before)
    return result
