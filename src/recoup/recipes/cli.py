"""The command ``recoup``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recoup.recipes.mistakes import MistakeError, mistakes_reported

__all__ = ["main"]

_USAGE = """\
recoup: training that remembers less

  recoup flow fit        train a flow on pictures, points, or the built-in digits
  recoup flow evaluate   say how well it codes pictures that it has not seen
  recoup flow sample     draw from it: pictures, or the density of points
  recoup flow demo       train in three memory modes, and compare them
  recoup lm fit          train a language model on your text, or on Python's documentation
  recoup lm evaluate     say how well it predicts text that it has not seen
  recoup lm generate     let it write
  recoup curve           measure memory and time against depth, for any builder
  recoup explain         say what a plan does with a model, for a number of bytes

Each says more with --help."""

Command = Callable[[Sequence[str]], int]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        args: The arguments; those of the process if None.

    Returns:
        0, or 2 if something was wrong that the user can mend, of which one line on stderr tells.
    """
    args = sys.argv[1:] if args is None else list(args)
    if not args or args[0] in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    try:
        command, rest = _command(args)
        return command(rest)
    except MistakeError as mistake:
        print(f"recoup: error: {mistake}", file=sys.stderr)
        return 2


def _command(args: Sequence[str]) -> tuple[Command, Sequence[str]]:
    """Find the longest name of a command that the arguments begin with."""
    for length in (2, 1):
        command = _COMMANDS.get(" ".join(args[:length]))
        if command is not None:
            return command, args[length:]
    if args[0] in {name.split()[0] for name in _COMMANDS} and (
        len(args) == 1 or args[1] in ("-h", "--help")
    ):
        return _show_usage, ()
    raise MistakeError(
        f"there is no command `{' '.join(args[:2])}`. The commands are {', '.join(_COMMANDS)}."
    )


def _show_usage(args: Sequence[str]) -> int:
    print(_USAGE)
    return 0


# What each command needs is imported when it is called: torch and Lightning take seconds.


def _fit(args: Sequence[str]) -> int:
    from recoup.recipes.flow.train import train

    return train(args)


def _evaluate(args: Sequence[str]) -> int:
    from recoup.recipes.flow.evaluate import evaluate

    return _call(evaluate, "flow evaluate", args)


def _sample(args: Sequence[str]) -> int:
    from recoup.recipes.flow.sample import sample

    return _call(sample, "flow sample", args)


def _demo(args: Sequence[str]) -> int:
    from recoup.recipes.flow.demo import demo

    return _call(demo, "flow demo", args)


def _lm_fit(args: Sequence[str]) -> int:
    from recoup.recipes.language_model.train import train

    return train(args)


def _lm_evaluate(args: Sequence[str]) -> int:
    from recoup.recipes.language_model.evaluate import evaluate

    return _call(evaluate, "lm evaluate", args)


def _lm_generate(args: Sequence[str]) -> int:
    from recoup.recipes.language_model.generate import generate

    return _call(generate, "lm generate", args)


def _curve(args: Sequence[str]) -> int:
    from jsonargparse import ArgumentParser

    from recoup.recipes.curve_command import curve_command

    parser = ArgumentParser(
        prog="recoup curve",
        description="Measure memory and time of a training step against depth.",
        exit_on_error=False,
    )
    parser.add_argument("build", help="the builder, module:function or path/to/file.py:function")
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--memories", nargs="+", default=["linear", "sqrt", "constant"])
    parser.add_argument("--device", default="cpu", help="cpu or a CUDA device")
    parser.add_argument("--repeats", type=int, default=3, help="steps under the clock; 0 for none")
    parser.add_argument("--csv", type=Path, help="write the points to this file")
    parser.add_argument("--figure", type=Path, help="draw the curve: .png, .svg or .pdf")
    with mistakes_reported():
        options = parser.parse_args(list(args))
    return curve_command(**options.as_dict())


def _explain(args: Sequence[str]) -> int:
    from jsonargparse import ArgumentParser

    from recoup.recipes.explain_command import explain_command

    parser = ArgumentParser(
        prog="recoup explain",
        description="Say what each block of a model does to keep to a number of bytes.",
        exit_on_error=False,
    )
    parser.add_argument(
        "build",
        help="a function that returns (model, argument, ...), module:function or path.py:function",
    )
    parser.add_argument("--budget", required=True, help="bytes for a step, such as 2GiB")
    parser.add_argument("--blocks", help="names of the blocks, a regular expression")
    parser.add_argument("--loss", help="from what the model returns to a scalar, as the builder")
    parser.add_argument("--device", default="cpu", help="cpu or a CUDA device")
    parser.add_argument("--figure", type=Path, help="draw the plan: .png, .svg or .pdf")
    with mistakes_reported():
        options = parser.parse_args(list(args))
    return explain_command(**options.as_dict())


def _call(function: Callable[..., int], name: str, args: Sequence[str]) -> int:
    """Call `function` with options named and explained by its signature and docstring."""
    from jsonargparse import ArgumentParser

    description = (function.__doc__ or "").strip().splitlines()[0]
    parser: Any = ArgumentParser(
        prog=f"recoup {name}", description=description, exit_on_error=False
    )
    parser.add_function_arguments(function, as_positional=False)
    # The options of `fit` that have two words are written with a hyphen, and so may these.
    names = [
        name.replace("-", "_").replace("__", "--", 1) + equals + value if name[:2] == "--" else arg
        for arg in args
        for name, equals, value in [arg.partition("=")]
    ]
    with mistakes_reported():
        options = parser.parse_args(names)
    return function(**options.as_dict())


_COMMANDS: dict[str, Command] = {
    "flow fit": _fit,
    "flow evaluate": _evaluate,
    "flow sample": _sample,
    "flow demo": _demo,
    "lm fit": _lm_fit,
    "lm evaluate": _lm_evaluate,
    "lm generate": _lm_generate,
    "curve": _curve,
    "explain": _explain,
}


if __name__ == "__main__":
    sys.exit(main())
