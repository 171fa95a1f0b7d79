"""The bytes in memory over a training step, and their recorder: what ran whenever they changed.

NOTE [ What runs when bytes change ]

Rule 1. The bytes are those of the meter, between marks: a mark is set wherever other code begins,
        so that all events between two of them have one cause. Marks allocate nothing.
Rule 2. In forward the cause is the innermost running module, and the call of a block around it.
Rule 3. In backward it is what had made the node that runs: nodes are numbered in the order in which
        they are made, and each mark of forward knows that number. A node that accumulates gradients
        has no number, and belongs to the node before it.
Rule 4. A module that runs in backward, or a block that says so, is a second run.
Rule 5. Global hooks of modules would make the compiler compile anew, and so change the bytes. Where
        anything is compiled, no modules are followed, and only calls of blocks are told apart.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from recoup._arguments import check_choice
from recoup._core.compile import is_compiled, never_compiled
from recoup._core.devices import NO_PEAKS, Peaks
from recoup._core.saved_tensors import num_nodes
from recoup._core.tensors import nodes_of, when_node_runs
from recoup.memory.meter import Span, Timeline
from recoup.memory.size import format_bytes

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")


class Stretch(NamedTuple):
    """A part of a step in which one piece of code ran, with the bytes in memory.

    Args:
        phase: "forward", which the loss is part of, or "backward".
        what: what ran: "forward", "loss", "backward", "backward of the loss", "runs again" (a
            forward, in backward) or "inverse".
        module: the qualified name of the module that ran; in backward, of the one that had made the
            part of the graph. "-" outside any module.
        way: how backward gets what the block of the module needs, as a plan chose; "" outside of
            the blocks of a plan.
        levels: the bytes in memory after each event of the allocator, beyond those before the step.
    """

    phase: Phase
    what: str
    module: str
    way: str
    levels: Sequence[int]


class Peak(NamedTuple):
    """The most bytes in memory at one time, and where that was.

    Args:
        num_bytes: the bytes.
        stretch: what ran when they were reached first.
    """

    num_bytes: int
    stretch: Stretch

    def __str__(self) -> str:
        stretch = self.stretch
        where = "" if stretch.module == "-" else f" in {stretch.module}"
        return f"{format_bytes(self.num_bytes)}{where} ({stretch.what})"


@dataclass(frozen=True, slots=True)
class StepLine:
    """The bytes in memory over one training step, as `recoup.timeline` records them.

    Args:
        name: what the step follows, such as "planned".
        stretches: the parts of the step, in order.
        baseline_bytes: the bytes before the step, where they count.
        peaks: its peak as it was requested, allocated and reserved, without those.
    """

    name: str
    stretches: tuple[Stretch, ...]
    baseline_bytes: int = 0
    peaks: Peaks = NO_PEAKS

    def __repr__(self) -> str:
        num_events = sum(len(stretch.levels) for stretch in self.stretches)
        peak = format_bytes(self.peak_bytes)
        return f"StepLine({self.name!r}, {num_events} events, peak {peak})"

    @property
    def peak_bytes(self) -> int:
        """The most bytes in memory at one time."""
        return max((peak.num_bytes for peak in map(self.peak, PHASES) if peak), default=0)

    def peak(self, phase: Phase) -> Peak | None:
        """Return the peak of a phase; None if nothing was allocated or freed in it.

        Args:
            phase: "forward" or "backward".
        """
        found = [
            Peak(self.baseline_bytes + max(stretch.levels), stretch)
            for stretch in self._within(phase)
            if stretch.levels
        ]
        return max(found, key=lambda peak: peak.num_bytes, default=None)

    def levels(self, phase: Phase) -> list[int]:
        """Return the bytes in memory after each event of a phase.

        Args:
            phase: "forward" or "backward".
        """
        stretches = self._within(phase)
        return [self.baseline_bytes + level for each in stretches for level in each.levels]

    def starts(self, phase: Phase) -> list[tuple[int, Stretch]]:
        """Return the stretches of a phase, each with the index of its first event.

        Args:
            phase: "forward" or "backward".
        """
        stretches = self._within(phase)
        num_events = accumulate((len(each.levels) for each in stretches), initial=0)
        return list(zip(num_events, stretches, strict=False))

    def _within(self, phase: Phase) -> list[Stretch]:
        check_choice(*PHASES, phase=phase)
        return [stretch for stretch in self.stretches if stretch.phase == phase]


# -- the names of running modules ------------------------------------------------------------------

ModulePath = tuple[nn.Module, str]  # the root of a tree of modules, and a qualified name within it


class RunningModules:
    """The stack of modules whose forward is running in this thread, within `followed`.

    The roots `modules` are known beforehand, others when they run; modules of a tree within another
    tree are named by the outer one. `changed` is called when another module is the innermost.
    """

    def __init__(
        self, modules: Iterable[nn.Module], changed: Callable[[], None] = lambda: None
    ) -> None:
        self._changed = changed
        self._thread = threading.get_ident()
        self._running: list[nn.Module] = []
        self._paths: dict[int, ModulePath] = {}
        self._roots: list[nn.Module] = []
        self._tensors: dict[int, Tensor] = {}
        for module in sorted(modules, key=lambda root: -sum(1 for _ in root.modules())):
            self._know(module)

    @contextmanager
    def followed(self) -> Generator[None]:
        @never_compiled
        def enter(module: nn.Module, inputs: Any) -> None:
            del inputs
            if threading.get_ident() == self._thread:
                if not self._running or id(module) not in self._paths:
                    self._know(module)  # again: functional_call gives it other parameters
                self._running.append(module)
                self._changed()

        @never_compiled
        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            del inputs, output
            is_mine = threading.get_ident() == self._thread
            if is_mine and self._running and self._running[-1] is module:
                self._running.pop()
                self._changed()

        entering = register_module_forward_pre_hook(enter)
        leaving = register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            entering.remove()
            leaving.remove()

    @property
    def path(self) -> ModulePath | None:
        return self._paths[id(self._running[-1])] if self._running else None

    def tensors(self) -> Iterable[Tensor]:
        """Return the parameters and buffers of all known modules."""
        for root in self._roots:
            self._know(root)  # lazy parameters have a shape by now
        return self._tensors.values()

    def _know(self, module: nn.Module) -> None:
        if id(module) not in self._paths:
            self._roots.append(module)
        for name, each in cast("Iterator[tuple[str, nn.Module]]", module.named_modules()):
            self._paths.setdefault(id(each), (module, name))
        for tensor in (*module.parameters(), *module.buffers()):
            if not is_lazy(tensor):
                self._tensors[id(tensor)] = tensor


def names_of(paths: Iterable[ModulePath]) -> Callable[[ModulePath], str]:
    """Return a function that names a path, with the class of its root if there are several."""
    titles: dict[int, str] = {}
    num_named: dict[str, int] = {}
    for root, _ in paths:
        if id(root) not in titles:
            kind = type(root).__name__
            num_named[kind] = num_named.get(kind, 0) + 1
            titles[id(root)] = kind if num_named[kind] == 1 else f"{kind}#{num_named[kind]}"

    def name_of(path: ModulePath) -> str:
        root, name = path
        title = titles[id(root)]
        if not name:
            return title
        return name if len(titles) == 1 else f"{title}.{name}"

    return name_of


# -- recording -------------------------------------------------------------------------------------

Losses = Callable[[Any], Sequence[Tensor]]


class _Cause(NamedTuple):
    """What runs: the `what` of a `Stretch`, the module, and the index of the call of a block."""

    what: str
    path: ModulePath | None  # None outside any
    call: int | None


_BACKWARD = _Cause("backward", None, None)


class StepRecorder:
    """A recorder of one step, whose caller enters its timeline (See Rule 1).

    With `follows_modules` modules are told apart, where no code is compiled (See Rule 5).
    """

    def __init__(self, line: Timeline, model: nn.Module, *, follows_modules: bool) -> None:
        self._line = line
        self._modules = RunningModules([model], self._changed)
        self._follows = follows_modules and not any(map(is_compiled, model.modules()))
        self._what = "forward"
        self._call: int | None = None
        self._again: list[tuple[str, int]] = []
        self._made_here = _BACKWARD  # by what had made the node that runs
        self._cause = _Cause("forward", None, None)
        self._spans: list[tuple[_Cause, Span]] = []
        self._numbers: list[int] = [0]  # of nodes, where each cause of forward began
        self._causes = [self._cause]

    # -- during the step -------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Generator[None]:
        """Return a context for the step, within that of its timeline."""
        with self._modules.followed() if self._follows else nullcontext():
            yield
            self._mark(self._cause)

    def observed(self, losses: Losses) -> Losses:
        """Return `losses`, which tells the recorder where forward ends and backward begins."""

        def taken(output: Any) -> Sequence[Tensor]:
            self._what = "loss"
            self._changed()
            found = losses(output)
            self._changed(_BACKWARD)
            self._what = "backward"
            for node in nodes_of(found):
                when_node_runs(node, self._node_runs)
            return found

        return taken

    @contextmanager
    def within(self, call: int) -> Generator[None]:
        """Return a context in which a call of a block runs in forward."""
        before, self._call = self._call, call
        self._changed()
        try:
            yield
        finally:
            self._call = before
            self._changed()

    @contextmanager
    def again(self, what: str, call: int) -> Generator[None]:
        """Return a context in which a call of a block "runs again", or its "inverse" runs."""
        self._again.append((what, call))
        self._changed()
        try:
            yield
        finally:
            self._again.pop()
            self._changed()

    def _node_runs(self, num_before: int) -> None:
        made = self._causes[bisect_right(self._numbers, num_before) - 1]  # See Rule 3
        what = "backward of the loss" if made.what == "loss" else "backward"
        self._made_here = made._replace(what=what)
        self._changed()

    def _changed(self, cause: _Cause | None = None) -> None:
        cause = cause or self._now()
        if cause == self._cause:
            return
        self._mark(cause)
        if self._what != "backward":
            self._numbers.append(num_nodes())
            self._causes.append(cause)

    def _now(self) -> _Cause:
        path = self._modules.path
        if self._what != "backward":
            return _Cause(self._what, path, self._call)
        if self._again:
            what, call = self._again[-1]
            return _Cause(what, path, call)
        if path is not None:  # See Rule 4
            return _Cause("runs again", path, self._made_here.call)
        return self._made_here

    def _mark(self, cause: _Cause) -> None:
        self._spans.append((self._cause, self._line.mark()))
        self._cause = cause

    # -- afterwards ------------------------------------------------------------------------

    @property
    def peaks(self) -> Peaks:
        return self._line.peaks

    def stretches(self, calls: Sequence[tuple[str, str]] = ()) -> tuple[Stretch, ...]:
        """Return the stretches of the step that have events, when its timeline has ended.

        `calls` are the name of the block of each call, and its way.
        """
        name_of = names_of(cause.path for cause, _ in self._spans if cause.path is not None)
        found: list[Stretch] = []
        level = 0
        for cause, span in self._spans:
            what, path, call = cause
            module, way = ("-", "") if call is None else calls[call]
            if path is not None:
                module = name_of(path)
            phase = "forward" if what in ("forward", "loss") else "backward"
            levels = span.levels
            if not levels and (span.peak_bytes, span.end_bytes) != (level, level):
                levels = (span.peak_bytes, span.end_bytes)  # all that the counter knows
            if levels:
                found.append(Stretch(phase, what, module, way, levels))
            level = span.end_bytes
        return tuple(found)
