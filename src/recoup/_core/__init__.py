"""The core: saved-tensor hooks, replay of randomness, regions, stages, the executor."""

from __future__ import annotations
