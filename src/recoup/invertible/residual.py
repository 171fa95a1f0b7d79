"""Invertible residual blocks: a contractive network added to its input.

NOTE [ Derivatives within forward ]

Rule 1. The log-determinant consists of derivatives of the network, which are taken while forward
        runs and are differentiated themselves. So a graph is always recorded, on an alias of `x`
        that carries no hooks of the caller; if no gradient is needed it is freed after the call.
Rule 2. All draws follow from one seed a call. The length of a series is drawn first, from a
        generator of its own: probes drawn from the same numbers would depend on it.
Rule 3. A call that takes gradients (the log-determinant of a network) needs its own residuals
        before it has ended, and so before the region around it can make them again: some second
        runs keep nothing at all. So the tensors that such a call saves are held here until the call
        ends, whatever the pair beneath does with them.
Rule 4. After the call nothing is held here: backward gets the tensors from the pair beneath, which
        packed each tensor once, in the order of the saves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from recoup._arguments import check_choice, check_whole
from recoup._core.compile import is_watched, never_compiled, uncompiled
from recoup._core.devices import own_generator
from recoup._core.rng import draw_seed
from recoup._core.saved_tensors import Pair, pair_in_force, saving
from recoup._core.settings import without_autocast
from recoup._core.tensors import check_modules, check_tensors
from recoup.errors import ConvergenceError
from recoup.invertible.channels import wide
from recoup.invertible.contract import InvertibleModule, check_within
from recoup.invertible.lipschitz import one_weight_a_call

LogDet = Literal["exact", "series", "unbiased"]
Network = Callable[[Tensor], Tensor]
Returned = tuple[Tensor, Tensor]  # a value, and its log-determinant

_linalg: Any = torch.linalg  # torch does not type its functions
_modules: Any = nn.modules  # has what all dropouts, and all batch norms, derive from

_MOST_EXACT = 256  # values in a sample: the Jacobian has their square
_ROUNDING = 128  # the default tolerance, in units of the type's rounding
_NOT_FOR_BLOCKS = (_modules.dropout._DropoutNd, _modules.batchnorm._BatchNorm)


def _not_compiled(method: Callable[[Any, Tensor], Returned]) -> Callable[[Any, Tensor], Returned]:
    """Break the graph at a method: one that is still being traced cannot be differentiated."""

    @wraps(method)
    def called(self: Any, x: Tensor) -> Returned:
        check_tensors(x=x)
        return (uncompiled(method) if is_watched() else method)(self, x)

    return called


class InvertibleResidual(InvertibleModule):
    """Add to the input what a network computes from it: ``y = x + network(x)``.

    The block is invertible if the network has a Lipschitz constant below 1. So build it from
    `LipschitzLinear` and `LipschitzConv2d`, with activations between them whose constant is at most
    1 (`LipSwish`, `torch.nn.ELU`, `torch.nn.Tanh`); its constant is then at most the product of
    their coefficients, L below. It must treat samples independently and draw no random numbers.

    `inverse` iterates ``x = y - network(x)``, which shrinks the error by L each time. `log_det` is

    * "exact": the Jacobian and its determinant; D evaluations of the network for samples of D
      values, D at most 256.
    * "series": the first `num_terms` terms of ``trace(J) - trace(J^2) / 2 + ...``, each trace
      estimated without bias from random signs. The truncated rest is at most
      ``D * L**(num_terms + 1) / ((num_terms + 1) * (1 - L))`` a sample.
    * "unbiased": the same `num_terms`, then one more with probability `continuation`, and so on,
      each divided by the probability that it is computed. The mean is the exact log-determinant
      and the mean of the gradient its gradient; the variance is bounded if ``L**2 < continuation``.
      The whole batch has one length, on average 1 / (1 - continuation) - 1 further terms.

    Signs and length follow from one seed a call, from torch's default CPU generator, in training
    and in evaluation alike.

    Autograd keeps what the network keeps, and about as much again for each derivative (D of them,
    or one a term); backward pays two evaluations for each. So a memory mode that recomputes pays
    off in a `Chain`. With ``memory="constant"`` a chain recomputes these blocks too, since the
    iterated inverse would cost more. In `inverse` autograd keeps every iteration: run it under
    `torch.no_grad` unless the gradient is needed. The block turns autocast off, since a rounded
    network need not contract, and `torch.compile` skips it. The `log_det` of `inverse` is the
    negative of that of `forward` for "exact"; otherwise it is another estimate, with other draws.

    Args:
        network: Maps ``(N, ...)`` to the same shape.
        log_det: "exact", "series" or "unbiased".
        num_terms: Number of terms of the series, the least for "unbiased".
        continuation: The probability of one more term, above 0 and below 1.
        tolerance: The inverse ends when no entry of ``x + network(x) - y`` is larger than this,
            relative to the largest entry of the sample's `y` if above 1; None for 128 times the
            machine epsilon of the type. The error of `x` is at most 1 / (1 - L) times that.
        max_iterations: The largest number of iterations.

    Raises:
        ValueError: When an argument is out of range, when the network has dropout or batch norm,
            when it returns another shape, or when a sample is too large for "exact".
        ConvergenceError: In inverse, when the iteration does not reach `tolerance`.

    Example:
        >>> import torch
        >>> from recoup.invertible import InvertibleResidual, LipschitzLinear
        >>> block = InvertibleResidual(LipschitzLinear(3, 3))
        >>> y, log_det = block(torch.ones(1, 3))
        >>> torch.allclose(block.inverse(y)[0], torch.ones(1, 3), atol=1e-4), log_det.shape
        (True, torch.Size([1]))

    Behrmann et al., "Invertible residual networks", https://arxiv.org/abs/1811.00995; Chen et al.,
    "Residual flows for invertible generative modeling", https://arxiv.org/abs/1906.02735.
    """

    inverts_in_backward = False

    def __init__(
        self,
        network: nn.Module,
        *,
        log_det: LogDet = "exact",
        num_terms: int = 8,
        continuation: float = 0.5,
        tolerance: float | None = None,
        max_iterations: int = 500,
    ) -> None:
        super().__init__()
        check_choice("exact", "series", "unbiased", log_det=log_det)
        check_whole(num_terms=num_terms, max_iterations=max_iterations)
        check_within(0, 1, 0.5, continuation=continuation)
        if tolerance is not None:
            check_within(0, math.inf, 1e-5, tolerance=tolerance)
        check_modules(network=network)
        for name, module in cast("Iterable[tuple[str, nn.Module]]", network.named_modules()):
            if isinstance(module, _NOT_FOR_BLOCKS):
                raise ValueError(
                    f"`network` has a {type(module).__name__}{f' at `{name}`' if name else ''}, "
                    "with which it computes another function at each call, or another for another "
                    "batch, so the block has no inverse. Leave it out; ActNorm between blocks "
                    "normalises."
                )
        self.network = network
        self.log_det: LogDet = log_det
        self.num_terms = num_terms
        self.continuation = continuation
        self.tolerance = tolerance
        self.max_iterations = max_iterations

    @_not_compiled
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map `x` of shape ``(N, ...)``; returns ``(y, log_det)``."""
        with without_autocast(x.device.type), one_weight_a_call():
            value, log_det = self._value_and_log_det(x)
            return x + value, log_det

    @_not_compiled
    def inverse(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Undo `forward` on `y` of shape ``(N, ...)`` by iteration; returns ``(x, log_det)``."""
        with without_autocast(y.device.type), one_weight_a_call():
            x = self._fixed_point(y)
            return x, -self._value_and_log_det(x)[1]

    def _value_and_log_det(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # Derivatives record a graph in any case, so first find out whether the caller needs one.
        wants_grad = torch.is_grad_enabled()
        if wants_grad and not x.requires_grad:
            parameters = cast("Iterable[Tensor]", self.network.parameters())
            is_trained = any(p.requires_grad for p in parameters)
            wants_grad = is_trained or self._shift(x).requires_grad
        with _differentiable(x, wants_grad) as alias:
            value, log_det = self._with_derivatives(alias, wants_grad)
        return (value, log_det) if wants_grad else (value.detach(), log_det.detach())

    def _with_derivatives(self, x: Tensor, wants_grad: bool) -> tuple[Tensor, Tensor]:
        if self.log_det == "exact":
            dims = math.prod(x.shape[1:])
            if dims > _MOST_EXACT:
                raise ValueError(
                    f'`x` has {dims} numbers a sample, but `log_det` "exact" is for at most '
                    f'{_MOST_EXACT}: the Jacobian has their square. Use log_det="unbiased", or '
                    '"series".'
                )
            return exact_log_det(self._shift, x, wants_grad)
        goes_on = self.continuation if self.log_det == "unbiased" else None
        probe, num_more = probe_for(x, goes_on)
        weights = series_weights(self.num_terms, num_more, self.continuation)
        return power_series(self._shift, x, probe, weights, wants_grad)

    def _shift(self, x: Tensor) -> Tensor:
        value = self.network(x)
        if value.shape != x.shape:
            raise ValueError(
                f"The network of InvertibleResidual returned shape {tuple(value.shape)} for an "
                f"input of shape {tuple(x.shape)}, but the same shape is needed. For a convolution "
                "of kernel size 3, set `padding` to 1."
            )
        return value

    def _fixed_point(self, y: Tensor) -> Tensor:
        if y.numel() == 0:
            return y
        tolerance = self.tolerance or _ROUNDING * torch.finfo(y.dtype).eps
        # For each sample: a large sample must not make the others less exact.
        allowed = tolerance * y.detach().abs().flatten(1).amax(1).clamp(min=1)
        x, worst, num_done = y, 0.0, 0
        while num_done < self.max_iterations and math.isfinite(worst):
            before, x, num_done = x, y - self._shift(x), num_done + 1
            # The residual of the equation at `before`; the new x is one iteration closer.
            residual = (x - before).detach().abs().flatten(1).amax(1)
            worst = float((residual / allowed).max())
            if worst <= 1:
                return x
        raise ConvergenceError(
            f"The inverse of InvertibleResidual over {type(self.network).__name__}, for `y` of "
            f"shape {tuple(y.shape)}, did not converge: after {num_done} repetitions of "
            f"`max_iterations` {self.max_iterations} a residual is {worst:.1e} times what "
            f"`tolerance` {tolerance:.1e} allows. If it still falls, raise `max_iterations` or "
            "`tolerance`; if `y` is not finite, look for what made it so; if neither, the network "
            "does not contract: build it of LipschitzLinear and LipschitzConv2d with a smaller "
            "`coefficient`, and of activations such as LipSwish."
        )


def exact_log_det(network: Network, x: Tensor, wants_grad: bool) -> tuple[Tensor, Tensor]:
    """Return ``g(x)`` and the exact log-determinant ``(N,)``, from one derivative per dimension."""
    value = network(x)
    columns = value.flatten(1).unbind(1)
    ones = value.new_ones(len(value))
    rows = [_pulled_back(each, x, ones, wants_grad).flatten(1) for each in columns]
    jacobian = torch.stack(rows, dim=1)
    unit = torch.eye(len(rows), device=x.device, dtype=x.dtype)
    log_det: Tensor = _linalg.slogdet(wide(unit + jacobian))[1].to(x.dtype)
    return value, log_det


def power_series(
    network: Network, x: Tensor, probe: Tensor, weights: Sequence[float], wants_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return ``g(x)`` and ``sum_k weights[k - 1] * trace(J^k)``, of shape ``(N,)``, from a probe.

    Each trace is estimated as ``v J^k v`` with the signs v of `probe`, of the shape of `x`.
    """
    value, row, total = network(x), probe, x.new_zeros(len(x))
    for weight in weights:
        row = _pulled_back(value, x, row, wants_grad)
        total = total + weight * (row * probe).flatten(1).sum(1)
    return value, total


def series_weights(num_terms: int, num_more: int, continuation: float) -> list[float]:
    """Return the coefficients of ``log(1 + z)``: 1, -1/2, 1/3 and so on.

    Each of the `num_more` further terms is divided by its probability, ``continuation ** j``.
    """
    weights = [(-1) ** (k + 1) / k for k in range(1, num_terms + num_more + 1)]
    for j in range(1, num_more + 1):
        weights[num_terms + j - 1] /= continuation**j
    return weights


def probe_for(x: Tensor, continuation: float | None) -> tuple[Tensor, int]:
    """Draw signs of the shape of `x`, and the number of further terms (Rule 2)."""
    own = own_generator(torch.device("cpu"), draw_seed())
    num_more = 0
    if continuation is not None:
        # 1 - u lies in (0, 1], so that its logarithm is finite
        uniform = 1 - float(torch.rand((), generator=own, dtype=torch.float64))
        num_more = int(math.log(uniform) / math.log(continuation))
    seed = int(torch.randint(2**63 - 1, (), generator=own, dtype=torch.int64))
    generator = own_generator(x.device, seed)
    bits = torch.randint(2, x.shape, generator=generator, device=generator.device)
    return bits.to(x.device, x.dtype).mul_(2).sub_(1), num_more


@contextmanager
def _differentiable(x: Tensor, wants_grad: bool) -> Generator[Tensor]:
    """Yield an alias of `x` to take derivatives with respect to (See Rule 1)."""
    with torch.inference_mode(mode=False), gradients_in_forward():  # gradients are enabled, too
        if wants_grad and x.requires_grad:
            yield x.view_as(x)
        else:
            yield (x.clone() if x.is_inference() else x.detach()).requires_grad_()


def _pulled_back(value: Tensor, x: Tensor, row: Tensor, wants_grad: bool) -> Tensor:
    """Return ``row J`` for the Jacobian of `value` in `x`."""
    return torch.autograd.grad(
        value, x, row, retain_graph=True, create_graph=wants_grad, materialize_grads=True
    )[0]


@contextmanager
def gradients_in_forward() -> Generator[None]:
    """Let `torch.autograd.grad` use tensors that are saved within, in any region (Rule 3)."""
    pair = pair_in_force()
    if pair is None:  # autograd has everything itself
        yield
        return
    at_hand: list[_AtHand] = []
    try:
        with saving(partial(_pack, at_hand, pair)):
            yield
    finally:
        for saved in at_hand:
            saved.tensor = None  # See Rule 4


@never_compiled
def _pack(at_hand: list[_AtHand], pair: Pair, tensor: Tensor) -> _AtHand:
    saved = _AtHand(tensor, pair)
    at_hand.append(saved)
    return saved


class _AtHand:
    """A saved tensor: held until the context ends, then unpacked by the pair beneath."""

    __slots__ = ("_packed", "_unpack", "tensor")

    def __init__(self, tensor: Tensor, pair: Pair) -> None:
        self._packed: Any = pair[0](tensor)
        self._unpack = pair[1]
        self.tensor: Tensor | None = tensor.detach()

    @never_compiled
    def get(self) -> Tensor:
        return self._unpack(self._packed) if self.tensor is None else self.tensor
