"""Numbers of bytes as text, such as ``"1.5 GiB"``, and tables of them."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from fractions import Fraction

from recoup._arguments import check_whole, is_whole, shown
from recoup._core.devices import Peaks

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("B", "KB", "MB", "GB", "TB", "PB", "EB")
_UNITS: dict[str, int] = {
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY)},
    **{unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL)},
    "": 1,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)


def parse_bytes(value: int | str, *, name: str = "value") -> int:
    """Parse a number of bytes, such as ``"1.5 GiB"``.

    Args:
        value: bytes as an `int`, or a number followed by a unit: ``B``; ``KB``, ``MB``, ``GB``,
            ``TB`` (powers of 1000); ``KiB``, ``MiB``, ``GiB``, ``TiB`` (powers of 1024). Case and
            spaces do not matter; a number alone counts bytes.
        name: the name of the argument in the error message.

    Returns:
        The number of bytes; a fraction of a byte is dropped.

    Raises:
        ValueError: if `value` is negative or cannot be parsed.

    Example:
        >>> from recoup.memory import parse_bytes
        >>> parse_bytes("1.5 KiB"), parse_bytes("2GB"), parse_bytes(64)
        (1536, 2000000000, 64)
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is not None and match[2].lower() in _UNITS:
            return int(Fraction(match[1].removesuffix(".")) * _UNITS[match[2].lower()])
    elif is_whole(value, 0, 2**64 - 1):
        return int(value)
    raise ValueError(
        f"`{name}` is {shown(value)}, which is no number of bytes. Give an int of at least 0, or a "
        'string such as "1.5 GiB", "64 KiB" or "2 GB".'
    )


def format_bytes(num_bytes: int) -> str:
    """Format a number of bytes with four significant digits and a binary unit.

    Args:
        num_bytes: the number of bytes; may be negative.

    Returns:
        Text that `parse_bytes` parses (unless negative) to within 0.05 percent, or one byte.

    Example:
        >>> from recoup.memory import format_bytes
        >>> format_bytes(1536), format_bytes(3 * 2**30), format_bytes(12)
        ('1.5 KiB', '3 GiB', '12 B')
    """
    check_whole(-(2**100), most=2**100, num_bytes=num_bytes)
    amount, power = float(abs(num_bytes)), 0
    # 1023.95 would be formatted as "1024", so it takes the next unit.
    while amount >= 1023.5 and power < len(_BINARY) - 1:
        amount, power = amount / 1024, power + 1
    digits = f"{amount:.4g}" if amount < 10_000 else f"{amount:.0f}"
    return f"{'-' if num_bytes < 0 else ''}{digits} {_BINARY[power]}"


def shown_beside(peaks: Peaks) -> str:
    """Return what to print after the allocated peak: the others, on a device that has others."""
    if peaks.reserved is None:
        return ""
    requested, reserved = map(format_bytes, (peaks.requested, peaks.reserved))
    return f" (requested {requested}, reserved {reserved})"


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = (0,)) -> list[str]:
    """Return a line for each row, with the columns `left` aligned left and the others right.

    Example:
        >>> from recoup.memory.size import aligned
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
