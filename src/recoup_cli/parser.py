"""The parser of the command line: argparse, with errors in one line.

jsonargparse would read the options off the functions, but must import them for that, and torch with
them, which takes seconds; and who has recoup without extras has no jsonargparse. So options are
declared to argparse, and only those of ``fit``, which are hundreds, are left to Lightning's parser.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from recoup_cli.mistakes import MistakeError, near

__all__ = ["Parser", "positive_int"]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are a `MistakeError`, and which leaves out what is not given.

    Args:
        about: What the command does; it begins with a verb in lower case.
        usage: What follows the name of the command.
        settings: Further arguments of an `ArgumentParser`.
    """

    def __init__(self, *, prog: str, about: str, usage: str, **settings: Any) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}",
            description=f"{about[0].upper()}{about[1:]}.",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            **settings,
        )
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """Raise a MistakeError instead of printing the usage and exiting."""
        raise MistakeError(f"{message}. See `{self.prog} --help`.")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Raise the error of arguments that there are not."""
        question = near(unknown[0].partition("=")[0], self._option_string_actions)
        raise MistakeError(
            f"there is no option `{' '.join(unknown)}`.{question} See `{self.prog} --help`."
        )


def positive_int(text: str) -> int:
    """Return the number that a text stands for; the parser reports the error."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)
