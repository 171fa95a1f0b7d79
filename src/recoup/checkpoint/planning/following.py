"""A model that trains as a plan says.

NOTE [ Following a plan ]

Rule 1. A forward of the model is a pass; the blocks that are called in it are, in this order, the
        stages of the plan. Stages each of which is given what the one before returned form a
        chain, which the executor runs under its part of the schedule. Outside of a forward of the
        model a pass begins where a block is called that is not after the last one.
Rule 2. A call that does not come as planned (another order, other arguments) is a chain of its own:
        it keeps its residuals if the plan keeps them, and is run again from its arguments
        otherwise. That is right and may take more memory, so it is said once.
Rule 3. A pass holds its chain until the next one begins or the pass ends. Then only what autograd
        holds is left.
Rule 4. Where a checkpoint of others has begun within the pass, what its blocks save is its own to
        make again: they run plainly, then and when it runs them again in backward.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from recoup.checkpoint.planning.forwards import around
from recoup.checkpoint.planning.linking import Returned
from recoup.checkpoint.region import run_again
from recoup.residuals.calls import Call
from recoup.residuals.executor import Plan, Run
from recoup.residuals.hooks import is_in_backward
from recoup.residuals.keeping import KeepingCall

__all__ = ["Follow", "Part", "PlannedStage"]

Fn = Callable[..., Any]


class PlannedStage(NamedTuple):
    """What a plan says of one call of a block.

    Args:
        name: the qualified name of the block.
        module: the block.
        part: the number of its chain.
        step: its place in that chain.
        is_kept: whether it keeps its residuals, all or some, when it is first called.
        chosen: of which operators it keeps the results alone; None if it keeps all residuals, or
            none.
    """

    name: str
    module: nn.Module
    part: int
    step: int
    is_kept: bool
    chosen: frozenset[int] | None


class Part(NamedTuple):
    """A chain of a plan.

    Args:
        num_stages: how many calls it has.
        plan: its schedule; None if all of its stages keep their residuals.
    """

    num_stages: int
    plan: Plan | None


class _Pass:
    """Where a forward of the model is."""

    def __init__(self) -> None:
        self.place = -1
        self.chain: Run | None = None
        self.last: Call | None = None
        self.returned = Returned(())
        self.around = around()


class _Here(threading.local):
    def __init__(self) -> None:
        self.passes: list[_Pass] = []
        self.loose = _Pass()


class Follow:
    """The follower of a model and its blocks (See Rule 1)."""

    def __init__(
        self, model: object, stages: Sequence[PlannedStage], parts: Sequence[Part]
    ) -> None:
        self._model = model
        self._stages = stages
        self._parts = parts
        self._places: dict[int, list[int]] = {}
        for place, stage in enumerate(stages):
            self._places.setdefault(id(stage.module), []).append(place)
        self._here = _Here()
        self._has_warned = False

    def called(
        self, module: nn.Module, run: Fn, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the model, or one of its blocks."""
        if module is self._model:
            return self._pass(run, args, kwargs)
        passes = self._here.passes
        now = passes[-1] if passes else self._here.loose
        if now.around != around() or (not passes and is_in_backward()):
            return run(*args, **kwargs)  # See Rule 4
        place = self._place_of(module, now)
        if place is None and not passes:
            _end(now)
            now = self._here.loose = _Pass()
            place = self._place_of(module, now)
        if place is None:
            self._warn(module)
            stage = self._stages[self._places[id(module)][0]]
            return _alone(stage, run, args, kwargs)
        return self._stage(self._stages[place], place, now, run, args, kwargs)

    def _pass(self, run: Fn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        passes = self._here.passes
        passes.append(_Pass())
        try:
            return run(*args, **kwargs)
        finally:
            _end(passes.pop())

    def _place_of(self, module: nn.Module, now: _Pass) -> int | None:
        return next((place for place in self._places[id(module)] if place > now.place), None)

    def _stage(
        self,
        stage: PlannedStage,
        place: int,
        now: _Pass,
        run: Fn,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        part = self._parts[stage.part]
        follows, now.place = place == now.place + 1, place
        if part.plan is None:
            _end(now)
            return _kept(stage, run, *args, **kwargs)
        fn = run if stage.chosen is None else functools.partial(_kept, stage, run)
        call = Call(f"block `{stage.name}`", fn, args, kwargs, stage.module)
        if stage.step == 0:
            _end(now)
            now.chain = part.plan.begin()
            state = call.state
        else:
            at, picks = now.returned.places_in(call.state, stage.module)
            if now.chain is None or not follows or not at:
                _end(now)
                self._warn(stage.module)
                return _alone(stage, run, args, kwargs)
            if now.last is not None:
                now.last.picks = picks
            step = part.plan.prepared.steps[stage.step]
            state = call.link(at, may_run_again=not step.is_taped or step.is_run_again)
        # After an exception nothing comes after this, and nothing of it is held.
        chain, now.chain, now.last = now.chain, None, None
        state, _ = chain.enter(call, state)
        now.returned = Returned(state)
        if stage.step + 1 == part.num_stages:
            chain.end(state)
        else:
            now.chain, now.last = chain, call
        return call.take_output(state)

    def _warn(self, module: nn.Module) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"A {type(module).__name__} of the planned model was called otherwise than when "
                "the plan was made (after other blocks, or more often). Its gradients are right, "
                "but it may take more memory than was planned. Make the plan with arguments as "
                "those in training.",
                stacklevel=4,
            )


def _end(now: _Pass) -> None:
    if now.chain is not None:
        now.chain.end(())
    now.chain = now.last = None
    now.returned = Returned(())


def _kept(stage: PlannedStage, run: Fn, *args: Any, **kwargs: Any) -> Any:
    if stage.chosen is None:
        return run(*args, **kwargs)
    name = f"block `{stage.name}`"
    return run_again(KeepingCall(name, run, args, kwargs, stage.module, stage.chosen))


def _alone(stage: PlannedStage, run: Fn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if stage.is_kept:
        return _kept(stage, run, *args, **kwargs)
    return run_again(Call(f"block `{stage.name}`", run, args, kwargs, stage.module))
