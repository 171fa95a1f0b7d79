"""NICE: additive couplings between the values of even and of odd index."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from torch.distributions import Distribution

from recoup import invertible
from recoup._arguments import check_flag, check_whole
from recoup.flows.building import check_counts, steps_of
from recoup.flows.flow import Flow
from recoup.flows.latents import Logistic
from recoup.schedules.memory import Memory

# Of the grid of exact couplings: 256 points or more between two levels, exact sums to 1024.
_FRACTION_BITS = 14
_MOST_LEVELS = 2**14


class NICE(Flow):
    """The flow of NICE, for samples of any shape: additive couplings of vectors, and one scaling.

    A sample is one vector; `num_couplings` additive couplings, which preserve volume, change its
    even and odd entries in turn, and an ActNorm at the end scales each entry: the only layer that
    changes volume. Every network sees half of the whole sample, so its size grows with the data's.

    With ``memory="constant"`` backward holds one coupling at a time, whatever the depth, and runs
    each network once more; the peak of "linear" grows with `num_couplings`. With ``exact=True``
    the couplings work on a grid, and their inverse is bitwise exact.

    The paper's size for MNIST is ``NICE((1, 28, 28), levels=256, width=1000, depth=5)``.

    Args:
        shape: Shape of one sample, of at least 2 values.
        levels: Number of grey levels of the data, 17 or 256 for instance; None for continuous
            data, which are then taken as they are.
        num_couplings: Number of couplings.
        width: Width of their networks.
        depth: Number of hidden layers of their networks.
        exact: Whether the couplings work on a grid, see `recoup.invertible.AdditiveCoupling`.
        dropout: Probability of dropout inside the networks.
        num_classes: Number of classes of a conditional flow; None for no labels.
        memory: Memory mode of the chain, see `recoup.invertible.Chain`.
        base: Distribution of the latents, `Logistic` by default, as in the paper.

    Raises:
        ValueError: When an argument is out of its range.

    Example:
        >>> import torch
        >>> from recoup.flows import NICE
        >>> flow = NICE((1, 8, 8), levels=17, width=32, exact=True, memory="constant")
        >>> flow.bits_per_dim(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3])
        >>> flow.sample(2).shape
        torch.Size([2, 1, 8, 8])

    Dinh et al., "NICE", https://arxiv.org/abs/1410.8516.
    """

    def __init__(
        self,
        shape: Sequence[int],
        *,
        levels: int | None,
        num_couplings: int = 4,
        width: int = 64,
        depth: int = 3,
        exact: bool = False,
        dropout: float = 0.0,
        num_classes: int | None = None,
        memory: Memory = "linear",
        base: Distribution | None = None,
    ) -> None:
        check_counts(num_couplings=num_couplings, width=width, num_classes=num_classes)
        check_flag(exact=exact)
        flatten = invertible.Flatten(shape)
        size = flatten.shape.numel()
        if size < 2:
            raise ValueError(f"`shape` is {tuple(shape)}, but a coupling needs at least 2 values.")
        if levels is not None:
            check_whole(2, levels=levels)
        if exact and levels is not None and levels > _MOST_LEVELS:
            raise ValueError(
                f"`levels` is {levels}, but with `exact` at most {_MOST_LEVELS} can be told "
                "apart on the grid. Use `exact=False`, or fewer levels."
            )
        stages: list[invertible.InvertibleModule] = [] if levels is None else [_scaling(levels)]
        # The even entries first: the halves of a coupling are then the even and the odd ones.
        stages += [flatten, invertible.Permute([*range(0, size, 2), *range(1, size, 2)])]
        couple = partial(invertible.AdditiveCoupling, exact=exact, fraction_bits=_FRACTION_BITS)
        stages += steps_of(
            "vector", size, num_couplings, couple=couple, copies=1, before=lambda _: [],
            width=width, depth=depth, dropout=dropout, num_context=num_classes or 0,
        )  # fmt: skip
        chain = invertible.Chain(*stages, invertible.ActNorm(size), memory=memory)
        base = Logistic(0.0, 1.0) if base is None else base
        super().__init__(chain, shape=shape, levels=levels, base=base, num_classes=num_classes)


def _scaling(levels: int) -> invertible.Normalize:
    """Centre the unit interval, about 4 wide, with the level boundaries between grid points.

    The distance of two levels becomes a power of two, and their boundary the middle of two points
    of the grid: so a coupling that rounds to the grid moves no value to another level.
    """
    width = levels * 2.0 ** round(math.log2(4 / levels))
    return invertible.Normalize(0.5 - 2.0 ** -(_FRACTION_BITS + 1) / width, 1 / width)
