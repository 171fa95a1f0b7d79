"""Lightning: a step of weights for each `training_step`, and stores in manual optimization."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import recoup
from recoup.integrations.lightning import WeightStep
from tests.neighbours.trainers import lightning_trainer
from tests.oracle import assert_same_tensors

# What lightning says of small loaders, and of the trees of torch.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*(dataloader|num_workers|many workers|logging interval|isinstance|val_loader).*"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Tied(LightningModule):
    """Encodes twice, and decodes by the weight of its embedding, in methods of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.encoder = nn.Embedding(8, 4), nn.Linear(4, 4)
        recoup.weight_noise(self, std=lambda step: 0.1 + 0.1 * step)
        self.breaks, self.losses = False, []

    def training_step(self, batch, index):
        (ids,) = batch
        encoded = self.encoder(self.embedding(ids)) + self.encoder(self.embedding(ids.flip(0)))
        scores = nn.functional.linear(encoded, self.embedding.weight)
        assert torch.equal(self.encoder.weight, self.encoder.weight)
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


def test_a_training_step_is_one_step(tmp_path):
    found, wanted = fit(tmp_path, Tied(), WeightStep()), Tied()
    torch.manual_seed(1)
    optimizer = wanted.configure_optimizers()
    for _ in range(2):
        for batch in batches():
            with recoup.weights.step(wanted):
                loss = wanted.training_step(batch, 0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        next(iter(batches()))  # validation draws the seed of its loader
    assert recoup.weights.applied(found)[0].step == 6
    assert found.losses == wanted.losses
    assert_same_tensors(found.state_dict(), wanted.state_dict())
    assert "training_step" not in vars(found)


def test_nothing_is_left_after_an_exception(tmp_path):
    module = Tied()
    own, module.breaks = module.training_step, True
    for kept in ({}, {"training_step": own}):
        vars(module).update(kept)
        with pytest.raises(RuntimeError, match="broken"):
            fit(tmp_path, module, WeightStep())
        assert vars(module).get("training_step") is kept.get("training_step")


class Manual(LightningModule):
    automatic_optimization = False

    def __init__(self, way=None):
        super().__init__()
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.store, self.way = recoup.GradStore(self.model.parameters()), way

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def training_step(self, batch, batch_idx):
        loss, is_around = self.model(batch).square().mean(), self.way == "collecting"
        with self.store.collecting() if is_around else nullcontext():
            (self.manual_backward if is_around else self.store.backward)(loss)
        if batch_idx % 2:
            self.store.mean_().clip_norm_(0.05)
            self.store.step(self.optimizers())


@pytest.mark.parametrize("way", ["collecting", "backward"])
def test_manual_optimization(way, tmp_path):
    found, data = Manual(way), torch.randn(6, 5, 4).double()
    trainer = lightning_trainer(tmp_path, max_epochs=1)
    trainer.fit(found, DataLoader(data, batch_size=None))
    wanted = Manual().model
    optimizer = torch.optim.AdamW(wanted.parameters(), lr=0.05)
    for window in data.split(2):
        optimizer.zero_grad()
        sum(wanted(x).square().mean() / 2 for x in window).backward()
        nn.utils.clip_grad_norm_(wanted.parameters(), 0.05)
        optimizer.step()
    assert_same_tensors(found.model.state_dict(), wanted.state_dict(), 1e-12)
    assert (trainer.global_step, len(found.store)) == (3, 0)
