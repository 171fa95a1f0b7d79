"""The base of all couplings: one part of the values decides how the other part is changed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from recoup._core.tensors import check_modules
from recoup.invertible.contract import InvertibleModule

__all__ = ["Condition", "Coupling", "Partition"]

Condition = Literal["first", "second"]
Partition = Literal["channels", "checkerboard"]


class Coupling(InvertibleModule):
    """The base of couplings: cuts a value into the conditioning part and the part it changes.

    A subclass states its formula for one network in `_change` and `_change_back`. With a second
    network, ``g``, the conditioning part is then changed too, by what ``g`` computes from the
    changed one.

    Args:
        network: The network that sees the conditioning part.
        g: The second network; None for none.
        condition: Which part the network sees, "first" or "second".
        split: "channels" cuts dimension 1 in half, and puts the larger half first if the number
            of channels is odd. "checkerboard" takes the squares of one colour of an image; the
            first part contains the upper left corner. The network then sees the whole image, with
            zeros at the changed places, and its output counts at those places only.

    Raises:
        ValueError: When `condition` or `split` is none of its choices.
    """

    def __init__(
        self, network: nn.Module, g: nn.Module | None, condition: Condition, split: Partition
    ) -> None:
        super().__init__()
        check_modules(network=network)
        if g is not None:
            check_modules(g=g)
        if condition not in ("first", "second"):
            raise ValueError(f'`condition` is {condition!r}, but must be "first" or "second".')
        if split not in ("channels", "checkerboard"):
            raise ValueError(f'`split` is {split!r}, but must be "channels" or "checkerboard".')
        self.network = network
        self.g = g
        self.condition: Condition = condition
        self.split: Partition = split
        self.takes_context = _takes_context(network) or _takes_context(g)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Couple `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        given, changed = self._halves(x)
        changed, log_det = self._change(self.network, given, changed, context)
        if self.g is not None:
            given, more = self._change(self.g, changed, given, context)
            log_det = log_det + more
        return self._join(given, changed), log_det

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, ...)``; returns ``(x, log_det)``."""
        given, changed = self._halves(y)
        more: Tensor | None = None
        if self.g is not None:
            given, more = self._change_back(self.g, changed, given, context)
        changed, log_det = self._change_back(self.network, given, changed, context)
        return self._join(given, changed), log_det if more is None else log_det + more

    @abstractmethod
    def _change(
        self, network: nn.Module, given: Tensor, changed: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return `changed` as `network` changes it for `given`, and the log-determinant."""

    @abstractmethod
    def _change_back(
        self, network: nn.Module, given: Tensor, changed: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Undo `_change`."""

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = _colours(x) if self.split == "checkerboard" else _channels(x)
        return (first, second) if self.condition == "first" else (second, first)

    def _join(self, given: Tensor, changed: Tensor) -> Tensor:
        first, second = (given, changed) if self.condition == "first" else (changed, given)
        if self.split == "checkerboard":
            return _board(first, second)
        return torch.cat((first, second), dim=1)

    def _evaluate_network(
        self,
        network: nn.Module,
        given: Tensor,
        changed: Tensor,
        copies: int,
        context: Tensor | None,
        then: Callable[[Tensor], Any] | None = None,
    ) -> Any:
        """Return the output of `network` for `given`, or what `then` makes of it.

        The network must return `copies` values for each entry of `changed`.
        """
        is_board = self.split == "checkerboard"
        if is_board:
            given = self._join(given, torch.zeros_like(changed))
        takes_context = context is not None and _takes_context(network)
        inputs = (given, cast("Tensor", context)) if takes_context else (given,)
        num_samples, num_channels, *sizes = changed.shape
        needed = (num_samples, copies * num_channels, *(given.shape[2:] if is_board else sizes))
        shape, dtype = given.shape, changed.dtype

        def of_values(values: Tensor) -> Any:
            if values.shape != needed:
                raise ValueError(
                    f"The network of {type(self).__name__} returned shape {tuple(values.shape)} "
                    f"for an input of shape {tuple(shape)}, but {tuple(needed)} is needed. "
                    f"Give it {needed[1]} output channels and keep the other sizes."
                )
            if is_board:
                values = self._halves(values)[1]
            # Networks may run in half precision under autocast; the coupling stays in x's own
            # type, or the inverse would not reproduce the input.
            values = values if values.dtype is dtype else values.to(dtype)
            return values if then is None else then(values)

        return self.evaluate(network, *inputs, then=of_values)

    def extra_repr(self) -> str:
        """Show which part is the condition."""
        board = ", split='checkerboard'" if self.split == "checkerboard" else ""
        return f"condition={self.condition!r}{board}"


def _takes_context(network: nn.Module | None) -> bool:
    """Return whether the network of a coupling is called with a context beside its input."""
    return bool(getattr(network, "takes_context", False))


def _channels(x: Tensor) -> tuple[Tensor, Tensor]:
    if x.dim() < 2 or x.shape[1] < 2:
        raise ValueError(
            f"`x` has shape {tuple(x.shape)}, but a coupling needs (N, C, ...) with C of at "
            f"least 2. For images of one channel, put `Squeeze()` before the coupling, or use "
            f'split="checkerboard".'
        )
    # Views of one split: backward then concatenates two gradients; with two slices it would pad
    # each with zeros and add them. An odd channel goes to the first half.
    return cast("tuple[Tensor, Tensor]", x.chunk(2, dim=1))


def _colours(x: Tensor) -> tuple[Tensor, Tensor]:
    """Pack the squares of each colour of ``(N, C, H, W)`` into ``(N, C, H, W / 2)``."""
    if x.dim() != 4 or x.shape[2] % 2 or x.shape[3] % 2:
        raise ValueError(
            f"`x` has shape {tuple(x.shape)}, but a checkerboard needs (N, C, H, W) with even H "
            f'and W. Pad the images, or use split="channels".'
        )
    n, c, h, w = x.shape
    patches = x.reshape(n, c, h // 2, 2, w // 2, 2)
    upper, lower = patches.unbind(3)
    (a, b), (d, e) = upper.unbind(-1), lower.unbind(-1)  # a b over d e: a and e are of one colour
    first, second = torch.stack((a, e), dim=3), torch.stack((b, d), dim=3)
    return first.reshape(n, c, h, w // 2), second.reshape(n, c, h, w // 2)


def _board(first: Tensor, second: Tensor) -> Tensor:
    """Undo `_colours`."""
    n, c, h, half = first.shape
    (a, e), (b, d) = (part.reshape(n, c, h // 2, 2, half).unbind(3) for part in (first, second))
    upper, lower = torch.stack((a, b), dim=-1), torch.stack((d, e), dim=-1)
    return torch.stack((upper, lower), dim=3).reshape(n, c, h, 2 * half)
