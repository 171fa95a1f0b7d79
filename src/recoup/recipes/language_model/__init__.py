"""The language model recipe: train an AWD-LSTM on text, then evaluate it and let it write."""

from __future__ import annotations

from recoup.recipes.language_model.fitting import Fitted, fit
from recoup.recipes.language_model.network import LanguageModel

__all__ = ["Fitted", "LanguageModel", "fit"]
