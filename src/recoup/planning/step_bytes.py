"""The bytes of a step: `recoup.estimate`, before anything runs, and `recoup.timeline`, by event.

NOTE [ An estimate ]

Rule 1. Everything happens without values (NOTE [ Steps without values ]): the model is built,
        measured, priced and rehearsed by the code of `recoup.plan`.
Rule 2. Code that builds a model reads numbers: rates that a `linspace` made, the sign of a
        determinant, whether a random weight has to be drawn again. So tensors of a few entries have
        values until the model is built, and a number that is read of another one is zero.
Rule 3. Nothing is kept: random streams go on as before, and a model that was there before has its
        tensors again in the end.
Rule 4. Kernels of recurrent layers, whose workspace nobody knows without running them, are refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

from recoup._arguments import check_callable, check_type, shown
from recoup._core.compile import never_compiled
from recoup._core.devices import generators_restored
from recoup._core.operators import DispatchMode
from recoup._core.pytree import flatten, tensors_in
from recoup.errors import RecoupError
from recoup.memory import format_bytes
from recoup.memory.figures import check_page, page_of, path_of, write_whole
from recoup.memory.meter import timeline as meter
from recoup.memory.size import aligned, shown_beside
from recoup.memory.step_recorder import PHASES, StepLine, StepRecorder
from recoup.planning.arguments import example_arguments, model_and_arguments
from recoup.planning.forwards import Args, Kwargs, suspended
from recoup.planning.frontier import FrontierPoint, frontier_of
from recoup.planning.options import PlanOptions, StepKeywords, check_keywords, checked_budget
from recoup.planning.plan import Plan, applied_plans, own_forwards
from recoup.planning.rehearsal import streams_restored, uncollected
from recoup.planning.step import Step
from recoup.planning.verification import has_room

_FEW = 4096  # entries of a tensor that has values (See Rule 2)


@dataclass(frozen=True)
class Estimate:
    """What `recoup.estimate` has found. Printing it shows all plans.

    Args:
        model: the class of the model.
        plain_peak_bytes: the peak of a step that keeps every residual.
        least_bytes: the smallest budget that suffices.
        points: the plans that are best for some budget, from the least bytes to the most.
        budget_bytes: the budget; None if there was none.
        peak_bytes: the peak of the fastest step that keeps to the budget; without one, of the plain
            step.
        relative_time: the time of that step, where 1 is the plain one, by its counted work.
        table: the plans, as they are printed.
    """

    model: str
    plain_peak_bytes: int
    least_bytes: int
    points: tuple[FrontierPoint, ...]
    budget_bytes: int | None
    peak_bytes: int
    relative_time: float
    table: str

    def __repr__(self) -> str:
        plain, least = map(format_bytes, (self.plain_peak_bytes, self.least_bytes))
        return f"Estimate({self.model}: {plain} plain, at least {least})"

    def __str__(self) -> str:
        if self.budget_bytes is None:
            return self.table
        return (
            f"{self.table}\n\nWithin {format_bytes(self.budget_bytes)}: a step of "
            f"{format_bytes(self.peak_bytes)} in {self.relative_time:.2f} of the plain time."
        )


def estimate(
    build: Callable[[], Any],
    budget: int | str | None = None,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    **options: Unpack[StepKeywords],
) -> Estimate:
    """Return the peak and the plans of a training step that is not run: will it fit?

    The model is built, planned and rehearsed under torch's `FakeTensorMode`, in which tensors have
    shapes and types, and no values and no memory. So a machine with little memory tells what a
    large one will need. Bytes are those of the tensors that operators return. What kernels allocate
    for a moment is left out: a few percent for convolutions on a CPU. Times are counted: the bytes
    that operators move, and the operations of their products.

    A model that does otherwise when it is traced (transformers makes a mask for its attention) is
    estimated so. Kept: nothing, and no memory is taken but for the modules themselves.

    Args:
        build: a function that returns the model and its arguments as in training, on the CPU, as
            ``(model, *args)``; a dict that ends it has keyword arguments. It is called in that
            mode, so it cannot load weights from files.
        budget: a number of bytes, as an int or a string such as ``"80 GiB"``; None for all budgets.
        optimizer: for ``budget_of="total"``, a function from the parameters to the optimizer, such
            as ``torch.optim.AdamW``.
        options: those of `recoup.plan`: `loss`, `blocks`, `budget_of`, `holds_output`, `exact`,
            `num_forwards` and `headroom`.

    Returns:
        The estimate, printable.

    Raises:
        BudgetError: no plan keeps to the budget; `least_bytes` is the smallest one that suffices.
        RecoupError: the model reads numbers from tensors, which have none; or it has recurrent
            layers, the size of whose workspace is not known.
        ValueError: an argument is invalid.

    Example:
        >>> import recoup, torch
        >>> def build():
        ...     layers = [
        ...         torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.GELU())
        ...         for _ in range(8)
        ...     ]
        ...     return torch.nn.Sequential(*layers), torch.empty(2**18, 4096)
        >>> recoup.estimate(build, "40 GiB")  # on a machine with less
        Estimate(Sequential: 72 GiB plain, at least 20.38 GiB)
    """
    check_callable(build=build)
    check_keywords("estimate", options, StepKeywords.__optional_keys__)
    if optimizer is not None and not callable(optimizer):
        raise ValueError(
            f"`optimizer` is {shown(optimizer)}, but must be a function from the parameters to an "
            "optimizer, such as torch.optim.AdamW."
        )
    budget_bytes = None if budget is None else checked_budget(budget)
    with _without_values() as mode, ExitStack() as after:
        model, args, kwargs = _built(build, mode, after)
        made = None if optimizer is None else optimizer(model.parameters())
        if optimizer is not None and not hasattr(made, "param_groups"):
            raise ValueError(
                f"`optimizer` returned {shown(made)}, but must return an optimizer of the "
                "parameters that it is given, such as torch.optim.AdamW."
            )
        chosen = PlanOptions(optimizer=made, **options)
        step = chosen.step(model, model, args, kwargs)
        frontier, room = frontier_of(step, chosen), chosen.room(step)
        points, least = frontier.points, frontier.least_bytes
        whole, time = room.of(points[-1].peak_bytes), points[-1].relative_time
        whole += room.baseline_bytes
        peak = whole
        if budget_bytes is not None:
            plan = frontier.plan(budget_bytes)
            peak, time = plan.rehearsed_peak_bytes, plan.predicted_time_ratio
    name, table = type(model).__name__, str(frontier)
    return Estimate(name, whole, least, points, budget_bytes, peak, time, table)


def _built(
    build: Callable[[], Any], mode: FakeTensorMode, after: ExitStack
) -> tuple[nn.Module, Args, Kwargs]:
    """Return the model and its arguments, without values until `after` (See Rules 1 to 3)."""
    with warnings.catch_warnings(), _Building(mode):
        # `copy.deepcopy` of a tensor asks for its address, and torch warns of that.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        given = build()
    model, args, kwargs = model_and_arguments(given)

    def without_values(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return mode.from_tensor(tensor)
        tensor.fake_mode = mode  # a deep copy has a copy of it
        return tensor

    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            after.callback(cast("Any", module)._init_flat_weights)
        own_tensors: Any = module
        for own in (own_tensors._parameters, own_tensors._buffers):
            after.callback(own.update, dict(own))
            own.update({name: without_values(t) for name, t in own.items() if t is not None})
        if isinstance(module, nn.RNNBase):
            cast("Any", module)._init_flat_weights()  # its list of parameters
    tensors, tree = flatten((args, kwargs))
    args, kwargs = tree.unflatten(tuple(map(without_values, tensors)))
    return model, tuple(args), kwargs


class _Building(DispatchMode):
    """A mode in which small tensors have values, and what reads one of another gets zero."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._known: Any = mode.fake_tensor_converter.tensor_memo

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        has_values = not any(isinstance(tensor, FakeTensor) for tensor in given)
        if has_values and given and all(tensor.numel() <= _FEW for tensor in given):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        try:
            made = func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            with unset_fake_temporarily():
                return torch.zeros((), dtype=args[0].dtype).item()
        self._known.clear()  # `module.to` cannot convert what a weak reference is held of
        is_small = sum(tensor.numel() for tensor in tensors_in(made)) <= _FEW
        if given or not is_small:
            return made
        with unset_fake_temporarily():
            return func(*args, **kwargs)


@contextmanager
def _without_values() -> Generator[FakeTensorMode]:
    """A context without values, whose errors say so."""
    try:
        with (
            generators_restored(),
            streams_restored(),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
        ):
            yield mode
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise RecoupError(
            f"The model reads values of tensors (by `{error.func}`), and an estimate has none: "
            "what it does depends on them. Plan it by recoup.plan, where it can run."
        ) from error
    except Exception as error:
        error.add_note("It ran without values, in torch's FakeTensorMode (recoup.estimate).")
        raise


# -- event by event --------------------------------------------------------------------------------


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
