"""Reporting errors of preparing a run in one line, without a traceback."""

from __future__ import annotations

import argparse
from collections.abc import Generator
from contextlib import contextmanager

from recoup.errors import RecoupError
from recoup_cli import MistakeError
from recoup_cli.mistakes import missing_module, report

__all__ = ["MISTAKES", "mistakes_reported", "one_line", "report_mistake"]


@contextmanager
def mistakes_reported() -> Generator[None]:
    """Turn the errors of preparing a run into a `MistakeError`.

    This covers preparation only: an error in the middle of training is a fault of the program, and
    keeps its traceback.
    """
    try:
        yield
    except MistakeError:
        raise
    except Exception as error:
        if not isinstance(error, MISTAKES) and type(error).__name__ not in _MISTAKES_OF_LIGHTNING:
            raise
        raise MistakeError(one_line(error)) from error


def report_mistake(error: Exception) -> int:
    """Print the error of a command in one line; return the exit code."""
    return report(error if isinstance(error, MistakeError) else MistakeError(one_line(error)))


# Errors that the user can correct.
MISTAKES = (argparse.ArgumentError, ValueError, OSError, ImportError, RecoupError)
_MISTAKES_OF_LIGHTNING = {"MisconfigurationException"}  # by name: its import takes seconds


def one_line(error: Exception) -> str:
    """Return the message of an error in one line, with what to do."""
    if isinstance(error, ModuleNotFoundError):
        return missing_module(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}."
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, argparse.ArgumentError):
        return f"{text}. See `--help-all`."
    if type(error).__name__ in _MISTAKES_OF_LIGHTNING:
        return f"{text} Change the settings of the Trainer, or leave them out."
    return text
