"""A parameter of a module under one of its names, with the reparametrizations applied to it.

NOTE [ A read computes ]

Rule 1. In a step (see `Step`), or where a graph is built, a read of the attribute returns the
        reparametrized weight if its module trains or the reparametrization has the mode "always";
        whoever reads it. In evaluation, and without a graph outside of steps, it is the parameter.
        A norm is no noise: every read computes it.
Rule 2. The computed weight is a `Value`, which no operator keeps for backward. It stands for the
        parameter, so that a write to it is an error.
Rule 3. A weight lives as long as its readers hold it, or until the step computes another one. Where
        it is read again, it is computed again, and then lives as long as the step; its gradients
        flow to the node of the first one, so that they are summed before they are scaled, as those
        of a single weight. After a backward, which frees that node, it is computed anew.
Rule 4. Code that runs again has the draw of its first run. A region of ours records the draws of
        all reads. Other code that runs again (torch's checkpoints, and those built upon them) does
        so in a backward. Its draw is that of the one frame of torch's checkpoint, or else of the
        one place in the random stream, which these restore; where there are two, that is an error.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recoup._core import rng
from recoup._core import saved_tensors as seam
from recoup._core.call import Call, run_again
from recoup._core.compile import is_symbolic, is_traced, never_compiled
from recoup._core.devices import fingerprint
from recoup._core.lazy_values import Source, Value, as_value, marked, read_anew
from recoup.errors import RecoupError, ReplayError
from recoup.weights.compiled import new_handle
from recoup.weights.reparametrization import (
    Application,
    Drawn,
    Operands,
    Override,
    Reparametrization,
    SameDraw,
    Step,
    local,
)

# The draws of a read, how many seeds they took from the stream, and the version of the raw weight.
_Recorded = tuple[tuple[Drawn, ...], int, int]
_MOST = 512  # places in the random stream that are remembered


class ParametrizedWeight:
    """A parameter under one of its names: each use of a shared parameter has its own.

    Its draws depend on `path`, its qualified name. Its reparametrizations run in their own order,
    not in that of the calls.
    """

    def __init__(
        self, key: str, path: str, name: str, steps: Iterable[Reparametrization] = ()
    ) -> None:
        self.key = key
        self.path = path
        self.name = name
        self.handle = new_handle(self)
        self.set_steps(steps)
        self.is_switched = False  # whether a context has ever turned noise on, in evaluation too
        self.lock = threading.RLock()
        self._by_place: dict[int, _Recorded | None] = {}  # None where there are two
        self._by_frame: Any = weakref.WeakKeyDictionary()  # the same, by frames of torch

    def __reduce__(self) -> tuple[Any, ...]:
        return ParametrizedWeight, (self.key, self.path, self.name, self.steps)

    def set_steps(self, steps: Iterable[Reparametrization]) -> None:
        self.steps = sorted(steps, key=lambda step: step.order)

    @property
    def applications(self) -> list[Application]:
        """The calls that applied its reparametrizations."""
        return [step.application for step in self.steps]

    def may_draw(self, is_training: bool) -> bool:
        """Whether a read may draw, of a module in training mode or not."""
        is_on = is_training or self.is_switched
        return any(step.is_random and (is_on or step.mode == "always") for step in self.steps)

    @never_compiled
    def read(self, module: nn.Module, raw: Tensor) -> Tensor:
        """Return the weight as it is used here and now; the raw one if nothing is applied."""
        step: Step | None = None
        for frame in local.frames:
            if type(frame) is Step:
                step = frame
                break
        if step is None and not is_plain(raw):
            return raw  # FSDP2 looks at its parts between steps
        drawn = self.drawn(module, raw)
        if not drawn:
            return raw
        if is_symbolic():
            raise RecoupError(
                f"{self.name} is computed when it is read, and torch.fx would keep what it is now "
                "as a constant. Trace the model before recoup is applied, or after "
                "recoup.weights.remove."
            )
        version = 0 if raw.is_inference() else raw._version
        if step is None:
            return self._compute(module, raw, version, drawn)
        given = (raw, drawn, version, torch.is_grad_enabled())
        known = step.made.get(self)
        if known is not None and (known[0][0] is not raw or known[0][1:] != given[1:]):
            known = None
        stub = again = None
        if known is not None:  # See Rule 3
            _, alive, stub, _ = known
            if (weight := alive()) is not None:
                return read_anew(weight)
        step.last = None  # before another one is made
        weight = self._compute(module, raw, version, drawn, stub)
        if known is not None:
            again = weight
        elif step.owner is not module and weight.requires_grad:
            if type(getattr(weight, "_recoup_source", None)) is _Recomputed:
                # Without memory; through it gradients reach the node of `weight`.
                empty = weight.new_empty(()).expand(weight.shape)
                stub = cast("Tensor", _WithNode.apply(weight, empty))
                seam.reverse_at_once(stub)
            _forget_after_backward(weight, step, self)
        step.last = weight
        step.made[self] = given, weakref.ref(weight), stub, again
        return weight

    # -- draws -------------------------------------------------------------------------------------

    @never_compiled
    def drawn(self, module: nn.Module, raw: Tensor) -> tuple[Drawn, ...]:
        """Return what is applied to the weight here and now; nothing if it is raw."""
        builds_graph = torch.is_grad_enabled() and seam.backward_id() == -1
        if builds_graph and seam.pair_in_force() is None and not rng.is_repeated():
            return self.draws(module.training, True)
        version = seam.version_of(raw)
        return self.draws_again(version, module.training, builds_graph)

    def draws(self, is_training: bool, builds_graph: bool) -> tuple[Drawn, ...]:
        """Return what is applied to the weight in a first run (See Rule 1)."""
        alone: Step | None = None
        found: list[Drawn] = []
        for each in self.steps:
            if not each.is_random:
                found.append(Drawn(each, 0, 1.0))
                continue
            is_on = is_training or each.mode == "always"
            step: Step | None = None
            same: SameDraw | None = None
            for frame in local.frames:
                if isinstance(frame, Override):
                    is_on = frame.is_on if self in frame.weights else is_on
                elif isinstance(frame, SameDraw):
                    same = frame
                elif step is None and each.application in frame.applications:
                    step = frame
            if not is_on or (step is None and not builds_graph):
                continue
            draws = same or step or alone
            if draws is None:
                draws = alone = Step(None, (), counts=False)
            drawn = draws.drawn.get(each) or draws.draw(each, self.path, is_training=is_training)
            for record in each.records:
                record.add(drawn)
            if drawn.magnitude:
                found.append(drawn)
        return tuple(found)

    def draws_again(self, version: int, is_training: bool, builds_graph: bool) -> tuple[Drawn, ...]:
        """Return the same for code that may run again, or does so now (See Rule 4)."""
        is_open = self.may_draw(is_training)
        is_noted = is_open and (not builds_graph or seam.pair_in_force() is not None)
        draw = partial(self.draws, is_training, builds_graph)
        return rng.remembered(partial(self._recorded, draw, version, is_open, is_noted))

    def _recorded(self, draw: Any, version: int, is_open: bool, is_noted: bool) -> Any:
        frame, again = seam.frame_in_force(), seam.is_in_backward()
        if (again and not _runs_again()) or not (again or is_noted or frame is not None):
            return draw()
        place, by_place = fingerprint(), self._by_place
        within: dict[int, _Recorded | None] = {}
        if frame is not None:
            within = self._by_frame.setdefault(frame, within)
        if not again:
            value, num_seeds = rng.counted(draw)
            made: _Recorded = (value, num_seeds, version)
            for known in (within, by_place if is_noted else {}):
                known[place] = made if (known.get(place) or made)[0] == made[0] else None
            if len(by_place) > _MOST:
                del by_place[next(iter(by_place))]
            return made[0]
        found = within.get(place) if within else by_place.get(place) if is_open else None
        if place not in within and len({*within.values()}) == 1:  # of a stream not restored
            (only,) = within.values()
            found = only and (only[0], 0, only[2])
        if found is None and (is_open or within or place in by_place):
            raise ReplayError(_NOT_TOLD.format(self.name))
        if found is None:
            return draw()  # in evaluation
        if found[2] != version:
            raise seam.changed_in_place(self.name)
        rng.skip(found[1])
        return found[0]

    # -- weights -----------------------------------------------------------------------------------

    def without_draws(self, module: nn.Module) -> Tensor:
        """Return the weight without what is drawn: the raw one, or normalized."""
        raw = cast("Tensor", module._parameters[self.key])
        drawn = tuple([Drawn(step, 0, 1.0) for step in self.steps if not step.is_random])
        return self._compute(module, raw, seam.version_of(raw), drawn) if drawn else raw

    def _compute(
        self,
        module: nn.Module,
        raw: Tensor,
        version: int,
        drawn: tuple[Drawn, ...],
        stub: Tensor | None = None,
    ) -> Tensor:
        """Return a new weight; its gradients flow through `stub` if there is one."""
        if type(raw) is not nn.Parameter and not is_plain(raw):
            raise RecoupError(
                f"{self.name} is a {type(raw).__name__}, but {drawn[0].step.kind} needs a plain, "
                "whole tensor. If it is sharded, read it within the forward of its module, where "
                "FSDP2 has gathered it."
            )
        operands = tuple([each.step.operands(module, self.key) for each in drawn])
        if seam.is_transformed() or is_traced():
            return _run(drawn, raw, operands)
        if not torch.is_grad_enabled():
            weight, source = _without_graph(raw, operands, drawn), Source(self.name)
            source.stands_for, source._version = self.key, seam.version_of(weight)
            source._is_exposed = True  # so it is kept if it is saved
            return marked(weight, source)
        if any(each.step.by_autograd for each in drawn):
            # See Rule 3 of NOTE [ One formula ]. A region notes the modules among the arguments.
            run, functions = partial(_run, drawn), [each.step.function for each in drawn]
            call = Call(f"the computation of {self.name}", run, (raw, operands, functions), {})
            weight = cast("Tensor", run_again(call, keeps_output=False))
            if isinstance(weight, Value):
                weight._recoup_source.name, weight._recoup_source.stands_for = self.name, self.key
            seam.reverse_at_once(weight)
            return weight
        if stub is None:
            weight = _run(drawn, raw, operands)
        else:
            with seam.grad_mode(False):
                weight = _without_graph(raw, operands, drawn)
            weight = cast("Tensor", _WithNode.apply(stub, weight))
        return as_value(weight, _Recomputed(self, raw, version, operands, drawn))


def is_plain(weight: Tensor) -> bool:
    """Whether a weight is a whole tensor, and none that wraps others (a DTensor)."""
    return type(weight) in (nn.Parameter, Tensor) or not is_traceable_wrapper_subclass(weight)


_NOT_TOLD = (
    "{} is read in a backward, by code that is run again there, and it cannot be told which draw "
    "it had: none is known, or two stood at one place of the random stream. Use recoup.checkpoint, "
    "or use_reentrant=False with preserve_rng_state=True. A hook reads it by `get_parameter`."
)


def _runs_again() -> bool:
    """Whether the code that runs in a backward may be a second run, and is no mere hook."""
    if torch.is_grad_enabled() or seam.pair_in_force() is not None:
        return True
    node: Any = torch._C._current_autograd_node()
    is_hook = isinstance(node, cast("Any", BackwardHookFunction)._backward_cls)
    return isinstance(node, torch.autograd.function.BackwardCFunction) and not is_hook


def _run(
    drawn: tuple[Drawn, ...], weight: Tensor, operands: tuple[Operands, ...], functions: object = ()
) -> Tensor:
    """Apply reparametrizations one after the other, with their graph."""
    del functions
    for each, own in zip(drawn, operands, strict=True):
        weight = each.step.apply(weight, own, each)
        seam.reverse_at_once(weight)
    return weight


def _without_graph(
    weight: Tensor, operands: tuple[Operands, ...], drawn: tuple[Drawn, ...]
) -> Tensor:
    is_new = False
    for each, own in zip(drawn, operands, strict=True):
        weight, is_new = each.step.compute(weight, own, each, is_new=is_new), True
    return weight


class _Recomputed(Source):
    """A reparametrized weight, which is computed again from the raw one and seeds."""

    way = "regenerate"

    def __init__(
        self,
        weight: ParametrizedWeight,
        raw: Tensor,
        version: int,
        operands: tuple[Operands, ...],
        drawn: tuple[Drawn, ...],
    ) -> None:
        super().__init__(weight.name, weight.lock)
        self.stands_for, self._drawn = weight.key, drawn
        # Detached, so that they stay what they were where parameters are given other memory.
        self._raw, self._version_of_raw = raw.detach(), version
        self._operands = tuple([tuple(map(Tensor.detach, own)) for own in operands])
        self._versions = _versions(operands)

    def make(self) -> None:
        if seam.version_of(self._raw) != self._version_of_raw:
            raise seam.changed_in_place(self.name)
        if self._versions != _versions(self._operands):
            raise seam.changed_in_place(f"An operand of {self.name}")
        with seam.grad_mode(False):
            self.give(_without_graph(self._raw, self._operands, self._drawn))


def _versions(operands: tuple[Operands, ...]) -> list[int]:
    return [seam.version_of(operand) for own in operands for operand in own]


def _forget_after_backward(weight: Tensor, step: Step, key: ParametrizedWeight) -> None:
    """Let a step compute a weight anew once a backward has gone through it, and freed its graph."""
    ref = weakref.ref(step)

    def forget(*_: object) -> None:
        step = ref()
        if step is not None:
            step.made.pop(key, None)
            step.last = None

    cast("Any", weight.grad_fn).register_hook(forget)


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
