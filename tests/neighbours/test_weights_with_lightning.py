"""Lightning: `WeightStep` makes each `training_step` one step, as `recoup.weights.step` does."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import recoup
from recoup.integrations.lightning import WeightStep
from tests.neighbours.trainers import lightning_trainer
from tests.oracle import assert_same_tensors

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(dataloader|num_workers|logging interval|isinstance|val_loader).*"
)


class Tied(LightningModule):
    """Encodes twice, and decodes by the weight of its embedding, in methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.encoder = nn.Embedding(8, 4), nn.Linear(4, 4)
        recoup.weight_noise(self, std=lambda step: 0.1 + 0.1 * step)
        self.breaks, self.losses, self.agree = False, [], []

    def training_step(self, batch, index):
        (ids,) = batch
        encoded = self.encoder(self.embedding(ids)) + self.encoder(self.embedding(ids.flip(0)))
        scores = nn.functional.linear(encoded, self.embedding.weight)
        self.agree.append(torch.equal(self.encoder.weight, self.encoder.weight))
        loss = nn.functional.cross_entropy(scores, ids)
        self.losses.append(float(loss.detach()))
        if self.breaks:
            raise RuntimeError("broken")
        return loss

    def validation_step(self, batch, index):
        assert self.encoder.weight is self.encoder.get_parameter("weight")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches():
    return DataLoader(TensorDataset(torch.arange(8).repeat(3)), batch_size=8)


def fit(tmp_path, module, *callbacks):
    torch.manual_seed(1)
    trainer = lightning_trainer(tmp_path, *callbacks, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, batches(), batches())
    return module


def by_hand():
    """The same training in a plain loop, whose steps are `recoup.weights.step`."""
    module = Tied()
    torch.manual_seed(1)
    optimizer = module.configure_optimizers()
    for _ in range(2):
        for batch in batches():
            with recoup.weights.step(module):
                loss = module.training_step(batch, 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        next(iter(batches()))  # validation draws the seed of its loader
    return module


def test_a_training_step_is_one_step(tmp_path):
    module, wanted = fit(tmp_path, Tied(), WeightStep()), by_hand()
    assert recoup.weights.applied(module)[0].step == 6
    assert (module.losses, module.agree) == (wanted.losses, [True] * 6)
    assert_same_tensors(module.state_dict(), wanted.state_dict())
    assert "training_step" not in vars(module)


def test_nothing_is_left_after_an_exception(tmp_path):
    module, callback = Tied(), WeightStep()
    module.breaks = True
    with pytest.raises(RuntimeError, match="broken"):
        fit(tmp_path, module, callback)
    assert "training_step" not in vars(module)
    module.breaks = False
    own = module.__dict__["training_step"] = module.training_step
    fit(tmp_path, module, callback)
    assert vars(module)["training_step"] is own
    assert recoup.weights.applied(module)[0].step == 7
