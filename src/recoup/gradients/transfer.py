"""Moving gradients to other devices, to files, and between processes."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, Self, SupportsIndex, cast

import torch
from torch import Tensor, nn

from recoup._arguments import check_flag, check_type, is_real, shown
from recoup._core.tensor_arguments import check_modules, check_place
from recoup.errors import GradientError
from recoup.gradients.all_reduce import UNORDERED, Op, all_reduce
from recoup.gradients.container import UNSCALED, Container, device_of
from recoup.gradients.targets import described, targets_by_name
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
        where = self._device if device is None else device_of(device)
        store = self._derived((), dtype=dtype or self._dtype, device=where)
        for each, gradient in self.items():
            kind = dtype if dtype is None or not gradient.is_complex() else dtype.to_complex()
            moved = gradient.to(device=where, dtype=kind, non_blocking=non_blocking, copy=True)
            if pin_memory:
                moved = _pinned(moved)
            store._gradients[each] = moved
        return store

    def named(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the gradients themselves, by the names of the parameters of `module`.

        Raises:
            GradientError: a gradient belongs to no parameter of `module`.
        """
        self._check_is_whole()
        check_modules(module=module)
        names: dict[Tensor, str] = {}
        for name, each in targets_by_name(module).items():
            names.setdefault(each, name)
        strangers = [described(each) for each in self if each not in names]
        if strangers:
            raise GradientError(
                f"{type(module).__name__} has no parameter that is {strangers[0]}, of which the "
                f"store holds the gradient ({len(strangers)} of this kind). Give the module that "
                "holds all of them, or pick those of this one with `filter`. Parameters that were "
                "replaced, by `load_state_dict(assign=True)` for instance, have no names any more: "
                "ask before."
            )
        gradients = self._gradients
        return {name: gradients[each] for each, name in names.items() if each in gradients}

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
        check_type(
            Mapping, f"a result of `store.state_dict(module)`{way_out}", state_dict=state_dict
        )
        check_type(nn.Module, f"the module that its names refer to{way_out}", module=module)
        check_flag(strict=strict)
        gradients, weight, scale = _parts_of(state_dict)
        loaded = type(self)(dtype=self._dtype, device=self._device)
        for each, gradient in _by_target(gradients, module, strict=strict).items():
            loaded._add(each, gradient.detach(), is_ours=False)
        self.clear()
        self._num_changes += 1
        self._gradients.update(loaded._gradients)
        self.weight, self._scale = weight, scale

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        pairs = ((copy.deepcopy(each, memo), value.clone()) for each, value in self.items())
        store = self._derived(pairs, params=copy.deepcopy(self.params, memo), ddp=None)
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


def _pinned(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        raise ValueError(
            f"`pin_memory` is for memory of the CPU, and the copies are on {tensor.device}. Pass "
            'device="cpu" too.'
        )
    return tensor.pin_memory() if torch.accelerator.is_available() else tensor


# -- states ----------------------------------------------------------------------------------------


def _parts_of(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], float, float | str | None]:
    """Return the gradients, the weight and the scale of a state, or raise if it is damaged."""
    lacking = [key for key in ("gradients", "weight", "scale") if key not in state]
    if lacking:
        raise GradientError(
            f"`state_dict` has no {lacking[0]!r}. Give what `store.state_dict(module)` returned; "
            "gradients by name alone are added with `add_`."
        )
    gradients, weight, scale = state["gradients"], state["weight"], state["scale"]
    are_tensors = isinstance(gradients, Mapping) and all(
        isinstance(name, str) and isinstance(each, Tensor)
        for name, each in cast("Mapping[Any, Any]", gradients).items()
    )
    is_scale = scale is None or scale == UNSCALED or (is_real(scale) and 0 < scale < math.inf)
    for key, is_right, needed in (
        ("gradients", are_tensors, "tensors by name"),
        ("weight", is_real(weight) and 0 <= weight < math.inf, "a number of at least 0"),
        ("scale", is_scale, f"a number above zero, {UNSCALED!r} or None"),
    ):
        if not is_right:
            raise GradientError(
                f"`state_dict` has {shown(state[key])} in {key!r}, where a state has {needed}: it "
                "is damaged, or no result of `store.state_dict(module)`."
            )
    return dict(gradients), float(weight), scale


def _by_target(
    gradients: Mapping[str, Tensor], module: nn.Module, *, strict: bool
) -> dict[Tensor, Tensor]:
    """Return the gradients by the parameters of `module` that have these names."""
    targets = targets_by_name(module)
    found: dict[Tensor, Tensor] = {}
    taken: dict[Tensor, str] = {}
    for name, gradient in gradients.items():
        target = targets.get(name)
        if target is None:
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
        found[target], taken[target] = _checked(name, gradient), name
    unexpected = [name for name in gradients if name not in targets]
    if unexpected and strict:
        raise GradientError(
            f"{type(module).__name__} has no parameter {', '.join(map(repr, unexpected))}. "
            "Pass strict=False to leave those out."
        )
    return found


def _checked(name: str, gradient: Tensor) -> Tensor:
    """Return a gradient from a file; sparse indices are checked, or sums would write elsewhere."""
    if gradient.layout is not torch.sparse_coo:
        return gradient
    parts = gradient._indices(), gradient._values(), gradient.shape
    try:
        return torch.sparse_coo_tensor(*parts, check_invariants=True)
    except RuntimeError as error:
        raise GradientError(f"The gradient of `{name}` is damaged: {error}") from error
