"""The addresses of the project in the metadata of a distribution: those of where it is built."""

from __future__ import annotations

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "RECOUP_REPOSITORY"  # the environment variable that a release sets


class Addresses(MetadataHookInterface):
    """`[project.urls]`, below the address of the repository; none where it is not known."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the addresses to the metadata."""
        repository = os.environ.get(REPOSITORY, "").rstrip("/")
        pages = {
            "Repository": "",
            "Documentation": "/tree/main/docs",
            "Changelog": "/blob/main/CHANGELOG.md",
            "Issues": "/issues",
        }
        metadata["urls"] = {name: repository + page for name, page in pages.items() if repository}
