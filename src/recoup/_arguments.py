"""Checks of arguments. Each error names the argument, what it got, and what it needs."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any, SupportsIndex, TypeGuard

_LONGEST = 80
_MOST = 2**31 - 1  # what torch can count in any of its sizes


def shown(value: object) -> str:
    """The value in an error: its `repr`, or its type where that is long."""
    text = repr(value)
    if len(text) > _LONGEST or "\n" in text:
        return f"a {type(value).__name__}"
    return text


def is_whole(value: object, least: int = 1, most: int = _MOST) -> bool:
    """Whether a value is a whole number from `least` to `most`."""
    # A tensor has `__index__`, whatever it holds.
    is_number = isinstance(value, numbers.Integral) or not hasattr(value, "shape")
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or not is_number:
        return False
    return least <= operator.index(value) <= most


def check_whole(least: int = 1, *, most: int = _MOST, **given: object) -> None:
    """Raise ValueError unless each argument is a whole number from `least` to `most`."""
    for name, value in given.items():
        if not is_whole(value, least, most):
            raise ValueError(
                f"`{name}` is {shown(value)}, but must be a whole number, at least {least}."
            )


def is_real(value: Any) -> TypeGuard[float]:
    """Whether a value is a number that a float can hold, and no NaN."""
    if type(value) is bool or not isinstance(value, numbers.Real):
        return False
    try:
        return not math.isnan(float(value))
    except OverflowError:
        return False


def check_real(**given: object) -> None:
    """Raise ValueError unless each argument is a number, and no NaN."""
    for name, value in given.items():
        if not is_real(value):
            raise ValueError(f"`{name}` is {shown(value)}, but must be a number.")


def check_flag(**given: object) -> None:
    """Raise ValueError unless each argument is True or False."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"`{name}` is {shown(value)}, but must be True or False.")


def check_callable(**given: object) -> None:
    """Raise ValueError unless each argument can be called, and is no class."""
    for name, value in given.items():
        if not callable(value) or isinstance(value, type):
            raise ValueError(f"`{name}` is {shown(value)}, but must be a function or a module.")


def check_type(kind: type | tuple[type, ...], needed: str, **given: object) -> None:
    """Raise ValueError unless each argument is a `kind`, which errors call `needed`."""
    for name, value in given.items():
        if not isinstance(value, kind):
            raise ValueError(f"`{name}` is {shown(value)}, but must be {needed}.")


def check_choice(*choices: str, **given: object) -> None:
    """Raise ValueError unless each argument is one of the choices."""
    for name, value in given.items():
        if value not in choices:
            raise ValueError(
                f"`{name}` is {shown(value)}, but must be one of {', '.join(choices)}."
            )
