"""The command ``recoup`` without torch: commands, options, help and mistakes.

`import recoup` imports torch, and a recipe imports Lightning, which takes seconds. This package
imports neither, so that help and error messages appear at once; recipes are imported to run.
"""

from __future__ import annotations

from recoup_cli.commands import main
from recoup_cli.mistakes import MistakeError

__all__ = ["MistakeError", "main"]
