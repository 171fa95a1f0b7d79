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
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [list(header), ["-" * width for width in widths], *map(list, rows)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
