"""`recoup.recomputing`: blocks of code whose values are recomputed in backward instead of kept."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch

from recoup._core.compile import is_watched, never_compiled, uncompiled
from recoup._core.compiled_graphs import ComputedAgain, is_followed
from recoup._core.dispatch_modes import InMode
from recoup._core.restoring import Restoring, Reusable
from recoup._core.saved_tensors import is_transformed, pair_in_force, saving
from recoup.errors import RecoupError
from recoup.regions.recorder import OpRecorder

__all__ = ["Recomputing", "place_in_code", "recomputing"]


def recomputing() -> AbstractContextManager[None]:
    """Return a context whose values are not kept, even if a later operator would save them.

    Kept: the tensors from outside that operators within take, and the random state that the first
    draw found (5 KB, or 8 bytes where a generator had just been seeded). Backward runs the
    operators that it needs again, once, when it asks for the first value of the block. They repeat
    their results and draws, whatever happened to a seed or generator since.

    Some memory is kept nevertheless, for correctness: memory that is allocated within and not
    overwritten as a whole by an operator (a custom kernel may have written to it); data received
    from other processes; and, for a tensor from before the block that is changed in place within
    it, a copy from before the change (the statistics of a batch norm, which are updated only once).
    Changes that a custom kernel makes to memory that operators had filled are not seen; register
    such a kernel as an operator (`torch.library`).

    In a graph of torch.compile the compiler computes again, in backward, what the block made; there
    its tensors are ordinary ones.

    Returns:
        A context manager. It does nothing where no gradient is recorded. Blocks may be nested, and
        any number of them may be in use. Tensors that come out of it are of a subclass of `Tensor`,
        which lets recoup see the operators that take them; an `autograd.Function` that saves one
        keeps it.

    Raises:
        ChangedError: in backward, when a tensor that the block took, or one that it made, was
            changed in place after it had been used.
        ReplayError: when backward is called after an exception in the block; when an operator
            within cannot be repeated; when the block takes a gradient within, and took none when it
            ran before.
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
    return (uncompiled(_here) if is_watched() else _here)()


def _here() -> AbstractContextManager[None]:
    return Recomputing(f"the block at {place_in_code()}")


def place_in_code() -> str:
    """Return the file and line of the code that called recoup."""
    frame = inspect.currentframe()
    while frame is not None and _is_passed_over(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_passed_over(module: str) -> bool:
    return module.partition(".")[0] in ("recoup", "torch")


class Recomputing(Reusable):
    """A context around blocks whose values are not kept.

    Args:
        name: the name of the blocks in errors.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def once(self) -> Restoring:
        """Return the context of one block."""
        return _Block(self._name)


class _Block(Restoring):
    __slots__ = ("_hooks", "_mode", "_name", "_recorder")

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._recorder: OpRecorder | None = None
        self._hooks: saving | None = None
        self._mode: InMode | None = None

    def __enter__(self) -> None:
        (uncompiled(_enter) if is_watched() else _enter)(self)

    @never_compiled
    def restore(self) -> None:
        if self._mode is not None:
            self._mode.restore()
        if self._hooks is not None:
            self._hooks.restore()
        if self._recorder is not None:
            self._recorder.close()
        self._mode = self._hooks = self._recorder = None

    @never_compiled
    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        if self._mode is not None and self._hooks is not None:
            self._mode.leave(kind, value, traceback)
            self._hooks.leave(kind, value, traceback)
        try:
            if kind is None and self._recorder is not None:
                self._recorder.finish()
        finally:
            self.restore()


def _enter(block: _Block) -> None:
    if not torch.is_grad_enabled():
        return  # nothing is kept anyway
    if is_transformed():
        raise RecoupError(
            "recoup.recomputing() does not work inside transforms of torch.func (grad, vmap, "
            "jacrev), which do not support saved tensor hooks. Leave it out there."
        )
    block._recorder = recorder = OpRecorder(block._name, pair_in_force())
    block._hooks = saving(recorder.pack, _unpack)
    block._hooks.__enter__()  # raises where hooks are disabled
    block._mode = InMode(recorder)
    block._mode.__enter__()


@never_compiled
def _unpack(packed: Any) -> Any:
    return packed.get()
