"""Byte budgets in the trainers of others: the same training, in the bytes that were promised."""

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
from tests.planned_zoo import MODELS, is_plain, transformers_or_skip

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(dataloader|num_workers|logging interval|torch.jit|isinstance|srun|val_loader).*"
)
ITS_OWN = "its own activation checkpointing on"


# -- trainers, and a way to ask both for the same --------------------------------------------------


class Trained(NamedTuple):
    """A model after its training, and the losses of the steps."""

    model: nn.Module
    losses: list[float]

    def assert_same(self, wanted: Trained) -> None:
        assert self.losses == wanted.losses
        assert_same_tensors(self.model.state_dict(), wanted.model.state_dict())

    def assert_no_trace(self) -> None:
        for each in self.model.modules():
            assert {"log", "log_dict"}.isdisjoint(vars(each)), type(each).__name__
            assert not each._forward_pre_hooks
            # transformers itself gives some of them another forward.
            own = [type(value) for name, value in vars(each).items() if "forward" in name]
            assert all(kind.__module__.partition(".")[0] != "recoup" for kind in own)


class Following:
    """The peaks of the steps, and how many plans there were after each."""

    plans: Any = ()

    def __init__(self) -> None:
        super().__init__()
        self.peaks, self.families = [], []

    def begin(self, *_: Any, **__: Any) -> None:
        self.tracker = StorageTracker("cpu").__enter__()

    def end(self, *_: Any, **__: Any) -> None:
        self.tracker.__exit__(None, None, None)
        self.peaks.append(self.tracker.peak_bytes)

    def count(self, *_: Any, **__: Any) -> None:
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


class OfLightning:
    budget = MemoryBudget
    num_planning = 0  # steps that a plan is made in
    share = 1 / 4  # of the way from the least bytes to the most, for a budget
    # A module returns its loss, and is planned with all forwards that it has in a step.
    left_out = {"loss", "num_forwards", "optimizer", "holds_output"}  # noqa: RUF012

    @staticmethod
    def train(folder: Any, *callbacks: Any, module: Any = None, **options: Any) -> Trained:
        module = module or Module()
        ends = [0, *itertools.accumulate(options.pop("sizes", (64,) * 4))]
        torch.manual_seed(7)
        rows = TensorDataset(torch.randn(256, 32))
        batches = [list(range(*pair)) for pair in itertools.pairwise(ends)]
        data = DataLoader(rows, batch_sampler=batches)
        torch.manual_seed(3)
        lightning_trainer(folder, *callbacks, max_epochs=2, **options).fit(module, data, data)
        return Trained(module, module.losses)

    @staticmethod
    def bytes_of() -> tuple[int, int]:
        """The least and the most that a training step takes."""
        x = torch.randn(64, 32)
        loss = lambda y: (y - x).square().mean()  # noqa: E731
        whole = recoup.plan(Module().net, x, budget="1 GiB", loss=loss)
        return whole.least_bytes, whole.most_bytes

    @staticmethod
    def follow() -> Any:
        class Follows(Following, lightning.pytorch.Callback):
            on_train_batch_start = Following.begin
            on_after_backward = Following.end
            on_train_batch_end = Following.count

        return Follows()


class OfTransformers:
    num_planning, share = 1, 1 / 2
    left_out = {"optimizer", "holds_output"}  # noqa: RUF012

    @property
    def budget(self) -> Any:
        transformers_or_skip()
        from recoup.integrations.transformers import MemoryBudget

        return MemoryBudget

    @staticmethod
    def train(folder: Any, *callbacks: Any, **options: Any) -> Trained:
        transformers = transformers_or_skip()
        pytest.importorskip("accelerate")
        torch.manual_seed(5)
        rows = [{"input_ids": row, "labels": row} for row in torch.randint(100, (32, 24))]
        model = MODELS["gpt2"]().model
        settings = {
            "per_device_train_batch_size": 4, "num_train_epochs": 1, "logging_steps": 1, "seed": 1,
            "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        }  # fmt: skip
        args = transformers.TrainingArguments(output_dir=str(folder), **settings | options)
        made = transformers.Trainer(model, args, None, rows, rows, callbacks=[*callbacks])
        made.train()
        history = made.state.log_history
        return Trained(model, [entry["loss"] for entry in history if "loss" in entry])

    @staticmethod
    def bytes_of() -> tuple[int, int]:
        tokens = torch.randint(100, (4, 24))
        model = MODELS["gpt2"]().model
        points = recoup.plan(model, input_ids=tokens, labels=tokens, holds_output=False).points
        return points[0].peak_bytes, points[-1].peak_bytes

    @staticmethod
    def follow() -> Any:
        class Follows(Following, transformers_or_skip().TrainerCallback):
            on_step_begin = Following.begin
            on_pre_optimizer_step = Following.end
            on_step_end = Following.count

            def on_substep_end(self, *_: Any, **__: Any) -> None:
                self.end()
                self.begin()

        return Follows()


TRAINERS: dict[str, Any] = {"lightning": OfLightning(), "transformers": OfTransformers()}


def budget_for(trainer: Any) -> int:
    least, most = trainer.bytes_of()
    return least + int((most - least) * trainer.share)


@pytest.fixture(params=TRAINERS)
def trainer(request):
    return TRAINERS[request.param]


# -- the same training -----------------------------------------------------------------------------

EVALUATES = {"eval_strategy": "steps", "eval_steps": 1, "gradient_accumulation_steps": 2}
TRAININGS = {
    "lightning": ("lightning", {}),
    "lightning accumulated": ("lightning", {"accumulate_grad_batches": 2}),
    "lightning bf16": ("lightning", {"precision": "bf16-mixed"}),
    "transformers accumulated": ("transformers", EVALUATES),
    "transformers compiled": (
        "transformers", {"torch_compile": True, "torch_compile_backend": "eager"}
    ),
    "transformers bf16, its own checkpointing": ("transformers", EVALUATES | {"bf16": True}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("training", TRAININGS)
def test_the_same_training_within_the_budget(tmp_path, training):
    name, options = TRAININGS[training]
    trainer, plans = TRAINERS[name], []
    budget = budget_for(trainer)
    callback, follows = trainer.budget(budget, show=plans.append), trainer.follow()
    own, says = {}, nullcontext()
    if "checkpointing" in training:
        fields = dataclasses.fields(transformers_or_skip().TrainingArguments)
        newer = "activation_checkpointing"  # than transformers 5.0
        own[newer if newer in {f.name for f in fields} else "gradient_checkpointing"] = True
        says = pytest.warns(UserWarning, match=ITS_OWN)
    with says:
        found = trainer.train(tmp_path, callback, follows, **options, **own)
    found.assert_same(trainer.train(tmp_path, **options))
    found.assert_no_trace()
    assert plans == [callback.plan]
    assert not callback.plan.is_applied
    assert len(follows.peaks) == 8
    assert max(follows.peaks[trainer.num_planning :]) <= budget


@pytest.mark.slow
def test_batches_of_several_sizes_are_planned_again(tmp_path):
    """They keep to the budget, and in the second epoch nothing is planned."""
    trainer, sizes = OfLightning(), {"sizes": (40, 30, 64, 58, 64)}  # the largest comes late
    budget, follows = budget_for(trainer), trainer.follow()
    follows.plans = []
    callback = MemoryBudget(budget, show=follows.plans.append, replan=True)
    found = trainer.train(tmp_path, callback, follows, **sizes)
    found.assert_same(trainer.train(tmp_path, **sizes))
    found.assert_no_trace()
    assert max(follows.peaks) <= budget
    assert max(follows.families) > 1
    assert follows.families[5:] == follows.families[4:5] * 5


@pytest.mark.slow
def test_a_second_training_has_a_plan_of_its_own(tmp_path):
    wanted, found, plans = Module(), Module(), []
    callback = MemoryBudget(OfLightning.bytes_of()[0] * 5 // 4, show=plans.append)
    for _ in range(2):
        of_plain = OfLightning.train(tmp_path, module=wanted)
        OfLightning.train(tmp_path, callback, module=found).assert_same(of_plain)
    assert plans[0] is not plans[1]
    assert is_plain(found)


# -- what a trainer has of its own -----------------------------------------------------------------


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


@pytest.mark.parametrize("budget", ["1 GiB", 1000])
def test_own_checkpointing_is_left_as_it_was_found(budget):
    model, callback = Around(), TRAINERS["transformers"].budget(budget)
    for _ in range(2):
        with pytest.warns(UserWarning, match=ITS_OWN):
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


def test_every_option_of_a_plan_is_one_of_a_trainer_and_is_checked_where_it_is_written(trainer):
    own = inspect.signature(trainer.budget.__init__).parameters
    fields = [f for f in dataclasses.fields(PlanOptions) if f.name not in trainer.left_out]
    wanted = {field.name: field.default for field in fields}
    assert {name: own[name].default for name in wanted} == wanted
    assert set(own) == {"self", "budget", *wanted, "show", "replan"}
    given = {name: OTHER[name] for name in wanted}
    options = trainer.budget("1 GiB", **given).options
    assert {name: getattr(options, name) for name in wanted} == given
    for options, words in (
        ({"budget": -1}, "`budget` is -1"),
        ({"budget_of": "all"}, "`budget_of`"),
        ({"compile": "fast"}, "`compile` is 'fast'"),
        ({"compile": True, "replan": True}, "`replan` is True with `compile`"),
    ):
        with pytest.raises(ValueError, match=words):
            trainer.budget(**{"budget": "1 GiB"} | options)


def test_lightning_refuses_what_it_cannot_plan_and_leaves_no_trace(tmp_path):
    for module, budget, words in (
        (Module(is_manual=True), "1 GiB", "automatic_optimization"),
        (Module(), 1000, "`budget`"),
    ):
        with pytest.raises(ValueError, match=words):
            OfLightning.train(tmp_path, MemoryBudget(budget), module=module)
        Trained(module, []).assert_no_trace()
        assert is_plain(module)


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
    found = OfLightning.train(tmp_path, budget, module=LeavesOut(places))
    found.assert_same(OfLightning.train(tmp_path, module=LeavesOut(places)))
    assert (budget.plan is None) == (len(places) == 4)
