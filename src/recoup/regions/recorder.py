"""The dispatch mode that records the operators of a block of code whose values are not kept.

NOTE [ A block ]

Rule 1. A dispatch mode records the operators. A pair of saved-tensor hooks around the block handles
        the tensors that operators within save; values that come out of the block bring hooks along
        for operators after it (`lazy_values`). Mode and hooks are removed when the block ends.
Rule 2. A tensor is marked as a value when the block ends, since it may change until then, and since
        operators are faster on plain tensors.
Rule 3. A higher-order operator may do anything, and one that communicates with other processes must
        not be repeated. Their arguments and results count as ones from outside after that.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from recoup._core.compile import never_compiled
from recoup._core.dispatch_modes import DispatchMode
from recoup._core.lazy_values import hooks_around, marked, read_anew
from recoup._core.operators import OperatorTraits, has_schema, map_instances, traits_of
from recoup._core.pytree import tensors_in
from recoup._core.saved_tensors import Kept, Pair
from recoup.regions.operator_draws import DrawRecorder
from recoup.regions.recorded_block import RecordedBlock
from recoup.regions.recorded_ops import RecordedOp, RecordedStorage, RecordedTensor, layout_of
from recoup.regions.recorded_storages import Storages

__all__ = ["OpRecorder"]

_BETWEEN_PROCESSES = frozenset(
    ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
)


class OpRecorder(DispatchMode):
    """The dispatch mode that records the operators of one block.

    Args:
        name: the name of the block in errors.
        pair: the pair of saved-tensor hooks around the block.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler; `never_compiled` does not

    def __init__(self, name: str, pair: Pair | None) -> None:
        super().__init__()
        self._block = RecordedBlock(name)
        self._storages = Storages(name)
        self._draws = DrawRecorder()
        self._outer_pair = pair
        self._results: list[weakref.ref[Tensor]] = []

    @never_compiled
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
        if not has_schema(func) or func.namespace in _BETWEEN_PROCESSES:  # See Rule 3
            result = func(*args, **kwargs)
            self._storages.forget((args, kwargs))
            return result
        traits = traits_of(func)
        if traits.is_view:
            self._storages.note(args)
            result = func(*args, **kwargs)
        elif traits.makes_or_writes:
            result = self._run(func, traits, args, kwargs)
        else:
            return func(*args, **kwargs)
        self._results.extend(weakref.ref(tensor) for tensor in tensors_in(result))
        return result

    def _run(
        self, func: Any, traits: OperatorTraits, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator that makes or changes a storage, and record it."""
        kwargs = _with_device_index(kwargs)
        arguments = {**dict(enumerate(args)), **kwargs}
        # Arguments that are read come first: an operator may read a tensor that it overwrites.
        takes: set[RecordedStorage] = set()
        recorded = {
            key: self._recorded(value, takes)
            for key, value in arguments.items()
            if key not in traits.writes
        }
        changes: set[RecordedStorage] = set()
        for key in traits.writes & arguments.keys():
            for tensor in tensors_in(arguments[key]):
                self._storages.will_change(tensor, str(func), is_overwritten=traits.overwrites)
            recorded[key] = self._recorded(arguments[key], changes)
        if traits.may_draw:
            result, draw = self._draws.run(func, args, kwargs)
        else:
            result, draw = func(*args, **kwargs), None
        makes: dict[int, RecordedTensor] = {}
        for position, tensor in enumerate(tensors_in(result)):
            storage = self._storages.made(tensor, is_blank=traits.allocates)
            if storage is not None:
                makes[position] = RecordedTensor(storage, layout_of(tensor))
                changes.add(storage)
        if changes or draw is not None:
            op = RecordedOp(
                func,
                tuple(recorded[position] for position in range(len(args))),
                {key: recorded[key] for key in kwargs if draw is None or key != "generator"},
                takes=frozenset(takes),
                makes=makes,
                changes=frozenset(changes),
                draw=draw,
                with_grad=torch.is_grad_enabled(),
            )
            self._block.ops.append(op)
        return result

    def _recorded(self, value: Any, storages: set[RecordedStorage]) -> Any:
        """Return an argument with its tensors recorded, and add their storages to `storages`."""

        def record(tensor: Tensor) -> RecordedTensor:
            recorded = self._storages.record(tensor)
            storages.add(recorded.storage)
            return recorded

        return map_instances(value, Tensor, record)

    @never_compiled
    def pack(self, tensor: Tensor) -> Any:
        """Keep a tensor that an operator within the block saves, unless the block makes it."""
        storage = self._storages.to_be_made(tensor)
        with torch._C._DisableTorchDispatch():  # the mode need not see our own operators
            if storage is not None:
                source = self._block.source(storage, tensor)
                self._block.keep_at_hand(source, tensor)
                return source._slot(tensor, None)
            outside = self._storages.source_of(tensor, self._outer_pair)
            if outside is not None:
                return outside._slot(tensor, None)
        name = f"A tensor of shape {tuple(tensor.shape)} that was saved in {self._block.name}"
        return Kept(tensor, name, self._outer_pair)

    def finish(self) -> None:
        """Keep the tensors that the block took, and mark the values that it made (See Rule 2)."""
        block = self._block
        block.asks_other_sources = self._storages.keep(self._outer_pair)
        block.end(is_whole=True)
        for ref in self._results:
            tensor = ref()
            storage = None if tensor is None else self._storages.to_be_made(tensor)
            if tensor is None or storage is None or (tensor.is_leaf and tensor.requires_grad):
                continue  # a leaf that requires grad is a parameter
            if type(tensor) is Tensor:
                marked(tensor, block.source(storage, tensor), hooks_around())
            else:
                read_anew(tensor)  # a value already, of a source within the block

    def close(self) -> None:
        """Drop all references: the saved tensors hold references to the pair of hooks."""
        if not self._block.is_whole:
            self._block.end(is_whole=False)
        self.__init__(self._block.name, None)


def _with_device_index(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `kwargs` with a device index, since another device may be current in backward."""
    device = kwargs.get("device")
    if device is None or device.type != "cuda" or device.index is not None:
        return kwargs
    return kwargs | {"device": torch.device("cuda", torch.cuda.current_device())}
