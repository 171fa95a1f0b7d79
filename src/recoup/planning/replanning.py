"""Plans by shape: a planned model plans again where other shapes need it.

NOTE [ Plans for several shapes ]

Rule 1. A plan serves the shapes that are no larger in any dimension than those it was made with: a
        step with them takes no more bytes. What it loses there is bounded by its own frontier. If
        bytes grow at most with the square of the entries (attention), the plan of a smaller shape
        is at most as fast as the frontier at a budget that is larger by that square. The bound
        decides whether a smaller shape gets a plan of its own. A plan that keeps everything serves
        all smaller shapes.
Rule 2. A shape that none of them serves is first tried under the plan whose shapes are nearest: in
        one step that leaves no trace. If it keeps to the budget, that plan serves it from then on.
        So lengths of which each is a little longer than the one before need a step each and few
        plans. No batch is made up for a plan ahead: the model may have no more positions, which on
        a GPU ends the process, and a loss may have no targets for it.
Rule 3. Plans are made before the forward begins, in a hook that runs before all others of the
        model (FSDP2 gathers parameters in one). The arguments are those that the caller gave, and
        the steps are run as for the first plan, hooks included.
Rule 4. No plan is made without gradients, for evaluation after training, within a region or a
        second run of one, or in a rehearsal of a model around this one.
Rule 5. A plan is entered when it is complete. If planning fails or is interrupted, the others serve
        what they served before. Plans whose shapes the new one serves are dropped.
Rule 6. A plan is made only while one thread calls the model: the steps that make it clear the
        gradients that another thread may be accumulating. With several threads, shapes that no
        plan serves are an error.
Rule 7. Ranks that hold parts of a model choose by the largest loss among them, so that all choose
        the same plan, or all make one.
Rule 8. If a step calls the model once more than its plan is for, and that does not fit, that call
        gets a plan for the bytes that are left. Later steps are planned for so many calls.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from recoup._core.compile import is_traced, uncompiled
from recoup.errors import BudgetError, RecoupError
from recoup.planning.argument_shapes import ArgumentShapes, shapes_of
from recoup.planning.forwards import (
    Args,
    Forward,
    Kwargs,
    WrappedForwards,
    enclosing_checkpoints,
    suspended,
)
from recoup.planning.frontier import frontier_of
from recoup.planning.options import PlanOptions
from recoup.planning.pending import PendingForwards
from recoup.planning.plan import Plan, own_forwards
from recoup.planning.ranks import largest_among_ranks
from recoup.planning.rehearsal import is_in_rehearsal
from recoup.planning.step import rehearse_planned

_MOST_LOST = 0.04  # of the time of a step, before a shape gets a plan of its own
_NEAR = 0.97  # of the entries: such a shape loses nothing that is worth a plan
_MOST_TRIED = 2.0  # budgets that a step may take, as its shapes say, to be tried
_MOST_PLANS = 64
_MOST_SHAPES = 8  # of a plan that are remembered beside those that it was made for
_ROOM = 0.02  # of the time of a step, for bytes that are left free
_logger = logging.getLogger(__name__)
_planning = threading.RLock()  # one thread plans, and others wait for its plan


class _Entry:
    """A plan, with the shapes that it was made for and those that it was tried on."""

    def __init__(self, shapes: ArgumentShapes, plan: Plan, pending: PendingForwards) -> None:
        self.shapes, self.plan = shapes, plan
        self.bound = plan.bound(pending)
        self.follower = plan.follower(self.bound)
        self.modules = frozenset(map(id, plan.planned.followed_modules))
        # Each with the bytes of a step, relative to those of the step that was rehearsed.
        self.served = [(shapes, 1.0)]

    def lost(self, shapes: ArgumentShapes) -> float:
        """Return a bound on the time lost for `shapes`; infinite if they are not served."""
        shares = [
            (own.share_of(shapes), share)
            for own, share in self.served
            if own.is_like(shapes) and own.cover(shapes)
        ]
        losses = (
            0.0 if entries >= _NEAR else self.plan.most_lost(share * entries**2)
            for entries, share in shares
        )
        return min(losses, default=math.inf)

    def distance_to(self, shapes: ArgumentShapes) -> float:
        """Return how unlike these shapes are; infinite where a step would take far too much."""
        used = self.plan.rehearsed_peak_bytes / max(self.plan.usable_bytes, 1)
        growths = [
            growth
            for own, share in self.served
            if own.is_like(shapes)
            and 0 < (growth := own.growth_to(shapes)) <= _MOST_TRIED / (used * share)
        ]
        return min((abs(math.log(growth)) for growth in growths), default=math.inf)

    def serve(self, shapes: ArgumentShapes, peak_bytes: float) -> bool:
        """Serve these shapes, too, if a step that took so many bytes fits and is not too slow."""
        share = peak_bytes / max(self.plan.rehearsed_peak_bytes, 1)
        if peak_bytes > self.plan.usable_bytes or self.plan.most_lost(share) > _MOST_LOST:
            return False
        self.served = [self.served[0], *self.served[1:][-_MOST_SHAPES:], (shapes, share)]
        return True


class _OfThread(threading.local):
    entry: _Entry | None = None  # that its next call follows


class PlansByShape:
    """The follower of the plans of a model, which makes one for a call that none serves.

    Args:
        model: the model.
        first: the first plan.
        args: the arguments that it was made with.
        kwargs: the keyword arguments.
        maker: makes plans for other arguments.

    Raises:
        ValueError: there is no tensor among the arguments.
    """

    def __init__(
        self, model: nn.Module, first: Plan, args: Args, kwargs: Kwargs, maker: PlanMaker
    ) -> None:
        self._model, self._maker = model, maker
        self._pending = PendingForwards()
        self._num_forwards = first.planned.num_forwards
        self._of_thread = _OfThread()
        self._group: WrappedForwards | None = None
        self._hook: RemovableHandle | None = None
        self._threads: set[int | None] = set()  # that have called the model
        shapes = shapes_of(model, args, kwargs)
        if not shapes.shapes:
            raise ValueError(
                "`replan` is True, but there is no tensor among the arguments whose shape tells "
                "when to plan again. Give the model tensors, in lists or dicts if need be."
            )
        self._entries = [_Entry(shapes, first, self._pending)]

    @property
    def plans(self) -> list[Plan]:
        """The plans."""
        return [entry.plan for entry in self._entries]

    @property
    def _entry(self) -> _Entry:
        return self._of_thread.entry or self._entries[0]

    @property
    def chosen(self) -> Plan:
        """The plan that this thread's next call follows."""
        return self._entry.plan

    def __str__(self) -> str:
        shown = "; ".join(str(entry.shapes) for entry in self._entries[:4])
        more = "; ..." if len(self._entries) > 4 else ""
        return f"plans again for other shapes; {len(self._entries)} planned ({shown}{more})"

    def begin(self, group: WrappedForwards) -> None:
        """Wrap the forwards of the model and its blocks, and serve their calls until `end`."""
        self._group, self._followed = group, set[int]()
        for entry in self._entries:
            self._follow(entry, group)
        if self._entries[0].plan.planned.root is not None:
            hook = _Hook(self._model, self)
            self._hook = self._model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def end(self) -> None:
        """Serve no more calls."""
        self._pending.unwatch()
        self._group = None
        if self._hook is not None:
            self._hook.remove()

    def called(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run the model, or a block of one of the plans, under the plan that was chosen last."""
        entry = self._entry
        if id(module) not in entry.modules:
            return forward(*args, **kwargs)
        return entry.follower.called(module, forward, args, kwargs)

    def serve(self, args: Args, kwargs: Kwargs) -> None:
        """Choose the plan for the next call, with these arguments, or make one.

        Raises:
            BudgetError: no plan for these arguments keeps to the budget.
        """
        group = self._group
        is_plain = not torch.is_grad_enabled() or is_traced() or enclosing_checkpoints()[0]
        if group is None or group.follower is None or is_plain:
            return
        with _planning:
            self._threads.add(threading.get_ident())
            self._of_thread.entry = self._served(group, args, kwargs)

    def plan_for(self, args: Args, kwargs: Kwargs) -> Plan | None:
        """Return the plan that serves a call with these arguments; None if there is none yet."""
        shapes = shapes_of(self._model, args, kwargs)
        lost, entry = self._least([e.lost(shapes) for e in self._entries], self._entries)
        return entry.plan if lost < math.inf else None

    def _served(self, group: WrappedForwards, args: Args, kwargs: Kwargs) -> _Entry:
        shapes, pending = shapes_of(self._model, args, kwargs), self._entry.bound.waiting()
        begin = time.perf_counter()
        if pending:
            entry = self._served_beside(shapes, pending)
            if entry is None and not self._may_plan(shapes):
                self._entry.bound.check(self._model)
                return self._entry
            if entry is not None:
                return entry
            what, made = "planned beside others", self._made_beside(pending, args, kwargs)
        else:
            entries = [e for e in self._entries if e.bound.num_forwards == self._num_forwards]
            lost, best = self._least([each.lost(shapes) for each in entries], entries)
            if lost <= _MOST_LOST or not self._may_plan(shapes):
                return best
            near, peak = self._nearest(entries, shapes), math.inf
            if near is not None:
                peak = self._maker.peak_under(near.plan, args, kwargs)
                if near.serve(shapes, peak):
                    near.plan.sizes.include(shapes)
                    self._log(f"tried the plan for {near.shapes} on", shapes, begin)
                    return near
            has_room = near is not None and near.plan.usable_bytes < peak < math.inf
            made = self._maker.plan(args, kwargs, self._num_forwards, has_room=has_room)
            what = "planned"
        entry = _Entry(shapes, made, self._pending)
        self._enter(entry, group)
        self._log(what, shapes, begin)
        return entry

    def _served_beside(self, shapes: ArgumentShapes, pending: Sequence[Any]) -> _Entry | None:
        """Return the plan for a call beside others whose backward is pending, if one fits."""
        own = self._entry
        others = [e for e in self._entries if e.bound.num_forwards == 1 and e is not own]
        entries = [own, *others]
        lost = largest_among_ranks(self._model, [each.lost(shapes) for each in entries])
        pairs = zip(entries, lost, strict=True)
        return next((e for e, each in pairs if each < math.inf and e.bound.fits(pending)), None)

    def _made_beside(self, pending: Sequence[Any], args: Args, kwargs: Kwargs) -> Plan:
        """Return a plan for a call beside others, in the bytes that they leave (See Rule 8)."""
        bound = self._entry.bound
        taken = sum(each.held_bytes for each in pending) + bound.gradient_bytes
        try:
            made = self._maker.plan(args, kwargs, 1, taken_bytes=taken)
        except (BudgetError, ValueError) as error:
            raise bound.error(self._model, pending) from error
        self._num_forwards = max(self._num_forwards, len(pending) + 1)
        return made

    def _may_plan(self, shapes: ArgumentShapes) -> bool:
        """Whether a plan may be made for a call now (See Rules 4 and 6)."""
        was_training = any(self._entries[0].shapes.training)
        if is_in_rehearsal() or (was_training and not any(shapes.training)):
            return False
        self._threads &= {each.ident for each in threading.enumerate()}
        if len(self._threads) > 1:
            raise RecoupError(
                f"Several threads train a {type(self._model).__name__} with replan=True, and no "
                f"plan serves {shapes}: the steps that make one would change gradients and buffers "
                "while another thread uses them. Run a step of each shape in one thread before, or "
                "plan for the largest batch without `replan`."
            )
        return True

    def _least(self, numbers: Sequence[float], entries: Sequence[_Entry]) -> tuple[float, _Entry]:
        """Return the least number and its entry, alike on all ranks; infinity if there is none."""
        found = largest_among_ranks(self._model, numbers)
        pairs = zip(found, entries, strict=True)
        return min(pairs, key=lambda pair: pair[0], default=(math.inf, self._entry))

    def _nearest(self, entries: Sequence[_Entry], shapes: ArgumentShapes) -> _Entry | None:
        """Return the plan to try on `shapes`; None if all serve them slowly, or none is near."""
        distances = [
            each.distance_to(shapes) if each.lost(shapes) == math.inf else math.inf
            for each in entries
        ]
        distance, near = self._least(distances, entries)
        return near if distance < math.inf else None

    def _follow(self, entry: _Entry, group: WrappedForwards) -> None:
        modules = entry.plan.planned.followed_modules
        group.begin([each for each in modules if id(each) not in self._followed])
        self._followed |= entry.modules

    def _enter(self, entry: _Entry, group: WrappedForwards) -> None:
        """Enter a plan, and drop those whose shapes it serves (See Rule 5)."""
        lost = largest_among_ranks(
            self._model,
            [max(entry.lost(shapes) for shapes, _ in each.served) for each in self._entries],
        )
        kept = [
            each
            for each, lost_then in zip(self._entries, lost, strict=True)
            if lost_then > _MOST_LOST or each.bound.num_forwards != entry.bound.num_forwards
        ]
        self._follow(entry, group)
        self._entries = [*kept[-_MOST_PLANS + 1 :], entry]

    def _log(self, what: str, shapes: ArgumentShapes, begin: float) -> None:
        name, seconds = type(self._model).__name__, time.perf_counter() - begin
        num = len(self._entries)
        _logger.info("%s: %s %s in %.3g s; %d plans", name, what, shapes, seconds, num)


class _Hook:
    """The hook of a model that has the plan chosen (See Rule 3); for and in a copy, nothing."""

    def __init__(self, model: nn.Module, plans: PlansByShape) -> None:
        self._model, self._plans = model, plans

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if module is self._model:
            serve = PlansByShape.serve
            serve = uncompiled(serve) if torch.compiler.is_compiling() else serve
            serve(self._plans, args, kwargs)

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # takes as many arguments; loads everywhere


class PlanMaker(NamedTuple):
    """The maker of the plans for other shapes, and of those for more forwards.

    Args:
        model: the model.
        call: the model itself, or a function that calls it.
        budget_bytes: the budget.
        options: the options of the plans.
    """

    model: nn.Module
    call: Callable[..., Any]
    budget_bytes: int
    options: PlanOptions

    def plan(
        self,
        args: Args,
        kwargs: Kwargs,
        num_forwards: int,
        *,
        has_room: bool = False,
        taken_bytes: int = 0,
    ) -> Plan:
        """Return a plan for other arguments.

        Args:
            args: the arguments.
            kwargs: the keyword arguments.
            num_forwards: the number of forwards of a step.
            has_room: whether it leaves bytes of the budget free where that costs little time.
            taken_bytes: the bytes of the budget that forwards before it hold.

        Raises:
            BudgetError: no plan keeps to the budget.
        """
        options = self._options_for(num_forwards)
        found = frontier_of(options.step(self.model, self.call, args, kwargs), options)
        if has_room:
            return found.plan_with_room(self.budget_bytes, _ROOM)
        plan = found.plan(self.budget_bytes - taken_bytes)
        plan.budget_bytes = self.budget_bytes
        return plan

    def peak_under(self, plan: Plan, args: Args, kwargs: Kwargs) -> float:
        """Return the peak of a step with other arguments that follows a plan, in one step.

        It is infinite if there is no memory for it.
        """
        planned = plan.planned
        options = self._options_for(planned.num_forwards)
        step = options.step(self.model, self.call, args, kwargs)
        step = replace(step, tiled=planned.tiled)
        with suspended(own_forwards(self.model)), planned.followed(plan.schedule):
            try:
                return plan.baseline_bytes + rehearse_planned(step).peak_bytes
            except torch.OutOfMemoryError:
                return math.inf

    def _options_for(self, num_forwards: int) -> PlanOptions:
        own, loss = self.options, self.options.loss
        if loss is None:
            return replace(own, num_forwards=num_forwards)
        if own.num_forwards not in (1, num_forwards):
            raise ValueError(f"`loss` takes {own.num_forwards} outputs, and not {num_forwards}.")

        def served(*outputs: Any) -> Any:
            try:
                each = [outputs] if own.num_forwards > 1 else [(output,) for output in outputs]
                losses = [loss(*given) for given in each]
            except Exception as error:
                raise ValueError(
                    f"`loss` failed for a batch of another shape than the example ({error}). With "
                    "replan=True it must serve every shape: let the model return its loss, read "
                    "sizes and targets from the output, or let `loss` read the targets of the "
                    "current batch from an object that the training loop updates before it calls "
                    "the model."
                ) from error
            return losses[0] if len(losses) == 1 else losses

        return replace(own, num_forwards=num_forwards, loss=served)
