"""Arguments of commands that are one function: options from its signature and docstring."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recoup_cli.mistakes import MistakeError, check_checkpoint, near
from recoup_cli.signatures import Option, signature_of

__all__ = ["help_of", "options_in"]


def options_in(args: Sequence[str], *, prog: str, file: Path, function: str) -> dict[str, Any]:
    """Return the arguments for a call of a function.

    Args:
        args: The command line; names of two words have a hyphen or an underscore.
        prog: Name of the command.
        file: The source file of the function.
        function: Name of the function.

    Raises:
        MistakeError: When an argument is unknown, missing, or of another type.
    """
    _, options = signature_of(file, function)
    parser = _parser(prog, file, function)
    given, unknown = parser.parse_known_args([_with_hyphens(arg) for arg in args])
    if unknown:
        names = [_shown(option) for option in options]
        raise MistakeError(
            f"there is no option `{' '.join(unknown)}`.{near(unknown[0], names)} See `--help` for "
            "those that there are."
        )
    found = vars(given)
    for option in options:
        if found[option.name] is ... and option.is_needed:
            raise MistakeError(f"`{_shown(option)}` is needed. See `--help`.")
        if found[option.name] is ...:
            found[option.name] = option.default
    if "checkpoint" in found:
        try:
            check_checkpoint(found["checkpoint"], "--checkpoint")
        except ValueError as error:
            raise MistakeError(str(error)) from None
    return found


def help_of(*, prog: str, file: Path, function: str) -> str:
    """Return the text of ``--help`` of a command."""
    return _parser(prog, file, function).format_help().rstrip()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        """Raise a MistakeError instead of printing the usage and exiting."""
        raise MistakeError(f"{message}. See `--help`.")


class _Formatter(argparse.HelpFormatter):
    """A formatter whose lines are as long as those of ``fit --help``."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"max_help_position": 26, "width": 98, **settings})


def _parser(prog: str, file: Path, function: str) -> _Parser:
    description, options = signature_of(file, function)
    positional = "".join(f" {each.name.upper()}" for each in options if each.name == _POSITIONAL)
    parser = _Parser(
        prog=prog,
        usage=f"{prog}{positional} [options]",
        description=description,
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    for option in options:
        settings: dict[str, Any] = {
            "type": _reader(option),
            "default": ...,
            "help": _explained(option).replace("%", "%%"),
        }
        if option.name == _POSITIONAL:
            metavar = option.name.upper()
            parser.add_argument(option.name, nargs="?", metavar=metavar, **settings)
        elif option.choices == (bool,) and option.default is False:
            del settings["type"]
            parser.add_argument(_shown(option), action="store_const", const=True, **settings)
        else:
            many = {"nargs": "+"} if option.is_many else {}
            parser.add_argument(_shown(option), metavar=_metavar(option), **many, **settings)
    return parser


_POSITIONAL = "build"  # of `curve` and `explain`


def _reader(option: Option) -> Callable[[str], object]:
    return lambda text: option.value(text, _shown(option))


def _shown(option: Option) -> str:
    return option.name if option.name == _POSITIONAL else f"--{option.name.replace('_', '-')}"


def _metavar(option: Option) -> str:
    """Return the placeholder of a value: short, so that explanations stand beside the options."""
    for kind, shown in ((int, "N"), (float, "X"), (Path, "PATH")):
        if kind in option.choices:
            return shown
    return {"checkpoint": "CKPT", "data": "PATH", "out": "PATH"}.get(option.name, "VALUE")


def _explained(option: Option) -> str:
    text = option.help.rstrip(".").replace("if None", "if left out")
    if option.is_needed:
        return f"{text} (needed)."
    if option.default in (None, "", False):
        return f"{text}."
    default = str(option.default)
    if option.is_many:
        default = default.strip("()").replace(",", "").replace("'", "")
    return f"{text} ({default})."


def _with_hyphens(arg: str) -> str:
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if arg.startswith("--") else arg
