"""The states of torch's default generators, on all devices."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
States = tuple[Tensor, ...]
_cpu_state = torch.default_generator.get_state


@functools.cache
def _accelerator() -> Any:
    """Return the module of the accelerator of this machine; None without one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else torch.get_device_module(device)


def _is_in_use(module: Any) -> bool:
    """Whether an accelerator was initialized; MPS always is."""
    return module is not None and (not hasattr(module, "is_initialized") or module.is_initialized())


def generator_states() -> States:
    """Return the states of the default generators."""
    module = _accelerator()
    if module is None or not _is_in_use(module):
        return (_cpu_state(),)
    # All devices, since a region may draw on one that is not the current device.
    return (_cpu_state(), *map(module.get_rng_state, range(torch.accelerator.device_count())))


def set_generator_states(states: States) -> None:
    """Set the states of the default generators."""
    torch.default_generator.set_state(states[0])
    for index, state in enumerate(states[1:]):
        _accelerator().set_rng_state(state, index)


@functools.cache
def _array_type(num_bytes: int) -> Any:
    """Return the type of an array of bytes; each new one would be a reference cycle."""
    return ctypes.c_char * num_bytes


def same_states(a: States, b: States) -> bool:
    """Whether two states are equal, so that nothing was drawn in between."""
    # A device that was initialized in between counts as unchanged: it has no state to replay.
    for x, y in zip(a, b, strict=False):
        # torch.equal takes four times as long for the 5 KB of a state, in every region.
        kind = _array_type(x.numel())
        if kind.from_address(x.data_ptr()).raw != kind.from_address(y.data_ptr()).raw:
            return False
    return True


def fingerprint() -> int:
    """Return a hash of the state of the default CPU generator."""
    state = torch.default_generator.get_state()
    return hash(ctypes.string_at(state.data_ptr(), state.numel()))


def hash_of(states: States) -> int:
    """Return a hash of the states of generators."""
    return hash(tuple(ctypes.string_at(each.data_ptr(), each.numel()) for each in states))


class generators_restored:  # noqa: N801 - it reads as what it does
    """A context after which the default generators have the states from before it.

    Attributes:
        states: the states that they will have.
    """

    states: States

    def __enter__(self) -> Self:
        self.states = generator_states()
        return self

    def __exit__(self, *error: object) -> None:
        set_generator_states(self.states)


def own_generator(device: torch.device, seed: int) -> torch.Generator:
    """Return a new generator seeded with `seed`."""
    return torch.Generator(device).manual_seed(seed)


def with_seed(call: Callable[[], T], seed: int) -> T:
    """Run `call` with the default generators seeded with `seed`, and restore them after it."""
    with generators_restored():
        seed_generators(seed)
        return call()


def seed_generators(seed: int) -> None:
    """Seed the default generators."""
    torch.default_generator.manual_seed(seed)
    module = _accelerator()
    if _is_in_use(module):
        getattr(module, "manual_seed_all", module.manual_seed)(seed)
