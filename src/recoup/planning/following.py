"""The follower of a plan: makes the blocks of a model keep or recompute their residuals.

NOTE [ Following a plan ]

Rule 1. A forward of the model is a pass. The blocks that it calls are the stages of the plan, in
        the order of the calls. Stages that each receive the output of the stage before form a
        chain, which the executor runs under its part of the schedule. Outside a forward of the
        model, a pass begins when a block is called whose place is not after that of the last one.
Rule 2. A block that is skipped (LayerDrop) is a stage that does nothing: the next block receives
        the output of the block before the gap, and the chain goes on, in no more bytes than with
        the skipped block. If a block receives anything else, another chain begins at its place.
Rule 3. In one pass each stage of the plan keeps its residuals at most once. A block that is called
        more often, or was not called when the plan was made, is recomputed from its arguments. A
        block that is called in another order follows its stage of the plan outside a chain. The
        gradients are right in all of these cases; one warning says that memory may be exceeded.
Rule 4. A pass holds its chain until the next chain begins or the pass ends. After that, only
        autograd holds what the chain has kept.
Rule 5. Blocks within a checkpoint of another library run plainly, in forward and in its
        recomputation, because that checkpoint recomputes what they save.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from recoup._core.call import Call, run_again
from recoup._core.executor import Executor, Run
from recoup._core.restoring import Restoring
from recoup._core.saved_tensors import is_in_backward
from recoup._core.stage import State
from recoup.planning.blocks import Block
from recoup.planning.forwards import around
from recoup.planning.keeping import KeepingCall
from recoup.planning.linking import Returned
from recoup.planning.sizes import ArgumentSizes

__all__ = ["Follow", "Part", "PlannedStage"]

Fn = Callable[..., Any]


class PlannedStage(NamedTuple):
    """The part of a plan for one call of a block.

    Args:
        name: the qualified name of the block.
        module: the block.
        part: the index of its chain.
        step: its place in that chain.
        is_kept: whether it keeps its residuals, all or some, when it is first called.
        chosen: the operators whose results are all that it keeps; None if it keeps all residuals or
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
        num_stages: the number of its calls.
        executor: runs its schedule; None if all of its stages keep their residuals.
    """

    num_stages: int
    executor: Executor | None


class _LeftOut:
    """A stage in the place of a block that was not called (See Rule 2)."""

    name = "a block that was left out"
    modules: tuple[nn.Module, ...] = ()
    held = None

    @property
    def code(self) -> object:
        """The same for all: there is no code to compare."""
        return _LeftOut

    def forward(self, state: State) -> tuple[State, Tensor | None]:
        """Return the state itself."""
        return state, None

    def inverse(self, state: State) -> State:
        """Return the state itself."""
        return state


_LEFT_OUT = _LeftOut()


class _Pass:
    """The progress of one forward of the model."""

    def __init__(self) -> None:
        self.place = -1
        self.used: set[int] = set()
        self.part = -1
        self.num_entered = 0
        self.chain: Run | None = None
        self.last: Call | None = None
        self.returned = Returned(())
        self.around = around()


class _InPass(Restoring):
    """A context around a forward of the model."""

    __slots__ = ("_num_around", "_passes")

    def __init__(self, passes: list[_Pass]) -> None:
        super().__init__()
        self._passes = passes
        self._num_around = -1

    def __enter__(self) -> None:
        self._num_around = len(self._passes)
        self._passes.append(_Pass())

    def restore(self) -> None:
        if self._num_around >= 0:
            del self._passes[self._num_around :]
            self._num_around = -1

    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        del kind, value, traceback
        now = self._passes[-1]
        self.restore()
        _end(now)


class _Here(threading.local):
    def __init__(self) -> None:
        self.passes: list[_Pass] = []
        self.loose = _Pass()


class Follow:
    """The follower of a model and its blocks (See Rule 1).

    Args:
        model: the model, whose forward is one pass.
        stages: the stages of the plan.
        parts: its chains.
        blocks: all planned blocks; those without a stage are recomputed if they are called.
    """

    def __init__(
        self,
        model: object,
        stages: Sequence[PlannedStage],
        parts: Sequence[Part],
        blocks: Sequence[Block],
    ) -> None:
        self._model = model
        self._names = {id(module): name for name, module in blocks}
        self._stages = stages
        self._parts = parts
        self._places: dict[int, list[int]] = {}
        for place, stage in enumerate(stages):
            self._places.setdefault(id(stage.module), []).append(place)
        self._here = _Here()
        self._has_warned = False
        self.sizes: ArgumentSizes | None = None  # those of the planned arguments

    def called(
        self, module: nn.Module, run: Fn, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the model, or one of its blocks."""
        if module is self._model:
            return self._pass(run, args, kwargs)
        passes = self._here.passes
        now = passes[-1] if passes else self._here.loose
        if now.around != around() or (not passes and is_in_backward()):
            return run(*args, **kwargs)  # See Rule 5
        place = self._place_of(module, now)
        if place is None and not passes:
            _end(now)
            now = self._here.loose = _Pass()
            place = self._place_of(module, now)
        if place is None:
            return self._out_of_order(module, now, run, args, kwargs)
        return self._stage(self._stages[place], place, now, run, args, kwargs)

    def _pass(self, run: Fn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.sizes is not None:
            self.sizes.warn_if_larger(type(self._model).__name__, args, kwargs)
        with _InPass(self._here.passes):
            return run(*args, **kwargs)

    def _place_of(self, module: nn.Module, now: _Pass) -> int | None:
        places = self._places.get(id(module), ())
        return next((place for place in places if place > now.place), None)

    def _out_of_order(
        self, module: nn.Module, now: _Pass, run: Fn, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a block whose stages are all before the last call (See Rule 3)."""
        _end(now)
        self._warn(module)
        places = self._places.get(id(module), ())
        unused = next((place for place in places if place not in now.used), None)
        if unused is not None and self._stages[unused].is_kept:
            now.used.add(unused)
            return _kept(self._stages[unused], run, *args, **kwargs)
        return run_again(Call(f"block `{self._names[id(module)]}`", run, args, kwargs, module))

    def _stage(
        self,
        stage: PlannedStage,
        place: int,
        now: _Pass,
        run: Fn,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        now.place = place
        now.used.add(place)
        executor = self._parts[stage.part].executor
        if executor is None:
            _end(now)
            return _kept(stage, run, *args, **kwargs)
        fn = run if stage.chosen is None else functools.partial(_kept, stage, run)
        call = Call(f"block `{stage.name}`", fn, args, kwargs, stage.module)
        at, picks = (), ()
        if now.chain is not None and now.part == stage.part:
            at, picks = now.returned.places_in(call.state, stage.module)
            if not at:
                self._warn(stage.module)
        # The pass releases the chain first: an exception then neither continues nor holds it.
        if now.chain is not None and now.last is not None and at:
            chain, last, first = now.chain, now.last, now.num_entered
            now.chain = now.last = None
            last.picks = picks
            state = tuple(call.state[place] for place in at)
        else:
            _end(now)
            chain, last, first = executor.begin(), None, 0
            state = call.state
        for _ in range(first, stage.step):
            state, _ = chain.enter(_LEFT_OUT, state)
        if last is not None:
            step = executor.prepared.steps[stage.step]
            state = call.link(at, may_run_again=not step.is_taped or step.is_run_again)
        state, _ = chain.enter(call, state)
        now.returned = Returned(state)
        now.part, now.num_entered = stage.part, stage.step + 1
        if now.num_entered == self._parts[stage.part].num_stages:
            chain.end(state)
        else:
            now.chain, now.last = chain, call
        return call.take_output(state)

    def _warn(self, module: nn.Module) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"A {type(module).__name__} of the planned model was called otherwise than when "
                "the plan was made (after other blocks, more often, or not at all then). Its "
                "gradients are right, but it may take more memory than was planned. Make the plan "
                "with arguments as those in training.",
                stacklevel=4,
            )


def _end(now: _Pass) -> None:
    chain, now.chain, now.last = now.chain, None, None
    now.returned = Returned(())
    if chain is not None:
        chain.end(())


def _kept(stage: PlannedStage, run: Fn, *args: Any, **kwargs: Any) -> Any:
    if stage.chosen is None:
        return run(*args, **kwargs)
    name = f"block `{stage.name}`"
    return run_again(KeepingCall(name, run, args, kwargs, stage.module, stage.chosen))
