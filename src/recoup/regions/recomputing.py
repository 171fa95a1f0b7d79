"""`recoup.recomputing`: blocks of code whose values are recomputed in backward instead of kept."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from recoup._core.compile import is_watched, uncompiled
from recoup._core.compiled_graphs import ComputedAgain, is_followed
from recoup._core.dispatch_modes import InMode
from recoup._core.saved_tensors import pair_in_force, saving
from recoup.regions.blocks import Block, refuse_transforms
from recoup.regions.recorder import OpRecorder

__all__ = ["recomputing"]

_PASSED_OVER = ("recoup", "torch")


def recomputing(*, compare: bool = True) -> AbstractContextManager[None]:
    """Return a context whose values are not kept, even if a later operator would save them.

    Kept: the tensors from outside that operators within take, and the random state that the first
    draw found (5 KB, or 8 bytes where a generator had just been seeded). Backward runs the
    operators that it needs again, once, when it asks for the first value of the block. They repeat
    their results and draws, whatever happened to a seed or generator since.

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
    return (uncompiled(_here) if is_watched() else _here)(compare)


def _here(compare: bool) -> AbstractContextManager[None]:
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
    refuse_transforms("recoup.recomputing")
    recorder = OpRecorder(name, pair_in_force(), compare=compare)
    try:
        with saving(recorder.pack), InMode(recorder):
            yield
        recorder.finish()
    finally:
        recorder.close()
