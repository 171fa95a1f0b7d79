"""The mapping from targets to owned gradients, and its state after errors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

from recoup._arguments import check_flag, check_real
from recoup._core.storage_tracking import bytes_of
from recoup._core.tensor_arguments import check_place
from recoup.errors import GradientError
from recoup.gradients.accumulation import Entries, as_dense, check_fits, coalesced, shared
from recoup.gradients.targets import described, parameters_of, tensors_in

__all__ = ["UNSCALED", "Container", "device_of", "scaled_by"]

UNSCALED = "unscaled"


class Container(MutableMapping[Tensor, Tensor]):
    """A mapping from tensors, told apart by identity, to their gradients."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[tuple[str, Tensor]] | None = None,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        check_place(dtype=dtype, is_real=True)
        self.params: tuple[Tensor, ...] = tensors_in("params", () if params is None else params)
        self.weight = 0.0
        self._entries = Entries(dtype, None if device is None else device_of(device))
        self._scale: float | str | None = None
        self._damage: str | None = None

    @contextmanager
    def _guarded(self) -> Generator[None]:
        """On an error within, mark the store as damaged if its gradients have changed."""
        was_empty = not self._entries.gradients
        num_changes = self._entries.num_changes
        try:
            yield
        except BaseException as error:
            if self._entries.num_changes != num_changes:
                if was_empty:
                    self._entries.gradients.clear()
                else:
                    self._damage = f"{type(error).__name__}: {error}"
            raise

    def _check_is_whole(self) -> None:
        if self._damage is not None:
            raise GradientError(
                "The store holds an incomplete gradient, because a call failed half way "
                f"({self._damage}). Call `clear()`, and collect the gradients again."
            )

    def _check_received(self, num_received: int, num_targets: int) -> None:
        if num_received == 0 and num_targets > 0:
            raise GradientError(
                f"None of the {num_targets} targets got a gradient. Are they what `outputs` was "
                "made from, and not copies? If it is right, pass allow_empty=True."
            )

    def _check_scale(self, scale: float | str | None, source: str) -> None:
        if self._entries.gradients and scale != self._scale:
            raise GradientError(
                f"{source} brings gradients that are {scaled_by(scale)}, but the gradients in the "
                f"store are {scaled_by(self._scale)}. Collect all with one scale, and call "
                "`unscale_` once, at the end."
            )

    # -- a mapping -------------------------------------------------------------------------

    def __getitem__(self, target: Tensor) -> Tensor:
        found = self.get(target)
        if found is None:
            raise KeyError(f"The store has no gradient of {_shown(target)}.")
        return found

    def get(self, target: Tensor, default: Any = None) -> Any:
        """Return the gradient of `target`, or `default` if there is none."""
        self._check_is_whole()
        return self._entries.gradients[target] if target in self else default

    def __setitem__(self, param: Tensor, grad: Tensor) -> None:
        """Replace the gradient of `param` by a copy of `grad`; the weight stays as it is.

        Raises:
            ValueError: `grad` cannot be a gradient of `param`.
        """
        self._check_is_whole()
        tensors_in("param", [param])
        tensors_in("grad", [grad])
        check_fits(grad, param)
        self._entries.put(param, shared(grad))

    def __delitem__(self, param: Tensor) -> None:
        self.pop(param)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._entries.gradients)

    def __len__(self) -> int:
        return len(self._entries.gradients)

    def __contains__(self, target: object) -> bool:
        return isinstance(target, Tensor) and target in self._entries.gradients

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
        self._check_is_whole()
        tensors_in("param", [param])
        tensors_in("grad", [grad])
        if grad.shape != param.shape:
            raise ValueError(
                f"`grad` has shape {tuple(grad.shape)}, but must have that of `param`, "
                f"{tuple(param.shape)}."
            )
        check_real(alpha=alpha)
        check_flag(own=own)
        with self._guarded():
            grad = grad.detach() if grad.requires_grad else grad
            self._entries.add(param, grad, float(alpha), is_ours=own)
        return self

    _NOTHING = object()

    def pop(self, param: Tensor, default: Any = _NOTHING) -> Tensor:
        """Remove the gradient of `param`, and return it."""
        self._check_is_whole()
        if default is Container._NOTHING and param not in self:
            raise KeyError(f"The store has no gradient of {_shown(param)}.")
        return self._entries.gradients.pop(param, default)

    def popitem(self) -> tuple[Tensor, Tensor]:
        """Remove the gradient that came last, and return it with its target."""
        self._check_is_whole()
        return self._entries.gradients.popitem()

    def discard(self, param: Tensor) -> None:
        """Remove the gradient of `param`, if there is one."""
        self._entries.gradients.pop(param, None)

    def clear(self) -> None:
        """Remove everything; a store that a failed call has left unusable is usable again."""
        self._entries.gradients.clear()
        self._entries.are_local = False
        self.weight = 0.0
        self._scale = None
        self._damage = None

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
        members = [set(map(id, parameters_of(group, "groups"))) for group in groups]
        for each in self:
            num_members = sum(id(each) in group for group in members)
            if num_members != 1:
                raise GradientError(
                    f"{described(each).capitalize()} belongs to {num_members} of the {len(groups)} "
                    "`groups`, and must belong to one. Name it in one of them, or `discard` it."
                )
        stores = tuple(
            self._derived((each, value) for each, value in self.items() if id(each) in group)
            for group in members
        )
        self.clear()
        return stores

    def _derived(self, pairs: Iterable[tuple[Tensor, Tensor]], **changes: Any) -> Self:
        """Return a store with other gradients and the settings, weight and scale of this one."""
        self._check_is_whole()
        settings: dict[str, Any] = {
            "dtype": self._entries.dtype,
            "device": self._entries.device,
            **changes,
        }
        store = type(self)(settings.pop("params", self.params), **settings)
        store._entries.gradients.update(pairs)
        store._entries.are_local = self._entries.are_local
        store.weight, store._scale = self.weight, self._scale
        return store

    def detach_(self) -> Self:
        """Detach the gradients from the graphs that ``create_graph`` has left."""
        # Two tensors may have one gradient, as long as it is not changed in place.
        return self._map(lambda each: each.detach().clone() if each.requires_grad else each)

    def coalesce_(self) -> Self:
        """Coalesce sparse gradients: sum the entries that they list more than once."""
        return self._map(lambda each: coalesced(each) if each.is_sparse else each)

    def densify_(self) -> Self:
        """Make sparse gradients dense, for an optimizer that does not take them."""
        return self._map(as_dense)

    def nbytes(self) -> int:
        """Return the bytes of the gradients; of a sharded one, of its part in this process."""
        return sum(bytes_of([gradient]) for gradient in self._entries.gradients.values())

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        self._check_is_whole()
        with self._guarded():
            for each, gradient in self._entries.gradients.items():
                self._entries.num_changes += 1
                self._entries.gradients[each] = function(gradient)
        return self


def device_of(device: torch.device | str) -> torch.device:
    """Return a device with its index, as in `Tensor.device`."""
    check_place(device)
    return torch.empty(0, device=device).device


def scaled_by(scale: float | str | None) -> str:
    """Return the description of a scale in errors."""
    if scale is None:
        return "as autograd made them"
    return "unscaled" if scale == UNSCALED else f"scaled by {scale}"


def _shown(target: object) -> str:
    return described(target) if isinstance(target, Tensor) else f"a {type(target).__name__}"
