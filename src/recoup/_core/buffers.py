"""The values of buffers, and of other attributes of modules, at an earlier time.

Threads may share a module, so one thread at a time has the turn to find or put other values in
buffers. Code within a turn may take a gradient, which on an accelerator runs regions in another
thread, while this one waits: they share the turn in which they were made.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from recoup._core.saved_tensors import set_versions, version_of
from recoup._core.sketch import Sketch, sketch_of
from recoup._core.sketch import are_equal as are_alike
from recoup._core.tensors import PLAIN, has_values

# The buffers of a module, or its attributes, and what they were at some time.
Buffers = tuple[dict[str, Tensor | None], dict[str, Tensor | None]]
Attributes = tuple[dict[str, Any], dict[str, Any]]


class Turn:
    """A turn to have other values in buffers."""

    lock = threading.Lock()
    current: Turn | None = None


class _Here(threading.local):
    turn: Turn | None = None


turn_here = _Here()


@contextmanager
def having_turn(of: Turn | None, *, is_needed: bool) -> Generator[Turn | None]:
    """Return a context that has the turn, if it is needed: this thread's, or that `of` a call."""
    around = turn_here.turn
    if not is_needed or around is not None:
        yield around
        return
    is_shared = of is not None and of is Turn.current
    with nullcontext() if is_shared else Turn.lock:
        turn_here.turn = Turn.current = of if is_shared else Turn()
        try:
            yield turn_here.turn
        finally:
            turn_here.turn = None
            Turn.current = of if is_shared else None


def all_of(buffers: Iterable[Buffers]) -> list[Tensor]:
    """Return the buffers that modules had."""
    return [each for _, before in buffers for each in before.values() if each is not None]


def copies_of_buffers(buffers: Iterable[Buffers]) -> list[tuple[Tensor, Tensor]]:
    """Return the buffers that modules had, with copies; without those of other layouts."""
    return copies_of(all_of(buffers))


def copies_of(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return tensors with copies; without those of other layouts."""
    return [
        (each, each.detach().clone())
        for each in tensors
        if not is_lazy(each) and each.layout is torch.strided
        if not each.is_nested and has_values(each)
    ]


def others_of(module: nn.Module) -> list[Tensor]:
    """Return the plain parameters of a module, and the tensors that are attributes of it."""
    values: list[Any] = [*vars(module).values(), *module._parameters.values()]
    return [each for each in values if type(each) in PLAIN and not is_lazy(each)]


def name_of_parameter(parameter: Tensor, modules: Iterable[nn.Module]) -> str:
    """Return the name of a parameter, in the first module that has it."""
    for module in modules:
        for name, each in module.named_parameters():
            if each is parameter:
                return f"`{name}` of {type(module).__name__}"
    return "a parameter"


def have_changed(
    tensors: Iterable[tuple[object, Tensor]], before: Sequence[Sketch | None]
) -> list[bool]:
    """Return which tensors, each of a module, have other values than when they were sketched."""
    now = [
        None if a is None else sketch_of(each) for (_, each), a in zip(tensors, before, strict=True)
    ]
    pairs = [
        [(a, b)] if a is not None and b is not None and not _has_nan(a) else []
        for a, b in zip(before, now, strict=True)
    ]
    if are_alike(chain.from_iterable(pairs)):  # which waits once for a device
        return [False] * len(pairs)
    return [not are_alike(each) for each in pairs]


def _has_nan(sketch: Sketch) -> bool:
    """Whether a sketch that is not on a device is unlike itself."""
    return isinstance(sketch, list) and any(map(math.isnan, sketch))


def are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values."""
    try:
        return torch.equal(a, b)
    except NotImplementedError:  # of types of a few bits
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def are_assigned(found: Attributes) -> bool:
    """Whether a module has other objects as its buffers, or attributes, now."""
    own, before = found
    return [*map(id, own.values())] != [*map(id, before.values())]


def are_own(found: Attributes) -> bool:
    """Whether these are plain tensors, so that FSDP2 has not put others in their places."""
    return {type(each) for own in found for each in own.values()} <= {*PLAIN, type(None)}


def assign(found: Iterable[Attributes]) -> None:
    """Let modules have the buffers, or attributes, that they had.

    What is the same stays all the while: other threads may be reading it.
    """
    for own, before in found:
        for name in own.keys() - before.keys():
            del own[name]
        for name, value in before.items():
            if name not in own or own[name] is not value:
                own[name] = value


def put_values(buffers: list[Tensor], values: list[Tensor]) -> None:
    """Give buffers other values, without a trace in their versions."""
    if not buffers:
        return
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            if buffer.shape != value.shape:  # an observer that takes its size in the first run
                version = version_of(buffer)
                set_versions((buffer.resize_(value.shape),), (version,))
        # `data` has versions of its own: other threads may look at those of the buffers now.
        cast("Any", torch)._foreach_copy_([buffer.data for buffer in buffers], values)
