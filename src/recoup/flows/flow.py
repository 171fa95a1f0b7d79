"""A flow: an invertible chain and the density it gives to data."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn import functional

from recoup._arguments import check_real, check_type, check_whole
from recoup._core.devices import with_seed
from recoup._core.tensors import check_tensors
from recoup.flows.latents import Base, Latents, as_latents
from recoup.flows.networks import check_labels
from recoup.invertible import Chain, Dequantize, VariationalDequantize
from recoup.invertible.chain import HasChain
from recoup.invertible.contract import as_tuple, sizes_of


class Flow(HasChain):
    """A density over data: an invertible chain to latents, and a distribution of the latents.

    ``log p(x) = log base(z) + log_det`` with ``z, log_det = chain(x)``, summed over all latents,
    early ones too. With `levels` the data are whole grey levels, to which noise is added first,
    and ``log_prob`` is a lower bound, in expectation, on the log-probability of the discrete data.
    With `num_classes` the density is conditional on a label: the chain gets the labels as a
    context, one-hot rows ``(N, num_classes)``, and every method needs them.

    The `memory` of the chain decides what autograd keeps and what backward pays; in addition the
    latents are kept, and with `levels` the dequantised data. It may be set at any time, also by
    ``flow.memory``, which sets that of the chain of a `VariationalDequantize` too, except for a
    `Schedule`, which is made for one chain; ``flow.drift`` does the same for the `DriftGuard`.
    Bytes (``"2 GiB"``) bound a step of each chain alone, and the flow keeps its latents besides,
    so a flow of two chains may take twice as many; for a bound on a step of the whole flow apply
    `recoup.plan` in "linear", with ``exact=False`` so that it may invert, as chains with bytes do.

    Args:
        chain: The invertible chain, data to latents.
        shape: Shape of one sample, without the batch.
        levels: Number of grey levels of the data, whole numbers from 0 to ``levels - 1``, of any
            type; the first batch is checked. None for continuous data.
        base: Distribution of the latents, standard normal by default: of single numbers, or of
            the part of one sample's latent that its batch and event shape cover from the right.
        dequantize: The layer that adds the noise: uniform by default; a `VariationalDequantize`
            learns it.
        num_classes: Number of classes of a conditional flow, whose chain must take a context.

    Raises:
        ValueError: When data or latents have another shape than the flow's, when data are complex,
            or are not grey levels although `levels` is given, when labels are missing, unexpected
            or not classes of the flow, or when the arguments contradict each other.

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
        dequantize: Dequantize | VariationalDequantize | None = None,
        num_classes: int | None = None,
    ) -> None:
        super().__init__()
        check_type(Chain, "a Chain", chain=chain)
        if dequantize is not None:
            check_type(Dequantize, "a Dequantize", dequantize=dequantize)
        if base is not None:
            check_type(Distribution, "a torch.distributions.Distribution", base=base)
        if num_classes is not None:
            check_whole(num_classes=num_classes)
        if dequantize is not None and levels not in (None, dequantize.levels):
            raise ValueError(
                f"`levels` is {levels}, but `dequantize` is for {dequantize.levels} levels. Leave "
                f"`levels` out, or make them equal."
            )
        if num_classes is not None and not chain.takes_context:
            raise ValueError(
                f"`num_classes` is {num_classes}, but nothing in `chain` takes a context, so "
                "labels would change nothing. Give its couplings networks with "
                f"`num_context={num_classes}`."
            )
        self.chain = chain
        self.shape = sizes_of(shape)
        if dequantize is None and levels is not None:
            dequantize = Dequantize(levels)
        self.dequantize = dequantize
        self.num_classes = num_classes
        self.base = Base(base)
        self._latent_shapes: tuple[torch.Size, ...] | None = None

    @property
    def levels(self) -> int | None:
        """Number of grey levels of the data; None for continuous data."""
        return None if self.dequantize is None else self.dequantize.levels

    @property
    def num_dims(self) -> int:
        """Number of values of one sample."""
        return self.shape.numel()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> tuple[Latents, Tensor]:
        """Map data to latents.

        Args:
            x: Data of shape ``(N, *shape)``.
            labels: Classes ``(N,)``, 0 to ``num_classes - 1``, for a conditional flow.

        Returns:
            The latents, a tensor ``(N, ...)`` or, where the chain splits, a tuple of tensors in
            the order they were split off; and the log-determinant ``(N,)`` in nats.
        """
        check_tensors(x=x)
        if x.shape[1:] != self.shape:
            raise ValueError(
                f"`x` has shape {tuple(x.shape)}, but this flow is for (N, "
                f"{', '.join(map(str, self.shape))}). Resize the data, or build the flow with "
                f"another `shape`."
            )
        if x.is_complex():
            raise ValueError(
                f"`x` is of type {x.dtype}, but a flow is a density over real numbers. Give the "
                "real and the imaginary part as two channels."
            )
        context = self._context(labels, len(x))
        if self.dequantize is None:
            return self.chain(x, *context)
        y, noise_log_det = self.dequantize(x.to(self.base.like.dtype))
        latents, log_det = self.chain(y, *context)
        return latents, log_det + noise_log_det

    def inverse(self, latents: Latents, labels: Tensor | None = None) -> Tensor:
        """Map latents, in the form that `forward` returns, to data ``(N, *shape)``.

        With `labels` other than those of the data, this shows the data as another class.
        """
        parts = as_tuple(latents, "latents")
        shapes = [tuple(z.shape[1:]) for z in parts]
        needed = [tuple(shape) for shape in self._shapes_of_latents()]
        if shapes != needed:
            raise ValueError(
                f"`latents` have the shapes {shapes} a sample, but this flow's are {needed}: give "
                "them in the form that `forward` returns."
            )
        x, _ = self.chain.inverse(latents, *self._context(labels, len(parts[0])))
        if self.dequantize is None:
            return x
        return Dequantize.inverse(self.dequantize, x)[0]  # learned noise is rounded off, too

    def log_prob(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the log-density ``(N,)`` in nats of data ``(N, *shape)``, levels if given."""
        latent, log_det = self._terms(x, labels)
        return latent + log_det

    def bits_per_dim(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the code length ``(N,)`` of data ``(N, *shape)``, in bits a value: a loss."""
        return self._to_bits(self.log_prob(x, labels))

    def parts(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return the two parts of `bits_per_dim`, each ``(N,)``; their sum is a loss, too.

        "latent" is the code length of the latents, "log_det" the part of the volume change.
        """
        latent, log_det = self._terms(x, labels)
        return {"latent": self._to_bits(latent), "log_det": self._to_bits(log_det)}

    @torch.no_grad()
    def sample(
        self,
        n: int,
        *,
        labels: Tensor | None = None,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Draw samples ``(n, *shape)``; whole levels, as floating-point numbers, if given.

        Args:
            n: Number of samples.
            labels: Class ``(n,)`` of each sample, for a conditional flow.
            temperature: Factor on the standard deviation of the latents; below 1 gives likelier
                samples. Other than 1 only for a base with a `loc`.
            generator: Generator from which the latents are seeded; torch's default if None.

        Raises:
            ValueError: When `temperature` is negative, or not 1 and the base has no `loc`.
        """
        check_whole(0, n=n)
        check_real(temperature=temperature)
        if generator is not None:
            check_type(torch.Generator, "a torch.Generator", generator=generator)
        sizes = [(n, *shape) for shape in self._shapes_of_latents()]
        drawn = [self.base.sample(size, temperature, generator) for size in sizes]
        return self.inverse(as_latents(drawn), labels)

    @torch.no_grad()
    def reconstruct(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Map data ``(N, *shape)`` to latents and back; returns the data, up to rounding."""
        return self.inverse(self(x, labels)[0], labels)

    @torch.no_grad()
    def interpolate(
        self, x0: Tensor, x1: Tensor, steps: int, labels: Tensor | None = None
    ) -> Tensor:
        """Go from `x0` to `x1`, each ``(N, *shape)``, on a straight line between their latents.

        Args:
            x0: The first end.
            x1: The other end.
            steps: Number of frames.
            labels: Classes ``(N,)`` of both ends and of the frames between them.

        Returns:
            Data ``(steps, N, *shape)``; the first is `x0` and the last `x1`, up to rounding.
        """
        check_whole(steps=steps)
        check_tensors(x0=x0, x1=x1)
        if x0.shape != x1.shape:
            raise ValueError(
                f"`x0` has shape {tuple(x0.shape)} and `x1` {tuple(x1.shape)}, but both must have "
                "one shape: each sample goes to the one in its place."
            )
        starts, ends = (as_tuple(self(x, labels)[0]) for x in (x0, x1))
        frames = [
            [a.lerp(b, step / max(1, steps - 1)) for a, b in zip(starts, ends, strict=True)]
            for step in range(steps)
        ]
        return torch.stack([self.inverse(as_latents(each), labels) for each in frames])

    def _terms(self, x: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        latents, log_det = self(x, labels)
        first, *others = (self.base.log_prob(z) for z in as_tuple(latents))
        return sum(others, first), log_det

    def _context(self, labels: Tensor | None, num_samples: int) -> tuple[Tensor, ...]:
        """Return the arguments of the chain beside the data: the context, if there are classes."""
        if self.num_classes is None:
            if labels is not None:
                raise ValueError(
                    "`labels` are given, but this flow is not conditional. Leave them out, or "
                    "build the flow with `num_classes`."
                )
            return ()
        check_labels(labels, self.num_classes, num_samples)
        like, classes = self.base.like, cast("Tensor", labels).to(torch.long)
        return (functional.one_hot(classes.to(like.device), self.num_classes).to(like.dtype),)

    def _to_bits(self, nats: Tensor) -> Tensor:
        return -nats / (self.num_dims * math.log(2))

    def _shapes_of_latents(self) -> tuple[torch.Size, ...]:
        """Find the shapes from one sample of zeros; modes and random stream do not change."""
        if self._latent_shapes is None:
            x = self.base.like.new_zeros(1, *self.shape)
            labels = None if self.num_classes is None else x.new_zeros(1, dtype=torch.long)
            with torch.no_grad(), _evaluation(self.chain):
                latents, _ = with_seed(lambda: self.chain(x, *self._context(labels, 1)), 0)
            self._latent_shapes = tuple(z.shape[1:] for z in as_tuple(latents))
        return self._latent_shapes

    def extra_repr(self) -> str:
        """Show shape, levels and classes."""
        classes = "" if self.num_classes is None else f", num_classes={self.num_classes}"
        return f"shape={tuple(self.shape)}, levels={self.levels}{classes}"


@contextmanager
def _evaluation(module: nn.Module) -> Generator[None]:
    """Put `module` in evaluation mode, and each part back into its own mode afterwards."""
    before = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for part, is_training in before:
            part.training = is_training
