"""Builders: functions that are named by a string, as on a command line."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

__all__ = ["BuildError", "load_builder"]


class BuildError(ValueError):
    """The builder cannot be found, or its result cannot be used as a training step."""


def load_builder(name: str) -> Callable[..., object]:
    """Import ``"module:function"`` or ``"path/to/file.py:function"``."""
    module_name, _, function_name = name.rpartition(":")
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
