"""The command ``recoup``, also as ``python -m recoup``.

::

    recoup explain models.py:build                    # all plans for a model, from fast to small
    recoup explain models.py:build --budget 8GiB      # one; exits with 1 if no step fits, for CI
    recoup explain models.py:build --estimate         # the same, before anything runs
    recoup explain models:build --html step.html      # the memory of a step, event by event
    recoup curve chain.py:build --depths 4 8 16       # memory and time against depth
"""

from __future__ import annotations

import argparse
import logging
import platform
import re
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import recoup
from recoup._core.settings import replaced
from recoup.errors import BudgetError, RecoupError
from recoup.memory import Point, curve, format_bytes, load_builder
from recoup.memory.figures import check_format, check_page, require_matplotlib
from recoup.planning.arguments import model_and_arguments

# What the user can correct.
_MISTAKES = (ValueError, OSError, ImportError)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: The arguments; those of the process if None.

    Returns:
        The exit code: 0; 2 if an argument is wrong; 1 if no step fits in the budget, or the
        builder, the model or the loss raised; 130 if it was stopped. For all but 0, one line on
        stderr gives the reason.
    """
    try:
        given = vars(_parser().parse_args(args))
    except SystemExit as ending:  # help, the version, or a mistake that the parser found
        return int(ending.code or 0)
    folder = str(Path.cwd())
    sys.path.insert(0, folder)  # a script has its own folder there, which is not the user's
    try:
        command: Callable[..., None] = given.pop("command")
        with replaced(sys, "argv", sys.argv[:1]):  # a builder may parse arguments of its own
            command(**given)
    except SystemExit as ending:  # of the builder, the model or the loss, when imported or called
        return _failed(str(_StepError("the code that was run", ending)), 1)
    except _StepError as error:
        return _failed(_one_line(error), 1)
    except (*_MISTAKES, RecoupError) as error:
        is_mistake = isinstance(error, _MISTAKES) and not isinstance(error, BudgetError)
        return _failed(_with_options(error, given), 2 if is_mistake else 1)
    except KeyboardInterrupt:
        print("recoup: stopped", file=sys.stderr)
        return 130
    finally:
        sys.path.remove(folder)
    return 0


class _StepError(Exception):
    """The builder, the model or the loss raised an error."""

    def __init__(self, what: str, error: BaseException) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename}, line {last.lineno}"
        super().__init__(f"{what} raised {type(error).__name__}: {_one_line(error)} ({place})")


@contextmanager
def _blaming(what: str) -> Generator[None]:
    """Return a context whose errors are those of the user's code, but for mistakes."""
    try:
        yield
    except (*_MISTAKES, RecoupError):
        raise
    except Exception as error:
        raise _StepError(what, error) from error


def _loaded(name: str) -> Any:
    """Return the function of this name; its module may fail where it is imported."""
    with _blaming(f"the import of {name}"):
        return load_builder(name)


def _explain(
    build: str, budget: str | None, blocks: str | None, loss: str | None, device: str,
    figure: Path | None, html: Path | None, compile: bool, tiles: bool, estimate: bool,  # noqa: A002
) -> None:  # fmt: skip
    """Print what each block of a model does with its residuals to keep to a number of bytes."""
    options: Any = {"blocks": blocks, "loss": None if loss is None else _loaded(loss)}
    if estimate:
        others = {"figure": figure, "html": html, "compile": compile, "tiles": tiles}
        others["device"] = device != "cpu"
        for name, given in others.items():
            if given:
                raise ValueError(f"`--{name}` needs a step that is run. Leave `--estimate` out.")
        builder = _loaded(build)
        with _blaming("the step"):
            print(recoup.estimate(builder, budget, **options))
        return
    _check_files(figure, html)
    model, args, kwargs = _built(build, device)
    if budget is not None:
        options["budget"] = budget
    with _blaming("the step"), _logged("recoup.planning"):
        make: Any = recoup.plan
        plan = make(model, *args, **options, compile=compile, tiles=tiles, **kwargs)
        print(plan)
        if figure is not None:
            print(f"figure: {plan.figure(figure)}")
        if html is not None:
            applied = None if budget is None else plan
            timeline = recoup.timeline(model, *args, plan=applied, loss=options["loss"], **kwargs)
            print(f"timeline: {timeline.page(html)}")


@contextmanager
def _logged(name: str) -> Generator[None]:
    """Return a context in which a logger writes to stderr, such as what is being compiled."""
    logger, handler = logging.getLogger(name), logging.StreamHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _curve(
    build: str, depths: list[int], memories: list[str], device: str, repeats: int,
    figure: Path | None,
) -> None:  # fmt: skip
    """Print a table of memory and time against depth, each point measured in its own process."""
    num_points, num_measured = len(set(depths)) * len(set(memories)), 0

    def report(point: Point) -> None:
        nonlocal num_measured
        num_measured += 1
        seconds = "" if point.seconds is None else f", {1e3 * point.seconds:.4g} ms"
        print(
            f"[{num_measured}/{num_points}] depth {point.depth}, {point.memory}: "
            f"{format_bytes(point.peak_bytes)}{seconds}",
            file=sys.stderr,
            flush=True,
        )

    _check_files(figure)
    modes = [int(memory) if memory.isdecimal() else memory for memory in memories]
    measured = curve(build, depths, modes, device=device, repeats=repeats, progress=report)
    print(measured)
    if figure is not None:
        print(f"figure: {measured.figure(figure)}")


def _built(build: str, device: str) -> tuple[nn.Module, list[Any], dict[str, Any]]:
    """Return the model and its arguments, on the device."""
    builder, name = _loaded(build), f"`build` ({build})"
    try:
        built: Any = builder()
    except Exception as error:
        raise _StepError(name, error) from error
    model, args, kwargs = model_and_arguments(built, name)
    try:
        model.to(device)
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    except (RuntimeError, AssertionError) as error:  # torch raises either
        raise ValueError(f"`--device` is {device}, which torch cannot use here.") from error
    return model, args, kwargs


def _check_files(figure: Path | None, html: Path | None = None) -> None:
    """Raise before minutes of measuring if a file cannot be written; make its folder."""
    if html is not None:
        check_page(html.suffix)
    if figure is not None:
        check_format(figure.suffix)
        require_matplotlib()
    for path in filter(None, (figure, html)):
        if path.is_dir():
            raise ValueError(f"{path} is a folder, but must be a file.")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with TemporaryFile(dir=path.parent):
                pass
        except OSError as error:
            raise ValueError(f"{path} cannot be written: {error.strerror}.") from error


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return " ".join(str(error).split()) or type(error).__name__


def _with_options(error: BaseException, options: Iterable[str]) -> str:
    """Return an error in a line, one of recoup's own with options in place of arguments."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if str(frame.f_globals.get("__name__")).partition(".")[0] not in ("recoup", "__main__"):
        return _one_line(error)
    names = "|".join({*options} - {"build"})
    return re.sub(rf"`({names})(?:=[^`]*)?`", r"`--\1`", _one_line(error))


def _failed(text: str, code: int) -> int:
    printable = "".join(c if c.isprintable() else " " for c in text)
    print(f"recoup: error: {printable}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def __init__(self, *, prog: str, about: str, usage: str = "[options]") -> None:
        usage, about = f"{prog} {usage}", f"{about[0].upper()}{about[1:]}."
        super().__init__(prog=prog, usage=usage, description=about, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise SystemExit(_failed(f"{message.rstrip('.')}. See `{self.prog} --help`.", 2))


def _parser() -> _Parser:
    about = "training that remembers less"
    parser = _Parser(prog="recoup", about=about, usage="COMMAND [options]")
    python, own = platform.python_version(), recoup.__version__
    version = f"recoup {own} (Python {python}, torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version, help="say the versions")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Callable[..., None], about: str, build: str) -> Callable[..., Any]:
        usage = "BUILD [options]"
        sub = commands.add_parser(name, prog=f"recoup {name}", about=about, usage=usage, help=about)
        sub.set_defaults(command=run)
        where = "a function, as module:function or path/to/file.py:function, that is called "
        sub.add_argument("build", metavar="BUILD", help=where + build)
        sub.add_argument("--device", default="cpu", help="cpu or an accelerator (cpu)")
        return sub.add_argument

    file: Any = {"type": Path, "metavar": "FILE"}
    add = command(
        "explain",
        _explain,
        "say what a plan does with a model, for a number of bytes",
        "without arguments and returns (model, argument, ...), where a last dict stands for "
        "keyword arguments",
    )
    add("--budget", metavar="BYTES", help="of a step, such as 2GiB; all plans if left out")
    add("--blocks", metavar="REGEX", help="names of the blocks; found if left out")
    add("--loss", help="a function from what the model returns to a scalar, given as BUILD is")
    add("--figure", help="draw the plan, or all: .png, .svg or .pdf", **file)
    add("--html", help="a page of the memory of a step, event by event: .html", **file)
    add("--compile", action="store_true", help="let blocks run compiled where that pays")
    add("--tiles", action="store_true", help="let the output layer run in tiles")
    add("--estimate", action="store_true", help="run nothing, and take no memory")

    add = command(
        "curve",
        _curve,
        "measure memory and time of a training step against depth",
        "as build(depth=..., memory=...) and returns (module, inputs), or a function that runs a "
        "training step",
    )
    number: Any = {"type": int, "metavar": "N"}
    depths, modes = [4, 8, 16, 32], ["linear", "sqrt"]
    add("--depths", nargs="+", default=depths, help="numbers of blocks (4 8 16 32)", **number)
    modes_help = "memory modes, or numbers of slots (linear sqrt); constant needs invertible blocks"
    add("--memories", nargs="+", metavar="MODE", default=modes, help=modes_help)
    repeats = "timed steps, of which the best counts; 0 for no times (3)"
    add("--repeats", default=3, help=repeats, **number)
    add("--figure", help="draw the curve: .png, .svg or .pdf", **file)
    return parser


if __name__ == "__main__":
    sys.exit(main())
