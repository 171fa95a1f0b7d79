"""What autograd saves while a function runs: by which operator, in which module, in which way.

NOTE [ Listening to what is saved ]

Rule 1. A pair of hooks of ours is the outermost one, and hands everything to the pair beneath. As
        autograd calls the innermost pair alone, one that others push within takes its place on the
        stack wrapped in one of ours, at the next operator or module. Whoever pushed it pops it.
Rule 2. Our own regions and values own what they save, and tell. Who has been told of a tensor by
        the pair beneath does not count it again.
Rule 3. What counts is what autograd still holds when the function has returned. So all that it is
        given here can be referred to weakly: our wrapping, or a slot.
Rule 4. Storages are told apart by their address while they live, and by a weak reference when
        the address was given to another.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recoup.residuals.compiler import never_compiled
from recoup.residuals.executor import _Output, _Run
from recoup.residuals.held import Held
from recoup.residuals.hooks import Kept, Pair, pair_in_force, saving
from recoup.residuals.listening import here
from recoup.residuals.region import Region, Slot

__all__ = ["Save", "Way", "saves_of"]

Way = Literal["keep", "recompute", "regenerate", "invert", "offload"]
Place = tuple[nn.Module, str]  # the root of a tree of modules, and a qualified name within it
_OURS = __name__.rpartition(".")[0]
_plainly = torch._C.DisableTorchFunction
_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 - torch's stubs do not know it
_pop: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks


class Save(NamedTuple):
    """A tensor that autograd asked to save.

    Args:
        operator: who saved it.
        shape: its shape.
        dtype: its type.
        module: the module that was running; empty outside of any.
        num_bytes: of its storages, unless an earlier save has counted them.
        way: what is done instead of keeping it, or "keep".
    """

    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    module: str
    num_bytes: int
    way: Way


def saves_of(fn: Callable[[], object]) -> list[Save]:
    """Run `fn` with grad, and return what autograd holds after it, parameters left out."""
    watch = _Watch(fn)
    try:
        with watch:
            result = fn()
        found = watch.found()
        del result  # alive until here: what it does not hold, autograd does not either
        return found
    finally:
        watch.close()


class _Packed:
    """What autograd holds, by way of a pair of ours, for a tensor that is not ours."""

    __slots__ = ("__weakref__", "packed", "unpack")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self.packed = packed
        self.unpack = unpack


@never_compiled
def _unpack(packed: _Packed) -> Tensor:
    return packed.unpack(packed.packed)


class _Noted(NamedTuple):
    """A save as it is written down while the function runs."""

    held: weakref.ref[Any]
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: Place | None
    way: Way
    storages: list[tuple[object, int]]
    is_parameter: bool


class _Watch(TorchFunctionMode):
    """A context in which everything that autograd saves is written down."""

    def __init__(self, fn: Callable[[], object]) -> None:
        super().__init__()
        self._noted: list[_Noted] = []
        self._storages = _Storages()
        self._parameters: set[object] = set()
        self._places: dict[int, Place] = {}
        self._running: list[nn.Module] = []
        self._operator: str | None = None
        self._thread = threading.get_ident()
        self._within = ExitStack()
        # A tree that holds another one, if both are seen, gives the names.
        for module in sorted(Held(fn).modules, key=_size, reverse=True):
            self._know(module)

    def __enter__(self) -> Any:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saving(partial(self._pack, pair_in_force()), _unpack))
            stack.callback(register_module_forward_pre_hook(self._enter_module).remove)
            leave = register_module_forward_hook(self._leave_module, always_call=True)
            stack.callback(leave.remove)
            stack.callback(setattr, here, "listener", here.listener)
            here.listener = self
            super().__enter__()
            stack.push(super().__exit__)
            self._within = stack.pop_all()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._within.__exit__(*exc_info)

    def close(self) -> None:
        """Let go of all: what autograd was given holds on to the hooks, and so to this."""
        self._noted, self._places, self._running = [], {}, []
        self._parameters, self._storages = set(), _Storages()

    # -- what runs -------------------------------------------------------------------------

    @never_compiled
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, knowing its name."""
        self._wrap_innermost()
        outer, self._operator = self._operator, _name(func)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._operator = outer

    @never_compiled
    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        del inputs
        if threading.get_ident() == self._thread:
            with _plainly():
                self._wrap_innermost()
                if not self._running:  # it may have other parameters now (functional_call)
                    self._know(module)
            self._running.append(module)

    @never_compiled
    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        del inputs, output
        if threading.get_ident() == self._thread and self._running:
            self._running.pop()

    def _know(self, module: nn.Module) -> None:
        for name, each in module.named_modules():
            self._places.setdefault(id(each), (module, name))
        for tensor in (*module.parameters(), *module.buffers()):
            if not is_lazy(tensor):
                self._parameters.update(token for token, _ in self._storages.of(tensor))

    def _wrap_innermost(self) -> None:
        """Put a pair of ours in the place of one that others pushed (See Rule 1)."""
        pair = pair_in_force()
        if pair is not None and not _is_ours(pair):
            _pop()
            saving(partial(self._pack, pair), _unpack).__enter__()

    # -- what is saved ---------------------------------------------------------------------

    @never_compiled
    def _pack(self, beneath: Pair | None, tensor: Tensor) -> _Packed:
        if beneath is None:
            with _plainly():
                name = f"A tensor that {self._said()} saved"
                packed = _Packed(Kept(tensor, name, None), Kept.get)
                self._note(tensor, packed, "keep", [tensor])
            return packed
        num_noted = len(self._noted)
        packed = _Packed(beneath[0](tensor), beneath[1])
        if len(self._noted) == num_noted:  # See Rule 2
            with _plainly():
                way, counted = _way_beneath(tensor, packed.packed, beneath)
                self._note(tensor, packed, way, counted)
        return packed

    def told(self, tensor: Tensor, slot: Any) -> None:
        """Take note that autograd holds `slot` in the place of `tensor`."""
        with _plainly():
            if isinstance(slot, Slot):
                way = _way_of_region(slot.region)
            else:
                way = "recompute" if isinstance(slot._source, _Output) else "regenerate"
            self._note(tensor, slot, way, [tensor])

    def _note(self, tensor: Tensor, held: Any, way: Way, counted: list[Tensor]) -> None:
        self._noted.append(
            _Noted(
                held=weakref.ref(held),
                operator=self._said(),
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                place=self._place(),
                way=way,
                storages=[each for value in counted for each in self._storages.of(value)],
                is_parameter=isinstance(tensor, nn.Parameter)
                or isinstance(tensor._base, nn.Parameter),
            )
        )

    def _said(self) -> str:
        return self._operator or _operator_of_frames()

    def _place(self) -> Place | None:
        for module in reversed(self._running):
            place = self._places.get(id(module))
            if place is None:
                self._know(module)
            return self._places[id(module)]
        return None

    # -- afterwards ------------------------------------------------------------------------

    def found(self) -> list[Save]:
        """Return what autograd still holds; a storage counts for the first who saved it."""
        for root in {id(root): root for root, _ in self._places.values()}.values():
            self._know(root)  # lazy ones have their parameters by now
        alive = [
            noted
            for noted in self._noted
            if noted.held() is not None
            and not noted.is_parameter
            and not all(token in self._parameters for token, _ in noted.storages)
        ]
        shown = _shown([noted.place for noted in alive if noted.place is not None])
        counted = set(self._parameters)
        num_bytes: dict[int, int] = {}
        for noted in sorted(alive, key=lambda noted: noted.way != "keep"):
            fresh = {token: size for token, size in noted.storages if token not in counted}
            counted.update(fresh)
            num_bytes[id(noted)] = sum(fresh.values())
        return [
            Save(
                noted.operator,
                noted.shape,
                noted.dtype,
                "" if noted.place is None else shown(noted.place),
                num_bytes[id(noted)],
                noted.way,
            )
            for noted in alive
        ]


class _Storages:
    """A token for each storage (See Rule 4)."""

    def __init__(self) -> None:
        self._tokens: dict[int, tuple[weakref.ref[torch.UntypedStorage], object]] = {}

    def of(self, tensor: Tensor) -> list[tuple[object, int]]:
        """Return a token and the bytes of each storage of `tensor`."""
        return [
            (self._token(part.untyped_storage()), part.untyped_storage().nbytes())
            for part in _parts(tensor)
        ]

    def _token(self, storage: torch.UntypedStorage) -> object:
        found = self._tokens.get(storage._cdata)
        if found is None or found[0]() is None:
            found = self._tokens[storage._cdata] = weakref.ref(storage), object()
        return found[1]


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors with memory of their own that `tensor` is made of."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    elif tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def _is_ours(pair: Pair) -> bool:
    return getattr(pair[1], "__module__", "").rpartition(".")[0] == _OURS


def _size(module: nn.Module) -> int:
    return sum(1 for _ in module.modules())


def _name(func: Any) -> str:
    return getattr(func, "__name__", type(func).__name__).strip("_").partition(".")[0]


def _operator_of_frames() -> str:
    """Name who saves outside of torch's own operators: a Function, or a region of ours."""
    frame = sys._getframe(2)
    for _ in range(4):
        if frame.f_code is Kept.__init__.__code__:
            return frame.f_locals["name"].removeprefix("The ")
        if frame.f_code.co_name == "apply" and "cls" in frame.f_locals:
            cls = frame.f_locals["cls"]
            is_checkpoint = cls.__module__ == "torch.utils.checkpoint"
            return "input of checkpoint" if is_checkpoint else cls.__name__
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "an operator"


def _way_of_region(region: Region) -> Way:
    fill: Any = region._fill
    run = getattr(getattr(fill, "func", None), "__self__", None)
    is_inverted = isinstance(run, _Run) and fill.args[0] in run._plan.inverted
    return "invert" if is_inverted else "recompute"


def _way_beneath(tensor: Tensor, packed: Any, pair: Pair) -> tuple[Way, list[Tensor]]:
    """Return what hooks of others do with `tensor`, and whose bytes count.

    A placeholder of a checkpoint is recomputed. What went out of sight, to another device, to
    pinned memory, or into a copy as large as itself was offloaded; anything else is kept.
    """
    held = list(_tensors(packed))
    own = {part.untyped_storage()._cdata for part in _parts(tensor)}
    if not held:
        is_checkpoint = "checkpoint" in getattr(pair[0], "__module__", "")
        return "recompute" if is_checkpoint else "offload", [tensor]
    if any(part.untyped_storage()._cdata in own for value in held for part in _parts(value)):
        return "keep", [tensor]
    for value in held:
        is_copy = value.dtype is tensor.dtype and value.shape == tensor.shape
        if value.device != tensor.device or is_copy or value.is_pinned():
            return "offload", [tensor]
    return "keep", held


def _tensors(packed: Any, depth: int = 0) -> Iterator[Tensor]:
    """Yield the tensors within what a hook returned."""
    if isinstance(packed, Tensor):
        yield packed
    elif depth > 3:
        return
    elif isinstance(packed, Kept | _Packed):
        yield from _tensors(packed._packed if isinstance(packed, Kept) else packed.packed, depth)
    elif isinstance(packed, tuple | list):
        for item in cast("tuple[Any, ...]", packed):
            yield from _tensors(item, depth + 1)
    elif isinstance(packed, dict):
        for item in cast("dict[Any, Any]", packed).values():
            yield from _tensors(item, depth + 1)
    else:
        for item in getattr(packed, "__dict__", {}).values():
            yield from _tensors(item, depth + 1)


def _shown(places: list[Place]) -> Callable[[Place], str]:
    """Return how places are shown: by the class of the root too if there are several roots."""
    titles: dict[int, str] = {}
    num_named: dict[str, int] = {}
    for root, _ in places:
        if id(root) not in titles:
            kind = type(root).__name__
            num_named[kind] = num_named.get(kind, 0) + 1
            titles[id(root)] = kind if num_named[kind] == 1 else f"{kind}#{num_named[kind]}"

    def show(place: Place) -> str:
        root, name = place
        title = titles[id(root)]
        if not name:
            return title
        return name if len(titles) == 1 else f"{title}.{name}"

    return show
