"""A picture without points, or without the path of a file, is an error that says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import recoup
from recoup.memory import Curve


def test_a_curve_without_points(tmp_path):
    with pytest.raises(ValueError, match="`points` is empty"):
        Curve("chain:build", "cpu", ()).figure(tmp_path / "curve.png")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("budget", [None, "1 GiB"])
@pytest.mark.parametrize("path", [None, 3, ""])
def test_no_path(budget, path):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    given = {} if budget is None else {"budget": budget}
    with pytest.raises(ValueError, match=r"`path` is .*must be the path of a file"):
        recoup.plan(model, torch.ones(2, 4), **given).figure(path)
