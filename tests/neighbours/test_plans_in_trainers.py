"""Byte budgets in a trainer of Lightning: the same training, in the bytes that were promised."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from contextlib import nullcontext
from typing import Any, NamedTuple

import lightning
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import BudgetError
from recoup.integrations.lightning import MemoryBudget
from recoup.planning.options import PlanOptions
from tests.neighbours.planned import Net
from tests.neighbours.trainers import lightning_trainer
from tests.oracle import assert_same_tensors
from tests.planned_zoo import is_plain, transformers_or_skip

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(dataloader|num_workers|logging interval|torch.jit|isinstance|srun|val_loader).*"
)


class Trained(NamedTuple):
    model: nn.Module
    losses: list[float]

    def assert_same(self, wanted: Trained) -> None:
        assert self.losses == wanted.losses
        assert_same_tensors(self.model.state_dict(), wanted.model.state_dict())

    def assert_no_trace(self) -> None:
        assert is_plain(self.model)
        for each in self.model.modules():
            assert {"log", "log_dict", "training_step"}.isdisjoint(vars(each)), type(each).__name__
            assert not each._forward_pre_hooks


class Follows(lightning.pytorch.Callback):
    plans: Any = ()

    def __init__(self) -> None:
        super().__init__()
        self.peaks, self.families = [], []

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        self.tracker = StorageTracker("cpu").__enter__()

    def on_after_backward(self, *_: Any, **__: Any) -> None:
        self.tracker.__exit__(None, None, None)
        self.peaks.append(self.tracker.peak_bytes)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.families.append(len(self.plans[0].family) if self.plans else 0)


class Module(LightningModule):
    """Logs, counts, draws, and trains a net with batch norm."""

    def __init__(self, *, is_manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.automatic_optimization = not is_manual
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        (x,) = batch
        loss = (self.net(x) - x).square().mean()
        self.log("train", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(folder: Any, *callbacks: Any, module: Any = None, sizes=(64,) * 4, **options: Any):
    module, ends = module or Module(), [0, *itertools.accumulate(sizes)]
    torch.manual_seed(7)
    rows = TensorDataset(torch.randn(256, 32))
    batches = [list(range(*pair)) for pair in itertools.pairwise(ends)]
    data = DataLoader(rows, batch_sampler=batches)
    torch.manual_seed(3)
    lightning_trainer(folder, *callbacks, max_epochs=2, **options).fit(module, data, data)
    return Trained(module, module.losses)


def budget_of_a_step() -> int:
    x = torch.randn(64, 32)
    loss = lambda y: (y - x).square().mean()  # noqa: E731
    whole = recoup.plan(Module().net, x, budget="1 GiB", loss=loss)
    return whole.least_bytes + (whole.most_bytes - whole.least_bytes) // 4


TRAININGS = {"plain": {}, "accumulated": {"accumulate_grad_batches": 2}}
TRAININGS["bf16"] = {"precision": "bf16-mixed"}


@pytest.mark.slow
@pytest.mark.parametrize("training", TRAININGS)
def test_the_same_training_within_the_budget(tmp_path, training):
    options, budget, plans = TRAININGS[training], budget_of_a_step(), []
    callback, follows = MemoryBudget(budget, show=plans.append), Follows()
    found = train(tmp_path, callback, follows, **options)
    found.assert_same(train(tmp_path, **options))
    found.assert_no_trace()
    assert plans == [callback.plan]
    assert not callback.plan.is_applied
    assert len(follows.peaks) == 8
    assert max(follows.peaks) <= budget


@pytest.mark.slow
def test_batches_of_several_sizes_are_planned_again(tmp_path):
    """They keep to the budget, and in the second epoch nothing is planned."""
    budget, follows, sizes = budget_of_a_step(), Follows(), (40, 30, 64, 58, 64)
    follows.plans = []
    callback = MemoryBudget(budget, show=follows.plans.append, replan=True)
    found = train(tmp_path, callback, follows, sizes=sizes)
    found.assert_same(train(tmp_path, sizes=sizes))
    found.assert_no_trace()
    assert max(follows.peaks) <= budget
    assert max(follows.families) > 1
    assert follows.families[5:] == follows.families[4:5] * 5


class Around(nn.Module):
    """Has the attributes of what it wraps, as models of peft do, with checkpointing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in "abc"))
        self.base.gradient_checkpointing = True

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)

    def forward(self, x):
        return self.base(x)


def budget_of_transformers() -> Any:
    transformers_or_skip()
    from recoup.integrations.transformers import MemoryBudget

    return MemoryBudget


@pytest.mark.parametrize("budget", ["1 GiB", 1000])
def test_own_checkpointing_is_left_as_it_was_found(budget):
    model, callback = Around(), budget_of_transformers()(budget)
    for _ in range(2):
        with pytest.warns(UserWarning, match="its own activation checkpointing on"):
            callback.on_train_begin(None, None, None, model=model)
        assert not model.gradient_checkpointing
        with pytest.raises(BudgetError) if budget == 1000 else nullcontext():
            model(torch.ones(64, 8))
        if budget != 1000:
            callback.on_train_end(None, None, None)
        assert model.base.gradient_checkpointing
        assert "gradient_checkpointing" not in vars(model)


OTHER = {  # than the defaults
    "loss": torch.sum, "blocks": ["net"], "budget_of": "total", "compile": True, "exact": False,
    "offload_to": "host", "tiles": True, "num_forwards": 2, "headroom": 0.5,
}  # fmt: skip
# A module returns its loss, and is planned with all forwards that it has in a step.
BUDGETS = [
    (lambda: MemoryBudget, {"loss", "num_forwards", "optimizer", "holds_output"}),
    (budget_of_transformers, {"optimizer", "holds_output"}),
]


@pytest.mark.parametrize(("budget", "left_out"), BUDGETS)
def test_every_option_of_a_plan_is_one_of_a_trainer_and_is_checked_there(budget, left_out):
    budget = budget()
    own = inspect.signature(budget.__init__).parameters
    fields = [f for f in dataclasses.fields(PlanOptions) if f.name not in left_out]
    wanted = {field.name: field.default for field in fields}
    assert {name: own[name].default for name in wanted} == wanted
    assert set(own) == {"self", "budget", *wanted, "show", "replan"}
    given = {name: OTHER[name] for name in wanted}
    options = budget("1 GiB", **given).options
    assert {name: getattr(options, name) for name in wanted} == given
    for options, words in (
        ({"budget": -1}, "`budget` is -1"),
        ({"budget_of": "all"}, "`budget_of`"),
        ({"compile": "fast"}, "`compile` is 'fast'"),
        ({"compile": True, "replan": True}, "`replan` is True with `compile`"),
    ):
        with pytest.raises(ValueError, match=words):
            budget(**{"budget": "1 GiB"} | options)


def test_lightning_refuses_what_it_cannot_plan_and_leaves_no_trace(tmp_path):
    for module, budget, words in (
        (Module(is_manual=True), "1 GiB", "automatic_optimization"),
        (Module(), 1000, "`budget`"),
    ):
        with pytest.raises(ValueError, match=words):
            train(tmp_path, MemoryBudget(budget), module=module)
        Trained(module, []).assert_no_trace()


class LeavesOut(Module):
    """Its step takes no number, and leaves out batches at some places."""

    def __init__(self, places: Any) -> None:
        super().__init__()
        self.places = places

    def training_step(self, batch: Any) -> Any:
        place = self.trainer.fit_loop.batch_idx
        return None if place in self.places else super().training_step(batch, place)

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]) if outputs else None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("places", [(0,), (0, 1, 2, 3)])
def test_a_first_batch_without_a_loss_is_left_out(tmp_path, places):
    budget = MemoryBudget("1 MiB")
    found = train(tmp_path, budget, module=LeavesOut(places))
    found.assert_same(train(tmp_path, module=LeavesOut(places)))
    assert (budget.plan is None) == (len(places) == 4)
