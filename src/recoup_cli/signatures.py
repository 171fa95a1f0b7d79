"""The options of a function or class, read from its source: importing it would take seconds."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from recoup_cli.mistakes import MistakeError

__all__ = ["Option", "package_folder", "signature_of"]

_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "Path": Path}
_TRUTHS = {"true": True, "yes": True, "false": False, "no": False}
_ARGUMENT = re.compile(r"^    (\w+): (.*(?:\n      .*)*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the command line.

    Attributes:
        name: Name of the argument.
        choices: Types and literal values that it takes, None included; empty if not known.
        is_many: Whether it takes several values.
        default: Default value.
        is_needed: Whether it has no default.
        help: Text of the docstring.
    """

    name: str
    choices: tuple[object, ...]
    is_many: bool
    default: object
    is_needed: bool
    help: str

    def value(self, text: str, shown: str) -> object:
        """Return the value of the option that a text stands for.

        Args:
            text: The text on the command line.
            shown: The option as on the command line, for the message.

        Raises:
            MistakeError: When the option takes no such value.
        """
        for choice in self.choices or (str,):
            value = _read(text, choice)
            if value is not ...:
                return value
        null_first = sorted(self.choices, key=lambda choice: choice is not None)
        names = ", ".join(
            "null" if choice is None else getattr(choice, "__name__", repr(choice))
            for choice in null_first
        )
        raise MistakeError(
            f"`{shown}` is {text}, but must be {'one of ' * (len(null_first) > 1)}{names}."
        )


@cache
def package_folder(package: str) -> Path | None:
    """Return the folder of a package without importing it; None if it is not installed."""
    try:
        spec = find_spec(package)
    except ImportError:  # from a finder that blocks it
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@cache
def signature_of(file: Path, name: str) -> tuple[str, tuple[Option, ...]]:
    """Return the first line of a docstring, and the options.

    Args:
        file: The source file.
        name: Name of the function, or of the class, whose `__init__` is then read.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    found = next(n for n in tree.body if isinstance(n, _DEFINED) and n.name == name)
    text = ast.get_docstring(found) or ""
    if isinstance(found, ast.ClassDef):
        found = next(n for n in found.body if isinstance(n, ast.FunctionDef) and n.name == _INIT)
    aliases = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    helps = {
        argument: " ".join(words.split())
        for argument, words in _ARGUMENT.findall(inspect.cleandoc(text).partition("Args:")[2])
    }
    arguments = [*found.args.args, *found.args.kwonlyargs]
    num_needed = len(found.args.args) - len(found.args.defaults)
    defaults = [None] * num_needed + [*found.args.defaults, *found.args.kw_defaults]
    options = tuple(
        Option(
            argument.arg,
            _choices(argument.annotation, aliases),
            _is_many(argument.annotation),
            None if default is None else _constant(default),
            default is None,
            helps.get(argument.arg, ""),
        )
        for argument, default in zip(arguments, defaults, strict=True)
        if argument.arg != "self"
    )
    return (text.splitlines() or [""])[0], options


_DEFINED = (ast.FunctionDef, ast.ClassDef)
_INIT = "__init__"


def _choices(node: ast.expr | None, aliases: dict[str, ast.expr]) -> tuple[object, ...]:
    """Return the types and values of an annotation; none if a part of it is unknown here."""
    if isinstance(node, ast.BinOp):
        parts = [_choices(side, aliases) for side in (node.left, node.right)]
        return (*parts[0], *parts[1]) if all(parts) else ()
    if isinstance(node, ast.Constant) and node.value is None:
        return (None,)
    if isinstance(node, ast.Name):
        if node.id in aliases:
            return _choices(aliases[node.id], {})
        return (_TYPES[node.id],) if node.id in _TYPES else ()
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        if node.value.id == "Literal":
            values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return tuple(_constant(value) for value in values)
        if _is_many(node):
            return _choices(node.slice, aliases)
    return ()


def _is_many(node: ast.expr | None) -> bool:
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("Sequence", "list")
    )


def _constant(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ...


def _read(text: str, choice: object) -> object:
    """Return the value of a text as a type or a literal; ... if it has none."""
    if choice is None:
        return None if text.lower() in ("null", "none", "") else ...
    if choice is bool:
        return _TRUTHS.get(text.lower(), ...)
    if isinstance(choice, type):
        try:
            return choice(text)
        except ValueError:
            return ...
    return choice if text == str(choice) else ...
