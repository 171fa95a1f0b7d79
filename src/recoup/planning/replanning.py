"""Plans by shape: a planned model plans again where other shapes need it.

NOTE [ Plans for several shapes ]

Rule 1. A plan serves the shapes that are no larger in any dimension than those it was made with: a
        step with them takes no more bytes. What it loses there is bounded by its own frontier. If
        bytes grow at most with the square of the entries (attention), the plan of a smaller shape
        is at most as fast as the frontier at a budget that is larger by that square. The bound
        decides whether a smaller shape gets a plan of its own. A plan that keeps everything serves
        all smaller shapes.
Rule 2. A shape that is smaller by a few entries gets no plan of its own, so that sizes of which
        each is a little smaller than the one before do not each get one.
Rule 3. A shape that none of them serves is first tried under the plan whose shapes are nearest: in
        one step that leaves no trace. If it keeps to the budget, that plan serves it from then on.
        If not, the plan that is made for it leaves bytes free where that costs little time. So
        lengths of which each is a little longer than the one before need a step each and few plans.
        No batch is made up for a plan ahead: the model may have no more positions, which on a GPU
        ends the process, and a loss may have no targets for it.
Rule 4. Plans are made before the forward begins, in a hook that runs before all others of the
        model (FSDP2 gathers parameters in one). The arguments are those that the caller gave, and
        the steps are run as for the first plan, hooks included.
Rule 5. No plan is made without gradients, for evaluation after training, within a region or a
        second run of one, or in a rehearsal of a model around this one.
Rule 6. A plan is entered when it is complete. If planning fails or is interrupted, the others serve
        what they served before. Plans whose shapes the new one serves are dropped.
Rule 7. A plan is made only while one thread calls the model: the steps that make it clear the
        gradients that another thread may be accumulating. With several threads, shapes that no
        plan serves are an error.
Rule 8. Ranks that hold parts of a model choose by the largest loss among them, so that all choose
        the same plan, or all make one.
Rule 9. If a step calls the model once more than its plan is for, and that does not fit, that call
        gets a plan for the bytes that are left. Later steps are planned for so many calls.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import warnings
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
_MOST_SHAPES = 64  # of a plan that are remembered
_ROOM = 0.02  # of the time of a step, for bytes that are left free
_logger = logging.getLogger(__name__)
_planning = threading.RLock()  # one thread plans, and others wait for its plan


class _Tried(NamedTuple):
    """Shapes with which a step has kept to the budget, and its bytes relative to the first."""

    shapes: ArgumentShapes
    share: float


class _Entry:
    """A plan, with the shapes that it was made for and those that it was tried on."""

    def __init__(self, shapes: ArgumentShapes, plan: Plan, pending: PendingForwards) -> None:
        self.plan = plan
        self.bound = plan.bound(pending)
        self.follower = plan.follower(self.bound)
        self.modules = frozenset(map(id, plan.planned.followed_modules))
        self.tried = [_Tried(shapes, 1.0)]

    @property
    def shapes(self) -> ArgumentShapes:
        """The shapes that it was made for."""
        return self.tried[0].shapes

    def lost(self, shapes: ArgumentShapes) -> float:
        """Return a bound on the time lost for `shapes`; infinite if they are not served."""
        return min(self._lost(tried, shapes) for tried in self.tried)

    def _lost(self, tried: _Tried, shapes: ArgumentShapes) -> float:
        if not (tried.shapes.is_like(shapes) and tried.shapes.cover(shapes)):
            return math.inf
        share = tried.shapes.share_of(shapes)
        return 0.0 if share >= _NEAR else self.plan.most_lost(tried.share * share * share)

    def growth_to(self, shapes: ArgumentShapes) -> tuple[float, float]:
        """Return how unlike these shapes are those that were tried, and the budgets they may take.

        Both are infinite for a call of another family.
        """
        if not self.shapes.is_like(shapes):
            return math.inf, math.inf
        used = self.plan.rehearsed_peak_bytes / max(self.plan.usable_bytes, 1)
        growths = [(tried.shapes.growth_to(shapes), tried.share) for tried in self.tried]
        return min((abs(math.log(g)) if g else math.inf, used * share * g) for g, share in growths)

    def serve(self, shapes: ArgumentShapes, peak_bytes: float) -> bool:
        """Serve these shapes, too, if a step that took so many bytes fits and is not too slow."""
        share = peak_bytes / max(self.plan.rehearsed_peak_bytes, 1)
        if peak_bytes > self.plan.usable_bytes or self.plan.most_lost(share) > _MOST_LOST:
            return False
        own, *others = self.tried
        before = [each.shapes for each in others[-2:]]
        if len(before) > 1 and all(shapes.cover(b) and shapes.share_of(b) >= _NEAR for b in before):
            del others[-1]  # the last ones say all that it says
        self.tried = [own, *[*others, _Tried(shapes, share)][-_MOST_SHAPES:]]
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
        self._has_warned = False
        self._threads: set[int | None] = set()  # that have called the model
        shapes = shapes_of(model, args, kwargs)
        if not shapes.shapes:
            raise ValueError(
                "`replan` is True, but there is no tensor among the arguments whose shape tells "
                "when to plan again. Give the model tensors, in lists or dicts if need be."
            )
        self._entries = [_Entry(shapes, first, self._pending)]
        self._beside: list[_Entry] = []  # for what other forwards leave free (See Rule 9)

    @property
    def plans(self) -> list[Plan]:
        """The plans."""
        return [entry.plan for entry in (*self._entries, *self._beside)]

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
        self._group = group
        self._followed = set[int]()
        for entry in (*self._entries, *self._beside):
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
        entry = self._of_thread.entry or self._entries[0]  # without a call
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
        lost, entry = self._best(self._entries, shapes_of(self._model, args, kwargs))
        return entry.plan if lost < math.inf else None

    def _served(self, group: WrappedForwards, args: Args, kwargs: Kwargs) -> _Entry:
        shapes, pending = shapes_of(self._model, args, kwargs), self._pending.alive()
        if pending:
            entries = [self._entry, *self._beside]
            lost = self._lost(entries, shapes)
            for entry, each in zip(entries, lost, strict=True):
                if each < math.inf and entry.bound.fits(pending):
                    return entry
            return self._made_beside(group, shapes, args, kwargs)
        entries = [e for e in self._entries if e.bound.num_forwards == self._num_forwards]
        lost, best = self._best(entries or self._entries, shapes)
        if (entries and lost <= _MOST_LOST) or not self._may_plan(shapes):
            return best
        begin = time.perf_counter()
        near = self._nearest(entries, shapes) if entries else None
        peak = math.inf if near is None else self._maker.peak_under(near.plan, args, kwargs)
        if near is not None and near.serve(shapes, peak):
            near.plan.sizes.include(args, kwargs)
            what, entry = f"tried the plan for {near.shapes} on", near
        else:
            has_room = near is not None and near.plan.usable_bytes < peak < math.inf
            made = self._maker.plan(args, kwargs, self._num_forwards, has_room=has_room)
            what, entry = "planned", _Entry(shapes, made, self._pending)
            self._enter(entry, group)
        self._log(what, shapes, begin)
        return entry

    def _made_beside(
        self, group: WrappedForwards, shapes: ArgumentShapes, args: Args, kwargs: Kwargs
    ) -> _Entry:
        """Return an entry for a call beside others whose backward is pending (See Rule 9)."""
        bound = self._entry.bound
        pending = bound.check(self._model) if not self._may_plan(shapes) else self._pending.alive()
        begin = time.perf_counter()
        taken = sum(each.held_bytes for each in pending) + bound.gradient_bytes
        try:
            made = self._maker.plan(args, kwargs, 1, taken_bytes=taken)
        except (BudgetError, ValueError) as error:
            raise bound.error(self._model, pending) from error
        self._num_forwards = max(self._num_forwards, len(pending) + 1)
        entry = _Entry(shapes, made, self._pending)
        self._follow(entry, group)
        self._beside = [*self._beside[-_MOST_PLANS + 1 :], entry]
        self._log("planned beside others", shapes, begin)
        return entry

    def _may_plan(self, shapes: ArgumentShapes) -> bool:
        """Whether a plan may be made for a call now (See Rules 5 and 7)."""
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

    def _lost(self, entries: Sequence[_Entry], shapes: ArgumentShapes) -> list[float]:
        return largest_among_ranks(self._model, [each.lost(shapes) for each in entries])

    def _best(self, entries: Sequence[_Entry], shapes: ArgumentShapes) -> tuple[float, _Entry]:
        place, lost = min(enumerate(self._lost(entries, shapes)), key=lambda one: one[1])
        return lost, entries[place]

    def _nearest(self, entries: Sequence[_Entry], shapes: ArgumentShapes) -> _Entry | None:
        """Return the plan to try on `shapes`; None if all serve them slowly, or none is near."""
        lost, pairs = self._lost(entries, shapes), [each.growth_to(shapes) for each in entries]
        unlike = largest_among_ranks(self._model, [one for one, _ in pairs])
        uses = largest_among_ranks(self._model, [use for _, use in pairs])
        found = [
            (unlike[place], place)
            for place, each in enumerate(lost)
            if each == math.inf and uses[place] <= _MOST_TRIED
        ]
        return entries[min(found)[1]] if found else None

    def _follow(self, entry: _Entry, group: WrappedForwards) -> None:
        modules = entry.plan.planned.followed_modules
        group.begin([each for each in modules if id(each) not in self._followed])
        self._followed |= entry.modules

    def _enter(self, entry: _Entry, group: WrappedForwards) -> None:
        """Enter a plan, and drop those whose shapes it serves (See Rule 6)."""
        lost = largest_among_ranks(
            self._model, [max(entry.lost(each.shapes) for each in e.tried) for e in self._entries]
        )
        kept = [e for e, each in zip(self._entries, lost, strict=True) if each > _MOST_LOST]
        self._follow(entry, group)
        self._entries = [*kept[-_MOST_PLANS + 1 :], entry]
        if len(kept) >= _MOST_PLANS and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"A {type(self._model).__name__} with replan=True was given more than "
                f"{_MOST_PLANS} shapes that need plans of their own; the oldest plans are "
                "forgotten. Pad batches to fewer shapes.",
                stacklevel=2,
            )

    def _log(self, what: str, shapes: ArgumentShapes, begin: float) -> None:
        name, seconds = type(self._model).__name__, time.perf_counter() - begin
        num = len(self._entries)
        _logger.info("%s: %s %s in %.3g s; %d plans", name, what, shapes, seconds, num)


class _Hook:
    """The hook of a model that has the plan chosen (See Rule 4); for and in a copy, nothing."""

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

        It is infinite if there is no memory for it, or if other steps may take more.
        """
        planned = plan.planned
        if any(call.is_estimated for call in planned.calls):
            return math.inf
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
