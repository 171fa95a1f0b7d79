"""Pruning and norms of torch replace a weight by a tensor: under noise of ours that is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, weight_norm

import recoup
from recoup.weights import applied, remove


def pruned(module):
    prune.l1_unstructured(module, "weight", 0.25)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch's old weight norm
@pytest.mark.parametrize("replace", [pruned, weight_norm])
def test_in_evaluation_too(replace):
    module = recoup.weight_dropout(nn.Linear(4, 4)).eval()
    with pytest.raises(ValueError, match=r"`weight` of Linear is to be replaced.*remove before"):
        replace(module)
    plain = remove(recoup.weight_dropout(nn.Linear(4, 4))).eval()
    replace(plain)
    assert torch.equal(plain.train()(torch.ones(1, 4)), plain(torch.ones(1, 4)))


def test_what_pruning_takes_back_is_noisy_and_listed():
    module = recoup.weight_dropout(nn.Linear(4, 4)).eval()
    with pytest.raises(ValueError, match="remove before"):
        pruned(module)
    assert [each.name for each in applied(module)] == ["weight"]
    assert set(dict(module.named_parameters())) == {"weight", "bias"}


def test_a_replica_has_tensors_for_parameters():
    module = recoup.weight_dropout(nn.Linear(4, 4)).eval()
    replica = module._replicate_for_data_parallel()
    replica.weight, replica.bias = module.weight.detach() + 1, module.bias
    assert torch.equal(replica(torch.zeros(1, 4)), module(torch.zeros(1, 4)))
    assert torch.equal(replica.weight, module.weight + 1)
