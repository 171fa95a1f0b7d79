"""A weight without entries has no norm: that is said before anything is changed."""

from __future__ import annotations

import pytest
from torch import nn

import recoup
from recoup.weights import applied


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("empty", [(3, 0), (0, 3)])
def test_weight_norm_changes_none_of_a_tree(empty, dim):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(*empty), nn.Linear(3, 3))
    names, kinds = list(module.state_dict()), [type(each) for each in module]
    with pytest.raises(ValueError, match=r"`1\.weight` has shape .*Let `pattern` leave it out"):
        recoup.weight_norm(module, dim=dim)
    assert list(module.state_dict()) == names
    assert applied(module) == []
    assert [type(each) for each in module] == kinds
    recoup.weight_norm(module, r"[02]\.weight", dim=dim)
    assert [each.name for each in applied(module)] == ["0.weight", "2.weight"]
