"""Batches that a trainer leaves out: the plan is made with the next one."""

from __future__ import annotations

import pytest
import torch

from tests.plan_oracle import dense

lightning = pytest.importorskip("lightning.pytorch")


class Module(lightning.LightningModule):
    def __init__(self, left_out):
        super().__init__()
        self.net, self.left_out = dense(4, 8), left_out

    def training_step(self, batch, batch_idx):
        return None if batch_idx in self.left_out else self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trained(left_out, *callbacks):
    model, rows = Module(left_out), torch.arange(32.0).view(4, 1, 8).repeat(1, 4, 1) / 32
    trainer = lightning.Trainer(
        accelerator="cpu", callbacks=list(callbacks), enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=False, logger=False, max_epochs=1,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(rows, batch_size=None))
    return model.state_dict()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("left_out", [(0,), (0, 1, 2, 3)])
def test_a_first_batch_without_a_loss_is_left_out(left_out):
    """R10"""
    from recoup.integrations.lightning import MemoryBudget

    want = trained(left_out)
    budget = MemoryBudget("1 MiB")
    found = trained(left_out, budget)
    assert all(torch.equal(found[name], value) for name, value in want.items())
    assert (budget.plan is None) == (len(left_out) == 4)
