"""A parameter of a module under one of its names, with the reparametrizations applied to it.

NOTE [ A read computes ]

Rule 1. In a step (see `steps`), or where a graph is built, a read of the attribute returns the
        reparametrized weight if its module trains or the reparametrization has the mode "always";
        whoever reads it. In evaluation, and without a graph outside of steps, it is the parameter.
        A norm is no noise: every read computes it.
Rule 2. The computed weight is a `Value`, which no operator keeps for backward. It stands for the
        parameter, so that a write to it is an error.
Rule 3. A weight lives as long as its readers hold it, or until the step computes another one. Where
        it is read again, it is computed again, and then lives as long as the step; its gradients
        flow to the node of the first one, so that they are summed before they are scaled, as those
        of a single weight.
Rule 4. Code that runs again has the draw of its first run. A region of ours records the draws of
        all reads. Other code that runs again (torch's checkpoints, and those built upon them) does
        so in a backward. Its draw is that of the one frame of torch's checkpoint, or else of the
        one place in the random stream, which these restore; where there are two, that is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recoup._core.call import Call, run_to_value
from recoup._core.compile import never_compiled
from recoup._core.generators import fingerprint
from recoup._core.lazy_values import Source, Value, as_value, marked, read_anew
from recoup._core.rng import counted, is_repeated, remembered, skip
from recoup._core.saved_tensors import (
    Kept,
    backward_id,
    frame_in_force,
    grad_mode,
    is_in_backward,
    is_transformed,
    pair_in_force,
    reverse_at_once,
    version_of,
)
from recoup.errors import ChangedError, RecoupError, ReplayError
from recoup.weights.compiled import new_handle
from recoup.weights.reparametrization import Application, Drawn, Operands, Reparametrization
from recoup.weights.steps import Draws, Override, SameDraw, Step, local, overriding

__all__ = ["ParametrizedWeight", "is_plain"]

_NONE: list[tuple[Operands, ...]] = [((),) * num for num in range(64)]
# The draws of a read, how many seeds they took from the stream, and the version of the raw weight.
_Recorded = tuple[tuple[Drawn, ...], int, int]
_MOST = 512  # places in the random stream that are remembered


class _Made(NamedTuple):
    """A weight that a step computed, and what it was computed from."""

    weight: weakref.ref[Tensor]
    kept: Tensor | None  # the weight, where the step keeps it alive (See Rule 3)
    stub: Tensor | None
    raw: Tensor
    given: tuple[Any, ...]


class ParametrizedWeight:
    """A parameter under one of its names: each use of a shared parameter has its own.

    Args:
        key: its name in the module that owns it.
        path: its qualified name, on which its draws depend.
        name: its name in errors.
    """

    steps: list[Reparametrization]

    def __init__(self, key: str, path: str, name: str) -> None:
        self.key = key
        self.path = path
        self.name = name
        self._set([])
        self.handle = new_handle(self)
        self._is_switched = False  # whether a context has turned noise on in evaluation
        self._by_place: dict[int, _Recorded | None] = {}  # None where there are two
        self._by_frame: weakref.WeakKeyDictionary[Any, dict[int, _Recorded | None]]
        self._by_frame = weakref.WeakKeyDictionary()

    roots = ()  # as of a module whose forward is a step (see `compiled`)

    @property
    def weights_within(self) -> tuple[ParametrizedWeight, ...]:
        """The weight itself."""
        return (self,)

    def add(self, step: Reparametrization) -> None:
        """Add a reparametrization; they run in their own order, not in that of the calls."""
        self._set([*self.steps, step])

    def keep_only(self, is_kept: Callable[[Reparametrization], bool]) -> None:
        """Take the other reparametrizations off."""
        self._set([step for step in self.steps if is_kept(step)])

    def _set(self, steps: list[Reparametrization]) -> None:
        self.steps = sorted(steps, key=lambda step: step.order)
        self._has_operands = any(step.added(self.key) for step in steps)

    def __getstate__(self) -> tuple[Any, ...]:
        return self.key, self.path, self.name, self.steps

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(*state[:3])
        self._set(state[3])

    @property
    def applications(self) -> list[Application]:
        """The calls that applied its reparametrizations."""
        return [step.application for step in self.steps]

    @never_compiled
    def read(self, module: nn.Module, raw: Tensor) -> Tensor:
        """Return the weight as it is used here and now; the raw one if nothing is applied."""
        if not is_plain(raw) and not any(type(frame) is Step for frame in local.frames):
            return raw  # FSDP2 looks at its parts between steps
        drawn = self.drawn(module, raw)
        return self._computed(module, raw, drawn) if drawn else raw

    @never_compiled
    def drawn(self, module: nn.Module, raw: Tensor) -> tuple[Drawn, ...]:
        """Return what is applied to the weight here and now; nothing if it is raw."""
        builds_graph = torch.is_grad_enabled() and backward_id() == -1
        if builds_graph and pair_in_force() is None and not is_repeated():
            return self.draws(module.training, builds_graph)
        return self.draws_again(version_of(raw), module.training, builds_graph, builds_graph)

    # -- draws -------------------------------------------------------------------------------------

    def draws(self, is_training: bool, draws_alone: bool) -> tuple[Drawn, ...]:
        """Return what is applied to the weight in a first run (See Rule 1).

        Args:
            is_training: whether its module is in training mode.
            draws_alone: whether a read outside of steps draws.
        """
        override = self._override() if overriding else None
        fresh: Draws | None = None
        found: list[Drawn] = []
        for each in self.steps:
            if not each.is_random:
                found.append(Drawn(each, 0, 1.0))
                continue
            if not (is_training or each.mode == "always") if override is None else not override:
                continue
            step: Step | None = None
            same: SameDraw | None = None
            for frame in local.frames:
                if type(frame) is SameDraw:
                    same = frame
                elif step is None and type(frame) is Step:
                    step = frame if each.application in frame.applications else None
            if step is None and not draws_alone:
                continue
            draws = same or step or fresh
            if draws is None:
                draws = fresh = Draws()
            drawn = draws.drawn.get(each)
            if drawn is None:
                drawn = draws.draw(each, self.path, is_training=is_training)
            for record in each.records:
                record.add(drawn)
            if drawn.magnitude:
                found.append(drawn)
        return tuple(found)

    def _override(self) -> bool | None:
        """Return whether the innermost override turns noise on or off; None without one."""
        turned = [each for each in local.frames if type(each) is Override and self in each.weights]
        return turned[-1].is_on if turned else None

    def draws_again(
        self, version: int, is_training: bool, draws_alone: bool, builds_graph: bool
    ) -> tuple[Drawn, ...]:
        """Return the same for code that may run again, or does so now (See Rule 4)."""
        draw = partial(self.draws, is_training, draws_alone)
        random = [step for step in self.steps if step.is_random]
        is_usual = any(is_training or step.mode == "always" for step in random)
        is_open = is_usual or (bool(random) and bool(overriding))
        is_noted = is_open and (not builds_graph or pair_in_force() is not None)
        self._is_switched |= is_noted and not is_usual
        return remembered(partial(self._recorded, draw, version, is_open, is_noted))

    def _recorded(self, draw: Any, version: int, is_open: bool, is_noted: bool) -> Any:
        frame, again = frame_in_force(), is_in_backward()
        if (again and not _runs_again()) or not (again or is_noted or frame is not None):
            return draw()
        place = fingerprint()
        within = {} if frame is None else self._by_frame.setdefault(frame, {})
        if not again:
            value, num_seeds = counted(draw)
            made = (value, num_seeds, version)
            for known in (within, self._by_place if is_noted else {}):
                known[place] = made if (known.get(place) or made)[0] == made[0] else None
            if len(self._by_place) > _MOST:
                del self._by_place[next(iter(self._by_place))]
            return made[0]
        is_known = place in within or place in self._by_place
        made = within[place] if place in within else self._by_place.get(place)
        if place not in within and len({*within.values()}) == 1:  # of a stream not restored
            (only,) = within.values()
            made = only and (only[0], 0, only[2])
        elif not is_open and not within:  # a step may have stood where this evaluation did
            made = None
        if made is None and (is_open or is_known or self._is_switched):
            raise ReplayError(_NOT_TOLD.format(self.name))
        if made is None:
            return draw()
        if made[2] != version:
            raise ChangedError(_CHANGED.format(self.name))
        skip(made[1])
        return made[0]

    # -- weights -----------------------------------------------------------------------------------

    def without_draws(self, module: nn.Module) -> Tensor:
        """Return the weight without what is drawn: the raw one, or normalized."""
        raw = cast("Tensor", module._parameters[self.key])
        drawn = tuple([Drawn(step, 0, 1.0) for step in self.steps if not step.is_random])
        return self._compute(module, raw, drawn, None) if drawn else raw

    def _computed(self, module: nn.Module, raw: Tensor, drawn: tuple[Drawn, ...]) -> Tensor:
        """Return the weight: the one that the step has, if that is alive, or a new one (Rule 3)."""
        step: Step | None = None
        for frame in local.frames:
            if type(frame) is Step:
                step = frame
                break
        if step is None:
            return self._compute(module, raw, drawn, None)
        given = (drawn, version_of(raw), torch.is_grad_enabled())
        before: _Made | None = step.made.get(self)
        is_same = before is not None and before.raw is raw and before.given == given
        weight = before.weight() if before is not None and is_same else None
        if weight is not None:
            return read_anew(weight)
        stub, step.last = before.stub if before is not None and is_same else None, None
        weight = step.last = self._compute(module, raw, drawn, stub)
        is_alone = is_same or step.owner is module or not weight.requires_grad
        if not is_alone and type(weight) is Value and type(weight._recoup_source) is _Recomputed:
            stub = _stub_of(weight)
        kept = weight if is_same else None
        step.made[self] = _Made(weakref.ref(weight), kept, stub, raw, given)
        return weight

    def _compute(
        self, module: nn.Module, raw: Tensor, drawn: tuple[Drawn, ...], stub: Tensor | None
    ) -> Tensor:
        """Return a new weight; its gradients flow through `stub` if there is one."""
        if not is_plain(raw):
            raise RecoupError(
                f"{self.name} is a {type(raw).__name__}, but {drawn[0].step.kind} needs a plain, "
                "whole tensor. If it is sharded, read it within the forward of its module, where "
                "FSDP2 has gathered it."
            )
        operands = _NONE[len(drawn)]
        if self._has_operands:
            operands = tuple([each.step.operands(module, self.key) for each in drawn])
        if is_transformed():
            return _run("apply_by_operators", drawn, [], raw, operands)
        if not torch.is_grad_enabled():
            weight, source = _without_graph(raw, operands, drawn), Source(self.name)
            source.stands_for, source._version = self.key, version_of(weight)
            source._is_exposed = True  # so it is kept if it is saved
            return marked(weight, source)
        functions = [each.step.function for each in drawn if each.step.by_autograd]
        if functions:  # See Rule 3 of NOTE [ One formula ]
            run = partial(_run, "apply", drawn, functions)
            call = Call(f"the reparametrization of {self.name}", run, (raw, operands), {})
            weight = cast("Tensor", run_to_value(call))
            if isinstance(weight, Value):
                weight._recoup_source.name, weight._recoup_source.stands_for = self.name, self.key
            reverse_at_once(weight)
            return weight
        if stub is None:
            weight = _run("apply", drawn, [], raw, operands)
        else:
            with grad_mode(False):
                weight = _without_graph(raw, operands, drawn)
            weight = cast("Tensor", _WithNode.apply(stub, weight))
        return as_value(weight, _Recomputed(self.name, self.key, raw, operands, drawn))


def is_plain(weight: Tensor) -> bool:
    """Whether a weight is a whole tensor, and none that wraps others (a DTensor)."""
    is_usual = type(weight) in (nn.Parameter, Tensor)
    return is_usual or not is_traceable_wrapper_subclass(weight)


_NOT_TOLD = (
    "{} is read in a backward, by code that is run again there, and it cannot be told which draw "
    "it had: none is known, or two stood at one place of the random stream. Use recoup.checkpoint, "
    "or use_reentrant=False with preserve_rng_state=True. A hook reads it by `get_parameter`."
)
_CHANGED = (
    "{} was changed in place between forward and backward, and code that uses it is run again "
    "there. Step the optimizer after backward."
)


def _runs_again() -> bool:
    """Whether the code that runs in a backward may be a second run, and is no mere hook."""
    node: Any = torch._C._current_autograd_node()
    is_function = isinstance(node, torch.autograd.function.BackwardCFunction)
    is_hook = isinstance(node, cast("Any", BackwardHookFunction)._backward_cls)
    return torch.is_grad_enabled() or pair_in_force() is not None or (is_function and not is_hook)


def _run(
    how: str,
    drawn: tuple[Drawn, ...],
    functions: list[Any],
    weight: Tensor,
    operands: tuple[Operands, ...],
) -> Tensor:
    """Apply reparametrizations; a region notes the modules among `functions`."""
    for each, own in zip(drawn, operands, strict=True):
        weight = getattr(each.step, how)(weight, own, each)
        reverse_at_once(weight)
    return weight


def _without_graph(
    weight: Tensor, operands: tuple[Operands, ...], drawn: tuple[Drawn, ...]
) -> Tensor:
    is_new = False
    for each, own in zip(drawn, operands, strict=True):
        weight, is_new = each.step.compute(weight, own, each, in_place=is_new), True
    return weight


class _Recomputed(Source):
    """A reparametrized weight, which is computed again from the raw one and seeds."""

    __slots__ = ("_drawn", "_operands", "_raw")

    way = "regenerate"

    def __init__(
        self,
        name: str,
        key: str,
        raw: Tensor,
        operands: tuple[Operands, ...],
        drawn: tuple[Drawn, ...],
    ) -> None:
        super().__init__(name)
        self.stands_for = key
        self._raw = Kept(raw, name, None)
        self._operands: list[tuple[Kept, ...]] = []
        if any(operands):
            of = f"An operand of {name}"
            self._operands = [tuple([Kept(x, of, None) for x in given]) for given in operands]
        self._drawn = drawn

    def make(self) -> None:
        operands = _NONE[len(self._drawn)]
        if self._operands:
            operands = tuple([tuple([x.get() for x in given]) for given in self._operands])
        with grad_mode(False):
            self.give(_without_graph(self._raw.get(), operands, self._drawn))


def _stub_of(weight: Tensor) -> Tensor:
    """Return a tensor without memory through which gradients reach the node of `weight`."""
    stub = cast("Tensor", _WithNode.apply(weight, weight.new_empty(()).expand(weight.shape)))
    reverse_at_once(stub)
    return stub


class _WithNode(torch.autograd.Function):
    """A value whose gradient flows to the node of another tensor."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, value: Tensor) -> Tensor:
        del ctx, source
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradients[0], None
