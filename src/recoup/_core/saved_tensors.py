"""The seam: the hooks through which recoup handles what autograd saves, and who is told of it.

NOTE [ The pair beneath ]

Rule 1. Autograd calls only the innermost pair of saved-tensor hooks. So our pairs pass each tensor
        that they do not handle to the pair beneath, as autograd would without them.
Rule 2. Autograd does not check the version of a tensor that went through hooks. So a tensor
        that we keep ourselves is kept with its version, which is checked at unpacking.
Rule 3. A kept tensor is detached: a saved output that held its own node would be a reference
        cycle, which only the garbage collector ends.
Rule 4. Only the top of the stack of pairs can be read. Each pair of ours records the pair that it
        was pushed upon; after an exception it pops all above that, including pairs of other code.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter, is_not, methodcaller
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from recoup._core.compile import never_compiled
from recoup._core.settings import replaced
from recoup.errors import ChangedError, RecoupError, ReplayError

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009 - torch's stubs do not know it
# torch.enable_grad() calls this; making and entering that context takes ten times as long.
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
_top: Callable[[bool], Pair | None] = _autograd._top_saved_tensors_default_hooks
push_pair: Callable[[Any, Any], None] = _autograd._push_saved_tensors_default_hooks
pop_pair: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
# Returns the number of the backward that this thread runs; -1 outside of one.
backward_id: Callable[[], int] = torch._C._current_graph_task_id
# Returns whether the backward that this thread runs leaves its graph for another one.
is_graph_retained: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph
# Returns the number of graph nodes that this thread has made.
num_nodes: Callable[[], int] = _autograd._get_sequence_nr
# Returns the version of a tensor, without a Python frame; raises for an inference tensor.
plain_version: Callable[[Tensor], int] = attrgetter("_version")
requires_grad_of: Callable[[Tensor], bool] = attrgetter("requires_grad")
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
is_there: Callable[[object], bool] = partial(is_not, None)
# Within it, neither function modes nor tensor subclasses see the operators.
without_torch_function: Any = torch._C.DisableTorchFunction
_engine: Any = torch.autograd.Variable._execution_engine
_LAST = 2**64 - 1
_CHECKPOINT = "torch.utils.checkpoint"
Pair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Packed(Protocol):
    """An object that autograd holds in place of a saved tensor; `get` must be `never_compiled`."""

    def get(self) -> Tensor:
        """Return the tensor; raise if it was changed in place."""
        ...


# Calls `get` of what autograd holds; without a Python frame, which each unpacking would pay for.
unpack: Callable[[Packed], Tensor] = methodcaller("get")
# Returns the innermost pair of saved-tensor hooks of this thread; without a Python frame.
pair_in_force: Callable[[], Pair | None] = partial(_top, False)


class saving:  # noqa: N801 - it stands where torch's saved_tensors_hooks does
    """A context in which saved tensors go through a pair of hooks."""

    __slots__ = ("_beneath", "_pack", "_unpack")

    _beneath: Pair | None

    def __init__(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor] = unpack
    ) -> None:
        self._pack, self._unpack = pack, unpack

    @never_compiled
    def __enter__(self) -> None:
        self._beneath = _top(False)
        push_pair(self._pack, self._unpack)

    @never_compiled
    def __exit__(self, kind: Any, value: Any, traceback: Any) -> bool | None:
        pop_down_to(self._beneath)


class without_pairs:  # noqa: N801 - as `saving`
    """A context in which no pair is in force, for code that keeps nothing for autograd."""

    __slots__ = ("_pairs",)

    def __init__(self) -> None:
        self._pairs: list[Pair] = []

    def __enter__(self) -> None:
        while (pair := _top(False)) is not None:
            self._pairs.append(pair)
            pop_pair()

    def __exit__(self, *error: object) -> None:
        while self._pairs:
            push_pair(*self._pairs.pop())


def pop_down_to(beneath: Pair | None) -> None:
    """Pop pairs of hooks until `beneath`, which is on the stack, is in force."""
    while (top := _top(False)) is not None and (beneath is None or top[0] is not beneath[0]):
        pop_pair()


class grad_mode:  # noqa: N801 - it stands where torch's set_grad_enabled does
    """A context in which grad mode is on, or off."""

    __slots__ = ("_before", "_is_enabled")

    def __init__(self, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._before = False

    @never_compiled
    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        set_grad_enabled(self._is_enabled)

    @never_compiled
    def __exit__(self, *error: object) -> None:
        set_grad_enabled(self._before)


def frame_in_force() -> object | None:
    """Return the frame of the torch.utils.checkpoint around this code; None if not found."""
    pair = pair_in_force()
    if pair is None or getattr(pair[0], "__module__", "") != _CHECKPOINT:
        return None
    pack: Any = inspect.unwrap(pair[0])
    cells = dict(zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True))
    if "target_frame_ref" in cells:
        return cells["target_frame_ref"].cell_contents()
    return cells["frame"].cell_contents if "frame" in cells else None


# For tensors made from a seed alone: a transform of torch.func would take them for random.
untransformed = torch._C._DisableFuncTorch
_functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009 - torch's stubs do not know it
# Returns the innermost transform of torch.func, in which hooks do not work; None outside of any.
is_transformed: Callable[[], object] = _functorch.peek_interpreter_stack


def check_hooks_work() -> None:
    """Raise inside a transform of torch.func."""
    if is_transformed():
        raise RecoupError(
            "torch.func transforms (grad, vmap, jacrev) do not support saved tensor hooks, which "
            'recompute, checkpoint and every memory mode but "linear" need. Within a transform, '
            'call the wrapped function or module directly, or set memory="linear".'
        )


def storage_id(tensor: Tensor) -> int:
    """Return what tells the storage of `tensor` from others; 0 if it has none of its own."""
    if tensor.layout is not torch.strided:
        return 0
    if type(tensor) is Tensor:
        return tensor.untyped_storage()._cdata
    if is_traceable_wrapper_subclass(tensor):
        return 0  # a DTensor wraps other tensors
    with torch._C.DisableTorchFunctionSubclass():  # or a `Value` would count as exposed
        return tensor.untyped_storage()._cdata


def is_in_backward() -> bool:
    """Whether this thread runs a backward."""
    return backward_id() != -1


def when_backward_ends(method: Callable[[], object]) -> None:
    """Call a bound method when the backward that this thread runs ends, if its object is alive."""
    ref = weakref.WeakMethod(method)  # the callback must not prolong the life of what it is for

    def call() -> None:
        alive = ref()
        if alive is not None:
            alive()

    _engine.queue_callback(call)


class _Freed:
    """A callback of a backward that does nothing, and calls a function when it is freed."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __call__(self) -> None:
        """Do nothing."""

    def __del__(self) -> None:
        self._call()


def when_backward_is_freed(call: Callable[[], object]) -> None:
    """Call a function after the backward that this thread runs has ended or failed.

    The thread is outside of that backward by then: its profiler can be ended.
    """
    _engine.queue_callback(_Freed(call))


class GraphOfRun:
    """The unpack hook of the graph of a second run, which can be differentiated within that run."""

    name = ""  # of the call that runs again
    is_over = False

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.is_over:
            raise ReplayError(
                f"A tensor that the second run of {self.name} has made is differentiated after it: "
                "its gradient would end at the input of that run. Code within puts it into a list, "
                "or another object, beside what it returns. Let it return the tensor."
            )
        return tensor


def version_of(tensor: Tensor) -> int:
    """Return the version of `tensor`; 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the version of each tensor; 0 for an inference tensor."""
    try:
        return list(map(plain_version, tensors))
    except RuntimeError:  # some have none
        return list(map(version_of, tensors))


def detached(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return `tensors` without their history."""
    return tuple(map(Tensor.detach, tensors))


def as_leaves(tensors: Iterable[Tensor], requires_grad: Iterable[bool]) -> tuple[Tensor, ...]:
    """Return `tensors` as leaves of a new graph that require a gradient as told.

    A parameter stays itself, since code must not take it for another tensor.
    """
    leaves: list[Tensor] = []
    with torch._C.DisableTorchFunctionSubclass():  # or the leaf of a value would be one
        for tensor, flag in zip(tensors, requires_grad, strict=True):
            is_plain = type(tensor) is Tensor or not isinstance(tensor, nn.Parameter)
            leaf = tensor.detach() if is_plain else tensor
            leaves.append(leaf.requires_grad_() if flag else leaf)
    return tuple(leaves)


def copies_of(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return copies of tensors that are about to be changed; a parameter stays itself."""
    return tuple([t if isinstance(t, nn.Parameter) else t.detach().clone() for t in tensors])


def set_versions(tensors: tuple[Tensor, ...], versions: tuple[int, ...]) -> None:
    """Set the version counters of `tensors`."""
    _autograd._unsafe_set_version_counter(tensors, versions)


def reverse_at_once(tensor: Tensor) -> None:
    """Let backward run the node that made `tensor` as soon as its gradient is complete.

    By default the engine runs the newest node first: the gradient of a weight that was made before
    its layer ran, as large as the weight, would wait until all of the layer is done.
    """
    node: Any = tensor.grad_fn
    if node is not None:
        node._set_sequence_nr(_LAST)


class Kept:
    """A tensor that is kept until backward, by the pair of hooks beneath ours if there is one.

    Its name is for error messages; an object is asked for it then.
    """

    __slots__ = ("_name", "_packed", "_unpack", "_version")

    def __init__(self, tensor: Tensor, name: object, pair: Pair | None) -> None:
        self._name = name
        self._version = 0 if tensor.is_inference() else tensor._version
        self._unpack: Callable[[Any], Tensor] | None = None
        self._packed: Any = tensor
        if pair is not None:
            # A state with its history, kept by the pair, would hold the graph that holds it. A view
            # of a parameter holds none, and is told by its base; a region lets go of the history.
            is_plain = tensor.grad_fn is None or isinstance(tensor._base, nn.Parameter)
            is_ours = getattr(getattr(pair[0], "__self__", None), "follows_history", False)
            self._packed = pair[0](tensor if is_plain or is_ours else tensor.detach())
            self._unpack = pair[1]
        elif type(tensor) is Tensor or not isinstance(tensor, nn.Parameter):
            self._packed = tensor.detach()  # See Rule 3

    @never_compiled
    def get(self) -> Tensor:
        """Return the tensor; raise if it was changed in place since it was kept."""
        if self._unpack is not None:
            return self._unpack(self._packed)
        packed = self._packed
        if not packed.is_inference() and packed._version != self._version:
            raise changed_in_place(self._name)  # See Rule 2
        return packed

    def has_parted(self, storages: Container[int]) -> bool:
        """Whether it may be changed: a copy is kept from now on, if it lies in `storages`.

        It may not if a pair of hooks has it.
        """
        if self._unpack is None and storage_id(self._packed) in storages:
            self._packed, self._version = self.get().clone(), 0
        return self._unpack is None

    def check(self) -> None:
        """Raise if the tensor was changed in place, unless a pair of hooks has it."""
        if self._unpack is None:
            self.get()


def changed_in_place(name: object) -> ChangedError:
    """Return the error for a kept tensor that was changed in place."""
    return ChangedError(
        f"{name} was changed in place between forward and backward, so backward would see other "
        "values than forward did. Run backward before changing it, or change a clone."
    )


Way = Literal["keep", "recompute", "regenerate", "invert", "offload"]


class SaveObserver(Protocol):
    """An object that is called for each saved tensor that is not kept."""

    def saved(self, tensor: Tensor, slot: Any, way: Way) -> None:
        """Note that autograd holds `slot` in place of `tensor`."""
        ...


class _Current(threading.local):
    observer: SaveObserver | None = None


current = _Current()


def observed_by(observer: SaveObserver) -> AbstractContextManager[SaveObserver | None]:
    """Return a context that calls `observer`; entering it returns the previous observer."""
    return replaced(current, "observer", observer)
