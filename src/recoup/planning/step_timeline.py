"""`recoup.timeline`: the bytes in memory over a training step, with a plan and without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from torch import nn

from recoup._arguments import check_type
from recoup.memory import format_bytes
from recoup.memory.figures import check_page, page_of, path_of, write_whole
from recoup.memory.meter import timeline as meter
from recoup.memory.size import aligned, shown_beside
from recoup.memory.step_recorder import PHASES, StepLine, StepRecorder
from recoup.planning.arguments import example_arguments
from recoup.planning.forwards import suspended
from recoup.planning.options import PlanOptions
from recoup.planning.plan import Plan, applied_plans, own_forwards
from recoup.planning.rehearsal import uncollected
from recoup.planning.step import Step
from recoup.planning.verification import has_room

_NOTEBOOK_HEIGHT = 760  # pixels


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The bytes in memory over a training step, as `recoup.timeline` returns it. Printable.

    Args:
        model: the class of the model.
        plain: the step of the model as it is; None if there was no room to run it.
        planned: the step that follows the plan; None without a plan.
        budget_bytes: the budget of the plan; None without a plan.
        plan: the text of the plan; "" without one.
    """

    model: str
    plain: StepLine | None
    planned: StepLine | None = None
    budget_bytes: int | None = None
    plan: str = ""

    def __repr__(self) -> str:
        return f"StepTimeline({self.model}: {self._peaks()})"

    @property
    def lines(self) -> tuple[StepLine, ...]:
        """The lines that there are, the plain one first."""
        return tuple(line for line in (self.plain, self.planned) if line is not None)

    def page(self, path: str | Path) -> Path:
        """Draw the step on a page of HTML that needs no other file, and tells what ran where.

        The line under the pointer (or at the slider, by keyboard or touch) is explained: its bytes,
        the module, and how backward gets what its block needs. Every event is drawn: a page of a
        hundred thousand of them has some megabytes.

        Args:
            path: the path of the page, ending in .html.

        Returns:
            The path.

        Raises:
            ValueError: `path` has another ending.
        """
        whole = path_of(path)
        check_page(whole.suffix)
        return write_whole(whole, self._html().encode())

    def __str__(self) -> str:
        table = [("peak", *(line.name for line in self.lines))]
        for phase in PHASES:
            peaks = (line.peak(phase) for line in self.lines)
            table.append((phase, *("-" if peak is None else str(peak) for peak in peaks)))
        if any(shown_beside(line.peaks) for line in self.lines):
            table.append(("beside", *(shown_beside(line.peaks)[2:-1] for line in self.lines)))
        return "\n".join(aligned(table, left=range(3)))

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the page, in a frame."""
        return (
            f'<iframe srcdoc="{escape(self._html())}" title="Memory over a step of '
            f'{escape(self.model)}" width="100%" height="{_NOTEBOOK_HEIGHT}" '
            'style="border: 0"></iframe>'
        )

    def _peaks(self) -> str:
        peaks = [f"{format_bytes(line.peak_bytes)} {line.name}" for line in self.lines]
        budget = [] if self.budget_bytes is None else [f"budget {format_bytes(self.budget_bytes)}"]
        return ", ".join([*peaks, *budget])

    def _html(self) -> str:
        summary = f"Peak of a training step: {self._peaks()}."
        if self.plain is None:
            summary += " There was no room to run the step as it is."
        title = f"Memory over a step of {self.model}"
        return page_of(title, summary, self.lines, self.budget_bytes, self.plan)


def timeline(
    model: nn.Module,
    *example_args: Any,
    plan: Plan | None = None,
    loss: Callable[[Any], Any] | None = None,
    holds_output: bool = True,
    **example_kwargs: Any,
) -> StepTimeline:
    """Record the bytes in memory over a training step, event by event, and which module ran.

    The step is run once as the model is, and once as it follows the plan, if there is one. Both
    leave no trace, as the steps of `recoup.plan` do. Bytes are those of `recoup.measure`: the most
    of the planned step are `Plan.rehearsed_peak_bytes`, for the arguments and the random state with
    which the plan was made. On an accelerator, and while a profiler of other code runs, the most
    and the last bytes of each module are recorded rather than every event.

    Where blocks run compiled, modules within them are not told apart, nor are others. The plain
    step is left out if there is no room for it. A chain that plans itself does so in its first
    forward, so run one before.

    Args:
        model: any module.
        example_args: its arguments as in training.
        plan: a plan for `model`, such as one of a `Plan.family`; None for the one that it follows,
            if any.
        loss: a function from the output of the model to a scalar, or several, as for `recoup.plan`.
        holds_output: whether the training loop holds the output of the model while backward runs.
        example_kwargs: keyword arguments of the model.

    Returns:
        The timeline. It prints as the peaks and where they are; its method `page` writes a page
        of HTML to look into it.

    Raises:
        ValueError: an argument is invalid, or `plan` is one of another model.

    Example:
        >>> import recoup, torch
        >>> blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in "abcd"]
        >>> model, x = torch.nn.Sequential(*blocks), torch.ones(256, 64)
        >>> plan = recoup.plan(model, x, budget="400 KiB")
        >>> found = recoup.timeline(model, x, plan=plan)
        >>> print(found)
        peak      as it is                        planned
        forward   576 KiB (loss)                  320 KiB (loss)
        backward  640 KiB (backward of the loss)  384 KiB (backward of the loss)
        >>> found.planned.peak_bytes == plan.rehearsed_peak_bytes
        True
    """
    example_args, example_kwargs = example_arguments(model, example_args, example_kwargs)
    options = PlanOptions(loss, holds_output=holds_output)
    if plan is None:
        plan = next((each for each in applied_plans(model) if each.model is model), None)
    else:
        check_type(Plan, "a plan, such as recoup.plan returns for a `budget`", plan=plan)
    if plan is not None and plan.model is not model:
        raise ValueError(
            f"`plan` is for another model, a {type(plan.model).__name__}. Make one for this "
            f"{type(model).__name__}, or leave it out."
        )
    step = options.step(model, model, example_args, example_kwargs)
    name = type(model).__name__
    with suspended(own_forwards(model)), uncollected():
        step = step.knowing_writes()
        if plan is None:
            return StepTimeline(name, _line_of(step, None))
        baseline, plain = plan.baseline_bytes, None
        if has_room(step.device, plan.most_bytes - baseline):
            plain = _line_of(step, None, baseline)
        planned = _line_of(step, plan, baseline)
    return StepTimeline(name, plain, planned, plan.budget_bytes, str(plan))


def _line_of(step: Step, plan: Plan | None, baseline_bytes: int = 0) -> StepLine:
    """Run a step of a model that follows a plan, or none."""
    is_compiled = plan is not None and any(call.codes for call in plan.planned.calls)
    if plan is not None:
        step = replace(step, tiled=plan.planned.tiled)
    line = meter(step.device, records_levels=True)
    recorder = StepRecorder(line, step.model, follows_modules=not is_compiled)

    def told(index: int, run: str) -> AbstractContextManager[Any]:
        if run == "call":
            return recorder.within(index)
        if run == "first":
            return nullcontext()
        return recorder.again("inverse" if run == "inverse" else "runs again", index)

    following = nullcontext() if plan is None else plan.planned.followed(plan.schedule, told)
    observed = replace(step, losses=recorder.observed(step.losses))
    with following, observed.counted(line):
        with recorder.recording():
            gradients = observed.run()
        del gradients
    if plan is None:
        return StepLine("as it is", recorder.stretches(), baseline_bytes, recorder.peaks)
    calls = [(block.name, block.way) for block in plan.blocks]
    return StepLine("planned", recorder.stretches(calls), baseline_bytes, recorder.peaks)
