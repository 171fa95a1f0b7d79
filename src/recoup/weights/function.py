"""Reparametrizations by a function of the user's own, whose result is never kept.

NOTE [ Any function ]

Rule 1. A function is differentiated by autograd, and may use any operators and parameters. So it
        runs as `recompute` runs a function: a region makes its residuals, and the weight that it
        returns, again in backward, and the two runs are compared.
Rule 2. The steps before it (norm, dropout, noise) run within that region, so that their results
        are not kept for it.
Rule 3. Functions run after the other kinds, in the order in which they were applied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from recoup._arguments import check_real, check_type, check_whole
from recoup._core.rng import hash_seed
from recoup._core.saved_tensors import version_of
from recoup.weights import draws
from recoup.weights.application import apply_to
from recoup.weights.choosing import ANY_WEIGHT, Where
from recoup.weights.reparametrization import Application, Drawn, Operands, Reparametrization


class Draw:
    """The random numbers that a function of a weight uses: the same ones in backward.

    They come from the seed of the forward, so nothing is kept for them. Each call is a draw of its
    own. The results have the type and the device of the weight and, without a `shape`, its shape.

    Args:
        weight: the weight that the numbers are for.
        seed: from 0 to 2**63 - 1.

    Example:
        >>> import recoup, torch
        >>> draw = recoup.weights.Draw(torch.zeros(2, 3), seed=5)
        >>> draw.normal().shape, draw.bernoulli(0.5, (2, 1)).shape
        (torch.Size([2, 3]), torch.Size([2, 1]))
    """

    def __init__(self, weight: Tensor, seed: int) -> None:
        check_type(Tensor, "a tensor", weight=weight)
        check_whole(0, most=2**63 - 1, seed=seed)
        if not weight.is_floating_point():
            raise ValueError(f"`weight` is {weight.dtype}, but must be of a floating-point type.")
        self._shape = tuple(weight.shape)
        self._kind: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        self._seed = seed
        self._num_draws = 0

    def _next_seed(self) -> int:
        self._num_draws += 1
        return hash_seed(self._seed, self._num_draws) >> 1

    def _sizes(self, shape: tuple[int, ...] | None) -> tuple[int, ...]:
        if shape is None:
            return self._shape
        check_type((tuple, list), "a tuple of sizes", shape=shape)
        for size in shape:
            check_whole(0, shape=size)
        return shape

    def normal(self, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return numbers from the standard normal distribution."""
        zeros = torch.zeros(self._sizes(shape), **self._kind)
        return draws.noised(zeros, self._next_seed(), 1.0, in_place=True)

    def uniform(self, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return numbers that are uniform from 0 to 1."""
        return draws.uniforms(self._sizes(shape), self._next_seed(), **self._kind)

    def bernoulli(self, p: float, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return 1 with the probability `p`, rounded to a multiple of 2^-16, and 0 otherwise."""
        check_real(p=p)
        if not 0 <= p <= 1:
            raise ValueError(f"`p` is {p}, but must be a probability from 0 to 1.")
        scales = draws.scales(self._sizes(shape), self._next_seed(), 1 - p, **self._kind)
        return scales.sign_()  # 0 where it is dropped, else a positive number


Function = Callable[[Tensor, Draw], Tensor]


def apply(
    module: nn.Module, fn: Function, where: Where = ANY_WEIGHT, *, mode: str = "training"
) -> nn.Module:
    """Reparametrize weights by a function of your own, and keep nothing of what it makes.

    A read of a weight computes ``fn(weight, draw)``. Kept: 8 bytes a weight; neither the
    result nor what `fn` makes on the way. Backward pays one more run of `fn`. The parameters remain
    the same objects under the same names. Norm, dropout and noise run first; several functions run
    in the order in which they were applied.

    Args:
        module: the module, or a tree of modules. One forward of it has one draw.
        fn: a function of a weight and a `Draw` that returns the weight to use, of any shape. It
            should draw from the `Draw`; draws of torch are repeated, too, but each forward then
            keeps the state of a generator, 5 KB. If it is a module, it is registered beside each
            weight (a `LoRA` for `weight` as `weight_lora`), which trains and saves its parameters.
            One module for several weights is shared by them; for one each, call `apply` for each.
        where: chooses parameters, as `pattern` of `weight_dropout` does; by default, all weights.
        mode: "training" for forwards in training mode, or "always".

    Returns:
        `module` itself.

    Raises:
        ValueError: when no parameter is chosen, `fn` is no function of this kind, or one of the
            weights has this very `fn` already.
        ChangedError: in backward, when the weight, or a value that `fn` reads, has changed.
        ReplayError: when `fn` changes a buffer, which a second run would change again.

    Example:
        >>> import recoup, torch
        >>> def quantised(weight, draw):  # with noise before rounding, and a straight gradient
        ...     rounded = (weight * 8 + draw.uniform()).floor() / 8
        ...     return weight + (rounded - weight).detach()
        >>> layer = recoup.weights.apply(torch.nn.Linear(4, 4), quantised, mode="always")
        >>> recoup.weights.applied(layer)
        [weight: apply(quantised, mode="always")]
        >>> layer(torch.ones(1, 4)).sum().backward()
        >>> layer.get_parameter("weight").grad.shape
        torch.Size([4, 4])
    """
    if not callable(fn) or isinstance(fn, type):
        raise ValueError(
            f"`fn` is {fn!r}, but must be a function of a weight and a draw, or a module (an "
            "instance) whose forward is one."
        )
    application = Application()
    return apply_to(module, where, lambda: WeightFunction(application, fn, mode))


class WeightFunction(Reparametrization):
    """A function of a weight that the user states."""

    kind = "apply"
    order = 3  # See Rule 3
    by_autograd = by_operators = True

    def __init__(self, application: Application, fn: Function, mode: str) -> None:
        super().__init__(application, mode)
        self.function = fn
        if isinstance(fn, nn.Module):
            self.suffix = f"_{type(fn).__name__.lower()}"
            self.adds_parameters = any(True for _ in fn.parameters())

    def shown(self) -> str:
        return _name_of(self.function)

    def is_same_as(self, other: Reparametrization) -> bool:
        return isinstance(other, WeightFunction) and other.function is self.function

    def applied_to(self, module: nn.Module, key: str) -> None:
        if isinstance(self.function, nn.Module):
            module.add_module(self.added(key), self.function)

    def removed_from(self, module: nn.Module, key: str) -> None:
        if self.suffix:
            delattr(module, self.added(key))

    def operands(self, module: nn.Module, key: str) -> Operands:
        return ()

    def compute(self, weight: Tensor, own: Operands, drawn: Drawn, is_new: bool = False) -> Tensor:
        version = version_of(weight)
        fn = cast("Function", self.function)
        made: Any = fn(weight, Draw(weight, drawn.seed))
        if not isinstance(made, Tensor) or not made.is_floating_point():
            got = made.dtype if isinstance(made, Tensor) else type(made).__name__
            raise ValueError(
                f"`fn` ({_name_of(fn)}) returned {got}, but must return a floating-point "
                "tensor, the weight to use."
            )
        if version_of(weight) != version:
            raise ValueError(
                f"`fn` ({_name_of(fn)}) changed the weight that it was given in place. Compute a "
                "new tensor from it."
            )
        return made


def _name_of(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
