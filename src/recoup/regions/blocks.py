"""`recoup.recomputing` and `recoup.offloading`: blocks of code that keep less."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from recoup._arguments import check_flag
from recoup._core.compile import ComputedAgain, is_followed, is_watched, never_compiled, uncompiled
from recoup._core.devices import accelerator, refuse_capture
from recoup._core.offload import Traffic, existing_folder, tier_for
from recoup._core.operators import InMode
from recoup._core.rng import is_run_again
from recoup._core.saved_tensors import (
    Kept,
    Packed,
    Pair,
    current,
    is_transformed,
    pair_in_force,
    saving,
)
from recoup.errors import RecoupError
from recoup.memory import parse_bytes
from recoup.regions.recorder import OpRecorder


class _Entered(threading.local):
    def __init__(self) -> None:
        self.contexts: list[AbstractContextManager[object]] = []


_entered = _Entered()


class Block:
    """A context that may be entered any number of times, also while it is in use.

    It does nothing where no gradient is recorded.

    Args:
        make: makes the context of one `with` statement.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        (uncompiled(Block._enter) if is_watched() else Block._enter)(self)

    @never_compiled
    def __exit__(self, *error: Any) -> None:
        _entered.contexts.pop().__exit__(*error)

    @never_compiled
    def _enter(self) -> None:
        is_grad_enabled = torch.is_grad_enabled()
        if is_grad_enabled and accelerator() is not None:
            refuse_capture()
        context = self._make() if is_grad_enabled else nullcontext()
        context.__enter__()
        _entered.contexts.append(context)


def _refuse_transforms(function: str) -> None:
    if is_transformed():
        raise RecoupError(
            f"{function}() does not work inside transforms of torch.func (grad, vmap, jacrev), "
            "which do not support saved tensor hooks. Leave it out there."
        )


_PASSED_OVER = ("recoup", "torch")


def recomputing(*, compare: bool = True) -> AbstractContextManager[None]:
    """Return a context whose values are not kept, even if a later operator would save them.

    Kept: the tensors from outside that operators within take, and the random state that the first
    draw found (5 KB). Backward runs the operators that it needs again, once, when it asks for the
    first value of the block. They repeat their results and draws, whatever happened to a seed or
    generator since.

    Some memory is kept nevertheless, for correctness: memory that is allocated within and not
    overwritten as a whole by an operator (a custom kernel may have written to it); data received
    from other processes; and, for a tensor from before the block that is changed in place within
    it, a copy from before the change (the statistics of a batch norm, which are updated only once).

    What a replay makes is compared with what the first run made, by sketches (weighted sums over
    all entries) of the last value that was saved and of those that come out, which cost about as
    much as a plain sum each. So a change that no version counter shows (by a fused optimizer or by
    numpy), and an operator that reads a clock, are errors.

    In a graph of torch.compile the compiler computes again, in backward, what the block made; there
    its tensors are ordinary ones.

    Args:
        compare: whether replays are compared with the first run: leave it out where kernels within
            are not deterministic, or where hooks around the block keep tensors with a loss.

    Returns:
        A context manager. It does nothing where no gradient is recorded. Blocks may be nested, and
        any number of them may be in use. Tensors that come out of it are of a subclass of `Tensor`,
        which lets recoup see the operators that take them; an `autograd.Function` that saves one
        keeps it.

    Raises:
        ChangedError: in backward, when a tensor that the block took, or one that it made, was
            changed in place after it had been used.
        ReplayError: when backward is called after an exception in the block; when an operator
            within cannot be repeated; in backward, when a replay makes other values than the first
            run, or when another thread draws at the same time from a default generator that an
            operator needs.
        RecoupError: inside a transform of torch.func.

    Example:
        >>> import recoup, torch
        >>> weight, x = torch.ones(3, 3, requires_grad=True), torch.ones(2, 3)
        >>> with recoup.recomputing():
        ...     noisy = weight + 0.1 * torch.randn_like(weight)
        >>> y = torch.nn.functional.linear(x, noisy)  # keeps x, weight and a random state
        >>> y.sum().backward()
        >>> weight.grad.shape
        torch.Size([3, 3])

    Source: "Gradient checkpointing for weight noise etc",
    https://github.com/rwth-i6/returnn/issues/1552.
    """
    if is_followed():
        return ComputedAgain()
    check_flag(compare=compare)
    return (uncompiled(_recomputed) if is_watched() else _recomputed)(compare)


def _recomputed(compare: bool) -> AbstractContextManager[None]:
    name = f"the block at {_place_in_code()}"
    return Block(partial(_recorded, name, compare))


def _place_in_code() -> str:
    """Return the file and line of the code that called recoup."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PASSED_OVER:
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


@contextmanager
def _recorded(name: str, compare: bool) -> Generator[None]:
    """Record the code of one `with` statement."""
    _refuse_transforms("recoup.recomputing")
    recorder = OpRecorder(name, pair_in_force(), compare=compare)
    try:
        with saving(recorder.pack), InMode(recorder):
            yield
        recorder.finish()
    finally:
        recorder.close()


def offloading(
    min_bytes: int | str = "1 MiB",
    to: str | os.PathLike[str] = "host",
    *,
    in_flight_bytes: int | str | None = None,
) -> AbstractContextManager[None]:
    """Return a context whose residuals wait in host memory, or in a folder, until backward.

    Kept: what is smaller than `min_bytes`, parameters, and the bytes in flight; everything else
    that autograd saves leaves the memory of the device. Copies run behind the computation. Each
    storage moves once, however many operators saved it, when no other code has it any more, or
    where the context is left. Backward fetches the tensors in the reverse order, each before it is
    asked for. It waits only where copying is slower than computing. A tensor that is still leaving
    when backward asks for it is taken from memory.

    On an accelerator, "host" is host memory, pinned where torch can, and copies run on a stream of
    their own. Tensors on the CPU, or on a device without streams (MPS), are in host memory already,
    so "host" leaves them where they are; give a folder on a fast disk to move them out of memory.
    Its file has no name and is deleted whatever becomes of the process. Tensors that other code
    holds anyway (a batch, the buffers of a module) are copied too if they are large, and save
    nothing.

    Within a call that runs again (`recoup.checkpoint`, torch's checkpoint) nothing is kept, so the
    context does nothing there; around such calls it moves what they keep, their inputs.

    Args:
        min_bytes: the least bytes of a storage that moves, such as ``"1 MiB"``.
        to: "host", or a folder that exists.
        in_flight_bytes: the bound on bytes of tensors that are being copied, or were fetched before
            backward asked for them; a storage that is larger moves alone. None for twice the
            largest storage.

    Returns:
        A context manager. It does nothing where no gradient is recorded. Any number may be in use;
        the innermost one moves what is saved.

    Raises:
        ValueError: `min_bytes` or `in_flight_bytes` is no number of bytes, or `to` is neither
            "host" nor a folder.
        OffloadError: where the context is left, when the folder cannot take what was to be moved.
            What could not be moved is in memory, so that backward still works.
        ChangedError: in backward, when a tensor was changed in place before it had left.
        RecoupError: inside a transform of torch.func.

    Example:
        >>> import recoup, tempfile, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU())
        >>> x = torch.ones(1024, 256)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with recoup.offloading("512 KiB", to=folder):
        ...         loss = model(x).sum()
        ...     loss.backward()

    Source: `torch.autograd.graph.save_on_cpu`, which copies without overlap; "Activation
    offloading", https://github.com/pytorch/torchtitan/issues/2379.
    """
    return (uncompiled(_away) if is_watched() else _away)(min_bytes, to, in_flight_bytes)


def _away(
    min_bytes: int | str, to: str | os.PathLike[str], in_flight_bytes: int | str | None
) -> AbstractContextManager[None]:
    least = _bytes("min_bytes", min_bytes)
    bound = None if in_flight_bytes is None else _bytes("in_flight_bytes", in_flight_bytes)
    place = to if to == "host" else existing_folder(to)
    if place is None:
        raise ValueError(
            f"`to` is {to!r}, which is no folder. Make the folder first, on a disk with room "
            'for what the step keeps, or give "host".'
        )
    return Block(partial(_sending_away, least, str(place), bound))


def _bytes(name: str, value: int | str) -> int:
    found = parse_bytes(value, name=name)
    if found < 1:
        raise ValueError(f"`{name}` is {value!r}, but it must be at least 1 byte.")
    return found


@contextmanager
def _sending_away(min_bytes: int, to: str, in_flight_bytes: int | None) -> Generator[None]:
    """Let the tensors that autograd saves go away."""
    if is_run_again():  # nothing is kept anyway
        yield
        return
    _refuse_transforms("recoup.offloading")
    traffic = Traffic(tier_for(to), in_flight_bytes, min_bytes)
    with saving(partial(_pack, traffic, pair_in_force())):
        yield
    traffic.raise_failure(to)


@never_compiled
def _pack(traffic: Traffic, beneath: Pair | None, tensor: Tensor) -> Packed:
    """Return what autograd holds in place of `tensor`; what stays goes to the pair `beneath`."""
    name = f"A tensor of shape {tuple(tensor.shape)} that was saved for backward"
    away = traffic.send(tensor, name, at_save=True)
    if away is None:
        return Kept(tensor, name, beneath)
    if current.observer is not None:
        current.observer.saved(tensor, away, "offload")
    return away
