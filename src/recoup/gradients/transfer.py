"""Gradients elsewhere: on other devices, in files, in other processes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self, SupportsIndex

import torch
from torch import Tensor, nn

from recoup.errors import GradientError
from recoup.gradients.container import Container, device_of
from recoup.gradients.naming import by_name, by_target
from recoup.gradients.reducing import Op, all_reduce
from recoup.memory.size import parse_bytes

__all__ = ["Transfer"]


class Transfer(Container):
    """How gradients are copied, saved, loaded and reduced."""

    def to(
        self,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
        pin_memory: bool = False,
    ) -> Self:
        """Return a copy on another device or in another type.

        Args:
            device: where to; by default where the gradients are.
            dtype: which type; by default that which they have.
            non_blocking: as for ``torch.Tensor.to``; wait for the device before you read.
            pin_memory: whether to put the copies, on the CPU, in pinned memory.
        """
        self._check_is_whole()
        place = self._entries.device if device is None else device_of(device)
        store = type(self)(self.params, dtype=dtype or self._entries.dtype, device=place)
        for each, gradient in self.items():
            kind = dtype if dtype is None or not gradient.is_complex() else dtype.to_complex()
            moved = gradient.to(device=place, dtype=kind, non_blocking=non_blocking, copy=True)
            store._entries.gradients[each] = moved.pin_memory() if pin_memory else moved
        store.weight, store._scale = self.weight, self._scale
        return store

    def named(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the gradients, not copies, under the names of the parameters of `module`.

        Raises:
            GradientError: a gradient belongs to none of its parameters.
        """
        self._check_is_whole()
        return by_name(self._entries.gradients, module)

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return what `load_state_dict` takes: gradients by name, the weight and the scale."""
        return {"gradients": self.named(module), "weight": self.weight, "scale": self._scale}

    def load_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        """Replace what the store holds by what `state_dict` was made of.

        Args:
            module: whose parameters the names mean.
            state_dict: what `state_dict` returned.
            strict: whether a name that `module` does not have is an error.

        Raises:
            GradientError: a name or a shape does not fit; nothing is changed then.
        """
        found = by_target(state_dict["gradients"], module, strict=strict)
        self.clear()
        for each, gradient in found.items():
            self._entries.add(each, gradient, is_ours=False)
        self.weight, self._scale = state_dict["weight"], state_dict["scale"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        store = type(self)(
            copy.deepcopy(self.params, memo), dtype=self._entries.dtype, device=self._entries.device
        )
        for each, gradient in self._entries.gradients.items():
            store._entries.gradients[copy.deepcopy(each, memo)] = gradient.clone()
        store.weight, store._scale, store._damage = self.weight, self._scale, self._damage
        memo[id(self)] = store
        return store

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        raise GradientError(
            "A GradStore tells its parameters by identity, which does not survive a file. Save "
            "`store.state_dict(module)`, and load it with `load_state_dict`."
        )

    def all_reduce_(
        self, group: Any = None, *, op: Op = "mean", bucket_bytes: int | str = "25 MiB"
    ) -> Self:
        """Average or sum the gradients over processes, in buckets.

        What any process has a gradient of, all have afterwards; what none has stays absent. For
        gradients that nobody has reduced: those of plain models, or of DistributedDataParallel
        within `no_sync()`.

        Args:
            group: the processes; by default all.
            op: "mean" or "sum".
            bucket_bytes: how much goes into one message, at least.

        Raises:
            GradientError: there are no processes, or they have other targets.
            ValueError: the store was made without `params`, or `op` is unknown.
        """
        self._check_is_whole()
        if op not in ("mean", "sum"):
            raise ValueError(f'`op` is {op!r}, but must be "mean" or "sum".')
        strangers = [each for each in self if each not in set(self.params)]
        if strangers or not self.params:
            raise ValueError(
                "The processes can only agree on an order of gradients that all declare alike: "
                "make the store with `params`, and collect nothing else."
            )
        with self._guarded():
            all_reduce(self._entries, self.params, op, parse_bytes(bucket_bytes), group)
        return self
