"""Batches that a trainer leaves out: the plan is made with the next one."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning.pytorch")
from recoup.integrations.lightning import MemoryBudget
from tests.neighbours.test_plans_in_trainers import Module, OfLightning


class LeavesOut(Module):
    def __init__(self, places):
        super().__init__()
        self.places = places

    def training_step(self, batch, index):
        return None if index in self.places else super().training_step(batch, index)

    def on_train_batch_end(self, outputs, *_):
        self.losses.append(float(outputs["loss"]) if outputs else None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("places", [(0,), (0, 1, 2, 3)])
def test_a_first_batch_without_a_loss_is_left_out(tmp_path, places):
    """R10"""
    budget = MemoryBudget("1 MiB")
    found = OfLightning.train(tmp_path, budget, module=LeavesOut(places))
    found.assert_same(OfLightning.train(tmp_path, module=LeavesOut(places)))
    assert (budget.plan is None) == (len(places) == 4)
