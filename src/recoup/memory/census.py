"""The census of residuals: the tensors that backward will need after a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

from recoup._arguments import check_callable
from recoup._core.saved_tensors import Way
from recoup.memory.saved_by_operator import saved_tensors_of
from recoup.memory.tables import aligned

__all__ = ["Residual", "Residuals", "residuals"]

_WAYS: tuple[Way, ...] = get_args(Way)
_VALUE_WIDTH, _MODULE_WIDTH = 40, 28  # of 100 columns


@dataclass(frozen=True, slots=True)
class Residual:
    """A residual: a tensor that backward needs, kept or obtained in another way.

    Args:
        value: the operator that saved it, its shape and its type, such as
            "linear [32, 16] float32".
        module: the qualified name of the module that was running; the name of its class for the
            outermost one, "-" outside any module.
        num_bytes: the bytes that it keeps or, if it is not kept, those that keeping it would take;
            0 if an earlier residual counts the same memory.
        way: how backward gets it: "keep", "recompute", "regenerate", "invert" or "offload".

    Example:
        >>> import torch
        >>> from recoup import residuals
        >>> x = torch.zeros(256, requires_grad=True)
        >>> print(residuals(lambda: x.exp()).entries[0])
        Residual(value='exp [256] float32', module='-', num_bytes=1024, way='keep')
    """

    value: str
    module: str
    num_bytes: int
    way: Way


@dataclass(frozen=True, slots=True)
class Residuals:
    """The residuals of a call, as `residuals` returns them. Printing shows a table.

    They can be iterated over; `len` is the number of residuals, not of rows of the table, in which
    equal ones share a row.

    Args:
        entries: the residuals, in the order in which they were saved.

    Example:
        >>> import torch
        >>> from recoup import residuals
        >>> x = torch.zeros(256, requires_grad=True)
        >>> found = residuals(lambda: x.exp().sin())
        >>> [each.value for each in found]
        ['exp [256] float32', 'sin [256] float32']
        >>> len(found), found.total_bytes(), found.total_bytes("recompute")
        (2, 1024, 0)
    """

    entries: tuple[Residual, ...]

    def __iter__(self) -> Iterator[Residual]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def total_bytes(self, way: Way | None = None) -> int:
        """Return the bytes of the residuals of one way, or of all.

        Args:
            way: "keep", "recompute", "regenerate", "invert" or "offload"; None for all.

        Raises:
            ValueError: if `way` is unknown.
        """
        if way is not None and way not in _WAYS:
            raise ValueError(f"`way` is {way!r}, but must be one of {', '.join(_WAYS)}, or None.")
        return sum(each.num_bytes for each in self.entries if way in (None, each.way))

    def __str__(self) -> str:
        groups: dict[tuple[str, str, Way], list[int]] = {}
        for each in self.entries:
            if each.num_bytes:
                groups.setdefault((each.value, each.module, each.way), []).append(each.num_bytes)
        ordered = sorted(groups.items(), key=lambda group: -sum(group[1]))
        rows = [("value", "module", "count", "MiB", "way")] + [
            (
                _cut_operator(value, _VALUE_WIDTH),
                _cut_front(module, _MODULE_WIDTH),
                str(len(sizes)),
                _mib(sum(sizes)),
                way,
            )
            for (value, module, way), sizes in ordered
        ]
        totals = [
            ("total" if way == "keep" else "", "", "", _mib(self.total_bytes(way)), way)
            for way in _WAYS
            if way == "keep" or any(each.way == way for each in self.entries)
        ]
        lines = aligned([*rows, *totals], left=[0, 1, 4])
        num_shared = sum(not each.num_bytes for each in self.entries)
        if num_shared:
            lines.append(f"{num_shared} more look at memory that is counted above")
        return "\n".join(lines)


def residuals(fn: Callable[[], object]) -> Residuals:
    """List the residuals that a call leaves for backward, kept or to be recomputed.

    `fn` is called once, with grad, and its result is released. The call is a forward like any
    other: it updates running statistics and advances the random stream. The residuals are those
    that autograd holds when `fn` returns, so a backward within `fn` leaves few of them.

    Bytes are counted by distinct storages, each for the first residual that uses it, without
    parameters and buffers. So the kept bytes are those that `fn` leaves allocated for backward, and
    those of its inputs. With saved-tensor hooks of other libraries, a residual counts as "offload"
    if the hooks moved it to another device, to pinned memory, into a copy, or to a place that
    cannot be inspected. Not listed are residuals of other threads, of code that runs without a
    graph (reentrant checkpoints), and those that a selective checkpoint has cached. Compiled code
    runs eagerly.

    Args:
        fn: a function without arguments that returns a value with the graph, such as a loss.

    Returns:
        The residuals, printable, the largest first, with values, modules, bytes and ways.

    Raises:
        RuntimeError: from torch, if `fn` uses a transform of torch.func.

    Example:
        >>> import torch
        >>> from recoup import residuals
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU())
        >>> x = torch.zeros(1024, 256)
        >>> print(residuals(lambda: model(x)))
        value                       module  count    MiB  way
        linear [1024, 256] float32  0           1  1.000  keep
        gelu [1024, 256] float32    1           1  1.000  keep
        total                                      2.000  keep

    Source: the hooks of `torch.autograd.graph.saved_tensors_hooks`.
    """
    check_callable(fn=fn)
    return Residuals(tuple(Residual(*saved) for saved in saved_tensors_of(fn)))


def _cut_operator(text: str, width: int) -> str:
    """Shorten the name of the operator, and keep shape and type."""
    operator, bracket, shape = text.rpartition(" [")
    if len(text) <= width:
        return text
    return f"{operator[: max(width - len(bracket + shape) - 3, 0)]}...{bracket}{shape}"[:width]


def _cut_front(text: str, width: int) -> str:
    return text if len(text) <= width else f"...{text[3 - width :]}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.3f}"
