"""What is alive: after a forward, at the worst moment of a backward, and when all is over."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from recoup._core import lazy_values as values
from recoup._core.storage_tracking import StorageTracker
from tests.oracle import tensors


def allocated_bytes(fn: Callable[[], Any]) -> tuple[int, int]:
    """Peak and final running sum of the allocations and frees that torch's profiler sees."""
    kinds = [ProfilerActivity.CPU]
    with profile(activities=kinds, profile_memory=True, acc_events=True) as profiler:
        fn()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    running, peak = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        running += event.nbytes()
        peak = max(peak, running)
    return peak, running


@contextmanager
def no_collector() -> Iterator[None]:
    """Without the garbage collector: what is freed within is freed by its last reference."""
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Held(NamedTuple):
    """The bytes of storages that forward made and that live on, with its output."""

    num_bytes: int
    cast_bytes: int  # of these, of copies of weights in another type, which autocast makes


class _Casts(TorchDispatchMode):
    def __init__(self, originals: Iterable[Tensor]) -> None:
        super().__init__()
        self._originals = {tensor.untyped_storage()._cdata for tensor in originals}
        self._made: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, copy = func(*args, **(kwargs or {})), torch.ops.aten._to_copy.default
        if func is copy and args[0].untyped_storage()._cdata in self._originals:
            self._made.append(weakref.ref(result.untyped_storage()))
        return result

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for ref in self._made if (storage := ref()) is not None)


def held_after(run: Any, weights: Iterable[Tensor] = (), around: Any = nullcontext) -> Held:
    """What the graph of `run()` holds, beside what was there before."""
    with StorageTracker() as tracker, _Casts(weights) as casts:
        with around():
            output = run()
        held = Held(tracker.current_bytes, casts.num_bytes)
    del output
    return held


class Step(NamedTuple):
    forward_peak: int
    held: int
    backward_peak: int
    left: int


def step_of(module: nn.Module, inputs: Any, *, around=nullcontext, with_gradients=True) -> Step:
    """Run a step; gradients are there before it, or else go with it."""
    leaves = [*module.parameters(), *(x for x in inputs if x.requires_grad)]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf) if with_gradients else None
    with no_collector(), StorageTracker() as tracker:
        with around():
            output = module(*inputs)
        # A loss of its own type for each output: sums keep nothing.
        loss = sum(part.sum() for part in tensors(output) if part.is_floating_point())
        del output
        forward_peak, held = tracker.peak_bytes, tracker.current_bytes
        tracker.peak_bytes = held
        loss.backward()
        del loss
        for leaf in [] if with_gradients else leaves:
            leaf.grad = None
        return Step(forward_peak, held, tracker.peak_bytes, tracker.current_bytes)


@contextmanager
def counting_remade() -> Iterator[SimpleNamespace]:
    """Count the values made again within, and how many of them live at once."""
    found, give = SimpleNamespace(num_made=0, most_alive=0), values.Source.give
    alive: list[weakref.ref[torch.UntypedStorage]] = []

    def counted(source: values.Source, made: Tensor) -> None:
        give(source, made)
        alive[:] = [ref for ref in alive if ref() is not None]
        alive.append(weakref.ref(made.untyped_storage()))
        found.num_made += 1
        found.most_alive = max(found.most_alive, len(alive))

    with mock.patch.object(values.Source, "give", counted):
        yield found


def histories(module: nn.Module) -> list[Tensor]:
    """The tensors with a history that can be reached from what belongs to `module`."""
    found: list[Tensor] = []
    seen: dict[int, Any] = {}
    todo: list[Any] = [module.__dict__]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (type, ModuleType)):
            continue
        seen[id(value)] = value  # alive, or another object might get its id
        if isinstance(value, Tensor):
            found += [value] if value.grad_fn is not None else []
        elif isinstance(value, FunctionType):  # without its globals
            todo += [value.__closure__, value.__defaults__]
        else:
            todo += gc.get_referents(value)
    return found
