"""Tables of numbers for the screen."""

from __future__ import annotations

import io
from collections.abc import Sequence

__all__ = ["table"]

# A line beneath the header, in characters that every terminal can show; rich's own has others.
_BOX = "    \n    \n -- \n    \n    \n    \n    \n    \n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows beneath a header, the first column aligned left and the others right.

    Example:
        >>> print(table(["memory", "MiB"], [["linear", "12.0"], ["sqrt", "3.4"]]))
        memory    MiB
        -------------
        linear   12.0
        sqrt      3.4
    """
    # Imported here, as the builder of the demo's curve lives beside a table, and needs torch alone.
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table

    lines = Table(box=Box(_BOX, ascii=True), show_edge=False, pad_edge=False)
    for number, name in enumerate(header):
        lines.add_column(name, justify="right" if number else "left")
    for row in rows:
        lines.add_row(*row)
    # No lines are broken: the width is that of the table.
    console = Console(file=io.StringIO(), width=10**4, markup=False, emoji=False)
    with console.capture() as shown:
        console.print(lines)
    return shown.get().rstrip()
