"""The other libraries that are installed; a missing one is left out, with a message."""

import importlib.util
from collections.abc import Mapping
from typing import TypeVar

__all__ = ["installed"]

T = TypeVar("T")
PACKAGES = ("FrEIA", "memcnn", "nflows", "normflows", "revlib", "revtorch", "zuko")


def installed(contestants: Mapping[str, T]) -> dict[str, T]:
    """Return the contestants without those of a library that is missing.

    Args:
        contestants: what is compared, by name; each name begins with the name of its package.
    """
    found = {}
    for name, contestant in contestants.items():
        package = name.split(",")[0]
        if package in PACKAGES and importlib.util.find_spec(package) is None:
            print(f"   {name}: left out, since it is not installed", flush=True)
        else:
            found[name] = contestant
    return found
