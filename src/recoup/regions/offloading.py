"""`recoup.offloading`: blocks of code whose residuals wait in another memory for backward."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from torch import Tensor

from recoup._core.compile import is_watched, never_compiled, uncompiled
from recoup._core.offload import Traffic
from recoup._core.rng import is_run_again
from recoup._core.save_observer import current
from recoup._core.saved_tensors import Kept, Packed, Pair, pair_in_force, saving
from recoup._core.tiers import existing_folder, tier_for
from recoup.memory import parse_bytes
from recoup.regions.blocks import Block, refuse_transforms

__all__ = ["offloading"]


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
    return (uncompiled(_here) if is_watched() else _here)(min_bytes, to, in_flight_bytes)


def _here(
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
    refuse_transforms("recoup.offloading")
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
