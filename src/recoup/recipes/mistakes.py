"""What a user can mend: told in one line, without a traceback."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from contextlib import contextmanager

from recoup.errors import RecoupError

__all__ = ["Mistake", "mistakes_reported"]


class Mistake(Exception):
    """Something that the user can mend. Its text is one line: what is wrong, and what to do."""


@contextmanager
def mistakes_reported() -> Generator[None]:
    """Turn the errors of preparing a run into a `Mistake`.

    Only preparing: an error in the middle of training is a fault of the program, and keeps its
    traceback.
    """
    try:
        yield
    except (argparse.ArgumentError, ValueError, OSError, ImportError, RecoupError) as error:
        raise Mistake(_one_line(error)) from error


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}."
    # A line that only says where the parser was is no help beside what it says next.
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line) or type(error).__name__
