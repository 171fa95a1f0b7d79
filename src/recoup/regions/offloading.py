"""`recoup.offloading`: blocks of code whose residuals wait in another memory for backward."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from recoup._core.compile import is_watched, never_compiled, uncompiled
from recoup._core.offload import Traffic, can_move
from recoup._core.restoring import Restoring, Reusable
from recoup._core.rng import is_run_again
from recoup._core.save_observer import current
from recoup._core.saved_tensors import Kept, Packed, Pair, is_transformed, pair_in_force, saving
from recoup._core.tiers import Tier, existing_folder, tier_for
from recoup.errors import RecoupError
from recoup.memory import parse_bytes

__all__ = ["Offloading", "offloading"]


def offloading(
    min_bytes: int | str = "1 MiB",
    to: str | os.PathLike[str] = "host",
    *,
    in_flight_bytes: int | str | None = None,
) -> AbstractContextManager[None]:
    """Return a context whose residuals wait in host memory, or in a folder, until backward.

    Kept: what is smaller than `min_bytes`, parameters, and the bytes in flight; everything else
    that autograd saves leaves the memory of the device. Copies run behind the computation. Each
    storage moves once, however many operators saved it, and stays until it has left. Backward
    fetches the tensors in the reverse order, each before it is asked for. It waits only where
    copying is slower than computing. A tensor that is still leaving when backward asks for it is
    taken from memory.

    On CUDA, "host" is pinned host memory, and copies run on a stream of their own. Tensors on the
    CPU are in host memory already, so "host" leaves them where they are; give a folder on a fast
    disk to move them out of memory. Its file has no name and is deleted whatever becomes of the
    process. Tensors that other code holds anyway (a batch, the buffers of a module) are copied too
    if they are large, and save nothing.

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
    return Offloading(least, _place(to), bound)


def _bytes(name: str, value: int | str) -> int:
    try:
        found = parse_bytes(value)
    except ValueError as error:
        raise ValueError(str(error).replace("`value`", f"`{name}`")) from None
    if found < 1:
        raise ValueError(f"`{name}` is {value!r}, but it must be at least 1 byte.")
    return found


def _place(to: str | os.PathLike[str]) -> str:
    if to == "host":
        return "host"
    folder = existing_folder(to)
    if folder is None:
        raise ValueError(
            f"`to` is {to!r}, which is no folder. Make the folder first, on a disk with room "
            'for what the step keeps, or give "host".'
        )
    return str(folder)


class Offloading(Reusable):
    """A context around blocks whose residuals wait elsewhere.

    Args:
        min_bytes: the least bytes of a storage that moves.
        to: "host" or the path of a folder.
        in_flight_bytes: the bound on bytes in flight; None for twice the largest storage.
    """

    def __init__(self, min_bytes: int, to: str, in_flight_bytes: int | None) -> None:
        super().__init__()
        self._arguments = min_bytes, to, in_flight_bytes

    def once(self) -> Restoring:
        """Return the context of one block."""
        return _Block(*self._arguments)


class _Block(Restoring):
    __slots__ = ("_hooks", "_in_flight_bytes", "_min_bytes", "_to", "_traffic")

    def __init__(self, min_bytes: int, to: str, in_flight_bytes: int | None) -> None:
        super().__init__()
        self._min_bytes = min_bytes
        self._to = to
        self._in_flight_bytes = in_flight_bytes
        self._traffic: Traffic | None = None
        self._hooks: saving | None = None

    def __enter__(self) -> None:
        (uncompiled(_enter) if is_watched() else _enter)(self)

    def begin(self) -> None:
        """Let the tensors that autograd saves from now on go away."""
        tier: Tier = tier_for(self._to)
        self._traffic = Traffic(tier, self._in_flight_bytes)
        outgoing = _Outgoing(self._traffic, self._min_bytes, pair_in_force())
        self._hooks = saving(outgoing.pack)
        self._hooks.__enter__()

    @never_compiled
    def restore(self) -> None:
        if self._hooks is not None:
            self._hooks.restore()
        self._hooks = self._traffic = None

    @never_compiled
    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        traffic = self._traffic
        try:
            if self._hooks is not None:
                self._hooks.leave(kind, value, traceback)
            if kind is None and traffic is not None:
                traffic.raise_failure(self._to)
        finally:
            self.restore()


def _enter(block: _Block) -> None:
    if not torch.is_grad_enabled() or is_run_again():
        return  # nothing is kept anyway
    if is_transformed():
        raise RecoupError(
            "recoup.offloading() does not work inside transforms of torch.func (grad, vmap, "
            "jacrev), which do not support saved tensor hooks. Leave it out there."
        )
    block.begin()


class _Outgoing:
    """The hooks of a block."""

    __slots__ = ("_beneath", "_min_bytes", "_traffic")

    def __init__(self, traffic: Traffic, min_bytes: int, beneath: Pair | None) -> None:
        self._traffic = traffic
        self._min_bytes = min_bytes
        self._beneath = beneath

    @never_compiled
    def pack(self, tensor: Tensor) -> Packed:
        """Return what autograd holds in place of `tensor`."""
        name = f"A tensor of shape {tuple(tensor.shape)} that was saved for backward"
        if can_move(tensor) and tensor.untyped_storage().nbytes() >= self._min_bytes:
            away = self._traffic.send(tensor, name)
            if away is not None:
                if current.observer is not None:
                    current.observer.saved(tensor, away, "offload")
                return away
        return Kept(tensor, name, self._beneath)
