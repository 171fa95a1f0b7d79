"""Builders: functions that are named by a string, as on a command line or by another process."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["BuildError", "build_name", "load_builder"]


class BuildError(ValueError):
    """The builder cannot be found, or its result cannot be used as a training step."""


def build_name(build: Callable[..., object] | str) -> str:
    """Return a name by which another process can import a builder: ``"module:function"``.

    Args:
        build: a function at the top level of a module or script, or its name, in which a path to
            a file (``"models/chain.py:build"``) can stand for the module.

    Returns:
        The name.

    Raises:
        ValueError: if another process cannot import `build`.

    Example:
        >>> from recoup.memory.builders import build_name, load_builder
        >>> build_name("chain.py:build")
        'chain.py:build'
        >>> build_name(load_builder)
        'recoup.memory.builders:load_builder'
    """
    if isinstance(build, str):
        module, _, function = build.rpartition(":")
        if not module or not function.isidentifier():
            raise ValueError(
                f'`build` is "{build}", but must name a function as "module:function" or '
                '"path/to/file.py:function".'
            )
        return build
    module = getattr(build, "__module__", None) or "?"
    name = getattr(build, "__qualname__", None) or repr(build)
    if getattr(sys.modules.get(module), name, None) is not build:
        raise ValueError(
            f"`build` is {name} of {module}, which another process cannot import, as each point is "
            "measured in a fresh one. Define a function at the top level of a module, and give "
            'that or its name, "module:function".'
        )
    if module != "__main__":
        return f"{module}:{name}"
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None or not Path(script).is_file():
        raise ValueError(
            f"`build` is {name} of an interactive session, which another process cannot import. "
            'Put it into a file, and give "path/to/file.py:function".'
        )
    return f"{Path(script).resolve()}:{name}"


def load_builder(name: str) -> Callable[..., object]:
    """Import a function by its name, such as ``"module:function"``.

    A module is imported as by ``import``. A file is run as a module of its own, with its folder at
    the front of `sys.path`, as Python does for a script.

    Args:
        name: ``"module:function"`` or ``"path/to/file.py:function"``; a path is relative to the
            current folder.

    Returns:
        The function.

    Raises:
        ValueError: if there is no such module, file or function.
        Exception: any that the module or file raises when it is imported.

    Example:
        >>> from recoup.memory import load_builder
        >>> load_builder("math:sqrt")(16)
        4.0
    """
    module_name, _, function_name = name.rpartition(":") if isinstance(name, str) else ("",) * 3  # pyright: ignore[reportUnnecessaryIsInstance]
    if not module_name or not function_name:
        raise BuildError(
            f"`name` is {name!r}, which names no function: give "
            '"module:function" or "path/to/file.py:function".'
        )
    if module_name.endswith(".py"):
        path = Path(module_name).resolve()
        spec = importlib.util.spec_from_file_location("__recoup_build__", path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise BuildError(f"there is no file {path}.")
        sys.path.insert(0, str(path.parent))  # as Python does for a script
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module was found, but not one that it imports
            raise BuildError(
                f"{error}. Run where it can be imported, or name its file, "
                f'"path/to/file.py:{function_name}".'
            ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise BuildError(f"there is no function {function_name} in {module_name}.")
    return function
