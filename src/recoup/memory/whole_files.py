"""Files that are written completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from recoup._arguments import shown

__all__ = ["path_of", "write_whole"]


def path_of(path: Any) -> Path:
    """Return the path of a file, or raise a ValueError if it is none."""
    if not isinstance(path, str | os.PathLike) or not Path(cast("str", path)).name:
        raise ValueError(f"`path` is {shown(path)}, but must be the path of a file.")
    return Path(cast("str", path))


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file atomically; missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
