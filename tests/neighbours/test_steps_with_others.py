"""Stores of gradients and steps of weights in code of others: a trainer, a compiler, GPT-2."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import recoup
from recoup.errors import GradientError
from recoup.integrations.lightning import WeightStep
from tests.neighbours.trainers import lightning_trainer
from tests.oracle import assert_same_tensors
from tests.plan_oracle import Made

# What lightning says of small loaders, and of the trees of torch.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*(dataloader|num_workers|many workers|logging interval|isinstance|val_loader).*"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
EXACT = 1e-12


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
    assert_same_tensors(found.model.state_dict(), wanted.state_dict(), EXACT)
    assert (trainer.global_step, len(found.store)) == (3, 0)


in_all_modes = pytest.mark.parametrize("mode", ["auto", "grad", "harvest", "collecting"])


def assert_collected(model, losses, mode, call=None):
    """A store collects what plain backwards leave in `.grad`, where it leaves nothing."""
    plain = copy.deepcopy(model)
    torch.manual_seed(3)
    for loss in losses:
        loss(plain).backward()
    want = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    store = recoup.GradStore(model.parameters())
    torch.manual_seed(3)
    for loss in losses:
        value = loss(model if call is None else call)
        if mode == "collecting":
            with store.collecting():
                value.backward()
        else:
            store.backward(value, mode=mode)
    assert all(p.grad is None for p in model.parameters())
    assert_same_tensors(store.named(model), want, EXACT)
    return want


@pytest.mark.sampled(1)
@in_all_modes
def test_a_compiled_model(mode, fresh_compiler):
    """What it does not use is absent; the names are those of the model inside."""
    parts = {"used": nn.Linear(6, 6), "norm": nn.LayerNorm(6), "unused": nn.Linear(6, 6)}
    model = Made(lambda model, x: model.norm(model.used(x)).tanh(), **parts).double()
    compiled = torch.compile(model, backend="aot_eager")
    losses = [lambda model, x=x: model(x).square().mean() for x in torch.randn(3, 4, 6).double()]
    want = assert_collected(model, losses, mode, call=compiled)
    assert sorted(want) == ["norm.bias", "norm.weight", "used.bias", "used.weight"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.sampled(4)
@in_all_modes
@pytest.mark.parametrize("kind", [None, "non-reentrant", "reentrant"])
def test_gpt2_with_its_own_checkpoints(kind, mode):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 31, "n_positions": 16}
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).double().train()
    assert model.lm_head.weight is model.transformer.wte.weight
    if kind is not None:
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
        if kind == "reentrant":
            model.enable_input_require_grads()
    words = torch.randint(31, (3, 2, 10))
    losses = [lambda m, x=x: m(input_ids=x, labels=x).loss for x in words]
    if kind == "reentrant" and mode == "grad":
        with pytest.raises(GradientError, match="use_reentrant=False"):
            assert_collected(model, losses, mode)
        assert all(p.grad is None for p in model.parameters())
        return
    assert len(assert_collected(model, losses, mode)) == len(list(model.parameters()))
