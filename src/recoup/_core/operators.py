"""Operators as dispatch modes see them: the properties of an operator, and its nested arguments.

NOTE [ The schema of an operator ]

The schema and tags of an operator say what it writes to and whether it draws random numbers.
Operators of torch that change a statistic without declaring it are known by the names of their
arguments. An operator that is not torch's own is treated as one that may draw.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

_TORCH_NAMESPACES = frozenset(("aten", "prim", "prims"))
_ALLOCATING = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
_OVERWRITING = frozenset((
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_",
    "normal_", "random_", "uniform_", "zero_",
))  # fmt: skip
_STATISTICS = frozenset(("running_mean", "running_var"))


class OperatorTraits(NamedTuple):
    """The properties of an operator that decide how its calls are recorded and repeated.

    Attributes:
        writes: the arguments that it writes to, by position or name.
        is_view: whether it only returns views of memory that exists.
        makes_or_writes: whether it returns tensors, or writes to any.
        overwrites: whether it ignores the previous content of the tensors that it writes to.
        allocates: whether it returns uninitialized memory.
        may_draw: whether it may draw random numbers.
    """

    writes: frozenset[int | str]
    is_view: bool
    makes_or_writes: bool
    overwrites: bool
    allocates: bool
    may_draw: bool


def has_schema(func: Any) -> bool:
    """Whether `func` has a schema; a higher-order operator has none, and may do anything."""
    return hasattr(func, "_schema")


@functools.cache
def traits_of(func: Any) -> OperatorTraits:
    """Return the properties of an operator that has a schema."""
    schema: Any = func._schema
    name = schema.name.partition("::")[2]
    writes: set[int | str] = set()
    is_view_in_place = torch.Tag.inplace_view in func.tags and not name.startswith("resize")
    for position, argument in enumerate(schema.arguments if not is_view_in_place else ()):
        alias = argument.alias_info
        if (alias is not None and alias.is_write) or argument.name in _STATISTICS:
            writes |= {argument.name} if argument.kwarg_only else {position, argument.name}
    # `set_` and `transpose_` write nothing: the tensor becomes another view.
    aliases = not writes and any(each.alias_info is not None for each in schema.returns)
    is_torchs = func.namespace in _TORCH_NAMESPACES
    return OperatorTraits(
        writes=frozenset(writes),
        is_view=aliases or (name == "set_" and is_torchs),
        makes_or_writes=bool(writes) or any("Tensor" in str(each.type) for each in schema.returns),
        overwrites=name in _OVERWRITING or "out" in writes,
        allocates=name in _ALLOCATING,
        may_draw=torch.Tag.nondeterministic_seeded in func.tags or not is_torchs,
    )


def map_instances(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Return nested arguments with `change` applied to each instance of `kind` in them."""
    if isinstance(value, kind):
        return change(value)
    if type(value) in (tuple, list):
        items = cast("list[Any]", value)
        return type(items)(map_instances(item, kind, change) for item in items)
    if type(value) is dict:
        entries = cast("dict[str, Any]", value)
        return {key: map_instances(item, kind, change) for key, item in entries.items()}
    return value
