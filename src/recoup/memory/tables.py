"""Tables of text in aligned columns."""

from __future__ import annotations

from collections.abc import Container, Sequence

__all__ = ["aligned"]


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Return a line for each row, with the columns `left` aligned left and the others right.

    Example:
        >>> from recoup.memory.tables import aligned
        >>> for line in aligned([["memory", "MiB"], ["linear", "12.0"], ["sqrt", "3.4"]]):
        ...     print(line)
        memory   MiB
        linear  12.0
        sqrt     3.4
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
