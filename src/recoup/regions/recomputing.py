"""Values that backward does not keep, named by the block of code that makes them."""

from __future__ import annotations

from contextlib import AbstractContextManager

from recoup._core.compile import is_loaded, uncompiled
from recoup.regions.recording import Recording, place_in_code

__all__ = ["recomputing"]


def recomputing() -> AbstractContextManager[None]:
    """Return a context: what is made within is not kept, even though a later operator would.

    Kept: the tensors from outside that operators within take, and the random state that the first
    draw found (5 KB, or 8 bytes where a generator had just been seeded). Backward runs the
    operators that it needs again, once, when it asks for the first value of the block. What they
    compute and draw is what they computed and drew, whatever happened to a seed or generator since.

    Kept nevertheless, so that it is right: memory that is allocated within and not overwritten as a
    whole by an operator (a kernel of somebody's own may have written there), what other processes
    sent, and of a tensor from before the block that is changed in place within it, a copy as it was
    (the statistics of a batch norm; they are counted once). What such a kernel changes in memory
    that operators had filled is not seen; make it an operator (`torch.library`).

    Returns:
        A context manager. It does nothing where no gradient is recorded. Blocks may be nested, and
        any number of them may be in use. Tensors that come out of it are of a subclass of `Tensor`,
        through which the operators that take them are seen; an `autograd.Function` that saves one
        keeps it.

    Raises:
        ChangedError: in backward, when a tensor that the block took, or one that it made, was
            changed in place after it had been used.
        ReplayError: when backward is called after an exception in the block; when an operator
            within cannot be repeated; when the block takes a gradient that it did not take before.
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
    return (uncompiled(_block) if is_loaded() else _block)()


def _block() -> AbstractContextManager[None]:
    return Recording(f"the block at {place_in_code()}")
