"""The contract of invertible modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from recoup._core.shared_evaluation import evaluate

__all__ = ["InvertibleModule"]


class InvertibleModule(nn.Module):
    """A module whose input can be computed from its output.

    `forward` maps data to latent and `inverse` latent to data; direction is never a flag. Both
    return the log-determinant of their own Jacobian, one number a sample, so that for
    ``y, log_det = f(x)`` and ``x, back = f.inverse(y)`` the sum ``log_det + back`` is 0.

    In a `Chain` with ``memory="constant"`` nothing of the module is kept: backward computes the
    input from the output with `inverse`, and runs `forward` once more for its residuals.
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
    # Whether `inverse` is defined, cheap and exact enough for backward; else backward recomputes.
    inverts_in_backward: ClassVar[bool] = True
    # Number of latents that `forward` splits off; it returns them in a tuple, the rest last.
    num_early: int = 0
    # Whether both directions take a second argument, the context (a tensor or None).
    takes_context: bool = False

    def forward(self, x: Tensor, /) -> tuple[Any, Tensor]:
        """Map data to latent: ``x`` of shape ``(N, ...)`` to ``(y, log_det)``, ``(N,)``."""
        raise NotImplementedError(f"{type(self).__name__} does not define `forward`.")

    def inverse(self, y: Any, /) -> tuple[Tensor, Tensor]:
        """Map latent to data: ``y`` to ``(x, log_det)``, ``log_det`` of shape ``(N,)``."""
        raise NotImplementedError(f"{type(self).__name__} does not define `inverse`.")

    cast("Any", inverse).is_missing = True  # inherited by a subclass that does not define one
    cast("Any", forward).is_missing = True

    def evaluate(
        self, network: nn.Module, *inputs: Tensor, then: Callable[[Any], Any] | None = None
    ) -> Any:
        """Call `network` so that forward, inverse and backward share one evaluation.

        In constant memory the inverse that backward runs also produces the residuals of `network`,
        which so runs once in forward and once in backward. Its random layers draw from a seed of
        their own, in every memory mode. A network that is called directly gives the same results,
        but runs twice in backward.

        Args:
            network: The network.
            inputs: Its inputs.
            then: Computes from the output of the network what both directions need of it (the
                scales of a coupling), so that this is evaluated once, too. Beside that output it
                may read parameters and buffers, but no other tensors: those may differ in the
                inverse.

        Returns:
            What `then` returns; without it, what `network` returns.
        """
        return evaluate(network, inputs, then)
