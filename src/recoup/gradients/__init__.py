"""Gradients as values: collected, summed, compared, and applied in one optimizer step."""

from __future__ import annotations

from recoup.gradients.segments import segments_backward
from recoup.gradients.stepping import step
from recoup.gradients.store import GradStore

__all__ = ["GradStore", "segments_backward", "step"]
