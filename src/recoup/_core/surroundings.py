"""The surroundings of a call: what its second run is given back, and what is compared by name.

NOTE [ What a second run finds ]

Rule 1. A second run is given back the settings of operators (autocast, the kernels of attention,
        the default device, whether `__torch_function__` of subclasses is called), the states of the
        default generators and the seeds of recoup, as the first run found them. What the second run
        does to these is undone.
Rule 2. A buffer of the modules that the first run changed counts once: a second run begins with the
        values that the first run found, and leaves those that it left. Values are compared, not
        versions, since fused kernels leave versions alone. A module has the buffers and parameters
        again that it had if they were assigned or replaced since, and is in the mode it was in.
        Parameters that it wrote to, and tensors that are plain attributes, count as buffers do from
        the second time on that the code runs, and so do all attributes of their modules (a flag
        that says when to write). In the first one, sketches of them show that it does, and what
        its second run writes to them is taken back; there is no copy to begin with.
Rule 3. Nothing else is given back. Numbers, lists, caches and counters that a second run finds
        otherwise change a residual, which is an error, or they do not matter. But what a second run
        sets as attributes of modules, and the hooks that it adds to parameters, are taken away: a
        module has those of the first run, in whose graph they are.
Rule 4. Versions of parameters, submodules and hooks are noted. They decide nothing: where a
        residual differs, they tell an error what has changed.
Rule 5. A copy of all buffers, and a dispatch mode that looks at each operator, cost too much for
        each run. So code is looked at in its first run in each mode (training or not): if no buffer
        changed, nothing was decided and nothing drawn, later runs do without, and another thread
        may draw meanwhile. What they do otherwise shows in a residual.
        Code may call modules that it does not hold itself, or not all that it holds. It is not
        looked at again, but in each first run modules are found as they are called, decisions and
        draws are noted, and the buffers of a module that was not seen are copied before it runs. A
        module with buffers counts as seen when it was called.
Rule 6. A run that began in a dispatch mode is repeated in one: composite operators differ there.
Rule 7. If a later run that is given what the first one decided differs from it, fails, or is not
        compared, and has decided less, it was given what is of other calls: the first run has
        cached a mask. Then it is run again, and decides.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, compress
from operator import attrgetter, itemgetter
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from recoup._core.captured import (
    Attributes,
    Buffers,
    Code,
    all_of,
    are_assigned,
    are_equal,
    are_own,
    assign,
    copies_of,
    have_changed,
    having_turn,
    name_of_parameter,
    note,
    others_of,
    put_values,
    turn_here,
)
from recoup._core.devices import unrepeated
from recoup._core.kept_outputs import KeptOutputs, deciding_operators
from recoup._core.kept_products import Products
from recoup._core.operators import InMode, OperatorMode, num_dispatch_modes, run_plainly
from recoup._core.rng import Draws
from recoup._core.saved_tensors import is_there, set_versions, version_of, versions_of
from recoup._core.settings import settings_now, with_settings
from recoup._core.sketch import sketch_of
from recoup._core.tensors import is_without_values
from recoup.errors import RecoupError

_training: Callable[[nn.Module], bool] = attrgetter("training")
_copy: Callable[[dict[str, Any]], dict[str, Any]] = cast("Any", dict.copy)
values_of: Callable[[dict[str, Any]], Iterable[Any]] = cast("Any", dict.values)
_hooks_of = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
# The code that was looked at (See Rule 5), by mode and by whether outputs were kept, and what it
# did then.
_looked_at: defaultdict[tuple[bool, bool], set[Code]] = defaultdict(set)
_decides: defaultdict[Any, set[Code]] = defaultdict(set)  # by the operator
_draws: set[Code] = set()  # or may have drawn
_counts: set[Code] = set()  # modules that changed a buffer of their own
_writes: set[Code] = set()  # those that wrote to a parameter, or to a tensor in an attribute
_finds: set[Code] = set()  # called modules which it does not hold


class Surroundings(Draws):
    """What the first run of a call finds, for the runs after it: its draws and all else.

    Later runs are given the outputs of the operators in `products`; and, if it `keeps_outputs`,
    what operators decided: inverses are not.
    """

    parameters: Sequence[Tensor] = ()
    buffers: Sequence[Buffers] = ()  # of each module
    held: Sequence[dict[str, Any]] = ()  # the dicts of parameters and buffers of each
    _spaces: Sequence[Attributes] = ()  # of parameters

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        code: object,
        products: Products | None = None,
        *,
        keeps_outputs: bool = True,
    ) -> None:
        self._entries = []
        self.name = name
        self._settings = settings_now()
        self._has_mode = num_dispatch_modes() > 0
        # Buffers, with the values before; None if they are not known.
        self.counted: list[tuple[Tensor, Tensor | None]] = []
        self._written: list[Attributes] = []  # of modules that write to theirs
        self._is_unsure = False
        self._turn = turn_here.turn
        self._modules: list[nn.Module] = []
        self._modes: list[bool] = []
        self._hooks: list[object] = []
        self.versions: list[int] = []  # of the parameters
        self.buffer_versions: list[int] = []
        self.found: list[int] = []  # the ids of what the modules hold
        if modules:
            self._note(modules)
        self._code = list(map(weakref.ref, (code, *self._modules)))
        # What it does is noted of the modules alone: blocks may share the code that calls them.
        self._root = self._code[1 : 1 + len(modules)] or self._code
        modes = [True in self._modes, *self._modes]
        others = list(map(operator.not_, modes))
        self._seen = (
            (_looked_at[True, keeps_outputs], list(compress(self._code, modes))),
            (_looked_at[False, keeps_outputs], list(compress(self._code, others))),
        )
        (training, trained), (evaluated, rest) = self._seen
        is_known = training.issuperset(trained) and evaluated.issuperset(rest)
        self._is_looking = not is_known and not (
            training.issuperset(compress(self._code[: 1 + len(modules)], modes))
            and evaluated.issuperset(compress(self._code[: 1 + len(modules)], others))
        )
        self._is_finding = not is_known or not _finds.isdisjoint(self._root)
        self.kept_outputs: KeptOutputs | None = None
        self._may_draw = self._is_finding or not _draws.isdisjoint(self._root)
        deciding = frozenset[Any]()
        if keeps_outputs and self._is_finding:
            deciding = deciding_operators()
        elif keeps_outputs:
            for func, deciders in tuple(_decides.items()):  # other threads add to it
                if not deciders.isdisjoint(self._root):
                    deciding |= {func}
        if deciding or products is not None:
            products = products or Products()
            self.kept_outputs = KeptOutputs(name, products, deciding, is_looking=self._is_looking)

    def _note(self, roots: Sequence[nn.Module]) -> None:
        """Note what errors can name (See Rule 4)."""
        found = dict.fromkeys(roots)
        modules = list(found)
        parameters: list[Tensor] = []
        buffers: list[Buffers] = []
        hooks: list[object] = []
        spaces: list[Attributes] = []  # of the parameters of each module
        for module in modules:  # which grows
            own: dict[str, Any] = module.__dict__
            space, held, children = own["_parameters"], own["_buffers"], own["_modules"]
            spaces.append((space, space.copy()))
            if space:
                parameters += cast("Iterable[Any]", filter(is_there, space.values()))
            buffers.append((held, held.copy()))
            forward = own.get("forward")
            if forward is not None and hasattr(forward, "is_lent"):  # by the layer around it
                forward = None
            if own["_forward_hooks"] or own["_forward_pre_hooks"] or forward is not None:
                hooks += (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
                hooks.append(forward)
            if children:
                for child in children.values():
                    if child is not None and child not in found:
                        found[child] = None
                        modules.append(child)
        self._modules, self._modes = modules, list(map(_training, modules))
        self.parameters = parameters
        self.versions = versions_of(parameters) if parameters else []
        self._hooks, self._spaces, self.buffers = hooks, spaces, buffers
        has_buffers = any(map(itemgetter(0), buffers))
        self.buffer_versions = versions_of(all_of(buffers)) if has_buffers else []
        self.held = list(map(itemgetter(0), chain(spaces, buffers)))
        self.found = list(map(id, chain.from_iterable(map(values_of, self.held))))

    def first(self) -> AbstractContextManager[None]:
        """Return a context for the first run."""
        counts = not (_counts.isdisjoint(self._code) and _writes.isdisjoint(self._code))
        if self._is_finding or self.kept_outputs or counts:
            return self._looking()
        return self.recording()

    @contextmanager
    def _looking(self) -> Generator[None]:
        """A context for a first run that is looked at, or that decides or counts."""
        if self._is_looking and any(map(is_lazy, self.parameters)):
            raise RecoupError(
                f"{self.name} has parameters without a shape (of nn.LazyLinear, for example). Call "
                "it once before, outside of a region: `with torch.no_grad(): module(x)`."
            )
        mode = nullcontext() if self.kept_outputs is None else self.kept_outputs.recording()
        found: list[Buffers] = [  # that the run may change (See Rule 5)
            (module._buffers, module._buffers.copy())
            for module, ref in zip(self._modules, self._code[1:], strict=True)
            if self._is_looking or ref in _counts
        ]
        written = [] if _writes.isdisjoint(self._code) else self._may_write(_writes)
        with having_turn(self._turn, is_needed=bool(found or written)) as self._turn:
            before, others = copies_of(all_of(found)), copies_of(each for _, each in written)
            writers = {ref() for ref, _ in written}
            attributes = [(vars(each), vars(each).copy()) for each in writers]
            looked_at = self._may_write(self._code) if self._is_looking else []
            sketches = [sketch_of(each) for _, each in looked_at]
            self.counted = [*before]
            with self._finding(before, found) as called, self.recording(), mode:
                yield
            if self._is_finding:
                self.counted = [pair for pair in before if not are_equal(*pair)]
                self._has_found(called)
            self.counted += [pair for pair in others if not are_equal(*pair)]
            self._written = list(filter(are_assigned, attributes))
            for ref, each in compress(looked_at, have_changed(looked_at, sketches)):
                note(_writes, [ref])
                self.counted.append((each, None))

    def has_run(self) -> None:
        """Note what the first run has left, and did otherwise than when it was looked at."""
        if self.has_foreign and not self._may_draw:
            # It has begun to draw, or another thread has drawn: the next run shows which.
            self._is_unsure = True
            self.look_again()
        before, self.versions = self.versions, versions_of(self.parameters)
        if before != self.versions:
            known = {id(each) for each, _ in self.counted}
            written = compress(self.parameters, map(operator.ne, before, self.versions))
            self.counted += [(each, None) for each in written if id(each) not in known]
        if self.found != list(map(id, chain.from_iterable(map(values_of, self.held)))):
            held = chain.from_iterable(own.values() for own, _ in self._spaces)
            self.parameters = list(filter(is_there, held))
            self.versions = versions_of(self.parameters)
        buffers = all_of(self.buffers)
        if versions_of(buffers) == self.buffer_versions:
            return
        counted = {id(buffer) for buffer, _ in self.counted}
        versions = dict(zip(map(id, buffers), self.buffer_versions, strict=True))
        for module in self._modules:  # one that has begun to count since it was looked at
            own = [each for each in module._buffers.values() if each is not None]
            changed = [e for e in own if version_of(e) != versions.get(id(e), version_of(e))]
            if changed and counted.isdisjoint(map(id, own)):
                note(_counts, [weakref.ref(module)])
                self.counted += [(buffer, None) for buffer in own]

    def _may_write(self, codes: Container[Code]) -> list[tuple[Code, Tensor]]:
        """Return the parameters and attributes of modules that are in `codes`, with the module."""
        pairs = zip(self._modules, self._code[1:], strict=True)
        return [(ref, e) for each, ref in pairs if ref in codes for e in others_of(each)]

    @contextmanager
    def _finding(
        self, before: list[tuple[Tensor, Tensor]], found: list[Buffers]
    ) -> Generator[set[int] | None]:
        """A context that finds the modules that are called (See Rule 5); yields their ids.

        Their buffers are added to `found`, and with the values that they have to `before`.
        """
        if not self._is_finding or self.kept_outputs is None:
            yield None  # compiled code runs under no such mode, and looks at hooks
            return
        thread, called = threading.get_ident(), set[int]()
        held = set(map(id, self._modules))
        (training, _), (evaluated, _) = self._seen

        def begins(module: nn.Module, args: object) -> None:
            if threading.get_ident() != thread or id(module) in called:
                return
            called.add(id(module))
            ref, is_held = weakref.ref(module), id(module) in held
            if not is_held:
                self._modules.append(module)
                self._modes.append(module.training)
                self._code.append(ref)
                self._seen[0 if module.training else 1][1].append(ref)
                if module._parameters or module._buffers or module._modules:  # else a function
                    note(_finds, self._root)
            is_copied = is_held and (self._is_looking or ref in _counts)
            is_seen = ref in (training if module.training else evaluated)
            if not is_copied and (not is_seen or ref in _counts):
                found.append((module._buffers, module._buffers.copy()))
                before.extend(copies_of(all_of(found[-1:])))

        with nn.modules.module.register_module_forward_pre_hook(begins):
            yield called

    def _has_found(self, called: set[int] | None) -> None:
        """Note what the first run showed about its code, and which modules it has called."""
        changed = {id(buffer) for buffer, _ in self.counted}
        left: set[Code] = set()  # with buffers that may change when they are called
        for module, ref in zip(self._modules, self._code[1:], strict=True):
            if not module._buffers:
                continue
            if not changed.isdisjoint(map(id, (module._buffers, *module._buffers.values()))):
                note(_counts, [ref])
            elif called is not None and id(module) not in called and ref not in self._root:
                left.add(ref)
        kept = self.kept_outputs
        if kept is None or kept.may_draw or (self.has_foreign and not self._is_looking):
            note(_draws, self._root)
        else:  # another thread has moved the generators, if they were
            self.has_foreign, self.start = False, None
        if kept is not None and kept.decided:
            for func in kept.decided:
                note(_decides[func], self._root)
        elif kept is not None and not kept.products.chosen:
            self.kept_outputs = None
            self._has_mode |= self._is_looking
        if self.buffers and is_without_values():
            return  # it is not seen which of them the run has changed
        for known, parts in self._seen:
            note(known, [part for part in parts if part not in left])

    def look_again(self) -> None:
        """Forget what is known of this code, since it has done otherwise."""
        for known, parts in self._seen:
            known.difference_update(parts)

    def release(self) -> None:
        """Free what later runs are given, of which the results are of no use any more."""
        self.start = self.kept_outputs = None

    # -- later runs ------------------------------------------------------------------------

    def decides_anew(self) -> bool:
        """Whether another later run may decide for itself what the last one was given (Rule 7)."""
        if self.kept_outputs is None or not self.kept_outputs.are_left:
            return False
        self.kept_outputs = None
        self._has_mode |= self._is_looking  # the mode of the first run (See Rule 6)
        return True

    @property
    def has_drawn_all(self) -> bool:
        """Whether a later run has left the generators where the first one did."""
        return self._is_unsure or super().has_drawn_all

    @contextmanager
    def restored(self) -> Generator[None]:
        """Return a context for a later run."""
        is_in_mode = self._has_mode and not num_dispatch_modes()
        settings, assigned = self._settings, self._written
        held = chain.from_iterable(map(values_of, self.held))
        if self.found != list(map(id, held)):
            found = chain(self._spaces, self.buffers)
            assigned = [*assigned, *filter(are_own, filter(are_assigned, found))]
        is_any = self.counted or assigned or self.kept_outputs
        is_any = is_any or is_in_mode or True in settings[0] or settings != settings_now()
        run = self._restored(assigned) if is_any else self.replaying()
        modules, parameters = self._modules, self.parameters
        attributes = list(map(_copy, map(vars, modules)))
        hooks: list[tuple[Any, ...]] = list(map(_hooks_of, parameters))
        if hooks.count((None, None)) < len(hooks):
            hooks = [tuple(own if own is None else dict(own) for own in each) for each in hooks]
        try:
            if list(map(_training, modules)) != self._modes:  # See Rule 2
                for module, training in zip(modules, self._modes, strict=True):
                    module.training = training
            with run:
                yield
        finally:  # See Rule 3
            # Written out: a function that is called for each module takes as long as all of this.
            for module, before in zip(modules, attributes, strict=False):  # it may have found more
                own = vars(module)
                are_same = map(operator.is_, own.values(), before.values())
                if len(own) != len(before) or not all(are_same):
                    assign([(own, before)])
            after = list(map(_hooks_of, parameters))
            if after != hooks:
                for own, before in zip(chain(*after), chain(*hooks), strict=True):
                    assign([] if own is None else [(own, before or {})])

    @contextmanager
    def _restored(self, assigned: list[Attributes]) -> Generator[None]:
        mode: AbstractContextManager[object] = nullcontext()
        if self.kept_outputs is not None:
            mode = self.kept_outputs.repeating()
        elif self._has_mode and not num_dispatch_modes():
            mode = InMode(OperatorMode(run_plainly))
        buffers = [buffer for buffer, _ in self.counted]
        turn = having_turn(self._turn, is_needed=bool(buffers or assigned))
        with with_settings(self._settings), turn:
            after = [buffer.detach().clone() for buffer in buffers]
            written = tuple(each for each in buffers if not each.is_inference())
            versions = versions_of(written)
            others = [(own, own.copy()) for own, _ in assigned]
            try:
                assign(assigned)
                known = [(buffer, value) for buffer, value in self.counted if value is not None]
                put_values([buffer for buffer, _ in known], [value for _, value in known])
                with self.replaying(), mode:
                    yield
            finally:
                put_values(buffers, after)
                set_versions(written, tuple(versions))
                assign(others)

    # -- what has changed ------------------------------------------------------------------

    def culprit(self) -> str:
        """Return what has changed since the first run, of what can be named; else ""."""
        for value, version in zip(self.parameters, self.versions, strict=True):
            if version_of(value) != version:
                return f"{name_of_parameter(value, self._modules)} was changed in place"
        now = Surroundings(self.name, self._modules, self, keeps_outputs=False)
        if now._modules != self._modules:
            return "a module in it was replaced, added or removed"
        if now._hooks != self._hooks:
            return "hooks of its modules were added or removed, or a `forward` was replaced"
        return unrepeated()
