"""Moving gradients to other devices, to files, and between processes.

NOTE [ Processes agree before they reduce ]

Rule 1. A collective that one process does not call hangs the others. So the processes first
        exchange a description of what they will send, even if one of them cannot go on; then all
        raise, or all send the same tensors in the same order, with zeros where one has no gradient.
Rule 2. The order is that of the targets, which is the same in every process.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, compress
from typing import Any, NamedTuple, Self, SupportsIndex, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recoup._arguments import check_flag, check_type
from recoup._core.tensors import check_modules, check_place
from recoup.errors import GradientError
from recoup.gradients.accumulation import as_dense, is_sharded
from recoup.gradients.container import UNSCALED, Container, device_of, number_in, refuse_any

_UNORDERED = (
    "The processes can only agree on an order of gradients that all declare alike: make the store "
    "with `params`, and collect nothing else."
)
_utils: Any = vars(torch)["_utils"]
_take_tensors: Callable[..., Iterator[list[Tensor]]] = _utils._take_tensors
_BUCKET_BYTES = 25 * 2**20  # the most in a message that is not of one gradient


class _Description(NamedTuple):
    """The description that a process sends to the others (See Rule 1)."""

    has_error: bool
    declared: int
    has_gradient: list[bool]
    weight: float
    scale: float | str | None


class Transfer(Container):
    """The methods that copy, save, load and reduce gradients."""

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Return a copy on another device or in another type.

        Args:
            device: the device; by default that of the gradients.
            dtype: the type; by default that of the gradients.
        """
        self._check_is_whole()
        check_place(dtype=dtype)
        where = self._device if device is None else device_of(device)
        store = self._derived((), dtype=dtype or self._dtype, device=where)
        for each, gradient in self.items():
            kind = dtype if dtype is None or not gradient.is_complex() else dtype.to_complex()
            store._gradients[each] = gradient.to(device=where, dtype=kind, copy=True)
        return store

    def named(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the gradients themselves, by the names of the parameters of `module`.

        Raises:
            GradientError: a gradient belongs to no parameter of `module`.
        """
        self._check_is_whole()
        check_modules(module=module)
        names = {each: name for name, each in module.named_parameters()}
        refuse_any(
            [each for each in self if each not in names],
            None,
            f"{type(module).__name__} has no parameter that is {{}}, of which the store holds the "
            "gradient. Give the module that holds all of them, or pick those of this one with "
            "`filter`. Parameters that were replaced have no names any more: ask before.",
        )
        return {name: self[each] for each, name in names.items() if each in self}

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the gradients by name, the weight and the scale, for `load_state_dict`."""
        return {"gradients": self.named(module), "weight": self.weight, "scale": self._scale}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], module: nn.Module, *, strict: bool = True
    ) -> None:
        """Replace the content of the store by that of `state_dict`.

        Args:
            state_dict: a result of `state_dict`, which may come from a file: it is checked.
            module: the module that the names refer to.
            strict: whether a name that `module` does not have is an error.

        Raises:
            GradientError: a name or a shape does not fit, or the state is damaged; nothing is
                changed then.
            ValueError: a gradient is of another kind than its parameter, or the arguments are
                neither a state nor a module; nothing is changed then.
        """
        way_out = ". Call load_state_dict(state_dict, module)"
        check_type(Mapping, f"what `store.state_dict(module)` gave{way_out}", state_dict=state_dict)
        check_type(nn.Module, f"the module that its names refer to{way_out}", module=module)
        check_flag(strict=strict)
        lacking = [key for key in ("gradients", "weight", "scale") if key not in state_dict]
        if lacking:
            raise GradientError(
                f"`state_dict` has no {lacking[0]!r}. Give what `store.state_dict(module)` "
                "returned; gradients by name alone are added with `add_`."
            )
        gradients, weight, scale = (state_dict[key] for key in ("gradients", "weight", "scale"))
        check_type(Mapping, "tensors by name", **{"state_dict['gradients']": gradients})
        weight = _number_of("weight", weight, "a number of at least 0", 0.0)
        if scale is not None and scale != UNSCALED:
            scale = _number_of("scale", scale, f"a scale, {UNSCALED!r} or None", math.ulp(0.0))
        loaded = type(self)(dtype=self._dtype, device=self._device)
        for each, gradient in _by_target(gradients, module, strict=strict).items():
            loaded._add(each, gradient, is_ours=False)
        self.clear()
        self._num_changes += 1
        self._gradients.update(loaded._gradients)
        self.weight, self._scale = weight, scale

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        pairs = ((copy.deepcopy(each, memo), value.clone()) for each, value in self.items())
        return self._derived(pairs, params=copy.deepcopy(self.params, memo), ddp=None)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise GradientError(
            "A GradStore tells its parameters by identity, which does not survive a file. Save "
            "`store.state_dict(module)`, and load it with `load_state_dict`."
        )

    def all_reduce_(self, group: Any = None) -> Self:
        """Average the gradients over processes, in buckets of 25 MiB.

        A target with a gradient in any process has one in all of them afterwards; the others stay
        absent. The weights are averaged alike, so that `mean_` is over all processes. Use it for
        gradients that are not yet reduced: those of plain models, or of DistributedDataParallel
        within `no_sync()`. Sparse ones become dense.

        Args:
            group: the process group; by default all processes.

        Raises:
            GradientError: there are no processes, they have other targets, or one cannot take
                part; then all raise, and nothing is changed.
            ValueError: the store was made without `params`.
        """
        if not self.params:
            raise ValueError(_UNORDERED)
        with self._guarded():
            _all_reduce(self, group)
        return self


# -- states ----------------------------------------------------------------------------------------


def _number_of(key: str, value: object, needed: str, least: float) -> float:
    """Return a number of a state, or raise if it is damaged."""
    given = {f"state_dict[{key!r}]": value}
    return number_in(needed, lambda number: least <= number < math.inf, **given)


def _by_target(
    gradients: Mapping[Any, Any], module: nn.Module, *, strict: bool
) -> dict[Tensor, Tensor]:
    """Return the gradients by the parameters of `module` that have these names."""
    kind, targets = type(module).__name__, dict(module.named_parameters())
    unexpected = [name for name in gradients if name not in targets]
    if unexpected and strict:
        raise GradientError(
            f"{kind} has no parameter {', '.join(map(repr, unexpected))}, or one that is listed "
            "under another name. Pass strict=False to leave those out."
        )
    found: dict[Tensor, Tensor] = {}
    for name in (name for name in gradients if name in targets):
        gradient, target = gradients[name], targets[name]
        is_tensor = isinstance(gradient, Tensor) and not gradient.is_nested
        if not is_tensor or gradient.shape != target.shape:
            shape = tuple(gradient.shape) if is_tensor else None
            raise GradientError(
                f"The gradient of `{name}` has shape {shape}, and the parameter "
                f"{tuple(target.shape)}. Load the state of a model of the same sizes."
            )
        found[target] = gradient.detach()
        if gradient.layout is torch.sparse_coo:  # with wrong indices sums would write elsewhere
            parts = gradient._indices(), gradient._values().detach(), gradient.shape
            try:
                found[target] = torch.sparse_coo_tensor(*parts, check_invariants=True)
            except RuntimeError as error:
                raise GradientError(f"The gradient of `{name}` is damaged: {error}") from error
    return found


# -- reducing --------------------------------------------------------------------------------------


def _all_reduce(store: Container, group: Any) -> None:
    """Average the gradients of a store, and its weight, over the processes of `group`."""
    if not (dist.is_available() and dist.is_initialized()):
        raise GradientError(
            "There are no processes to reduce over. Call torch.distributed.init_process_group, or "
            "leave `all_reduce_` out."
        )
    targets, gradients = store.params, store._gradients
    declared = [
        (tuple(t.shape), gradients[t].dtype if t in gradients else store._dtype_for(t))
        for t in targets
    ]
    error: Exception | None = None
    try:
        _check_takes_part(store)
    except (GradientError, ValueError) as found:
        error = found
    has_gradient = [each in gradients for each in targets]
    told = zlib.crc32(repr(declared).encode())
    mine = _Description(error is not None, told, has_gradient, store.weight, store._scale)
    received: list[Any] = [None] * dist.get_world_size(group)
    with torch.accelerator.device_index(targets[0].device.index):
        dist.all_gather_object(received, mine, group=group)
    if error is not None:
        raise error
    everyone = cast("list[_Description]", received)
    holders = _check_agree(everyone)
    store._num_changes += 1  # an error from here on leaves a partial reduction
    factor = 1 / len(everyone)
    anywhere = map(any, zip(*(each.has_gradient for each in everyone), strict=True))
    _average(store, [*compress(targets, anywhere)], factor, group)
    store._is_local = False
    store.weight = sum(each.weight for each in everyone) * factor
    store._scale = holders[0].scale if holders else store._scale


# -- agreeing --------------------------------------------------------------------------------------


def _check_takes_part(store: Container) -> None:
    """Raise if this process cannot take part in a reduction."""
    store._check_is_whole()
    gradients, known = store._gradients, set(map(id, store.params))
    if any(id(each) not in known for each in gradients):
        raise ValueError(_UNORDERED)
    if is_sharded(*gradients.values()):
        raise GradientError(
            "The store holds DTensors, which FSDP2 has reduced already. Leave `all_reduce_` out."
        )
    if any(gradient.requires_grad for gradient in gradients.values()):
        raise GradientError(
            "The store holds gradients with a graph, which a reduction would cut: `detach_()` them."
        )


def _check_agree(everyone: Sequence[_Description]) -> list[_Description]:
    """Return the descriptions of those with gradients, or raise if the processes do not agree."""
    failed = [rank for rank, each in enumerate(everyone) if each.has_error]
    if failed:
        raise GradientError(
            f"Process {failed[0]} of the group could not take part in `all_reduce_`; its own "
            "error has the reason. Nothing was reduced."
        )
    if len({each.declared for each in everyone}) > 1:
        raise GradientError(
            "The processes called `all_reduce_` with targets of another number, shape, type or "
            "order. Make the store of each process with the same parameters in the same order."
        )
    holders = [each for each in everyone if any(each.has_gradient)]
    if len({each.scale for each in holders}) > 1:
        raise GradientError(
            "The gradients of the processes do not have one scale. Call `unscale_` on all "
            "processes, or on none."
        )
    return holders


# -- sending ---------------------------------------------------------------------------------------


def _average(store: Container, targets: Sequence[Tensor], factor: float, group: Any) -> None:
    gradients = store._gradients
    for target in targets:
        if target not in gradients:
            device = target.device if store._device is None else store._device
            zeros = torch.zeros(target.shape, dtype=store._dtype_for(target), device=device)
            gradients[target] = zeros
        gradients[target] = as_dense(gradients[target])
    # Each is of one type and device; a large gradient is alone, to save a copy.
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in targets:
        by_device.setdefault(gradients[each].device, []).append(gradients[each])
    for bucket in chain.from_iterable(_take_tensors(e, _BUCKET_BYTES) for e in by_device.values()):
        is_copied = len(bucket) > 1 or not bucket[0].is_contiguous()
        flat = torch.cat([each.reshape(-1) for each in bucket]) if is_copied else bucket[0]
        flat.mul_(factor)  # before the sum, which may be too large for 16 bits
        dist.all_reduce(flat, group=group)
        if is_copied:
            pieces = torch.split(flat, [gradient.numel() for gradient in bucket])
            for gradient, piece in zip(bucket, pieces, strict=True):
                gradient.copy_(piece.view(gradient.shape))
