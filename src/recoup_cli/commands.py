"""The commands, and running one of them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recoup_cli import fit_help
from recoup_cli.arguments import help_of, options_in
from recoup_cli.fit_arguments import SHORT_NAMES, Fit, check_arguments
from recoup_cli.mistakes import MistakeError, missing_module, near, report
from recoup_cli.signatures import package_folder
from recoup_cli.version import version_line

__all__ = ["FLOW", "LANGUAGE_MODEL", "main"]

_USAGE = """\
usage: recoup COMMAND [options]

Training that remembers less. Commands:

  recoup flow fit        train a flow on pictures, points, or the built-in digits
  recoup flow evaluate   say how well it codes pictures that it has not seen
  recoup flow sample     draw from it: pictures, or the density of points
  recoup flow demo       train in three memory modes, and compare them
  recoup lm fit          train a language model on your text, or on Python's documentation
  recoup lm evaluate     say how well it predicts text that it has not seen
  recoup lm generate     let it write
  recoup curve           measure memory and time against depth, for any builder
  recoup explain         say what a plan does with a model, for a number of bytes
  recoup --version       say which recoup, Python and torch these are

Each says more with --help."""

FLOW = Fit(
    "recipes/flow",
    "FlowTraining",
    "Images",
    fit_help.FLOW,
    sources=("moons", "rings", "checkerboard"),
)
LANGUAGE_MODEL = Fit(
    "recipes/language_model",
    "LanguageModelTraining",
    "Texts",
    fit_help.LANGUAGE_MODEL,
    short_names={**SHORT_NAMES, "--weight-noise": "--model.weight_noise"},
    default_config="tiny",
)


@dataclass(frozen=True)
class _Command:
    """A command.

    Attributes:
        module: Module to import when the command runs, below ``recoup.recipes``.
        function: Function of the module to call.
        fit: Description of the arguments, if the command trains.
    """

    module: str
    function: str
    fit: Fit | None = None

    @property
    def source(self) -> Path:
        folder = package_folder("recoup") or Path()
        return folder.joinpath("recipes", *self.module.split(".")).with_suffix(".py")


_COMMANDS = {
    "flow fit": _Command("flow.train", "train", FLOW),
    "flow evaluate": _Command("flow.evaluate", "evaluate"),
    "flow sample": _Command("flow.sample", "sample"),
    "flow demo": _Command("flow.demo", "demo"),
    "lm fit": _Command("language_model.train", "train", LANGUAGE_MODEL),
    "lm evaluate": _Command("language_model.evaluate", "evaluate"),
    "lm generate": _Command("language_model.generate", "generate"),
    "curve": _Command("curve_command", "curve_command"),
    "explain": _Command("explain_command", "explain_command"),
}


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        args: The arguments; those of the process if None.

    Returns:
        0; 2 if the user has to correct something, 1 if the command failed, 130 or 143 if it was
        stopped. For all but 0, one line on stderr gives the reason.
    """
    args = sys.argv[1:] if args is None else list(args)
    try:
        return _run(args)
    except MistakeError as mistake:
        return report(mistake)
    except KeyboardInterrupt:
        print("recoup: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(args: Sequence[str]) -> int:
    if args[:1] == ["--version"]:
        print(version_line())
        return 0
    name, rest = _named(args)
    command = _COMMANDS.get(name)
    is_help = "-h" in rest or "--help" in rest
    if command is None:
        print(_USAGE)
        return 0
    if command.fit is not None:
        if is_help:
            print(_help(command.fit))
            return 0
        check_arguments(rest, command.fit)
        return _imported(command)(rest)
    about: Any = {
        "prog": f"recoup {name}",
        "file": command.source,
        "function": command.function,
    }
    if is_help:
        print(help_of(**about))
        return 0
    options = options_in(rest, **about)
    return _imported(command)(**options)


def _named(args: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the longest command name that `args` begin with, and the rest; "" means help."""
    for length in (2, 1):
        name = " ".join(args[:length])
        if name in _COMMANDS:
            return name, args[length:]
    wants_help = {"-h", "--help", "help"}
    if not args or args[0] in wants_help:
        return "", ()
    is_group = args[0] in {name.partition(" ")[0] for name in _COMMANDS}
    if is_group and (len(args) == 1 or args[1] in wants_help):
        return "", ()
    given = " ".join(args[:2])
    raise MistakeError(
        f"there is no command `{given}`.{near(given, _COMMANDS) or near(args[0], _COMMANDS)} The "
        f"commands are {', '.join(_COMMANDS)}."
    )


def _imported(command: _Command) -> Any:
    """Import and return the function of a command; this imports torch, which takes seconds."""
    try:
        module = importlib.import_module(f"recoup.recipes.{command.module}")
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "recoup":
            raise
        raise MistakeError(missing_module(error)) from error
    return getattr(module, command.function)


def _help(fit: Fit) -> str:
    """Return the help of ``fit``, with a line for each family of configurations."""
    names = sorted(path.stem for path in fit.configs.glob("*.yaml"))
    firsts = dict.fromkeys(name.partition("-")[0] for name in names)
    lines = [", ".join(name for name in names if name.startswith(f"{first}-")) for first in firsts]
    listed = "".join(f"\n                       {line}" for line in lines if line)
    return fit.help.replace("{configs}", listed)
