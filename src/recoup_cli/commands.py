"""The commands, and running one of them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from recoup_cli import options
from recoup_cli.fit_arguments import FLOW, LANGUAGE_MODEL, Fit, long_names
from recoup_cli.mistakes import MistakeError, check_checkpoint, missing_module, report
from recoup_cli.parser import Parser
from recoup_cli.version import version_line

__all__ = ["FLOW", "LANGUAGE_MODEL", "main"]


class _Command(NamedTuple):
    """A command, or a group of them.

    Attributes:
        help: What it does.
        target: Module below ``recoup.recipes``, and its function to call; a group has none.
        add_options: Adds the options, which are the arguments of the function.
        fit: In place of that, the description of a command that trains, whose function takes the
            command line as it is.
        usage: What follows the name.
    """

    help: str
    target: str = ""
    add_options: Callable[[Parser], None] | None = None
    fit: Fit | None = None
    usage: str = "[options]"


_COMMANDS = {
    "flow": _Command("normalizing flows: fit, evaluate, sample, demo", usage="COMMAND [options]"),
    "flow fit": _Command(FLOW.help, "flow.train:train", fit=FLOW),
    "flow evaluate": _Command(
        "say how well a flow codes pictures that it has not seen",
        "flow.evaluate:evaluate",
        options.add_flow_evaluate,
    ),
    "flow sample": _Command(
        "draw from a flow: pictures, or the density of points",
        "flow.sample:sample",
        options.add_sample,
    ),
    "flow demo": _Command(
        "train in three memory modes, and compare them", "flow.demo:demo", options.add_demo
    ),
    "lm": _Command("language models: fit, evaluate, generate", usage="COMMAND [options]"),
    "lm fit": _Command(LANGUAGE_MODEL.help, "language_model.train:train", fit=LANGUAGE_MODEL),
    "lm evaluate": _Command(
        "say how well a language model predicts text that it has not seen",
        "language_model.evaluate:evaluate",
        options.add_lm_evaluate,
    ),
    "lm generate": _Command(
        "let a language model write", "language_model.generate:generate", options.add_generate
    ),
    "curve": _Command(
        "measure memory and time against depth, for any builder",
        "curve_command:curve_command",
        options.add_curve,
        usage="BUILD [options]",
    ),
    "explain": _Command(
        "say what a plan does with a model, for a number of bytes",
        "explain_command:explain_command",
        options.add_explain,
        usage="BUILD [options]",
    ),
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
    try:
        target, arguments = _parsed(args)
    except SystemExit:  # a parser has printed the help or the version
        return 0
    except ValueError as error:
        raise MistakeError(str(error)) from None
    module, _, function = target.partition(":")
    try:
        imported = importlib.import_module(f"recoup.recipes.{module}")  # torch takes seconds
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "recoup":
            raise
        raise MistakeError(missing_module(error)) from error
    return getattr(imported, function)(**arguments)


def _parsed(args: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the function to call, and its arguments.

    Raises:
        MistakeError: When the parser refuses an argument.
        ValueError: When a file is not there.
        SystemExit: When the arguments ask for help.
    """
    known, rest = _parser().parse_known_args(args)
    given = vars(known)
    parser, command = given.pop("parser"), given.pop("command")
    if command.fit is not None:
        long_names(rest, command.fit)  # finds what it can before the import
        return command.target, {"args": rest}
    if rest:
        parser.refuse(rest)
    if not command.target:
        parser.parse_args(["--help"])
    if "checkpoint" in given:
        check_checkpoint(given["checkpoint"], "--checkpoint")
    return command.target, given


def _parser() -> Parser:
    about = _Command("training that remembers less", usage="COMMAND [options]")
    top = Parser(prog="recoup", about=about.help, usage=about.usage)
    top.set_defaults(command=about)
    version = "say which recoup, Python and torch these are"
    top.add_argument("--version", action="version", version=version_line(), help=version)
    groups = {"": top.add_subparsers(title="commands", metavar="COMMAND")}
    for name, command in _COMMANDS.items():
        group, _, last = name.rpartition(" ")
        parser = groups[group].add_parser(
            last,
            prog=f"recoup {name}",
            about=command.help,
            help=command.help,
            usage=command.usage,
            add_help=command.fit is None,
        )
        parser.set_defaults(command=command)
        if not command.target:
            groups[name] = parser.add_subparsers(title="commands", metavar="COMMAND")
        elif command.add_options is not None:
            command.add_options(parser)
    return top
