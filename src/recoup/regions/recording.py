"""The context of `recoup.recomputing`, which records the operators of a block of code.

NOTE [ A block ]

Rule 1. A dispatch mode records the operators. A pair of saved-tensor hooks around the block handles
        the tensors that operators within save; values that come out of the block bring hooks along
        for operators after it (`lazy_values`). Mode and hooks are removed when the block ends.
Rule 2. A tensor is marked as a value when the block ends, since it may change until then, and since
        operators are faster on plain tensors.
Rule 3. The schema and tags of an operator say what it changes and whether it draws. Operators of
        torch that change a statistic without declaring it are known by the names of their
        arguments; an operator that is not torch's own is treated as one that may draw.
Rule 4. A higher-order operator may do anything, and one that communicates with other processes must
        not be repeated. Their arguments and results count as ones from outside after that.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recoup._core.compile import is_loaded, never_compiled, uncompiled
from recoup._core.dispatch_modes import InMode
from recoup._core.lazy_values import _marked, read_anew
from recoup._core.restoring import Restoring, Reusable
from recoup._core.saved_tensors import Kept, Pair, is_transformed, pair_in_force, saving
from recoup.errors import RecoupError
from recoup.regions.operator_arguments import mapped, tensors_in
from recoup.regions.operator_draws import Streams
from recoup.regions.recorded import Look, Memory, Operator, Record, layout_of
from recoup.regions.recorded_storages import Storages

__all__ = ["Recording", "place_in_code"]

_BETWEEN_PROCESSES = frozenset(
    ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
)
_OWN = frozenset(("aten", "prim", "prims"))
_ALLOCATING = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
_OVERWRITING = frozenset((
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_",
    "normal_", "random_", "uniform_", "zero_",
))  # fmt: skip
_STATISTICS = frozenset(("running_mean", "running_var"))  # See Rule 3


class Recording(Reusable):
    """A context around a block whose values are not kept.

    Args:
        name: the name of the block in errors.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def once(self) -> Restoring:
        """Return the context of one block."""
        return _Block(self._name)


class _Block(Restoring):
    __slots__ = ("_hooks", "_mode", "_name", "_recorder")

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._recorder: _Recorder | None = None
        self._hooks: saving | None = None
        self._mode: InMode | None = None

    def __enter__(self) -> None:
        (uncompiled(_enter) if is_loaded() else _enter)(self)

    @never_compiled
    def restore(self) -> None:
        if self._mode is not None:
            self._mode.restore()
        if self._hooks is not None:
            self._hooks.restore()
        if self._recorder is not None:
            self._recorder.close()
        self._mode = self._hooks = self._recorder = None

    @never_compiled
    def leave(self, kind: Any, value: Any, traceback: Any) -> None:
        if self._mode is not None and self._hooks is not None:
            self._mode.leave(kind, value, traceback)
            self._hooks.leave(kind, value, traceback)
        try:
            if kind is None and self._recorder is not None:
                self._recorder.finish()
        finally:
            self.restore()


def _enter(block: _Block) -> None:
    if not torch.is_grad_enabled():
        return  # nothing is kept anyway
    if is_transformed():
        raise RecoupError(
            "recoup.recomputing() does not work inside transforms of torch.func (grad, vmap, "
            "jacrev), which do not support saved tensor hooks. Leave it out there."
        )
    block._recorder = recorder = _Recorder(block._name, pair_in_force())
    block._hooks = saving(recorder.pack, _unpack)
    block._hooks.__enter__()  # raises where hooks are disabled
    block._mode = InMode(recorder)
    block._mode.__enter__()


def place_in_code() -> str:
    """Return the file and line of the code that called recoup."""
    frame = inspect.currentframe()
    while frame is not None and _is_passed_over(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return "an unknown place" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_passed_over(module: str) -> bool:
    return module.partition(".")[0] in ("recoup", "torch")


class _Recorder(TorchDispatchMode):
    """The dispatch mode that records the operators of one block."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler; `never_compiled` does not

    def __init__(self, name: str, beneath: Pair | None) -> None:
        super().__init__()
        self._record = Record(name)
        self._storages = Storages(name)
        self._streams = Streams()
        self._beneath = beneath
        self._results: list[weakref.ref[Tensor]] = []

    @never_compiled
    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator and record it."""
        kwargs = kwargs or {}
        if not hasattr(func, "_schema") or func.namespace in _BETWEEN_PROCESSES:  # See Rule 4
            result = func(*args, **kwargs)
            self._storages.forget((args, tuple(kwargs.values())))
            return result
        traits = _traits(func)
        if traits.is_view:
            self._storages.note(args)
            result = func(*args, **kwargs)
        elif traits.is_recorded:
            result = self._recorded(func, traits, args, kwargs)
        else:
            return func(*args, **kwargs)
        self._results.extend(weakref.ref(tensor) for tensor in tensors_in(result))
        return result

    def _recorded(
        self, func: Any, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        kwargs = _with_devices(kwargs)
        taken: set[Memory] = set()
        changed: set[Memory] = set()
        looks = self._looks(func, traits, {**dict(enumerate(args)), **kwargs}, taken, changed)
        if traits.may_draw:
            result, draw = self._streams.draw(func, args, kwargs)
        else:
            result, draw = func(*args, **kwargs), None
        makes: dict[int, Look] = {}
        for place, tensor in enumerate(tensors_in(result)):
            memory = self._storages.made(tensor, is_blank=traits.allocates)
            if memory is not None:
                makes[place] = Look(memory, layout_of(tensor))
                changed.add(memory)
        if changed or draw is not None:
            operator = Operator(
                func,
                tuple(looks[place] for place in range(len(args))),
                {key: looks[key] for key in kwargs if draw is None or key != "generator"},
                takes=frozenset(taken),
                makes=makes,
                changes=frozenset(changed),
                draw=draw,
                with_grad=torch.is_grad_enabled(),
            )
            self._record.operators.append(operator)
        return result

    def _looks(
        self,
        func: Any,
        traits: _Traits,
        given: dict[Any, Any],
        taken: set[Memory],
        changed: set[Memory],
    ) -> dict[Any, Any]:
        """Return the arguments of an operator, with a `Look` in the place of each tensor."""
        # Arguments that are read come first: an operator may read a tensor that it overwrites.
        looks = {
            key: mapped(value, Tensor, partial(self._look, taken))
            for key, value in given.items()
            if key not in traits.writes
        }
        for key in traits.writes & given.keys():
            for tensor in tensors_in(given[key]):
                self._storages.will_change(tensor, str(func), is_overwritten=traits.overwrites)
            looks[key] = mapped(given[key], Tensor, partial(self._look, changed))
        return looks

    def _look(self, memories: set[Memory], tensor: Tensor) -> Look:
        look = self._storages.look(tensor)
        memories.add(look.memory)
        return look

    @never_compiled
    def pack(self, tensor: Tensor) -> Any:
        """Keep a tensor that an operator within the block saves, unless the block makes it."""
        memory = self._storages.to_be_made(tensor)
        with torch._C._DisableTorchDispatch():  # the mode need not see our own operators
            if memory is not None:
                made = self._record.source(memory, tensor)
                self._record.keep_at_hand(made, tensor)
                return made._slot(tensor, None)
            source = self._storages.source_of(tensor, self._beneath)
            if source is not None:
                return source._slot(tensor, None)
        name = f"A tensor of shape {tuple(tensor.shape)} that was saved in {self._record.name}"
        return Kept(tensor, name, self._beneath)

    def finish(self) -> None:
        """Keep the tensors that the block took, and mark the values that it made (See Rule 2)."""
        self._record.asks_others = self._storages.keep(self._beneath)
        self._record.end(is_whole=True)
        for ref in self._results:
            tensor = ref()
            memory = None if tensor is None else self._storages.to_be_made(tensor)
            if tensor is None or memory is None or (tensor.is_leaf and tensor.requires_grad):
                continue  # a leaf that requires grad is a parameter
            if type(tensor) is Tensor:
                _marked(tensor, self._record.source(memory, tensor))
            else:
                read_anew(tensor)  # a value already, of a source within the block

    def close(self) -> None:
        """Drop all references: the saved tensors hold references to the pair of hooks."""
        if not self._record.is_whole:
            self._record.end(is_whole=False)
        self.__init__(self._record.name, None)


@never_compiled
def _unpack(packed: Any) -> Tensor:
    return packed.get()


class _Traits(NamedTuple):
    """The properties of an operator that decide how it is recorded.

    Attributes:
        writes: the arguments that it changes, by place or name.
        is_view: whether it only returns views of its arguments.
        is_recorded: whether it makes or changes anything.
        overwrites: whether it ignores the previous content of the tensors that it changes.
        allocates: whether it returns uninitialized memory.
        may_draw: whether it may draw random numbers.
    """

    writes: frozenset[int | str]
    is_view: bool
    is_recorded: bool
    overwrites: bool
    allocates: bool
    may_draw: bool


@functools.cache
def _traits(func: Any) -> _Traits:
    schema: Any = func._schema
    name = schema.name.partition("::")[2]
    writes: set[int | str] = set()
    for place, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if (alias is not None and alias.is_write) or argument.name in _STATISTICS:
            writes |= {argument.name} if argument.kwarg_only else {place, argument.name}
    aliases = [each.alias_info for each in schema.returns]
    returns = any("Tensor" in str(each.type) for each in schema.returns)
    return _Traits(
        writes=frozenset(writes),
        is_view=not writes and any(alias is not None for alias in aliases),
        is_recorded=returns or bool(writes),
        overwrites=name in _OVERWRITING or "out" in writes,
        allocates=name in _ALLOCATING,
        may_draw=torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in _OWN,
    )


def _with_devices(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `kwargs` with a device index, since another device may be current in backward."""
    device = kwargs.get("device")
    if device is None or device.type != "cuda" or device.index is not None:
        return kwargs
    return kwargs | {"device": torch.device("cuda", torch.cuda.current_device())}
