"""Moving gradients to other devices, to files, and between processes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from numbers import Real
from typing import Any, Self, SupportsIndex

import torch
from torch import Tensor, nn

from recoup._arguments import check_flag, check_type
from recoup._core.tensor_arguments import check_modules, check_place
from recoup.errors import GradientError
from recoup.gradients.accumulation import Entries
from recoup.gradients.all_reduce import UNORDERED, Op, all_reduce
from recoup.gradients.container import Container, device_of
from recoup.gradients.targets import described
from recoup.memory.size import parse_bytes

__all__ = ["Transfer"]


class Transfer(Container):
    """The methods that copy, save, load and reduce gradients."""

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
            device: the device; by default that of the gradients.
            dtype: the type; by default that of the gradients.
            non_blocking: as for ``torch.Tensor.to``; synchronize before you read the copies.
            pin_memory: whether to put the copies, on the CPU, in pinned memory; has no effect
                where there is no accelerator.

        Raises:
            ValueError: memory of another device than the CPU cannot be pinned.
        """
        self._check_is_whole()
        check_place(dtype=dtype)
        check_flag(non_blocking=non_blocking, pin_memory=pin_memory)
        where = self._entries.device if device is None else device_of(device)
        store = self._derived((), dtype=dtype or self._entries.dtype, device=where)
        for each, gradient in self.items():
            kind = dtype if dtype is None or not gradient.is_complex() else dtype.to_complex()
            moved = gradient.to(device=where, dtype=kind, non_blocking=non_blocking, copy=True)
            if pin_memory:
                moved = _pinned(moved)
            store._entries.gradients[each] = moved
        return store

    def named(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the gradients themselves, by the names of the parameters of `module`.

        Raises:
            GradientError: a gradient belongs to no parameter of `module`.
        """
        self._check_is_whole()
        check_modules(module=module)
        names: dict[Tensor, str] = {each: name for name, each in module.named_parameters()}
        strangers = [described(each) for each in self if each not in names]
        if strangers:
            raise GradientError(
                f"{type(module).__name__} has no parameter that is {strangers[0]}, of which the "
                f"store holds the gradient ({len(strangers)} of this kind). Give the module that "
                "holds all of them, or pick those of this one with `filter`. Parameters that were "
                "replaced, by `load_state_dict(assign=True)` for instance, have no names any more: "
                "ask before."
            )
        gradients = self._entries.gradients
        return {name: gradients[each] for each, name in names.items() if each in gradients}

    def state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the gradients by name, the weight and the scale, for `load_state_dict`."""
        return {"gradients": self.named(module), "weight": self.weight, "scale": self._scale}

    def load_state_dict(
        self, state_dict: Mapping[str, Any], module: nn.Module, *, strict: bool = True
    ) -> None:
        """Replace the content of the store by that of `state_dict`.

        Args:
            state_dict: a result of `state_dict`.
            module: the module that the names refer to.
            strict: whether a name that `module` does not have is an error.

        Raises:
            GradientError: a name or a shape does not fit; nothing is changed then.
            ValueError: a gradient is of another kind than its parameter, or the arguments are
                neither a state nor a module; nothing is changed then.
        """
        _check_order(state_dict, module)
        lacking = [key for key in ("gradients", "weight", "scale") if key not in state_dict]
        if lacking:
            raise GradientError(
                f"`state_dict` has no {lacking[0]!r}. Give what `store.state_dict(module)` "
                "returned; gradients by name alone are added with `add_`."
            )
        check_type(Real, "a number in `weight`", state_dict=state_dict["weight"])
        check_flag(strict=strict)
        found = _by_target(state_dict["gradients"], module, strict=strict)
        loaded = Entries(self._entries.dtype, self._entries.device)
        for each, gradient in found.items():
            loaded.add(each, gradient, is_ours=False)
        self.clear()
        self._entries.num_changes += 1
        self._entries.gradients.update(loaded.gradients)
        self.weight, self._scale = state_dict["weight"], state_dict["scale"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        pairs = ((copy.deepcopy(each, memo), value.clone()) for each, value in self.items())
        store = self._derived(pairs, params=copy.deepcopy(self.params, memo))
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

        A target with a gradient in any process has one in all of them afterwards; the others stay
        absent. The weights are reduced alike, so that `mean_` is over all processes. Use it for
        gradients that are not yet reduced: those of plain models, or of DistributedDataParallel
        within `no_sync()`. Sparse ones become dense where the backend (NCCL) cannot sum them.

        Args:
            group: the process group; by default all processes.
            op: "mean" or "sum".
            bucket_bytes: the least size of a message, but for the last of each type.

        Raises:
            GradientError: there are no processes, they have other targets, or one cannot take
                part; then all raise, and nothing is changed.
            ValueError: the store was made without `params`, or `op` is unknown.
        """
        if op not in ("mean", "sum"):
            raise ValueError(f'`op` is {op!r}, but must be "mean" or "sum".')
        if not self.params:
            raise ValueError(UNORDERED)
        num_bytes = parse_bytes(bucket_bytes)
        with self._guarded():
            all_reduce(self, op, num_bytes, group)
        return self


def _check_order(state_dict: object, module: object) -> None:
    for name, given, kind, what in (
        ("state_dict", state_dict, Mapping, "a result of `store.state_dict(module)`"),
        ("module", module, nn.Module, "the module that its names refer to"),
    ):
        if not isinstance(given, kind):
            raise ValueError(
                f"`{name}` is a {type(given).__name__}, but must be {what}. Call "
                "load_state_dict(state_dict, module)."
            )


def _pinned(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        raise ValueError(
            f"`pin_memory` is for memory of the CPU, and the copies are on {tensor.device}. Pass "
            'device="cpu" too.'
        )
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor


def _by_target(
    gradients: Mapping[str, Tensor], module: nn.Module, *, strict: bool
) -> dict[Tensor, Tensor]:
    """Return the gradients by the parameters of `module` that have these names."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found: dict[Tensor, Tensor] = {}
    taken: dict[Tensor, str] = {}
    unexpected: list[str] = []
    for name, gradient in gradients.items():
        target = parameters.get(name)
        if target is None:
            unexpected.append(name)
            continue
        if target in found:
            raise GradientError(
                f"`{taken[target]}` and `{name}` are one parameter of {type(module).__name__}, and "
                "the state has a gradient of each. Add them, and leave one."
            )
        if target.shape != gradient.shape:
            raise GradientError(
                f"The gradient of `{name}` has shape {tuple(gradient.shape)}, and the parameter "
                f"{tuple(target.shape)}. Load the state of a model of the same sizes."
            )
        found[target], taken[target] = gradient, name
    if unexpected and strict:
        raise GradientError(
            f"{type(module).__name__} has no parameter {', '.join(map(repr, unexpected))}. "
            "Pass strict=False to leave those out."
        )
    return found
