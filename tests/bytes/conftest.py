"""Conditions under which bytes are counted."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.alive import step_of


@pytest.fixture(scope="module")
def measured():
    """One thread, on which buffers depend."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    step_of(torch.nn.Linear(2, 2), [torch.ones(1, 2)])  # what torch imports at first
    gc.collect()
    yield
    torch.set_num_threads(before)
