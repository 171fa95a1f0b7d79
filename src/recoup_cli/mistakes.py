"""Errors that the user can correct, reported in one line without a traceback."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "MistakeError",
    "StoppedError",
    "check_checkpoint",
    "missing_module",
    "near",
    "report",
]


class MistakeError(Exception):
    """An error with a text of one line: the problem, and the remedy.

    Args:
        text: The line.
        exit_code: Exit code of the command: 2 for a mistake in its arguments, 1 for a failure.
    """

    def __init__(self, text: str, exit_code: int = 2) -> None:
        super().__init__("".join(c if c.isprintable() else " " for c in text))
        self.exit_code = exit_code


class StoppedError(MistakeError):
    """The error of a run that a signal ended. Its text says how to resume the run."""


def report(mistake: MistakeError) -> int:
    """Print an error as every command does, in one line on stderr; return the exit code."""
    prefix = "recoup:" if isinstance(mistake, StoppedError) else "recoup: error:"
    print(f"{prefix} {mistake}", file=sys.stderr)
    return mistake.exit_code


def missing_module(error: ImportError) -> str:
    """Return a line that names the missing module, and says how to install it."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        what = f"{error.name.partition('.')[0]} is needed, but is not installed."
    else:
        what = f"A module cannot be imported ({' '.join(str(error).split())})."
    return f'{what} Install all that recipes need by `pip install "recoup[recipes]"`.'


def check_checkpoint(path: str | Path, option: str) -> None:
    """Raise a ValueError if the checkpoint that an option names does not exist."""
    if not Path(path).is_file():
        raise ValueError(
            f"`{option}` is {path}, but there is no such file. Give a .ckpt file, such as "
            "checkpoints/best.ckpt in the folder of a run."
        )


def near(name: str, names: Iterable[str]) -> str:
    """Return a question that suggests the name closest to `name`; empty if none is close."""
    found = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean `{found[0]}`?" if found else ""
