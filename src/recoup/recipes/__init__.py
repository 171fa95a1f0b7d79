"""Recipes: whole jobs from one command line, built from recoup's public names."""

from __future__ import annotations
