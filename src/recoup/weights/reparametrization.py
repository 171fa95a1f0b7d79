"""The base of reparametrizations, each one formula, and the steps that their draws belong to.

NOTE [ One formula ]

Rule 1. A weight is computed twice from the same numbers: in forward, and again in backward, where
        nothing needs a graph. Both call `compute`, so both have the same bits.
Rule 2. What a draw does to an entry of a weight depends on no other entry: it scales it, or adds to
        it. So the gradient of the weight is that of the result, scaled likewise: `compute` is its
        own transpose, and has derivatives of any order.
Rule 3. A formula that has parameters of its own (a norm, a learned deviation) or is a function of
        the user's is differentiated by autograd, in a region, so that none of it is kept.
Rule 4. An autograd function of Python does not work in a transform of torch.func. There, the scales
        or the summands are a tensor: `compute` of ones, or of zeros.

NOTE [ One draw a step ]

Rule 5. A step begins and ends with the forward of a module that a reparametrization was applied to,
        or with `step(model)`; the outermost one counts. In it a weight is drawn at its first read,
        and every other read has that draw. What is read outside of steps has a draw of its own.
Rule 6. `same_draw` around reads and forwards gives them one draw; the innermost one counts.
Rule 7. The innermost `disabled` or `enabled` takes precedence, and over training mode, too.
Rule 8. A seed is drawn for a step, or for a read outside of steps; that of a weight is a hash of it
        and of the name of the weight. So eager and compiled code have the same draws.
Rule 9. Frames are in force in one thread. Code that runs again has recorded draws (see `weight`).
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from recoup._arguments import is_real, shown
from recoup._core.compile import never_compiled
from recoup._core.rng import draw_seed
from recoup._core.saved_tensors import is_transformed, untransformed

Magnitude = float | Tensor | Callable[[int], float]
Operands = tuple[Tensor, ...]


class Application:
    """One call that applied a reparametrization to a module tree; its draws go together."""

    def __init__(self) -> None:
        self.step = 0  # how many there were in training so far, or what `set_step` was given
        self.counts = True  # whether steps are counted


class Drawn(NamedTuple):
    """A reparametrization with the seed and the magnitude that one step uses."""

    step: Reparametrization
    seed: int
    magnitude: float


class Reparametrization:
    """One step from the raw weight to the one that is used; `mode` is "training" or "always"."""

    kind: ClassVar[str]
    order: ClassVar[int]
    argument: ClassVar[str] = ""  # the name of its magnitude, if it has one
    most: ClassVar[float] = math.inf  # the largest magnitude
    is_random: ClassVar[bool] = True
    is_additive: ClassVar[bool] = False  # whether a draw is added to a weight, or scales it
    by_autograd = False  # See Rule 3
    by_operators = False  # whether `compute` is differentiable as it is, and keeps nothing large
    suffix = ""  # of the name of a parameter, or a module, that it adds beside the weight
    adds_parameters = False  # of any kind
    function: Callable[..., Tensor] | None = None  # of the user's
    is_tied = False  # whether another name of the weight may share it
    records: Collection[set[Drawn]] = ()  # that note which draws there were
    draws_by_row = False  # whether it scales whole rows of an embedding's table
    rate: Magnitude = 1.0  # a float, or what has one for a step

    def __init__(self, application: Application, mode: str) -> None:
        if mode not in ("training", "always"):
            raise ValueError(
                f'`mode` is {mode!r}, but must be "training" (noise in training mode only) or '
                '"always" (in evaluation too).'
            )
        self.application = application
        self.mode = mode

    def __repr__(self) -> str:
        mode = "" if self.mode == "training" else f', mode="{self.mode}"'
        return f"{self.kind}({self.shown()}{mode})"

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "records"}

    def shown(self) -> str:
        """Return its arguments as `applied` shows them."""
        rate = self.rate
        if callable(rate) and not isinstance(rate, Tensor):
            return f"{self.argument}={getattr(rate, '__name__', type(rate).__name__)}"
        return f"{self.argument}={float(rate):g}"

    # -- its magnitude -----------------------------------------------------------------------------

    def magnitude(self, step: int) -> float:
        """Return the magnitude at a step, or raise if it is not valid; at 0 nothing is applied."""
        return self.rate if isinstance(self.rate, float) else self._number(self.rate, step)

    def _number(self, value: Any, step: int) -> float:
        if callable(value) and not isinstance(value, Tensor):
            value = cast("Callable[[int], Any]", value)(step)
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(
                f"`{self.argument}` requires a gradient, but a draw has none for it. Give its "
                "`detach()`, which shares its memory, or an nn.Parameter as `std` of "
                "recoup.weight_noise."
            )
        if isinstance(value, Tensor) and value.dim() == 0:
            value = value.item()
        number = float(value) if is_real(value) else math.nan
        if not (math.isfinite(number) and 0.0 <= number <= self.most):
            needed = "0 or more" if self.most == math.inf else f"from 0 to {self.most:g}"
            got = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
            raise ValueError(
                f"`{self.argument}` is {got}, but must be {needed}: a number, a 0-dim tensor, or a "
                "function from the step to a number."
            )
        return number

    def checked(self, value: Any) -> Magnitude:
        """Return `value` as a rate, or raise if it is none."""
        number = self._number(value, self.application.step)
        return number if isinstance(value, Real) else value

    def set_rate(self, module: nn.Module, key: str, rate: Magnitude) -> None:
        """Set the rate for the weight `key` of `module`."""
        del module, key
        self.rate = rate

    # -- a module that has it ----------------------------------------------------------------------

    def is_same_as(self, other: Reparametrization) -> bool:
        """Whether a weight that has `other` cannot have this one, too."""
        return other.kind == self.kind

    def fit(self, module: nn.Module, key: str, name: str) -> None:
        """Adapt to the weight `key` of `module`, or raise if it cannot be applied to it."""

    def added(self, key: str) -> str:
        """Return the name of what it adds beside the weight `key`; or ""."""
        return key + self.suffix if self.suffix else ""

    def first_value(self, weight: Tensor) -> nn.Parameter:
        """Return the parameter that it adds beside a weight."""
        raise NotImplementedError

    def applied_to(self, module: nn.Module, key: str) -> None:
        """Register what it takes in addition to the weight."""
        weight = module._parameters[key]
        if self.suffix and weight is not None:
            module.register_parameter(key + self.suffix, self.first_value(weight))

    def removed_from(self, module: nn.Module, key: str) -> None:
        """Leave the module with a plain weight."""
        module._parameters.pop(self.added(key), None)

    def operands(self, module: nn.Module, key: str) -> Operands:
        """Return the parameters that it takes in addition to the weight."""
        return (getattr(module, key + self.suffix),) if self.suffix else ()

    # -- its formula -------------------------------------------------------------------------------

    def compute(self, weight: Tensor, own: Operands, drawn: Drawn, is_new: bool = False) -> Tensor:
        """Return the reparametrized weight; where `weight` is new, it may be overwritten."""
        raise NotImplementedError

    def scaled_rows(self, rows: Tensor, ids: Tensor, num_rows: int, drawn: Drawn) -> Tensor:
        """Return rows of a table that were looked up, as they are in the reparametrized one."""
        raise NotImplementedError

    def apply(self, weight: Tensor, operands: Operands, drawn: Drawn) -> Tensor:
        """Return the reparametrized weight with its graph, which keeps nothing but the seed."""
        if self.by_operators:
            return self.compute(weight, operands, drawn)
        if not is_transformed():
            return cast("Tensor", DrawnWeight.apply(weight, drawn))
        with untransformed():  # See Rule 4
            made = torch.zeros if self.is_additive else torch.ones
            draw = made(weight.shape, dtype=weight.dtype, device=weight.device)
            draw = self.compute(draw, (), drawn, is_new=True)
        return weight + draw if self.is_additive else weight * draw


class DrawnWeight(torch.autograd.Function):
    """A weight under a draw, which is its own derivative (See Rule 2)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, drawn: Drawn) -> Tensor:
        ctx.drawn = drawn
        return drawn.step.compute(weight, (), drawn)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        drawn: Drawn = ctx.drawn
        if drawn.step.is_additive:
            return gradients[0], None
        if not torch.is_grad_enabled():
            return drawn.step.compute(gradients[0], (), drawn), None
        return cast("Tensor", DrawnWeight.apply(gradients[0], drawn)), None


# -- steps -----------------------------------------------------------------------------------------


class _Local(threading.local):
    def __init__(self) -> None:
        self.frames: list[Any] = []  # in force in this thread, the innermost last
        self.raw_of: nn.Module | None = None  # whose weights are read as they are (see `module`)
        self.lists: dict[int, list[Tensor]] = {}  # on which recurrent layers run, by their ids


local = _Local()


class Frame:
    """A step or a user's context, in force in a thread from entering to leaving it."""

    @never_compiled
    def __enter__(self) -> None:
        local.frames.append(self)

    @never_compiled
    def __exit__(self, *error: object) -> None:
        leave(self)


@contextmanager
def running_on(layer: nn.Module, weights: list[Tensor]) -> Generator[None]:
    """Return a context in which a recurrent layer has these weights in its list."""
    before = local.lists.get(id(layer))
    local.lists[id(layer)] = weights
    try:
        yield
    finally:
        del local.lists[id(layer)]
        if before is not None:
            local.lists[id(layer)] = before


def leave(frame: Frame) -> None:
    """Take a frame out of force; contexts of generators may end in another order."""
    frames = local.frames
    for index in reversed(range(len(frames))):
        if frames[index] is frame:
            del frames[index]
            return


class Step(Frame):
    """Draws that several reads share (See Rule 5)."""

    def __init__(
        self,
        owner: nn.Module | None,
        applications: Sequence[Application],
        seed: int | None = None,
        counts: bool = True,
    ) -> None:
        self.owner = owner  # whose forward it is; None for a block of the user's
        self.applications = applications  # those whose draws belong to it
        self.drawn: dict[Reparametrization, Drawn] = {}
        # By weight: what it was computed from, a weak reference to it, the tensor through which
        # gradients of a second one reach it, and that second one (see `weight`).
        self.made: dict[object, tuple[Any, ...]] = {}
        self.last: Tensor | None = None  # the weight that is most often read again at once
        self._seed = seed
        self._counts = counts  # whether schedules count it
        # The numbers of the step, by the calls that applied; how often a name was drawn for.
        self._numbers: dict[Application | str, int] = {}

    def draw(self, step: Reparametrization, path: str, *, is_training: bool) -> Drawn:
        """Draw for the weight that is called `path`."""
        application = step.application
        number = self._numbers.get(application)
        if number is None:  # it is the same for all weights
            number = self._numbers[application] = application.step
            application.step += self._counts and is_training and application.counts
        rate, seed = step.rate, 0
        magnitude = rate if isinstance(rate, float) else step.magnitude(number)
        if magnitude:
            if self._seed is None:
                self._seed = draw_seed()
            name = f"{path} {step.kind}"
            again = self._numbers[name] = self._numbers.get(name, -1) + 1
            text = f"{self._seed} {name} {again}".encode()
            seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
        drawn = self.drawn[step] = Drawn(step, seed, magnitude)
        return drawn


class SameDraw(Step):
    """Draws that last for several steps (See Rule 6)."""


class Override(Frame):
    """Noise turned on or off for some weights (See Rule 7)."""

    def __init__(self, weights: Iterable[Any], *, is_on: bool) -> None:
        self.weights = frozenset(weights)
        self.is_on = is_on

    @never_compiled
    def __enter__(self) -> None:
        for weight in self.weights:
            weight.is_switched = weight.is_switched or self.is_on
        super().__enter__()
