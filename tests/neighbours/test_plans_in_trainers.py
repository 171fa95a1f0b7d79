"""Byte budgets in the trainers of others: the same training, in the bytes that were promised."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import logging
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
from recoup.invertible import AdditiveCoupling
from recoup.planning.options import PlanOptions
from tests.neighbours.planned import Net, give_steady_times
from tests.planned_zoo import MODELS, is_plain, transformers_or_skip

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(dataloader|num_workers|logging interval|torch.jit|isinstance|srun|val_loader).*"
)
ITS_OWN = "its own activation checkpointing on"


class Trained(NamedTuple):
    """A model after its training, and the losses of the steps."""

    model: nn.Module
    losses: list[float]

    def assert_same(self, wanted: Trained) -> None:
        assert self.losses == wanted.losses
        state = self.model.state_dict()
        for name, value in wanted.model.state_dict().items():
            assert torch.equal(state[name], value), name

    def assert_no_trace(self) -> None:
        for each in self.model.modules():
            assert {"log", "log_dict"}.isdisjoint(vars(each)), type(each).__name__
            assert not each._forward_pre_hooks
            # transformers itself gives some of them another forward.
            own = [type(value) for name, value in vars(each).items() if "forward" in name]
            assert all(kind.__module__.partition(".")[0] != "recoup" for kind in own)


class Couplings(nn.Module):
    """Blocks that can be inverted, between layers that cannot."""

    def __init__(self) -> None:
        super().__init__()
        half = lambda: nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))  # noqa: E731
        self.stem, self.head = nn.Linear(32, 32), nn.Linear(32, 32)
        self.blocks = nn.ModuleList(AdditiveCoupling(half(), half()) for _ in range(6))

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)


# -- lightning -------------------------------------------------------------------------------------


class Module(LightningModule):
    """Logs, counts, draws, and trains a net with batch norm."""

    def __init__(self, net: Any = Net, *, is_manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = net()
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


class Following:
    """The peaks of the steps, and how many plans there were after each."""

    def __init__(self, plans: Any = ()) -> None:
        super().__init__()
        self.plans, self.peaks, self.families = plans, [], []

    def begin(self) -> None:
        self.tracker = StorageTracker("cpu").__enter__()

    def end(self) -> None:
        self.tracker.__exit__(None, None, None)
        self.peaks.append(self.tracker.peak_bytes)

    def count(self) -> None:
        self.families.append(len(self.plans[0].family) if self.plans else 0)


class OfLightning:
    budget = MemoryBudget
    num_planning = 0  # steps that a plan is made in

    def __init__(self) -> None:
        # A module returns its loss, and is planned with all forwards that it has in a step.
        self.left_out = {"loss", "num_forwards", "optimizer", "holds_output"}
        self.shapes = {"sizes": (40, 30, 64, 58, 64)}  # the largest of which comes late
        self.invertible = {"net": Couplings}

    @staticmethod
    def train(folder: Any, *callbacks: Any, module: Any = None, **options: Any) -> Trained:
        module = module or Module(options.pop("net", Net))
        sizes = options.pop("sizes", (64,) * 4)
        ends = [0, *itertools.accumulate(sizes)]
        torch.manual_seed(7)
        rows = TensorDataset(torch.randn(256, 32))
        batches = [list(range(*pair)) for pair in itertools.pairwise(ends)]
        data = DataLoader(rows, batch_sampler=batches)
        torch.manual_seed(3)
        settings: dict[str, Any] = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        settings |= {"accelerator": "cpu", "devices": 1, "max_epochs": 2}
        trainer = lightning.Trainer(
            default_root_dir=folder, callbacks=list(callbacks), **settings | options
        )
        trainer.fit(module, data, data)
        return Trained(module, module.losses)

    @staticmethod
    def bytes_of(net: Any = Net) -> tuple[int, int]:
        """The least and the most that a training step takes."""
        x = torch.randn(64, 32)
        loss = lambda y: (y - x).square().mean()  # noqa: E731
        whole = recoup.plan(Module(net).net, x, budget="1 GiB", loss=loss)
        return whole.least_bytes, whole.most_bytes

    @staticmethod
    def follow(plans: Any = ()) -> Any:
        class Follows(Following, lightning.pytorch.Callback):
            def on_train_batch_start(self, *_: Any) -> None:
                self.begin()

            def on_after_backward(self, *_: Any) -> None:
                self.end()

            def on_train_batch_end(self, *_: Any) -> None:
                self.count()

        return Follows(plans)


# -- transformers ----------------------------------------------------------------------------------


class Regression(nn.Module):
    """A model for a trainer of transformers: it is given keywords, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Couplings()

    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": (self.net(x) - labels).square().mean()}


def regression() -> tuple[nn.Module, Any]:
    torch.manual_seed(7)
    return Regression(), [{"x": x, "labels": x.roll(1)} for x in torch.randn(256, 32)]


class Tokens(list):
    """Rows of tokens; a batch is as long as the next of `lengths`."""

    def __init__(self, lengths: Any = (24,)) -> None:
        torch.manual_seed(5)
        super().__init__(torch.randint(100, (32, 24)))
        self.lengths = itertools.cycle(lengths)

    def __getitems__(self, indices: list[int]) -> Any:
        length = next(self.lengths)
        rows = [list.__getitem__(self, index)[:length] for index in indices]
        return [{"input_ids": row, "labels": row} for row in rows]


def gpt2(**options: Any) -> tuple[nn.Module, Any]:
    return MODELS["gpt2"]().model, Tokens(**options)


class OfTransformers:
    num_planning = 1

    def __init__(self) -> None:
        self.left_out = {"optimizer", "holds_output"}
        self.shapes = {"lengths": (12, 12, 24, 24, 20, 24, 24, 16), "num_train_epochs": 2}
        self.invertible = {"build": regression, "per_device_train_batch_size": 64}

    @property
    def budget(self) -> Any:
        transformers_or_skip()
        from recoup.integrations.transformers import MemoryBudget

        return MemoryBudget

    @staticmethod
    def train(
        folder: Any, *callbacks: Any, build: Any = gpt2, trainer: Any = None, **options: Any
    ) -> Trained:
        transformers = transformers_or_skip()
        pytest.importorskip("accelerate")
        given = {"lengths": options.pop("lengths")} if "lengths" in options else {}
        model, rows = build(**given)
        settings = {
            "per_device_train_batch_size": 4, "num_train_epochs": 1, "logging_steps": 1, "seed": 1,
            "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        }  # fmt: skip
        args = transformers.TrainingArguments(output_dir=str(folder), **settings | options)
        made = (trainer or transformers.Trainer)(
            model=model, args=args, train_dataset=rows, eval_dataset=rows, callbacks=[*callbacks]
        )
        made.train()
        history = made.state.log_history
        return Trained(model, [entry["loss"] for entry in history if "loss" in entry])

    @staticmethod
    def bytes_of(build: Any = gpt2, per_device_train_batch_size: int = 4) -> tuple[int, int]:
        model, rows = build()
        rows = [*rows[:per_device_train_batch_size]]
        if build is gpt2:
            rows = [{"input_ids": row, "labels": row} for row in rows]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        points = recoup.plan(model, **batch, holds_output=False).points
        return points[0].peak_bytes, points[-1].peak_bytes

    @staticmethod
    def follow(plans: Any = ()) -> Any:
        transformers = transformers_or_skip()

        class Follows(Following, transformers.TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                self.begin()

            def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
                self.end()

            def on_substep_end(self, *_: Any, **__: Any) -> None:
                self.end()
                self.begin()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                self.count()

        return Follows(plans)


TRAINERS: dict[str, Any] = {"lightning": OfLightning(), "transformers": OfTransformers()}


@pytest.fixture(params=TRAINERS)
def trainer(request):
    return TRAINERS[request.param]


# -- the same training -----------------------------------------------------------------------------

EVALUATES = {"eval_strategy": "steps", "eval_steps": 1, "gradient_accumulation_steps": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lightning", {}),
        ("lightning", {"accumulate_grad_batches": 2}),
        ("lightning", {"precision": "bf16-mixed"}),
        ("transformers", EVALUATES),
        ("transformers", EVALUATES | {"bf16": True}),
    ],
    ids=[
        "lightning",
        "lightning accumulated",
        "lightning bf16",
        "transformers accumulated",
        "bf16",
    ],
)
def test_the_same_training_within_the_budget(tmp_path, name, options):
    trainer = TRAINERS[name]
    least, most = trainer.bytes_of()
    budget = least + (most - least) // (4 if name == "lightning" else 2)
    plans: list[recoup.Plan] = []
    callback, follows = trainer.budget(budget, show=plans.append), trainer.follow()
    found = trainer.train(tmp_path, callback, follows, **options)
    found.assert_same(trainer.train(tmp_path, **options))
    found.assert_no_trace()
    assert plans == [callback.plan]
    assert not callback.plan.is_applied
    assert len(follows.peaks) == 8
    assert max(follows.peaks[trainer.num_planning :]) <= budget


@pytest.mark.slow
def test_blocks_are_inverted_where_they_may_be(tmp_path, trainer):
    least, most = trainer.bytes_of(**trainer.invertible)
    budget, follows = least + (most - least) // 3, trainer.follow()
    wanted = trainer.train(tmp_path, **trainer.invertible)
    callback = trainer.budget(budget, exact=False)
    found = trainer.train(tmp_path, callback, follows, **trainer.invertible)
    assert "invert" in {row.way for row in callback.plan.blocks}
    assert callback.plan.drift is not None
    assert max(follows.peaks[trainer.num_planning :]) <= budget
    assert found.losses == pytest.approx(wanted.losses, rel=1e-3)
    found.assert_no_trace()


@pytest.mark.slow
def test_batches_of_several_sizes_are_planned_again(tmp_path, trainer):
    """They keep to the budget, and in the second epoch nothing is planned."""
    least, most = trainer.bytes_of()
    budget, plans = least + (most - least) // (4 if trainer.num_planning == 0 else 2), []
    follows = trainer.follow(plans)
    callback = trainer.budget(budget, show=plans.append, replan=True)
    found = trainer.train(tmp_path, callback, follows, **trainer.shapes)
    found.assert_same(trainer.train(tmp_path, **trainer.shapes))
    found.assert_no_trace()
    num = len(follows.peaks) // 2
    assert max(follows.peaks[num * trainer.num_planning :]) <= budget
    assert max(follows.families) > 1
    assert follows.families[num:] == follows.families[num - 1 : num] * num
    with pytest.raises(ValueError, match="`replan` is True with `compile`"):
        trainer.budget("1 GiB", replan=True, compile=True)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_compiled_blocks(tmp_path, trainer, monkeypatch):
    give_steady_times(monkeypatch)
    plans: list[recoup.Plan] = []
    trainer.train(tmp_path, trainer.budget("1 GiB", show=plans.append, compile="aot_eager"))
    assert all(row.way.startswith("keep, compiled") for row in plans[0].blocks)


@pytest.mark.slow
def test_a_second_training_has_a_plan_of_its_own_and_a_line_of_log(tmp_path, caplog):
    wanted, found = Module(), Module()
    callback, plans = MemoryBudget(OfLightning.bytes_of()[0] * 5 // 4), []
    for _ in range(2):
        OfLightning.train(tmp_path, module=wanted)
        with caplog.at_level(logging.INFO, logger="recoup"):
            trained = OfLightning.train(tmp_path, callback, module=found)
        plans.append(callback.plan)
        assert not callback.plan.is_applied
    trained.assert_same(Trained(wanted, wanted.losses))
    assert is_plain(found)
    assert plans[0] is not plans[1]
    lines = [each.getMessage() for each in caplog.records if each.name.startswith("recoup")]
    assert [line.partition(",")[0] for line in lines] == ["Plan(Module"] * 2
    assert all(line.endswith("; applied)") for line in lines)


@pytest.mark.slow
def test_transformers_plans_at_the_first_forward_with_a_graph(tmp_path):
    """A reference forward without a graph comes first (GRPO), and two with one (R-Drop)."""
    trainer = TRAINERS["transformers"]

    class Twice(transformers_or_skip().Trainer):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
            with torch.no_grad():
                model(**{key: value[:1, :4] for key, value in inputs.items()})
            return model(**inputs).loss + model(**inputs).loss

    least, most = trainer.bytes_of()
    with pytest.raises(BudgetError, match="num_forwards=2"):
        trainer.train(tmp_path, trainer.budget((least + most) // 2), trainer=Twice)
    callback, follows = trainer.budget(least + most, num_forwards=2), trainer.follow()
    found = trainer.train(tmp_path, callback, follows, trainer=Twice)
    found.assert_same(trainer.train(tmp_path, trainer=Twice))
    assert max(follows.peaks[1:]) <= least + most
    assert len({row.name for row in callback.plan.blocks}) < len(callback.plan.blocks)


# -- what a trainer has of its own -----------------------------------------------------------------


@pytest.mark.slow
def test_transformers_switches_the_own_checkpointing_of_a_model_off(tmp_path):
    trainer = TRAINERS["transformers"]
    names = {field.name for field in dataclasses.fields(transformers_or_skip().TrainingArguments)}
    newer = "activation_checkpointing"  # than transformers 5.0
    name = newer if newer in names else "gradient_checkpointing"
    with pytest.warns(UserWarning, match=ITS_OWN):
        found = trainer.train(tmp_path, trainer.budget("1 GiB"), **{name: True})
    found.assert_same(trainer.train(tmp_path))
    assert any(getattr(each, "gradient_checkpointing", False) for each in found.model.modules())


class OfLayers(nn.Module):
    """Has checkpointing of its own, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in "abc"))
        self.gradient_checkpointing = True

    def forward(self, x):
        return self.layers(x)


class Around(nn.Module):
    """Has the attributes of what it wraps, as models of peft do."""

    def __init__(self) -> None:
        super().__init__()
        self.base = OfLayers()

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
        with pytest.raises(BudgetError) if budget == 1000 else contextlib.nullcontext():
            model(torch.ones(64, 8))
        if budget != 1000:
            callback.on_train_end(None, None, None)
        assert model.base.gradient_checkpointing
        assert "gradient_checkpointing" not in vars(model)


def test_every_option_of_a_plan_is_one_of_a_trainer(trainer):
    own = inspect.signature(trainer.budget.__init__).parameters
    fields = [f for f in dataclasses.fields(PlanOptions) if f.name not in trainer.left_out]
    wanted = {field.name: field.default for field in fields}
    assert {name: own[name].default for name in wanted} == wanted
    assert set(own) == {"self", "budget", *wanted, "show", "replan"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": -1}, "`budget` is -1"),
        ({"budget_of": "all"}, "`budget_of`"),
        ({"compile": "fast"}, "`compile` is 'fast'"),
    ],
)
def test_what_is_wrong_is_refused_where_it_is_written(trainer, options, words):
    with pytest.raises(ValueError, match=words):
        trainer.budget(**{"budget": "1 GiB"} | options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 1000}, "`budget`"),
        # On the CPU there is no host beside it, so an error shows that it is asked for.
        ({"offload_to": "host"}, '`offload_to` is "host", but the model is on the cpu'),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path, trainer, options, words):
    with pytest.raises(ValueError, match=words):
        trainer.train(tmp_path, trainer.budget(**{"budget": "1 GiB"} | options))


def test_lightning_refuses_manual_optimization_and_leaves_no_trace(tmp_path):
    for module, budget, words in (
        (Module(is_manual=True), "1 GiB", "automatic_optimization"),
        (Module(), 1000, "`budget`"),
    ):
        with pytest.raises(ValueError, match=words):
            OfLightning.train(tmp_path, MemoryBudget(budget), module=module)
        Trained(module, []).assert_no_trace()
        assert is_plain(module)
