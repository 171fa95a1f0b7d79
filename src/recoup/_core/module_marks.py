"""What modules say of themselves: how they run, and how they are inverted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import Tensor, nn


def is_gathered(module: nn.Module) -> bool:
    """Whether FSDP2 gathers the parameters of `module` for its calls, and frees them afterwards."""
    return hasattr(type(module), "unshard")


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_hooked(module: object) -> bool:
    """Whether hooks run when `module` is called: calls of its parts are not the same."""
    return isinstance(module, nn.Module) and any(vars(module)[name] for name in HOOKS)


def is_in_place(module: Any) -> bool:
    """Whether `module` says that the first thing it does changes its input in place."""
    return are_in_place((module,))[0]


def are_in_place(callables: Iterable[Any]) -> list[bool]:
    """Return for each callable whether the first thing that it does changes its input in place."""
    firsts: list[Any] = []
    for first in callables:
        while isinstance(first, nn.Sequential) and first._modules:
            first = next(iter(first._modules.values()))
        firsts.append(first)
    return list(map(bool, marks_of(firsts, "inplace")))


def mark_of(fn: Any, name: str) -> Any:
    """Return an attribute that marks a module, of its own or of its class; False without one."""
    return marks_of((fn,), name)[0]


def marks_of(callables: Iterable[Any], name: str) -> list[Any]:
    """Return what `mark_of` does for each callable, in one call of Python."""
    marks: list[Any] = []
    for fn in callables:
        kind: Any = fn.__class__
        if getattr(kind, "__getattr__", None) is nn.Module.__getattr__:  # it would look, slowly
            marks.append(fn.__dict__.get(name, getattr(kind, name, False)))
        else:
            marks.append(getattr(fn, name, False))
    return marks


Direction = Literal["forward", "inverse"]


def has_inverse(link: object) -> bool:
    """Whether an object defines `inverse`; a base class may mark its own as missing."""
    method = getattr(link, "inverse", None)
    return callable(method) and not getattr(method, "is_missing", False)


def check_pair(
    returned: Any, num_samples: int, direction: Direction, name: str, *, num_early: int = 0
) -> tuple[Any, Tensor]:
    """Return `returned`, or raise if it is not a value and its log-determinant.

    A module that forgets the log-determinant returns one tensor, which would be unpacked along the
    batch: for two samples without an error.

    Args:
        returned: the result of an invertible module.
        num_samples: the number of samples in its input batch.
        direction: the method that returned it.
        name: the name of the module in error messages.
        num_early: how many latents it splits off early; the value is a tuple if there are any.

    Raises:
        ValueError: `returned` is anything else.
    """
    wrong = _why_not_pair(returned, num_samples, num_early)
    if wrong is None:
        return returned
    raise ValueError(
        f"`{direction}` of {name} returned {wrong}. Return (value, log_det): the value with the "
        f"{num_samples} samples of the batch, and its log-determinant, real and of shape "
        f"({num_samples},), on the device of the value; `x.new_zeros(len(x))` where the volume "
        "does not change."
    )


def _why_not_pair(returned: Any, num_samples: int, num_early: int) -> str | None:
    """Return a description of `returned` if it is not such a pair, or None."""
    if not _is_sequence(returned) or len(returned) != 2:
        return _shown(returned)
    value, log_det = returned
    parts: Sequence[Any] = value if num_early and _is_sequence(value) else (value,)
    if num_early and len(parts) != num_early + 1:
        return f"{_shown(value)} as the value, where {num_early + 1} parts are due"
    for part in parts:
        if not isinstance(part, Tensor) or part.shape[:1] != (num_samples,):
            return f"{_shown(part)} as the value"
    if not isinstance(log_det, Tensor):
        return f"{_shown(log_det)} as the log-determinant"
    is_real = log_det.is_floating_point() or not (
        log_det.is_complex() or parts[0].is_floating_point()  # integer values allow integers
    )
    if log_det.shape != (num_samples,) or not is_real or log_det.device != parts[0].device:
        return f"{_shown(log_det)} on {log_det.device} as the log-determinant"
    return None


def _is_sequence(value: Any) -> bool:
    return isinstance(value, tuple | list)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    kind = type(value).__name__
    return f"a {kind} of {len(value)} values" if _is_sequence(value) else f"a {kind}"
