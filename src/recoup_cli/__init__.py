"""The command ``recoup`` before torch is there: commands, options, help and mistakes.

`import recoup` imports torch, and a recipe Lightning, which takes seconds. Nothing in this package
does, so that help and mistakes are answered at once; recipes are imported when they are to run.
"""

from __future__ import annotations

from recoup_cli.commands import main
from recoup_cli.mistakes import MistakeError

__all__ = ["MistakeError", "main"]
