"""Plans by shape: a planned model plans again where other shapes need it.

NOTE [ Plans for several shapes ]

Rule 1. A plan serves the shapes that are no larger in any dimension than those it was made with: a
        step with them takes no more bytes. What it loses there is bounded by its own frontier: if
        bytes grow at most with the square of the entries (attention), the plan of a smaller shape
        is at most as fast as the frontier at a budget that is larger by that square. The bound
        decides whether a smaller shape gets a plan of its own.
Rule 2. A shape that none of them serves is first tried under the plan whose shapes are nearest, in
        one step that leaves no trace. If it keeps to the budget, that plan serves it from then on.
        So lengths of which each is a little longer than the one before need few plans. No batch is
        made up for a plan ahead: the model may have no more positions, which on a GPU ends the
        process, and a loss may have no targets for it.
Rule 3. Plans are made before the forward begins, in a hook that runs before all others of the model
        (FSDP2 gathers parameters in one). The arguments are those that the caller gave, and the
        steps are run as for the first plan, hooks included.
Rule 4. No plan is made without gradients, for evaluation after training, within a region or a
        second run of one, or in a rehearsal of a model around this one.
Rule 5. A plan is entered when it is complete. If planning fails or is interrupted, the others serve
        what they served before. Shapes that the new one serves are served by no other.
Rule 6. A plan is made only while one thread calls the model: the steps that make it clear the
        gradients that another thread may be accumulating. With several threads, shapes that no plan
        serves are an error.
Rule 7. Ranks that hold parts of a model choose by the largest loss among them, so that all choose
        the same plan, or all make one.
Rule 8. All forwards of a step follow plans that are made for the largest of them. So where a plan
        is for several forwards, it serves all shapes that it covers, and a later forward that is
        larger gets a plan. If that does not fit beside what the forwards before it hold, this one
        step goes on under the plan of before.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from recoup._core.compile import is_traced, uncompiled
from recoup.errors import BudgetError, RecoupError
from recoup.planning.arguments import ArgumentShapes, shapes_of
from recoup.planning.following import PlanFollower
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
from recoup.planning.pending import PendingForwards, StepBound
from recoup.planning.plan import Plan, own_forwards
from recoup.planning.rehearsal import is_in_rehearsal
from recoup.planning.step import Step, largest_among_ranks, rehearse_planned

_MOST_LOST = 0.04  # of the time of a step, before a shape gets a plan of its own
_NEAR = 0.97  # of the entries: such a shape loses nothing that is worth a plan
_MOST_TRIED = 2.0  # budgets that a step may take, as its shapes say, to be tried
_MOST_ENTRIES = 64
_ROOM = 0.02  # of the time of a step, for bytes that are left free
_logger = logging.getLogger(__name__)
_planning = threading.RLock()  # one thread plans, and others wait for its plan


class _Entry(NamedTuple):
    """Shapes that a plan was made for, or tried on.

    Args:
        shapes: the shapes.
        plan: the plan.
        bound: the bound that it sets to steps.
        follower: the follower of the plan.
        share: the bytes of a step with the shapes, relative to the step that was rehearsed.
    """

    shapes: ArgumentShapes
    plan: Plan
    bound: StepBound
    follower: PlanFollower
    share: float = 1.0

    def lost(self, shapes: ArgumentShapes) -> float:
        """Return a bound on the time lost for `shapes`; infinite if they are not served."""
        if self.shapes.trained != shapes.trained or not self.shapes.cover(shapes):
            return math.inf  # where less is trained, another plan may need less time
        entries = self.shapes.share_of(shapes)
        is_near = entries >= _NEAR or self.plan.planned.num_forwards > 1  # See Rule 8
        return 0.0 if is_near else self.plan.most_lost(self.share * entries**2)

    def distance_to(self, shapes: ArgumentShapes) -> float:
        """Return how unlike these shapes are; infinite where trying them is not worth a step."""
        is_like = (self.shapes.family, self.shapes.trained) == (shapes.family, shapes.trained)
        growth = self.shapes.growth_to(shapes) if is_like else math.inf
        used = self.share * self.plan.rehearsed_peak_bytes / max(self.plan.usable_bytes, 1)
        is_tried = 0 < growth * used <= _MOST_TRIED and self.lost(shapes) == math.inf
        return abs(math.log(growth)) if is_tried else math.inf

    def tried(self, shapes: ArgumentShapes, peak_bytes: float) -> _Entry | None:
        """Return the entry for a step that took so many bytes; None if it is slow or too large."""
        share = peak_bytes / max(self.plan.rehearsed_peak_bytes, 1)
        if peak_bytes > self.plan.usable_bytes or self.plan.most_lost(share) > _MOST_LOST:
            return None
        self.plan.sizes.include(shapes)
        return self._replace(shapes=shapes, share=share)


class _OfThread(threading.local):
    entry: _Entry | None = None  # that its next call follows


class PlansByShape:
    """The follower of the plans of a model, which makes one for a call that none serves.

    A ValueError says that there is no tensor among the arguments of the step of the first one.
    """

    def __init__(self, first: Plan, step: Step, budget_bytes: int, options: PlanOptions) -> None:
        self._model, self._call = step.model, step.call if step.root is None else step.root
        self._budget_bytes, self._options = budget_bytes, options
        self._pending = PendingForwards()
        self._of_thread = _OfThread()
        self._group: WrappedForwards | None = None
        self._hook: RemovableHandle | None = None
        self._threads: set[int | None] = set()  # that have called the model
        shapes = shapes_of(step.model, step.args, step.kwargs)
        if not shapes.shapes:
            raise ValueError(
                "`replan` is True, but there is no tensor among the arguments whose shape tells "
                "when to plan again. Give the model tensors, in lists or dicts if need be."
            )
        self._entries = [self._entry_of(shapes, first)]

    def _entry_of(self, shapes: ArgumentShapes, plan: Plan) -> _Entry:
        bound = plan.bound(self._pending)
        return _Entry(shapes, plan, bound, plan.follower(bound))

    @property
    def plans(self) -> list[Plan]:
        """The plans."""
        return list({id(entry.plan): entry.plan for entry in self._entries}.values())

    @property
    def _entry(self) -> _Entry:
        """The entry that this thread's next call follows."""
        return self._of_thread.entry or self._entries[0]

    def __str__(self) -> str:
        shown = "; ".join(str(entry.shapes) for entry in self._entries[:4])
        more = "; ..." if len(self._entries) > 4 else ""
        return f"plans again for other shapes; {len(self.plans)} planned ({shown}{more})"

    def begin(self, group: WrappedForwards) -> None:
        """Wrap the forwards of the model and its blocks, and serve their calls until `end`."""
        self._group, self._followed = group, set[int]()
        for plan in self.plans:
            self._follow(plan, group)
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
        return self._entry.follower.called(module, forward, args, kwargs)

    def serve(self, args: Args, kwargs: Kwargs) -> None:
        """Choose the plan for the next call, with these arguments, or make one."""
        group = self._group
        is_plain = not torch.is_grad_enabled() or is_traced() or enclosing_checkpoints()[0]
        if group is None or group.follower is None or is_plain:
            return
        with _planning:
            self._threads.add(threading.get_ident())
            try:
                self._of_thread.entry = self._served(group, args, kwargs)
            except Exception as error:
                if self._options.loss is not None and not isinstance(error, RecoupError):
                    error.add_note(
                        "With replan=True, `loss` must serve batches of every shape: let the model "
                        "return its loss, read sizes and targets from the output, or let `loss` "
                        "read the targets of the current batch from an object that the training "
                        "loop updates before it calls the model."
                    )
                raise

    def _served(self, group: WrappedForwards, args: Args, kwargs: Kwargs) -> _Entry:
        shapes, own = shapes_of(self._model, args, kwargs), self._entry
        pending = own.bound.waiting()
        is_beside = len(pending) % own.plan.planned.num_forwards > 0  # another forward of its step
        lost, best = self._least([each.lost(shapes) for each in self._entries], self._entries)
        if pending and lost < math.inf:
            return best if best.bound.fits(pending) else own
        if pending and not is_beside:  # a forward more than is planned
            raise BudgetError(
                f"A {type(self._model).__name__} was called for another time before a backward, "
                f"with {shapes}, which none of its plans covers, and they are for one call. Plan "
                f"with `num_forwards={len(pending) + 1}`, call it with the largest arguments "
                "first, or let go of outputs that are not needed.",
                own.bound.room.budget_for(own.bound.bytes_with(pending)),
            )
        if lost <= _MOST_LOST or not self._may_plan(shapes):
            return best if lost < math.inf else own
        step = self._options.step(self._model, self._call, args, kwargs)
        entry, near, peak = None, self._nearest(shapes), 0.0
        if near is not None and not pending:
            peak = self._peak_under(near.plan, step)
            entry = near.tried(shapes, peak)
        if entry is None:
            usable = math.inf if near is None else near.plan.usable_bytes
            entry = self._entry_of(shapes, self._made(step, has_room=usable < peak < math.inf))
        self._enter(entry, group)
        what = "planned for" if near is None or entry.plan is not near.plan else "tried"
        _logger.info(
            "%s: %s %s; %d plans", type(self._model).__name__, what, shapes, len(self.plans)
        )
        return entry if entry.bound.fits(pending) else own

    def _made(self, step: Step, *, has_room: bool) -> Plan:
        """Return a plan for a step; one that leaves bytes free where that costs little time."""
        found = frontier_of(step, self._options)
        if has_room:
            return found.plan_with_room(self._budget_bytes, _ROOM)
        return found.plan(self._budget_bytes)

    def _peak_under(self, plan: Plan, step: Step) -> float:
        """Return the peak of a step that follows a plan; infinite if there is no memory for it."""
        step = replace(step, tiled=plan.planned.tiled)
        with suspended(own_forwards(self._model)), plan.planned.followed(plan.schedule):
            try:
                return plan.baseline_bytes + rehearse_planned(step).peak_bytes
            except torch.OutOfMemoryError:
                return math.inf

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

    def _nearest(self, shapes: ArgumentShapes) -> _Entry | None:
        """Return the entry whose plan to try on `shapes`; None if none is near."""
        distances = [each.distance_to(shapes) for each in self._entries]
        distance, near = self._least(distances, self._entries)
        return near if distance < math.inf else None

    def _follow(self, plan: Plan, group: WrappedForwards) -> None:
        modules = plan.planned.followed_modules
        group.begin([each for each in modules if id(each) not in self._followed])
        self._followed.update(map(id, modules))

    def _enter(self, entry: _Entry, group: WrappedForwards) -> None:
        """Enter shapes, and drop those that their plan serves (See Rule 5)."""
        lost = [entry.lost(each.shapes) for each in self._entries]
        lost = largest_among_ranks(self._model, lost)
        pairs = zip(self._entries, lost, strict=True)
        # The bound is narrowest for the shapes that a plan was made for.
        kept = [
            each
            for each, lost_then in pairs
            if lost_then > _MOST_LOST or (each.plan is entry.plan and each.share == 1.0)
        ]
        self._follow(entry.plan, group)
        self._entries = [*kept[-_MOST_ENTRIES + 1 :], entry]


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
