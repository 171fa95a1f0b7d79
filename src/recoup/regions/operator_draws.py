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

import ctypes
import inspect
import threading
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recoup._core.generators import own_generator
from recoup._core.pytree import tensors_in
from recoup.errors import ReplayError

__all__ = ["Draw", "DrawRecorder", "DrawReplayer"]

_WITH_GENERATORS = ("cpu", "cuda")  # devices for which torch makes generators
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


class DrawRecorder:
    """The generators that the operators of a block draw from, as it runs."""

    def __init__(self) -> None:
        self._last: dict[Any, tuple[Any, bytes]] = {}  # generators, and what was left of them

    def run(
        self, func: Any, args: Any, kwargs: dict[str, Any], *, may_draw: bool
    ) -> tuple[Any, Draw | None]:
        """Run an operator; return its result, and a `Draw` if it drew (See Rule 1)."""
        if not may_draw:
            return func(*args, **kwargs), None
        generator = kwargs.get("generator")
        # An operator gets a new Python object for the same generator.
        stream = _device_of(args, kwargs) if generator is None else generator._cdata
        if generator is None and stream.type != "meta":
            generator = _default(stream, func)
        if generator is None:
            return func(*args, **kwargs), None
        with _lock:
            before = generator.get_state()
            result, after = _run(func, args, kwargs, generator.device, before)
            generator.set_state(after)
        bytes_before, bytes_after = _bytes(before), _bytes(after)
        if bytes_before == bytes_after:
            return result, None
        kept: Tensor | int | None = None
        if self._last.get(stream, (None, b""))[1] != bytes_before:
            is_cpu = generator.device.type == "cpu"
            seed: int = generator.initial_seed() if is_cpu else 0
            kept = seed if is_cpu and _bytes(_seeded(seed)) == bytes_before else before
        self._last[stream] = generator, bytes_after
        return result, Draw(stream, generator.device, kept, hash(bytes_after))


class DrawReplayer:
    """The states of the generators in one replay."""

    def __init__(self) -> None:
        self._states: dict[Any, Tensor] = {}

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], draw: Draw | None) -> Any:
        """Run an operator so that it repeats its draw."""
        if draw is None:
            return func(*args, **kwargs)
        state = self._states[draw.stream] if draw.before is None else draw.before
        state = _seeded(state) if isinstance(state, int) else state
        result, after = _run(func, args, kwargs, draw.device, state)
        if hash(_bytes(after)) != draw.after:
            raise ReplayError(
                f"{func} drew other numbers in backward than in forward: its arguments changed, or "
                f"another thread drew from the default generator of {draw.device} at the same "
                "time. Draw in one thread at a time, or from a torch.Generator of its own in each."
            )
        self._states[draw.stream] = after
        return result


def _run(
    func: Any, args: Any, kwargs: dict[str, Any], device: torch.device, state: Tensor
) -> tuple[Any, Tensor]:
    """Run an operator from a state; return its result, and the state after it (See Rule 3)."""
    with_generator = _with_generator(func)
    if with_generator is not None and device.type in _WITH_GENERATORS:
        ours = own_generator(device, 0)
        ours.set_state(state)
        return with_generator(*args, **kwargs | {"generator": ours}), ours.get_state()
    default = _default(device, func)
    with _lock:
        before = default.get_state()
        try:
            default.set_state(state)
            return func(*args, **kwargs), default.get_state()
        finally:
            default.set_state(before)


def _default(device: torch.device, func: Any) -> Any:
    """Return the default generator of a device, or what has its methods."""
    if device.type == "cpu":
        return torch.default_generator
    try:
        module = torch.get_device_module(device)
        read, write = module.get_rng_state, module.set_rng_state
    except (RuntimeError, AttributeError):
        raise ReplayError(
            f"{func} draws on {device.type}, whose torch module has no `get_rng_state` and "
            "`set_rng_state` to repeat it in backward. Draw before the block, or on the CPU."
        ) from None
    where = (device,) if inspect.signature(read).parameters else ()  # MPS has one device
    return SimpleNamespace(
        device=device,
        get_state=partial(read, *where),
        set_state=lambda state: write(state, *where),  # type: ignore[reportUnknownLambdaType]
    )


def _device_of(args: Any, kwargs: dict[str, Any]) -> torch.device:
    given = tensors_in((args, kwargs))
    return kwargs.get("device") or (given[0].device if given else torch.device("cpu"))


def _seeded(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def _bytes(state: Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


@cache
def _with_generator(func: Any) -> Any:
    """Return the overload of `func` that takes a generator, if there is one."""
    arguments = _arguments(func)
    if "generator" in arguments:
        return func
    packet = func.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        others = _arguments(overload)
        if others.pop("generator", None) is not None and others == arguments:
            return overload
    return None


def _arguments(func: Any) -> dict[str, str]:
    return {argument.name: str(argument.type) for argument in func._schema.arguments}
