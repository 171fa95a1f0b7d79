"""The options of a plan: its step and losses, what a budget bounds, where inputs may wait."""

from __future__ import annotations

import copy
import functools
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypedDict, cast, get_args

import torch
from torch import Tensor, nn

from recoup._arguments import (
    check_callable,
    check_choice,
    check_flag,
    check_whole,
    is_real,
    is_whole,
)
from recoup._core.compile import is_compiled
from recoup._core.devices import has_fixed_segments, is_accelerator, synchronize
from recoup._core.offload import existing_folder, tier_for
from recoup._core.pytree import flatten, tensors_in
from recoup._core.storage_tracking import bytes_of
from recoup._core.tensors import is_without_values
from recoup.memory import parse_bytes
from recoup.planning.compiling import backend_of
from recoup.planning.forwards import Args, Kwargs
from recoup.planning.step import Step, largest_among_ranks
from recoup.planning.work import SECONDS_PER_MOVED_BYTE
from recoup.schedules import Offload, Schedule

Policy = Literal["full", "every 2nd block", "save attention", "keep"]
# What a policy leaves no choice of.
_CHOICES = ("compile", "exact", "offload_to", "tiles", "headroom")
_TRIAL_BYTES = 1 << 25
# Of a budget, on an accelerator: what is needed where its segments can grow, and where they cannot
# (tests/unit/planning/test_headroom, benchmarks/budgets.py).
_HEADROOM = 0.05
_HEADROOM_OF_FIXED_SEGMENTS = 0.25


def checked_budget(budget: int | str) -> int:
    """Return the bytes of a budget; a ValueError if it is no number of bytes."""
    return parse_bytes(budget, name="budget")


class StepKeywords(TypedDict, total=False):
    """The options of `recoup.plan` that an estimate has, too."""

    loss: Callable[[Any], Any] | None
    blocks: str | Iterable[str | nn.Module] | None
    budget_of: Literal["step", "total"]
    holds_output: bool
    exact: bool
    num_forwards: int
    headroom: float | None


class PlanKeywords(StepKeywords, total=False):
    """The options of `recoup.plan`, as keyword arguments."""

    optimizer: torch.optim.Optimizer | None
    compile: bool | str
    offload_to: str | os.PathLike[str] | None
    tiles: bool | int


def check_keywords(function: str, options: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise a TypeError if a function was given keyword arguments of other names."""
    for name in options.keys() - names:
        raise TypeError(f"{function}() got an unexpected keyword argument `{name}`")


@dataclass(frozen=True)
class PlanOptions:
    """The options that all makers of plans share, checked; `recoup.plan` explains each."""

    loss: Callable[[Any], Any] | None = None
    blocks: str | Iterable[str | nn.Module] | None = None
    budget_of: Literal["step", "total"] = "step"
    optimizer: torch.optim.Optimizer | None = None
    holds_output: bool = True
    compile: bool | str = False
    exact: bool = True
    offload_to: str | os.PathLike[str] | None = None
    tiles: bool | int = False
    num_forwards: int = 1
    headroom: float | None = None

    def __post_init__(self) -> None:
        check_choice("step", "total", budget_of=self.budget_of)
        backend_of(self.compile)
        tiles = self.tiles
        if not isinstance(tiles, bool) and not is_whole(tiles, 2):
            raise ValueError(
                f"`tiles` is {tiles!r}, but must be True, False, or how many tiles the output "
                "layer runs in with its loss: an int of at least 2."
            )
        check_flag(exact=self.exact, holds_output=self.holds_output)
        check_whole(num_forwards=self.num_forwards)
        headroom = self.headroom
        if headroom is not None and not (is_real(headroom) and 0 <= headroom < 1):
            raise ValueError(
                f"`headroom` is {headroom!r}, but must be the part of the budget that is left for "
                "fragmentation, such as 0.05, from 0 to less than 1."
            )
        if isinstance(self.blocks, Iterator):  # it would serve one plan
            object.__setattr__(self, "blocks", list(self.blocks))
        if self.loss is not None:
            check_callable(loss=self.loss)
        if self.optimizer is not None and not hasattr(self.optimizer, "param_groups"):
            raise ValueError(
                f"`optimizer` is {self.optimizer!r}, but must be a torch.optim.Optimizer, such as "
                "torch.optim.Adam(model.parameters())."
            )
        if self.optimizer is not None and self.budget_of == "step":
            raise ValueError(
                '`optimizer` is given, but its state counts only with budget_of="total". Leave it '
                "out, or set that."
            )

    def step(self, model: nn.Module, call: Callable[..., Any], args: Args, kwargs: Kwargs) -> Step:
        """Return a step with these options that calls the model, or a function around it."""
        num = self.num_forwards if call is model else 1
        return Step(model, call, args, kwargs, losses_from(self.loss), self.holds_output, num)

    def room(self, step: Step) -> Room:
        """Return the room that budgets leave for a step, on the rank that has the least."""
        headroom = self.headroom
        if headroom is None and is_accelerator(step.device):
            headroom = _HEADROOM_OF_FIXED_SEGMENTS if has_fixed_segments(step.device) else _HEADROOM
        own = [self._baseline_bytes(step.model), headroom or 0.0]
        baseline, headroom = largest_among_ranks(step.model, own)
        gradients = None if self.budget_of == "step" else gradient_bytes(step.model)
        return Room(int(baseline), float(headroom), gradients)

    def _baseline_bytes(self, model: nn.Module) -> int:
        """Return the bytes alive before a step that count: none, or all with "total"."""
        if self.budget_of == "step":
            return 0
        own = bytes_of((*model.parameters(), *model.buffers())) + gradient_bytes(model)
        return own if self.optimizer is None else own + _state_bytes(self.optimizer)

    def check_policy(self, policy: str, budget: int | str | None) -> None:
        """Raise ValueError if a policy is unknown, or leaves no choice of what else is given."""
        check_choice(*get_args(Policy), policy=policy)
        if budget is not None:
            raise ValueError(
                f"`budget` is {budget!r}, and `policy` {policy!r}, but a plan follows one of them: "
                "the fastest that keeps to the bytes, or what the policy says, whatever it takes. "
                "Choose one."
            )
        for name in _CHOICES:
            if (given := getattr(self, name)) != getattr(PlanOptions, name):
                raise ValueError(
                    f"`{name}` is {given!r}, but `policy` {policy!r} says what each block does. "
                    f"Leave `{name}` out, or give a `budget` in place of the policy."
                )

    def check_replan(self, model: nn.Module | None = None) -> None:
        """Raise a ValueError if no plans with these options can be made for other shapes."""
        if self.compile:
            raise ValueError(
                "`replan` is True with `compile`, but compiled blocks are measured and timed for "
                "one shape. Leave one of them out, or pad batches to the shape of the example."
            )
        if model is not None and is_compiled(model):
            raise ValueError(
                f"`replan` is True, but `model` is a compiled {type(model).__name__}, which "
                "does not show its arguments before its forward. Plan before compiling it, or "
                "leave `replan` out."
            )


# -- what a budget bounds --------------------------------------------------------------------------


class Room(NamedTuple):
    """The room that a budget leaves for a step.

    Args:
        baseline_bytes: the bytes that are alive before it and count.
        headroom: the part of the budget that is left for fragmentation.
        gradient_bytes: those of the baseline that are gradients; None if it does not count.
    """

    baseline_bytes: int
    headroom: float
    gradient_bytes: int | None = None

    def of(self, budget_bytes: int) -> int:
        """Return the bytes that a step may take within a budget."""
        return budget_bytes - math.ceil(budget_bytes * self.headroom) - self.baseline_bytes

    def budget_for(self, step_bytes: int) -> int:
        """Return the least budget in which a step may take so many bytes."""
        budget = math.ceil((self.baseline_bytes + step_bytes) / (1 - self.headroom))
        return budget + (self.of(budget) < step_bytes)  # which rounds down


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of the gradients that the parameters of a model have now."""
    return bytes_of([p.grad for p in model.parameters() if p.grad is not None])


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the state of an optimizer, after its first step."""
    if optimizer.state:
        return bytes_of(tensors_in(cast("Any", optimizer.state)))
    try:
        return bytes_of(tensors_in(_stepped_without_memory(optimizer)))
    except Exception as error:
        raise ValueError(
            f"`optimizer` is a {type(optimizer).__name__} that has not stepped yet, and the size "
            f"of its state cannot be predicted ({error}). Step it once before planning."
        ) from error


def _stepped_without_memory(optimizer: torch.optim.Optimizer) -> Mapping[Any, Any]:
    """Return the state of a copy of `optimizer` after a step on meta tensors."""
    other: Any = copy.copy(optimizer)
    other.state = cast("Any", defaultdict)(dict)
    other.param_groups = []
    for group in optimizer.param_groups:
        empty = [nn.Parameter(torch.empty_like(p, device="meta")) for p in group["params"]]
        for parameter in empty:
            parameter.grad = torch.empty_like(parameter)
        # No fused kernel runs without memory; others make the same state.
        own = {name: False if name == "fused" else value for name, value in group.items()}
        other.param_groups.append({**own, "params": empty})
    type(optimizer).step(other)
    return other.state


# -- losses ----------------------------------------------------------------------------------------

_Losses = Callable[[Sequence[Any]], Sequence[Tensor]]


class NoOutputError(ValueError):
    """The model returned None, as a `training_step` does to leave out a batch."""


def losses_from(loss: Callable[..., Any] | None) -> _Losses:
    """Return a function from the outputs of all forwards of a step to one scalar or several.

    Without `loss`, that is the attribute or entry `loss` of an output, if it is a scalar, or else
    the differentiable tensors in the output: scalars as they are, and the sum of the absolute
    values of others.
    """
    if loss is None:
        return lambda outputs: [each for output in outputs for each in _found(output)]

    def given(outputs: Sequence[Any]) -> Sequence[Tensor]:
        try:
            losses = loss(*outputs)
        except TypeError as error:
            error.add_note(
                f"`loss` was called with what the model returned ({len(outputs)} arguments): give "
                "a function of that, such as lambda output: loss(output, target)."
            )
            raise
        several: list[Any] = [*losses] if isinstance(losses, (tuple, list)) else [losses]
        for each in several:
            shape = getattr(each, "shape", None)
            if not isinstance(each, Tensor) or each.numel() != 1:
                kind = type(each).__name__ if shape is None else f"tensor of shape {tuple(shape)}"
                raise ValueError(
                    f"`loss` returned a {kind}, but must return a scalar tensor or a tuple of them."
                )
        return _differentiable(several)

    return given


def _found(output: Any) -> Sequence[Tensor]:
    if output is None:
        raise NoOutputError(
            "`model` returned None for these arguments, so there is no backward to plan for. Give "
            "arguments for which it returns its loss or its output."
        )
    if isinstance(output, Mapping):
        named = cast("Any", output).get("loss")
    else:
        named = getattr(output, "loss", None)
    if isinstance(named, Tensor) and named.numel() == 1:
        return _differentiable([named])
    tensors, _ = flatten(output)
    wanted = [t for t in tensors if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    return _differentiable([t if t.numel() == 1 else t.abs().sum() for t in wanted])


def _differentiable(losses: list[Tensor]) -> Sequence[Tensor]:
    found = [loss for loss in losses if loss.requires_grad]
    if not found:
        raise ValueError(
            "`model` returned nothing that requires a gradient for these arguments, so there is no "
            "backward to plan for. Let its parameters require gradients, or give `loss`; and plan "
            "outside of `torch.inference_mode`."
        )
    return found


# -- where the inputs of blocks may wait -----------------------------------------------------------


class OffloadPlace(NamedTuple):
    """A place for inputs of blocks, and what moving a byte there costs.

    Args:
        to: "host" or the path of a folder.
        seconds_per_byte: the time of moving a byte there and back; None if nothing is offloaded.
            Copies run behind the computation, but the search does not count on that: so it never
            offloads where recomputing is faster.
    """

    to: str = "host"
    seconds_per_byte: float | None = None

    def of(self, schedule: Schedule) -> Schedule:
        """Return a schedule that offloads to this place."""
        actions = (
            replace(a, to=self.to) if isinstance(a, Offload) else a for a in schedule.actions
        )
        return replace(schedule, actions=tuple(actions))


def place_of(offload_to: str | os.PathLike[str] | None, device: torch.device) -> OffloadPlace:
    """Return the place that the argument `offload_to` means, whose speed is measured."""
    if offload_to is None or offload_to == "host":
        is_away = is_accelerator(device)
        if offload_to == "host" and not is_away:
            raise ValueError(
                f'`offload_to` is "host", but the model is on the {device.type}, whose memory is '
                "host memory. Name a folder on a disk, or leave it out."
            )
        return OffloadPlace("host", _seconds_per_byte("host", device) if is_away else None)
    folder = existing_folder(offload_to)
    if folder is None:
        raise ValueError(
            f"`offload_to` is {offload_to!r}, which is no folder. Make the folder first, on a "
            'disk with room for the inputs of blocks, or give "host".'
        )
    return OffloadPlace(str(folder), _seconds_per_byte(str(folder), device))


def _seconds_per_byte(to: str, device: torch.device) -> float:
    """Return the time of moving a byte to a place and back."""
    return SECONDS_PER_MOVED_BYTE if is_without_values() else _measured_per_byte(to, device)


@functools.cache
def _measured_per_byte(to: str, device: torch.device) -> float:
    tier = tier_for(to)
    data = torch.zeros(_TRIAL_BYTES, dtype=torch.uint8, device=device)
    if not tier.takes(data):
        return SECONDS_PER_MOVED_BYTE
    seconds = 0.0
    for _ in range(2):  # the first one makes what is pinned, and files
        synchronize(device)
        start = time.perf_counter()
        sent = tier.send(data)
        sent.land()
        sent.fetch()()
        synchronize(device)
        seconds = time.perf_counter() - start
    return seconds / _TRIAL_BYTES
