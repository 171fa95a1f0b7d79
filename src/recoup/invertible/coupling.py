"""Couplings: one part of the values decides how the other part is changed."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from recoup._arguments import check_choice, check_flag, check_whole
from recoup._core.saved_tensors import grad_mode
from recoup._core.tensors import check_modules, check_tensors
from recoup.errors import GridError
from recoup.invertible.contract import InvertibleModule, check_within, got, per_sample, zero_log_det

Condition = Literal["first", "second"]
Partition = Literal["channels", "checkerboard"]


class Coupling(InvertibleModule):
    """The base of couplings: cuts a value into the conditioning part and the part it changes.

    A subclass states its formula: what it needs of the output of a network, in `_of_output`, and
    how this changes a value, in `_change` and `_change_back`. With a second network, ``g``, the
    conditioning part is then changed too, by what ``g`` computes from the changed one.

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

    _copies = 1  # values that a network returns for each value that is changed

    def __init__(
        self, network: nn.Module, g: nn.Module | None, condition: Condition, split: Partition
    ) -> None:
        super().__init__()
        check_modules(network=network)
        if g is not None:
            check_modules(g=g)
        check_choice("first", "second", condition=condition)
        check_choice("channels", "checkerboard", split=split)
        self.network = network
        self.g = g
        self.condition: Condition = condition
        self.split: Partition = split
        self.takes_context = _takes_context(network) or _takes_context(g)

    def forward(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Couple `x` of shape ``(N, C, ...)``; returns ``(y, log_det)``."""
        given, changed = self._halves(x)
        changed, log_det = self._run(self.network, given, changed, context, self._change)
        if self.g is not None:
            given, more = self._run(self.g, changed, given, context, self._change)
            log_det = log_det + more
        return self._join(given, changed), log_det

    def inverse(self, y: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, C, ...)``; returns ``(x, log_det)``."""
        given, changed = self._halves(y)
        more: Tensor | None = None
        if self.g is not None:
            given, more = self._run(self.g, changed, given, context, self._change_back)
        changed, log_det = self._run(self.network, given, changed, context, self._change_back)
        return self._join(given, changed), log_det if more is None else log_det + more

    @abstractmethod
    def _of_output(self, output: Tensor) -> Any:
        """Return what both directions need of the output of a network; evaluated with it."""

    @abstractmethod
    def _change(self, x: Tensor, values: Any) -> tuple[Tensor, Tensor]:
        """Return `x` as the values of `_of_output` change it, and the log-determinant."""

    @abstractmethod
    def _change_back(self, y: Tensor, values: Any) -> tuple[Tensor, Tensor]:
        """Undo `_change`."""

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = _colours(x) if self.split == "checkerboard" else _channels(x)
        return (first, second) if self.condition == "first" else (second, first)

    def _join(self, given: Tensor, changed: Tensor) -> Tensor:
        first, second = (given, changed) if self.condition == "first" else (changed, given)
        if self.split == "channels":
            return torch.cat((first, second), dim=1)
        n, c, h, half = first.shape
        (a, e), (b, d) = (p.reshape(n, c, h // 2, 2, half).unbind(3) for p in (first, second))
        upper, lower = torch.stack((a, b), dim=-1), torch.stack((d, e), dim=-1)
        return torch.stack((upper, lower), dim=3).reshape(n, c, h, 2 * half)

    def _run(
        self,
        network: nn.Module,
        given: Tensor,
        changed: Tensor,
        context: Tensor | None,
        change: Callable[[Tensor, Any], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return what `change` makes of `changed` by the output of `network` for `given`."""
        is_board = self.split == "checkerboard"
        if is_board:
            given = self._join(given, torch.zeros_like(changed))
        takes_context = context is not None and _takes_context(network)
        inputs = (given, cast("Tensor", context)) if takes_context else (given,)
        sizes = given.shape[2:] if is_board else changed.shape[2:]
        needed = (len(changed), self._copies * changed.shape[1], *sizes)
        shape, dtype = given.shape, changed.dtype

        def of_output(output: Tensor) -> Any:
            if output.shape != needed:
                raise ValueError(
                    f"The network of {type(self).__name__} returned shape {tuple(output.shape)} "
                    f"for an input of shape {tuple(shape)}, but {tuple(needed)} is needed. "
                    f"Give it {needed[1]} output channels and keep the other sizes."
                )
            # Networks may run in half precision under autocast; the coupling stays in x's own
            # type, or the inverse would not reproduce the input.
            output = output.to(dtype)
            return self._of_output(self._halves(output)[1] if is_board else output)

        # Nothing here holds what the network says: it goes before the parts are joined.
        return change(changed, self.evaluate(network, *inputs, then=of_output))


class AdditiveCoupling(Coupling):
    """Add to one half of the channels what a network computes from the other half.

    With one network ``y1 = x1, y2 = x2 + network(x1)``. With a second one, ``g``, the given half is
    changed too, ``y1 = x1 + g(y2)``: a reversible residual block. It preserves volume, so `log_det`
    is zero. The networks need not be invertible; each runs once in forward and once in inverse.

    With ``exact=True`` values lie on a grid of multiples of ``2**-fraction_bits``: the input and
    what the networks return are rounded to it (their gradients go straight through), and the sum of
    two such numbers is exact while it is below ``2**(24 - fraction_bits)`` in float32. So `inverse`
    is bitwise exact if the networks are bitwise reproducible: for the same batch on the same
    device, with deterministic kernels (which may round differently for another batch size). This
    holds through any number of such couplings and of layers that only move values (`Permute`,
    `Flip`, `Squeeze`, `Split`, `Flatten`), and constant memory then gives bitwise the gradients of
    the other modes. Each call computes the largest magnitude of its sums once, to check the
    bound. Layers that multiply (`ActNorm`, 1x1 convolutions) leave the grid: put them after the
    last coupling.

    Autograd keeps what the networks keep, and nothing else.

    Args:
        network: Maps the conditioning half to a shift of the shape of the other half. The first
            half of C channels has ``(C + 1) // 2``, the second ``C // 2``.
        g: Optional second network, from the changed half to a shift of the conditioning half.
        condition: Which half `network` sees, "first" or "second". With "second" and `g`, this is
            the block of RevNets: ``y1 = x1 + network(x2), y2 = x2 + g(y1)``.
        split: "channels", or "checkerboard" for images: see `Coupling`.
        exact: Whether values lie on a grid, so that the inverse is exact to the bit.
        fraction_bits: Number of binary digits after the point on the grid.

    Raises:
        ValueError: When an argument is out of range, when the input has fewer than 2 channels or,
            with `exact`, is of half precision, or when a network returns another shape than needed.
        GridError: When a value is so large that sums on the grid are not exact.

    Example:
        >>> import torch
        >>> from recoup.invertible import AdditiveCoupling
        >>> layer = AdditiveCoupling(torch.nn.Linear(2, 2))
        >>> y, log_det = layer(torch.ones(1, 4))
        >>> torch.allclose(layer.inverse(y)[0], torch.ones(1, 4)), log_det.tolist()
        (True, [0.0])

    Dinh et al., "NICE", https://arxiv.org/abs/1410.8516; Gomez et al., "The Reversible Residual
    Network", https://arxiv.org/abs/1707.04585.
    """

    def __init__(
        self,
        network: nn.Module,
        g: nn.Module | None = None,
        *,
        condition: Condition = "first",
        split: Partition = "channels",
        exact: bool = False,
        fraction_bits: int = 12,
    ) -> None:
        super().__init__(network, g, condition, split)
        check_flag(exact=exact)
        check_whole(0, fraction_bits=fraction_bits)
        if fraction_bits > 20:
            raise ValueError(
                f"`fraction_bits` is {fraction_bits}, but must be from 0 to 20. Use 12, with which "
                "float32 reaches to 4096."
            )
        self.exact = exact
        self.fraction_bits = fraction_bits

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super()._halves(self._on_grid(x) if self.exact else x)

    def _of_output(self, output: Tensor) -> Tensor:
        return self._on_grid(output) if self.exact else output

    def _change(self, x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._within_bound(x + values) if self.exact else x + values, zero_log_det(x)

    def _change_back(self, y: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return self._within_bound(y - values) if self.exact else y - values, zero_log_det(y)

    def _on_grid(self, x: Tensor) -> Tensor:
        """Round `x` to multiples of ``2**-fraction_bits``; the gradient goes straight through.

        The step is a power of two, so that scaling by it is exact. Autograd keeps nothing.
        """
        check_tensors(x=x)
        if not x.is_floating_point() or self._bound(x.dtype) < 4:
            raise ValueError(
                f"`x` is of type {x.dtype}, but with `exact` and `fraction_bits` "
                f"{self.fraction_bits} it must be torch.float32 or torch.float64. Convert it, or "
                "use autocast, which leaves it as it is."
            )
        scale = 2.0**self.fraction_bits
        with grad_mode(False):
            change = (x * scale).round_().div_(scale).sub_(x)  # exact, as the two are close
        return x + change

    def _bound(self, dtype: torch.dtype) -> float:
        """Return the magnitude below which `dtype` holds every number on the grid."""
        significant_bits = 1 - int(math.log2(torch.finfo(dtype).eps))
        return 2.0 ** (significant_bits - self.fraction_bits)

    def _within_bound(self, sums: Tensor) -> Tensor:
        """Return `sums`, or raise a GridError if one of them is too large to be exact."""
        if sums.numel() == 0:
            return sums
        bound, largest = self._bound(sums.dtype), float(sums.detach().abs().max())
        if not largest < bound:
            raise GridError(
                f"{type(self).__name__} made a value of {largest:.6g}, but with `fraction_bits` "
                f"{self.fraction_bits} sums in {sums.dtype} are exact below {bound:g} only. Use "
                "fewer `fraction_bits`, for a coarser grid that reaches further, or double "
                "precision; if values are not finite, look for what made them so."
            )
        return sums


class AffineCoupling(Coupling):
    """Scale and shift one half of the channels by what a network computes from the other half.

    ``y1 = x1, y2 = x2 * exp(log_scale) + shift`` with ``shift, raw = network(x1).chunk(2, dim=1)``
    and ``log_scale = bound * tanh(raw / bound)``. The scale stays between ``exp(-bound)`` and
    ``exp(bound)`` whatever the network returns, so the inverse of one layer never magnifies an
    error by more than ``exp(bound)``; a network that returns zeros gives the identity. The network
    need not be invertible; it runs once in forward and once in inverse. With a second one, ``g``,
    the given half is then changed in the same way by what ``g`` computes from ``y2``.

    Autograd keeps what the networks keep, the input, and two tensors of the size of each half that
    is changed.

    Args:
        network: Maps the conditioning half to twice the channels of the other half. The first half
            of C channels has ``(C + 1) // 2``, the second ``C // 2``.
        g: Optional second network, from the changed half to twice the channels of the other.
        condition: Which half `network` sees, "first" or "second".
        split: "channels", or "checkerboard" for images: see `Coupling`.
        bound: The largest absolute log-scale, above 0.

    Raises:
        ValueError: When an argument is out of range, when the input has fewer than 2 channels, or
            when the network returns another shape than needed.

    Example:
        >>> import torch
        >>> from recoup.invertible import AffineCoupling
        >>> layer = AffineCoupling(torch.nn.Linear(2, 4))
        >>> y, log_det = layer(torch.ones(1, 4))
        >>> torch.allclose(layer.inverse(y)[0], torch.ones(1, 4)), log_det.shape
        (True, torch.Size([1]))

    Dinh et al., "Density estimation using Real NVP", https://arxiv.org/abs/1605.08803.
    """

    _copies = 2

    def __init__(
        self,
        network: nn.Module,
        g: nn.Module | None = None,
        *,
        condition: Condition = "first",
        split: Partition = "channels",
        bound: float = 2.0,
    ) -> None:
        super().__init__(network, g, condition, split)
        check_within(0, math.inf, 2.0, bound=bound)
        self.bound = bound

    def _of_output(self, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shift, raw = output.chunk(2, dim=1)
        log_scale = self.bound * torch.tanh(raw / self.bound)
        return shift, log_scale.exp(), per_sample(log_scale)

    def _change(self, x: Tensor, values: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        shift, scale, log_det = values
        return torch.addcmul(shift, x, scale), log_det

    def _change_back(self, y: Tensor, values: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        shift, scale, log_det = values
        return (y - shift) / scale, -log_det


def _takes_context(network: nn.Module | None) -> bool:
    return bool(getattr(network, "takes_context", False))


def _channels(x: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[1] < 2:
        raise ValueError(
            f"{got(x)}, but a coupling needs (N, C, ...) with C of at least 2. For images of one "
            'channel, put `Squeeze()` before it, or use split="checkerboard".'
        )
    # Views of one split: backward then concatenates two gradients; with two slices it would pad
    # each with zeros and add them. An odd channel goes to the first half.
    return cast("tuple[Tensor, Tensor]", x.chunk(2, dim=1))


def _colours(x: Any) -> tuple[Tensor, Tensor]:
    """Pack the squares of each colour of ``(N, C, H, W)`` into ``(N, C, H, W / 2)``."""
    if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[2] % 2 or x.shape[3] % 2:
        raise ValueError(
            f"{got(x)}, but a checkerboard needs (N, C, H, W) with even H and W. Pad the images, "
            'or use split="channels".'
        )
    n, c, h, w = x.shape
    patches = x.reshape(n, c, h // 2, 2, w // 2, 2)
    upper, lower = patches.unbind(3)
    (a, b), (d, e) = upper.unbind(-1), lower.unbind(-1)  # a b over d e: a and e are of one colour
    first, second = torch.stack((a, e), dim=3), torch.stack((b, d), dim=3)
    return first.reshape(n, c, h, w // 2), second.reshape(n, c, h, w // 2)
