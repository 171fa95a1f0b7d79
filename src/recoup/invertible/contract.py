"""What every invertible module promises."""

from __future__ import annotations

from typing import Any, ClassVar, cast

from torch import Tensor, nn

from recoup._core.shared_evaluation import evaluate

__all__ = ["InvertibleModule"]


class InvertibleModule(nn.Module):
    """A module whose input can be computed from its output.

    Data to latent is `forward`, latent to data is `inverse`; direction is never a flag. Both
    return the log-determinant of their own Jacobian, one number a sample, so that for
    ``y, log_det = f(x)`` and ``x, back = f.inverse(y)`` it holds that ``log_det + back = 0``.

    In a `Chain` with ``memory="constant"`` nothing of the module is kept: backward computes the
    input back with `inverse`, and runs `forward` once more for what its own operations saved.
    `recoup.invertible.check_invertible` tests a module of your own.

    Example:
        >>> import torch
        >>> from recoup.invertible import InvertibleModule, check_invertible
        >>> class Negate(InvertibleModule):
        ...     def forward(self, x):
        ...         return -x, x.new_zeros(len(x))
        ...
        ...     def inverse(self, y):
        ...         return -y, y.new_zeros(len(y))
        >>> bool(check_invertible(Negate(), torch.ones(3, 4)))
        True
    """

    returns_log_det: ClassVar[bool] = True
    # Whether `inverse` is defined, cheap and exact enough for backward; else it is recomputed.
    inverts_in_backward: ClassVar[bool] = True
    # How many latents `forward` splits off; its value is a tuple of them, and last what goes on.
    num_early: int = 0
    # Whether both directions take a second argument, the context (a tensor or None).
    takes_context: bool = False

    def forward(self, x: Tensor, /) -> tuple[Any, Tensor]:
        """Map data to latent: ``x`` of shape ``(N, ...)`` to ``(y, log_det)``, ``(N,)``."""
        raise NotImplementedError(f"{type(self).__name__} does not define `forward`.")

    def inverse(self, y: Any, /) -> tuple[Tensor, Tensor]:
        """Map latent to data: ``y`` to ``(x, log_det)``, ``log_det`` of shape ``(N,)``."""
        raise NotImplementedError(f"{type(self).__name__} does not define `inverse`.")

    cast("Any", inverse).is_missing = True  # in a subclass that defines none
    cast("Any", forward).is_missing = True

    def evaluate(self, network: nn.Module, *inputs: Tensor) -> Any:
        """Call `network` so that forward, inverse and backward share one evaluation.

        In constant memory the inverse that backward runs makes the residuals of `network` too,
        so it runs once in forward and once in backward. Its random layers draw from a seed of
        their own, in every memory mode. Called directly, a network is right too, and runs twice
        in backward.
        """
        return evaluate(network, inputs)
