"""The mapping from targets to the gradients that a store owns, and what callers give it."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from recoup._arguments import check_flag, is_real, shown
from recoup._core.storage_tracking import bytes_of
from recoup._core.tensors import check_place
from recoup.errors import GradientError
from recoup.gradients.accumulation import (
    are_several_processes,
    as_dense,
    check_fits,
    coalesced,
    described,
    is_sharded,
    owned,
    scaled,
    total,
)

UNSCALED = "unscaled"
_LOW = (torch.float16, torch.bfloat16)


class Container(MutableMapping[Tensor, Tensor]):
    """A mapping from tensors, told apart by identity, to their gradients."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]] | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        ddp: nn.Module | bool | None = None,
    ) -> None:
        check_place(dtype=dtype, is_real=True)
        if not (ddp is None or ddp is False or hasattr(ddp, "require_backward_grad_sync")):
            raise ValueError(
                f"`ddp` is {shown(ddp)}, but must be the DistributedDataParallel that reduces the "
                "gradients, or False if none does."
            )
        self.params: tuple[Tensor, ...] = tensors_in("params", () if params is None else params)
        self.weight = 0.0
        self._gradients: dict[Tensor, Tensor] = {}
        self._dtype = dtype
        self._device = None if device is None else device_of(device)
        self._ddp = ddp
        self._is_local = False  # maybe parts of a sum over processes that no reducer has seen
        self._scale: float | str | None = None
        self._damage: str | None = None
        self._num_changes = 0

    # -- sums ------------------------------------------------------------------------------

    def _add(self, target: Tensor, gradient: Tensor, alpha: float = 1.0, *, is_ours: bool) -> None:
        """Add ``alpha * gradient`` to that of `target`, or raise and change nothing.

        The memory of `gradient` is handed over if it is ours.
        """
        check_fits(gradient, target)
        into = self._gradients.get(target)
        if into is not None and into.shape != gradient.shape:
            raise ValueError(
                f"The store holds a gradient of shape {tuple(into.shape)} of what is "
                f"{described(target)} now. Drop it (`discard`) when a tensor is resized."
            )
        self._num_changes += 1  # a sum in place may fail half way
        if into is None or into.is_sparse:
            gradient = self._adopted(target, gradient, is_ours=is_ours)
        elif gradient.device != into.device or gradient.is_sparse:
            gradient = gradient.to(device=into.device, dtype=into.dtype)
        if into is not None:
            gradient = total(into, gradient, alpha)
        elif alpha != 1:
            gradient = scaled(gradient, alpha)
        self._gradients[target] = gradient

    def _adopted(self, target: Tensor, gradient: Tensor, *, is_ours: bool) -> Tensor:
        """Return an owned tensor with the values of `gradient`: itself, if it is ours and fits."""
        device = target.device if self._device is None else self._device
        dtype = self._dtype_for(target)
        if gradient.dtype is not dtype or gradient.device != device:
            return owned(gradient.to(device=device, dtype=dtype))
        return owned(gradient) if is_ours else gradient.clone()

    def _dtype_for(self, target: Tensor) -> torch.dtype:
        """Return the type that the gradient of `target` is summed in."""
        own = target.dtype
        if self._dtype is not None:
            return self._dtype.to_complex() if own.is_complex else self._dtype
        chosen = target.grad_dtype if target.is_leaf else None
        if chosen not in (None, own):
            return chosen
        return torch.float32 if own in _LOW else own

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        self._check_is_whole()
        with self._guarded():
            for each, gradient in self._gradients.items():
                self._num_changes += 1
                self._gradients[each] = function(gradient)
        return self

    # -- errors ----------------------------------------------------------------------------

    @contextmanager
    def _guarded(self) -> Generator[None]:
        """On an error within, mark the store as damaged if its gradients have changed."""
        was_empty = not self._gradients
        num_changes = self._num_changes
        try:
            yield
        except BaseException as error:
            if self._num_changes != num_changes:
                if was_empty:
                    self._gradients.clear()
                else:
                    self._damage = f"{type(error).__name__}: {error}"
            raise

    def _check_is_whole(self) -> None:
        if self._damage is not None:
            raise GradientError(
                "The store holds an incomplete gradient, because a call failed half way "
                f"({self._damage}). Call `clear()`, and collect the gradients again."
            )

    def _check_scale(self, scale: float | str | None, source: str) -> None:
        if self._gradients and scale != self._scale:
            raise GradientError(
                f"{source} goes with gradients that are {scaled_by(scale)}, but those in the store "
                f"are {scaled_by(self._scale)}. Give all calls the same scaler, and call its "
                "`update` after the step only."
            )

    @contextmanager
    def _reduced_in_time(
        self, targets: Sequence[Tensor], *, by_grad: bool = False
    ) -> Generator[None]:
        """Raise if a backward within would leave gradients of this process alone in a sum.

        No reducer sees what `torch.autograd.grad` computes.
        """
        if is_sharded(*targets) or not self._may_be_reduced(targets):
            yield
            return
        ddp: Any = self._ddp
        syncs = bool(ddp) and ddp.require_backward_grad_sync
        if ddp is None or (syncs and (by_grad or self._is_local)):
            raise GradientError(
                "The reducer of a DistributedDataParallel does not see what was collected within "
                '`no_sync()`, nor the gradients of mode="grad": they would remain those of this '
                "process. Make the store with GradStore(params, ddp=model), run all of forward and "
                "backward in `no_sync()` or none of it, and in the first case call `all_reduce_` "
                "at the end. Without a reducer, pass ddp=False."
            )
        yield
        self._is_local = not syncs

    def _may_be_reduced(self, targets: Sequence[Tensor]) -> bool:
        """Whether a reducer may have to see what a backward leaves in `.grad` of the targets."""
        return is_sharded(*targets) or (self._ddp is not False and are_several_processes())

    # -- a mapping -------------------------------------------------------------------------

    def __getitem__(self, target: Tensor) -> Tensor:
        self._check_is_whole()
        if target not in self:
            raise KeyError(f"The store has no gradient of {described(target)}.")
        return self._gradients[target]

    def __setitem__(self, param: Tensor, grad: Tensor) -> None:
        """Replace the gradient of `param` by a copy of `grad`; the weight stays as it is.

        Raises:
            ValueError: `grad` cannot be a gradient of `param`.
        """
        self._check_pair(param, grad)
        check_fits(grad, param)
        self._num_changes += 1
        self._gradients[param] = self._adopted(param, grad.detach(), is_ours=False)

    def __delitem__(self, param: Tensor) -> None:
        self.__getitem__(param)  # or an error
        del self._gradients[param]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._gradients)

    def __len__(self) -> int:
        return len(self._gradients)

    def __contains__(self, target: object) -> bool:
        return isinstance(target, Tensor) and target in self._gradients

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        if self._damage is not None:
            return f"GradStore(not usable: {self._damage})"
        return f"GradStore({len(self)} gradients, {self.nbytes()} bytes, weight={self.weight:g})"

    def add_(self, param: Tensor, grad: Tensor, *, alpha: float = 1.0, own: bool = False) -> Self:
        """Add ``alpha * grad`` to the gradient of `param`.

        Args:
            param: the target.
            grad: a tensor of its shape.
            alpha: a factor.
            own: whether the store may take `grad` itself and not a copy; do not use it afterwards.

        Raises:
            ValueError: `grad` cannot be a gradient of `param`.
        """
        self._check_pair(param, grad)
        alpha = number_in("a finite number", math.isfinite, alpha=alpha)
        check_flag(own=own)
        with self._guarded():
            self._add(param, grad.detach(), alpha, is_ours=own)
        return self

    def _check_pair(self, param: object, grad: object) -> None:
        self._check_is_whole()
        tensors_in("param", [param])
        tensors_in("grad", [grad])

    def discard(self, param: Tensor) -> None:
        """Remove the gradient of `param`, if there is one."""
        self._gradients.pop(param, None)

    def clear(self) -> None:
        """Remove everything; a store that a failed call has left unusable is usable again."""
        self._gradients.clear()
        self._is_local = False
        self.weight = 0.0
        self._scale = None
        self._damage = None

    # -- other stores from this one --------------------------------------------------------

    def clone(self) -> Self:
        """Return a copy that shares no memory with the store."""
        return self._derived((each, gradient.clone()) for each, gradient in self.items())

    __copy__ = clone

    def filter(self, params: Iterable[Tensor]) -> Self:
        """Return a copy with only the gradients of `params`."""
        wanted = set(map(id, tensors_in("params", params)))
        return self._derived((t, g.clone()) for t, g in self.items() if id(t) in wanted)

    def split(self, *groups: Any) -> tuple[Self, ...]:
        """Move the gradients into one store for each group, and empty this one.

        Args:
            groups: optimizers, or tensors that belong together.

        Raises:
            GradientError: a gradient belongs to no group, or to two.
        """
        self._check_is_whole()
        members = [{*map(id, group)} for group in members_of("groups", groups, self)]
        stores = tuple(
            self._derived((each, value) for each, value in self.items() if id(each) in group)
            for group in members
        )
        self.clear()
        return stores

    def _derived(self, pairs: Iterable[tuple[Tensor, Tensor]], **changes: Any) -> Self:
        """Return a store with other gradients and the settings, weight and scale of this one."""
        self._check_is_whole()
        settings: dict[str, Any] = {"dtype": self._dtype, "device": self._device, "ddp": self._ddp}
        settings |= changes
        store = type(self)(settings.pop("params", self.params), **settings)
        store._gradients.update(pairs)
        store._is_local = self._is_local
        store.weight, store._scale = self.weight, self._scale
        return store

    # -- layouts ---------------------------------------------------------------------------

    def detach_(self) -> Self:
        """Detach the gradients from the graphs that ``create_graph`` has left."""
        # Two tensors may have one gradient, as long as it is not changed in place.
        return self._map(lambda each: each.detach().clone() if each.requires_grad else each)

    def coalesce_(self) -> Self:
        """Coalesce sparse gradients: sum the entries that they list more than once."""
        return self._map(coalesced)

    def densify_(self) -> Self:
        """Make sparse gradients dense, for an optimizer that does not take them."""
        return self._map(as_dense)

    def nbytes(self) -> int:
        """Return the bytes of the gradients; of a sharded one, of its part in this process."""
        return sum(bytes_of([gradient]) for gradient in self._gradients.values())


def device_of(device: torch.device | str) -> torch.device:
    """Return a device with its index, as in `Tensor.device`."""
    check_place(device)
    return torch.empty(0, device=device).device


def scaled_by(scale: float | str | None) -> str:
    """Return the description of a scale in errors."""
    names: dict[Any, str] = {None: "as autograd made them", UNSCALED: "unscaled"}
    return names.get(scale, f"scaled by {scale}")


# -- arguments -------------------------------------------------------------------------------------


def tensors_in(argument: str, given: object) -> tuple[Tensor, ...]:
    """Return each tensor once, in order, from tensors or pairs of name and tensor."""
    if isinstance(given, Tensor | nn.Module | str) or not isinstance(given, Iterable):
        way_out = "[tensor]" if isinstance(given, Tensor) else "module.parameters()"
        got = described(given)
        raise ValueError(f"`{argument}` is {got}, but must be tensors: give {way_out}.")
    found: dict[int, Tensor] = {}
    for each in cast("Iterable[Any]", given):
        tensor: Any = each
        if isinstance(each, tuple) and len(cast("tuple[Any, ...]", each)) == 2:
            _, tensor = cast("tuple[Any, Any]", each)
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"`{argument}` has {described(tensor)} in it, but must be tensors, or pairs of "
                "name and tensor: give module.parameters()."
            )
        found[id(tensor)] = tensor
    return tuple(found.values())


def parameters_of(params: Any, argument: str = "params") -> tuple[Tensor, ...]:
    """Return the parameters of an optimizer, or the tensors given, each once."""
    if not hasattr(params, "param_groups"):
        return tensors_in(argument, params)
    groups: list[dict[str, Any]] = params.param_groups
    return tuple({id(each): each for group in groups for each in group["params"]}.values())


def members_of(
    argument: str, groups: Sequence[Any], tensors: Iterable[Tensor]
) -> list[tuple[Tensor, ...]]:
    """Return the members of groups, or raise unless each of the tensors is in one group."""
    members = [parameters_of(group, argument) for group in groups]
    ids = [set(map(id, each)) for each in members]
    for tensor in tensors:
        num_members = sum(id(tensor) in each for each in ids)
        if num_members != 1:
            raise GradientError(
                f"{described(tensor).capitalize()} belongs to {num_members} of the {len(groups)} "
                f"`{argument}`, and must belong to one. Name it in one of them, or `discard` it."
            )
    return members


def refuse_any(tensors: Sequence[Tensor], optimizer: Any, words: str) -> None:
    """Raise GradientError if there are tensors; `{}` in `words` are their names, up to five."""
    if not tensors:
        return
    names: dict[int, str] = {}
    for group in getattr(optimizer, "param_groups", ()):
        for name, each in zip(group.get("param_names", ()), group["params"], strict=False):
            names[id(each)] = f"`{name}`"
    listed = ", ".join(names.get(id(each), described(each)) for each in tensors[:5])
    more = f" and {len(tensors) - 5} more" if len(tensors) > 5 else ""
    raise GradientError(words.format(listed + more))


def scale_of(scaler: Any) -> float:
    """Return the scale of a GradScaler now."""
    if isinstance(scaler, type) or not hasattr(scaler, "get_scale"):
        raise ValueError(f"`scaler` is {shown(scaler)}, but must be a torch.amp.GradScaler.")
    return float(scaler.get_scale())


def number_in(needed: str, is_right: Callable[[float], bool], **given: object) -> float:
    """Return an argument as a number, or raise ValueError; for a tensor, this waits for the device.

    NaN, for what is no number, is never right.
    """
    ((name, value),) = given.items()
    is_one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    number = float(cast("Any", value)) if is_one or is_real(value) else math.nan
    if not is_right(number):
        raise ValueError(f"`{name}` is {shown(value)}, but must be {needed}.")
    return number


def weight_in(weight: object) -> float:
    """Return the weight of a batch, or raise ValueError; torch fills tensors with floats only."""
    needed = "a number above zero. A batch that counts for nothing is left out"
    return number_in(needed, lambda number: 0 < number < math.inf, weight=weight)
