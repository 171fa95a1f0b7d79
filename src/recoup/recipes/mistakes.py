"""Reporting errors of preparing a run in one line, without a traceback."""

from __future__ import annotations

import argparse
import re
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

_SETTING = re.compile(r'Parser key "(?P<name>[^"]+)": (?P<what>.*)')
_EXPECTED = re.compile(r"Expected an? (?:<class '(\w+)'>|typing\.Literal\[([^]]*)\])")
_GIVEN = re.compile(r"(?:Given|Got) value: (.*)$")


def one_line(error: Exception) -> str:
    """Return the message of an error in one line, with the option names of the command line."""
    if isinstance(error, ModuleNotFoundError):
        return missing_module(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}."
    text = " ".join(str(error).split()) or type(error).__name__
    if type(error).__name__ in _MISTAKES_OF_LIGHTNING:
        return f"{text} Change the settings of the Trainer, or leave them out."
    if text.startswith("the following arguments are required: "):
        return f"`--{text.rpartition(': ')[2].replace(', ', '`, `--')}` is needed. See `--help`."
    if text.startswith("unrecognized arguments: "):
        unknown = text.removeprefix("unrecognized arguments: ")
        return f"there is no option `{unknown}`. See `--help` for those that there are."
    setting = _SETTING.match(text)
    if setting is None:
        return text
    # Messages of the parser about types, in plain words.
    expected = list(dict.fromkeys(kind or names for kind, names in _EXPECTED.findall(text)))
    given = _GIVEN.search(text)
    if not expected or given is None:
        return f"`--{setting['name']}`: {setting['what']}"
    choices = ", ".join("null" if kind == "NoneType" else kind for kind in expected)
    return (
        f"`--{setting['name']}` is {given[1]}, but must be {'one of ' * (',' in choices)}{choices}."
    )
