"""A family of plans: a planned model plans again where other shapes need it.

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
Rule 5. No plan is made without gradients, in a mode other than that of the first plan, within a
        second run or a backward, or in a rehearsal of a model around this one.
Rule 6. A plan joins the family when it is complete. If planning fails or is interrupted, the
        family serves what it served before. Plans whose shapes the new one serves are dropped.
Rule 7. A plan is made only while one thread calls the model: the steps that make it clear the
        gradients that another thread may be accumulating. With several threads, shapes that no
        plan serves are an error.
Rule 8. Ranks that hold parts of a model choose by the largest loss among them, so that all choose
        the same plan, or all make one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from recoup._core.compile import is_traced, uncompiled
from recoup._core.rng import is_run_again
from recoup.errors import RecoupError
from recoup.planning.family import MOST_LOST, Member, PlanMaker, PlanOfShapes
from recoup.planning.forwards import WrappedForwards
from recoup.planning.ranks import largest_among_ranks
from recoup.planning.rehearsal import is_in_rehearsal
from recoup.planning.shapes import ArgumentShapes, shapes_of

__all__ = ["Replanner"]

_MOST_TRIED = 2.0  # budgets that a step may take, as its shapes say, to be tried
_MOST_PLANS = 64
_logger = logging.getLogger(__name__)
_planning = threading.RLock()  # one thread plans, and others wait for its plan


class _OfThread(threading.local):
    member: Member | None = None


class Replanner:
    """The follower of a family of plans, which makes a plan for a call that none serves.

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
        self,
        model: nn.Module,
        first: PlanOfShapes,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        maker: PlanMaker,
    ) -> None:
        self._model = model
        self._maker = maker
        self._is_training = model.training
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
        self._members = [Member(shapes, first)]

    @property
    def plans(self) -> list[PlanOfShapes]:
        """The plans of the family."""
        return [member.plan for member in self._members]

    @property
    def chosen(self) -> PlanOfShapes:
        """The plan that this thread's next call follows."""
        return (self._of_thread.member or self._members[0]).plan

    @property
    def summary(self) -> str:
        """A line on the shapes that have a plan."""
        shown = "; ".join(str(member.shapes) for member in self._members[:4])
        more = "; ..." if len(self._members) > 4 else ""
        return f"plans again for other shapes; {len(self._members)} planned ({shown}{more})"

    @property
    def followed_modules(self) -> list[nn.Module]:
        """The modules whose forwards go through the family."""
        modules = (each for plan in self.plans for each in plan.planned.followed_modules)
        return list({id(each): each for each in modules}.values())

    def begin(self, group: WrappedForwards) -> None:
        """Serve the calls of the model, whose forwards `group` has wrapped, until `end`."""
        self._group = group
        if self._members[0].plan.planned.root is not None:
            hook = _Hook(self)
            self._hook = self._model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def end(self) -> None:
        """Serve no more calls."""
        hook, self._hook = self._hook, None
        self._group = None
        if hook is not None:
            hook.remove()

    def called(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the model, or a block of one of the plans, under the plan that was chosen last."""
        member = self._of_thread.member or self._members[0]
        if id(module) not in member.modules:
            return forward(*args, **kwargs)
        return member.follower.called(module, forward, args, kwargs)

    def serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Choose the plan for the next call, with these arguments, or make one.

        Raises:
            BudgetError: no plan for these arguments keeps to the budget.
        """
        group = self._group
        is_plain = not torch.is_grad_enabled() or is_traced() or is_run_again()
        if group is None or group.follower is None or is_plain:
            return
        shapes = shapes_of(self._model, args, kwargs)
        with _planning:
            self._threads.add(threading.get_ident())
            lost = self._lost(shapes)
            best = min(range(len(lost)), key=lambda place: lost[place])
            member = self._members[best]
            may_plan = self._model.training is self._is_training and not is_in_rehearsal()
            if lost[best] > MOST_LOST and may_plan:
                self._threads &= {each.ident for each in threading.enumerate()}
                if len(self._threads) > 1:
                    raise _in_many_threads(self._model, shapes)
                member = self._serving(shapes, lost, group, args, kwargs)
            self._of_thread.member = member

    def plan_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlanOfShapes | None:
        """Return the plan that serves a call with these arguments; None if there is none yet."""
        lost = self._lost(shapes_of(self._model, args, kwargs))
        best = min(range(len(lost)), key=lambda place: lost[place])
        return self._members[best].plan if lost[best] < math.inf else None

    def _lost(self, shapes: ArgumentShapes) -> list[float]:
        return largest_among_ranks(self._model, [m.lost(shapes) for m in self._members])

    def _serving(
        self,
        shapes: ArgumentShapes,
        lost: Sequence[float],
        group: WrappedForwards,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Member:
        """Return a member for shapes that none serves (See Rule 3)."""
        begin = time.perf_counter()
        near = self._nearest(shapes, lost)
        peak = math.inf if near is None else self._maker.peak_under(near.plan, args, kwargs)
        if near is not None and near.may_serve(peak):
            near.serve(shapes, peak)
            near.plan.sizes.include(args, kwargs)
            what, member = f"tried the plan for {near.shapes} on", near
        else:
            has_room = near is not None and near.plan.budget_bytes < peak < math.inf
            plan = self._maker.plan(args, kwargs, has_room=has_room)
            what, member = "planned", Member(shapes, plan)
            self._add(member, group)
        seconds = time.perf_counter() - begin
        name = type(self._model).__name__
        _logger.info(
            "%s: %s %s in %.3g s; %d plans", name, what, shapes, seconds, len(self._members)
        )
        return member

    def _nearest(self, shapes: ArgumentShapes, lost: Sequence[float]) -> Member | None:
        """Return the plan to try on `shapes`; None if all serve them slowly, or none is near."""
        pairs = [m.growth_to(shapes) for m in self._members]
        unlike = largest_among_ranks(self._model, [one for one, _ in pairs])
        uses = largest_among_ranks(self._model, [use for _, use in pairs])
        found = [
            (unlike[place], place)
            for place, each in enumerate(lost)
            if each == math.inf and uses[place] <= _MOST_TRIED
        ]
        return self._members[min(found)[1]] if found else None

    def _add(self, member: Member, group: WrappedForwards) -> None:
        """Let a member join the family, and drop those whose shapes it serves (See Rule 6)."""
        lost = largest_among_ranks(
            self._model,
            [max(member.lost(each.shapes) for each in m.tried) for m in self._members],
        )
        kept = [m for m, each in zip(self._members, lost, strict=True) if each > MOST_LOST]
        followed = set(map(id, self.followed_modules))
        modules = member.plan.planned.followed_modules
        group.begin([each for each in modules if id(each) not in followed])
        self._members = [*kept[-_MOST_PLANS + 1 :], member]
        if len(kept) >= _MOST_PLANS:
            self._warn()

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"A {type(self._model).__name__} with replan=True was given more than "
                f"{_MOST_PLANS} shapes that need plans of their own; the oldest plans are "
                "forgotten. Pad batches to fewer shapes.",
                stacklevel=2,
            )


class _Hook:
    """The hook of a model that has the plan chosen (See Rule 4); a copy does nothing."""

    def __init__(self, replanner: Replanner | None = None) -> None:
        self._replanner = replanner

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        if self._replanner is not None:
            if torch.compiler.is_compiling():
                uncompiled(_serve)(self._replanner, args, kwargs)
            else:
                self._replanner.serve(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> Any:
        return _Hook, ()


def _in_many_threads(model: nn.Module, shapes: ArgumentShapes) -> RecoupError:
    return RecoupError(
        f"Several threads train a {type(model).__name__} with replan=True, and no plan serves "
        f"{shapes}: the steps that make one would change gradients and buffers while another "
        "thread uses them. Run a step of each shape in one thread before, or plan for the largest "
        "batch without `replan`."
    )


def _serve(replanner: Replanner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    replanner.serve(args, kwargs)
