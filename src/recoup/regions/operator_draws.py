"""Draws of operators, repeated one operator at a time and independent of any later draw.

NOTE [ One operator, one state ]

Rule 1. An operator draws from the generator that it is given, or from the default one of the device
        that it works on. It has drawn if the state of that generator has changed.
Rule 2. A draw keeps the state before it where that is not the one that the previous draw of the
        block left: at the first draw, and where other code seeded the generator or drew from it in
        between. A generator of the CPU that was only seeded is kept as its seed, 8 bytes.
Rule 3. The numbers come from a private generator in the same state, in forward too, since other
        threads may draw from the original one. An operator that takes no generator, or that works
        on a device for which torch makes none, draws from the default one, which is set to the
        state and restored afterwards. There a draw of another thread leaves another state behind
        than the first run did, which is an error.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recoup._core import devices
from recoup._core.devices import hash_of, same_states
from recoup._core.pytree import tensors_in
from recoup.errors import ReplayError

__all__ = ["Draw", "Draws"]

_lock = threading.RLock()  # blocks of several threads draw one after the other


class Draw(NamedTuple):
    """A draw: its generator, by address or device, its device, and its states (See Rule 2).

    Attributes:
        before: the state before it, or a seed; None if the previous draw left that state.
        after: the hash of the state after it.
    """

    stream: Any
    device: torch.device
    before: Tensor | int | None
    after: int


class Draws:
    """The generators that operators draw from, in one run of a block, and what is left of them."""

    def __init__(self) -> None:
        self._left: dict[Any, tuple[Any, Tensor]] = {}  # by address, which the generator holds

    def first(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Draw | None]:
        """Run an operator; return its result, and a `Draw` if it drew (See Rule 1)."""
        generator = kwargs.get("generator")
        stream: Any = None if generator is None else generator._cdata  # each call gets a new object
        device = generator.device if generator is not None else _device_of(args, kwargs)
        if device.type == "meta":
            return func(*args, **kwargs), None
        if generator is None:
            devices.refuse_draws(func, device)
            stream, generator = device, devices.default_generator(device)
        with _lock:
            before = generator.get_state()
            result, after = _run(func, args, kwargs, device, before)
            generator.set_state(after)
        if same_states((before,), (after,)):
            return result, None
        kept: Tensor | int | None = before
        if stream in self._left and same_states((self._left[stream][1],), (before,)):
            kept = None
        elif device.type == "cpu" and same_states((_seeded(generator.initial_seed()),), (before,)):
            kept = generator.initial_seed()
        self._left[stream] = generator, after
        return result, Draw(stream, device, kept, hash_of((after,)))

    def again(self, func: Any, args: Any, kwargs: dict[str, Any], draw: Draw | None) -> Any:
        """Run an operator so that it repeats its draw."""
        if draw is None:
            return func(*args, **kwargs)
        state = self._left[draw.stream][1] if draw.before is None else draw.before
        state = _seeded(state) if isinstance(state, int) else state
        result, after = _run(func, args, kwargs, draw.device, state)
        if hash_of((after,)) != draw.after:
            raise ReplayError(
                f"{func} drew other numbers in backward than in forward: its arguments changed, or "
                f"another thread drew from the default generator of {draw.device} at the same "
                "time. Draw in one thread at a time, or from a torch.Generator of its own in each."
            )
        self._left[draw.stream] = None, after
        return result


def _run(
    func: Any, args: Any, kwargs: dict[str, Any], device: torch.device, state: Tensor
) -> tuple[Any, Tensor]:
    """Run an operator from a state; return its result, and the state after it (See Rule 3)."""
    with_generator = _with_generator(func)
    if with_generator is not None and devices.makes_generators(device.type):
        ours = devices.own_generator(device, 0)
        ours.set_state(state)
        return with_generator(*args, **kwargs | {"generator": ours}), ours.get_state()
    default = devices.default_generator(device)
    with _lock:
        before = default.get_state()
        try:
            default.set_state(state)
            return func(*args, **kwargs), default.get_state()
        finally:
            default.set_state(before)


def _device_of(args: Any, kwargs: dict[str, Any]) -> torch.device:
    given = tensors_in((args, kwargs))
    return kwargs.get("device") or (given[0].device if given else torch.device("cpu"))


def _seeded(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed).get_state()


@cache
def _with_generator(func: Any) -> Any:
    """Return the overload of `func` that takes a generator, if there is one."""

    def arguments(of: Any) -> dict[str, str]:
        return {argument.name: str(argument.type) for argument in of._schema.arguments}

    own, packet = arguments(func), func.overloadpacket
    for overload in (func, *(getattr(packet, name) for name in packet.overloads())):
        theirs = arguments(overload)
        if theirs.get("generator") and own | {"generator": theirs["generator"]} == theirs:
            return overload
    return None
