"""Tables of numbers for the screen."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["table"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows beneath a header, the first column aligned left and the others right.

    Example:
        >>> print(table(["memory", "MiB"], [["linear", "12.0"], ["sqrt", "3.4"]]))
        memory   MiB
        ------  ----
        linear  12.0
        sqrt     3.4
    """
    first, *others = (max(map(len, column)) for column in zip(header, *rows, strict=True))
    form = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    lines = [header, ["-" * width for width in (first, *others)], *rows]
    return "\n".join(form.format(*line).rstrip() for line in lines)
