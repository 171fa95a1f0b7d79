"""Files under the names of other libraries: a table, put to the very modules that wrote them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import recoup
from recoup.weights import to_plain_names


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, parametrizations.weight_norm])
@pytest.mark.parametrize("build", [lambda: nn.Linear(3, 4), lambda: nn.Conv1d(3, 4, 2)])
def test_a_weight_norm_of_torch(build, norm):
    plain, x = build(), torch.randn(2, 3, 3)
    theirs = norm(copy.deepcopy(plain), "weight")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(1.5)
    ours = recoup.weight_norm(plain)
    names = to_plain_names(theirs.state_dict())
    ours.load_state_dict(names, strict=True)
    torch.testing.assert_close(ours(x), theirs(x))
    assert to_plain_names(names).keys() == names.keys()


NAMES = {  # as fastai and salesforce have them, and gluon
    "rnns.0.weight_hh_l0_raw": "rnns.0.weight_hh_l0",
    "rnns.0.module.weight_ih_l0": "rnns.0.weight_ih_l0",
    "rnns.1.module.weight_hh_l0_raw": "rnns.1.weight_hh_l0",
    "0.l1_i2h_weight": "0.weight_ih_l1",
    "0.r0_h2h_bias": "0.bias_hh_l0_reverse",
    "_unfused.1.r_cell.h2r_weight": "weight_hr_l1_reverse",
    "i2h_weight": "weight_ih",
    "encoder.weight": "encoder.weight",
    "module.decoder.bias": "module.decoder.bias",
}


def test_the_names_of_others():
    file = {name: torch.full((2,), place) for place, name in enumerate(NAMES)}
    got = to_plain_names(file)
    assert list(got) == list(NAMES.values())
    assert all(got[new] is file[old] for old, new in NAMES.items())


@pytest.mark.parametrize("copy_first", [True, False])
def test_what_a_wrapper_computes_with_is_left_out(copy_first):
    raw, dropped = torch.ones(2), torch.zeros(2)
    file = {"module.weight_hh_l0": dropped, "weight_hh_l0_raw": raw}
    file = file if copy_first else dict(reversed(file.items()))
    assert to_plain_names(file)["weight_hh_l0"] is raw


def test_arrays_and_what_is_none():
    np = pytest.importorskip("numpy")
    assert list(to_plain_names({"0.gamma": np.ones(2, "float32")})) == ["0.weight"]
    assert list(to_plain_names({"0.gamma": torch.ones(2)})) == ["0.gamma"]
    with pytest.raises(ValueError, match="is a dict"):
        to_plain_names({"model": {}})
    with pytest.raises(ValueError, match="different values"):
        to_plain_names({"weight": torch.ones(1), "parametrizations.weight.original": torch.ones(2)})
