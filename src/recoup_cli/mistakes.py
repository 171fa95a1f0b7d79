"""Errors that the user can mend, told in one line without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["MistakeError", "StoppedError", "check_checkpoint", "missing_module", "near"]


class MistakeError(Exception):
    """An error whose text is one line: what is wrong, and what to do.

    Args:
        text: The line.
        exit_code: What the command exits with: 2 for what the user asked for, 1 for a failure.
    """

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__("".join(c if c.isprintable() else " " for c in text))
        self.exit_code = exit_code


class StoppedError(MistakeError):
    """A run that ended by a signal. Its text says how it is gone on with."""


def missing_module(error: ImportError) -> str:
    """Return the line that says which module is missing, and how to install it."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        what = f"{error.name.partition('.')[0]} is needed, but is not installed."
    else:
        what = f"A module cannot be imported ({' '.join(str(error).split())})."
    return f'{what} Install all that recipes need by `pip install "recoup[recipes]"`.'


def check_checkpoint(path: str | Path, option: str) -> None:
    """Raise a ValueError if a checkpoint that an option names is not there."""
    if not Path(path).is_file():
        raise ValueError(
            f"`{option}` is {path}, which is not there. Give a .ckpt file, such as "
            "checkpoints/best.ckpt in the folder of a run."
        )


def near(name: str, names: Iterable[str]) -> str:
    """Return a question that names what is spelled nearly as `name`; empty if nothing is."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean `{found[0]}`?" if found else ""
