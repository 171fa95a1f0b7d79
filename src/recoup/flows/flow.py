"""A flow: an invertible chain and the density it gives to data."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from recoup.flows.base import Base
from recoup.invertible import Chain, Dequantize
from recoup.residuals.seeds import with_seed
from recoup.schedules.memory import Memory

__all__ = ["Flow"]

Latents = Any  # a tensor, or a tuple of them where the chain splits: pyright cannot say which


class Flow(nn.Module):
    """A density over data: an invertible chain to latents, and a distribution of the latents.

    ``log p(x) = log base(z) + log_det`` with ``z, log_det = chain(x)``, summed over all latents,
    early ones too. With `levels` the data are whole grey levels, noise is added to them first,
    and ``log_prob`` is a lower bound, in expectation, on the log-probability of the discrete data.

    What is kept for backward, and what backward pays, is the `memory` of the chain; beyond it the
    latents are kept, and with `levels` the dequantised data.

    Args:
        chain: The invertible chain, data to latents.
        shape: Shape of one sample, without the batch.
        levels: Number of grey levels of the data, 0 to ``levels - 1``; None for continuous data.
        base: Distribution of the latents, standard normal by default. Of single numbers, or of
            whatever part of one sample's latent its batch and event shape cover from the right.

    Raises:
        ValueError: When data or latents have another shape than the flow's.

    Example:
        >>> import torch
        >>> from recoup.flows import Flow
        >>> from recoup.invertible import ActNorm, Chain
        >>> flow = Flow(Chain(ActNorm(2)), shape=(2,))
        >>> density = flow.eval().log_prob(torch.zeros(1, 2)).exp()
        >>> torch.allclose(density, torch.tensor(1 / (2 * torch.pi)))
        True
        >>> flow.sample(3).shape
        torch.Size([3, 2])

    Dinh et al., "NICE", https://arxiv.org/abs/1410.8516; bits per dimension as in Theis et al.,
    https://arxiv.org/abs/1511.01844.
    """

    def __init__(
        self,
        chain: Chain,
        *,
        shape: Sequence[int],
        levels: int | None = None,
        base: Distribution | None = None,
    ) -> None:
        super().__init__()
        self.chain = chain
        self.shape = torch.Size(shape)
        self.dequantize = None if levels is None else Dequantize(levels)
        self.base = Base(Normal(0.0, 1.0) if base is None else base)
        self._latent_shapes: tuple[torch.Size, ...] | None = None

    @property
    def memory(self) -> Memory:
        """What backward through the chain remembers; may be set at any time."""
        return self.chain.memory

    @memory.setter
    def memory(self, memory: Memory) -> None:
        self.chain.memory = memory

    @property
    def levels(self) -> int | None:
        """Number of grey levels of the data, None for continuous data."""
        return None if self.dequantize is None else self.dequantize.levels

    @property
    def num_dims(self) -> int:
        """Number of values of one sample."""
        return self.shape.numel()

    def forward(self, x: Tensor) -> tuple[Latents, Tensor]:
        """Map data to latents.

        Args:
            x: Data of shape ``(N, *shape)``.

        Returns:
            The latents, a tensor ``(N, ...)`` or, where the chain splits, a tuple of tensors in
            the order they were split off; and the log-determinant ``(N,)`` in nats.
        """
        if x.shape[1:] != self.shape:
            raise ValueError(
                f"`x` has shape {tuple(x.shape)}, but this flow is for (N, "
                f"{', '.join(map(str, self.shape))}). Resize the data, or build the flow with "
                f"another `shape`."
            )
        if self.dequantize is None:
            return self.chain(x)
        y, noise_log_det = self.dequantize(x.to(self.base.like.dtype))
        latents, log_det = self.chain(y)
        return latents, log_det + noise_log_det

    def inverse(self, latents: Latents) -> Tensor:
        """Map latents, in the form that `forward` returns, to data ``(N, *shape)``."""
        x, _ = self.chain.inverse(latents)
        return x if self.dequantize is None else self.dequantize.inverse(x)[0]

    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log-density ``(N,)`` in nats of data ``(N, *shape)``; of levels, if given."""
        latent, log_det = self._terms(x)
        return latent + log_det

    def bits_per_dim(self, x: Tensor) -> Tensor:
        """Return the code length ``(N,)`` of data ``(N, *shape)``, in bits a value: the loss."""
        return self._to_bits(self.log_prob(x))

    def parts(self, x: Tensor) -> dict[str, Tensor]:
        """Return the two parts of `bits_per_dim`, each ``(N,)``; their sum is the whole.

        "latent" is the code length of the latents, "log_det" what the volume change adds. Costs
        one forward, so a training step that wants both takes their sum as its loss.
        """
        latent, log_det = self._terms(x)
        return {"latent": self._to_bits(latent), "log_det": self._to_bits(log_det)}

    @torch.no_grad()
    def sample(
        self, n: int, *, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draw `n` samples ``(n, *shape)``; whole levels, as floating-point numbers, if given.

        Args:
            n: Number of samples.
            temperature: Factor on the standard deviation of the latents; below 1 gives likelier
                samples. Other than 1 only for a base with a `loc`.
            generator: Where the latents' seed comes from; torch's default generator if None.

        Raises:
            ValueError: When `temperature` is negative, or not 1 and the base has no `loc`.
        """
        shapes = self._shapes_of_latents()
        return self.inverse(
            _as_latents([self.base.sample((n, *s), temperature, generator) for s in shapes])
        )

    @torch.no_grad()
    def reconstruct(self, x: Tensor) -> Tensor:
        """Map data ``(N, *shape)`` to latents and back; the data again, up to rounding."""
        return self.inverse(self(x)[0])

    @torch.no_grad()
    def interpolate(self, x0: Tensor, x1: Tensor, steps: int) -> Tensor:
        """Go from `x0` to `x1`, each ``(N, *shape)``, on a straight line between their latents.

        Returns:
            Data ``(steps, N, *shape)``; the first is `x0` and the last `x1`, up to rounding.
        """
        starts, ends = (_as_tuple(self(x)[0]) for x in (x0, x1))
        frames: list[Tensor] = []
        for step in range(steps):
            weight = step / max(1, steps - 1)
            mixed = [a.lerp(b, weight) for a, b in zip(starts, ends, strict=True)]
            frames.append(self.inverse(_as_latents(mixed)))
        return torch.stack(frames)

    def _terms(self, x: Tensor) -> tuple[Tensor, Tensor]:
        latents, log_det = self(x)
        first, *others = (self.base.log_prob(z) for z in _as_tuple(latents))
        return sum(others, first), log_det

    def _to_bits(self, nats: Tensor) -> Tensor:
        return -nats / (self.num_dims * math.log(2))

    def _shapes_of_latents(self) -> tuple[torch.Size, ...]:
        """Find the shapes from one sample of zeros, disturbing neither modes nor the stream."""
        if self._latent_shapes is None:
            x = self.base.like.new_zeros(1, *self.shape)
            with torch.no_grad(), _evaluation(self.chain):
                latents, _ = with_seed(lambda: self.chain(x), 0)
            self._latent_shapes = tuple(z.shape[1:] for z in _as_tuple(latents))
        return self._latent_shapes

    def extra_repr(self) -> str:
        """Show shape and levels."""
        return f"shape={tuple(self.shape)}, levels={self.levels}"


def _as_tuple(latents: Latents) -> tuple[Tensor, ...]:
    return (latents,) if isinstance(latents, Tensor) else tuple(latents)


def _as_latents(parts: Sequence[Tensor]) -> Latents:
    return parts[0] if len(parts) == 1 else tuple(parts)


@contextmanager
def _evaluation(module: nn.Module) -> Generator[None]:
    """Put `module` in evaluation mode, and each part back in the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
