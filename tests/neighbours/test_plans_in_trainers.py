"""Byte budgets in the trainers of others: the same training, in the bytes that were promised."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.errors import BudgetError
from recoup.integrations.lightning import MemoryBudget as OfLightning
from recoup.invertible import AdditiveCoupling
from recoup.planning.options import PlanOptions
from tests.neighbours.planned import Net, give_steady_times
from tests.planned_zoo import MODELS, is_plain, transformers_or_skip

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(dataloader|num_workers|logging interval|torch.jit|isinstance|srun|val_loader).*"
)


def test_a_budget_that_is_none_is_refused_at_once():
    """N13: an error where it is written, and not with the first batch."""
    with pytest.raises(ValueError, match="`budget` is -1"):
        OfLightning(-1)
    with pytest.raises(ValueError, match="`budget_of`"):
        OfLightning("1 GiB", budget_of="all")  # type: ignore[arg-type]
    transformers_or_skip()
    from recoup.integrations.transformers import MemoryBudget as OfTransformers

    with pytest.raises(ValueError, match="`budget` is -1"):
        OfTransformers(-1)


class Module(LightningModule):
    """Logs, counts, draws, and trains a net with batch norm."""

    def __init__(self, *, is_manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.automatic_optimization = not is_manual
        self.losses: list[float] = []
        self.peaks: list[int] = []

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


def data() -> DataLoader[Any]:
    torch.manual_seed(7)
    return DataLoader(TensorDataset(torch.randn(256, 32)), batch_size=64)


def fit(tmp_path: Any, module: Module, *callbacks: Any, **options: Any) -> Module:
    torch.manual_seed(3)
    options = {"max_epochs": 2, "logger": False, "enable_checkpointing": False} | options
    trainer = Trainer(
        accelerator="cpu", devices=1, default_root_dir=tmp_path, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), **options,
    )  # fmt: skip
    trainer.fit(module, data(), data())
    return module


class Peaks(lightning.pytorch.Callback):
    """The peak of each backward with its forward."""

    def __init__(self) -> None:
        self.peaks: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.tracker = StorageTracker("cpu")
        self.tracker.__enter__()

    def on_after_backward(self, *_: Any) -> None:
        self.tracker.__exit__(None, None, None)
        self.peaks.append(self.tracker.peak_bytes)


def same(found: Module, wanted: Module) -> None:
    assert found.losses == wanted.losses
    for name, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


def no_trace(module: nn.Module, kept: Any = ()) -> None:
    for each in module.modules():
        assert {"log", "log_dict"}.isdisjoint(vars(each)), type(each).__name__
    assert is_plain(module)


def step_bytes(module: Module) -> tuple[int, int]:
    """The least and the most that a training step takes."""
    x = torch.randn(64, 32)
    whole = recoup.plan(module.net, x, budget="1 GiB", loss=lambda y: (y - x).square().mean())
    return whole.least_bytes, whole.most_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}],
    ids=["plain", "accumulated", "bf16"],
)
def test_lightning(tmp_path, options):
    least, most = step_bytes(Module())
    budget = least + (most - least) // 4
    wanted = fit(tmp_path, Module(), **options)
    plans: list[recoup.Plan] = []
    peaks = Peaks()
    callback = OfLightning(budget, show=plans.append)
    found = fit(tmp_path, Module(), callback, peaks, **options)
    same(found, wanted)
    assert plans == [callback.plan]
    assert not callback.plan.is_applied
    assert max(peaks.peaks) <= budget
    no_trace(found)


@pytest.mark.slow
def test_lightning_twice_has_a_plan_of_each_training_and_a_line_of_log(tmp_path, caplog):
    module, callback = Module(), OfLightning("1 GiB")
    plans = []
    for _ in range(2):
        with caplog.at_level(logging.INFO, logger="recoup"):
            fit(tmp_path, module, callback, max_epochs=1)
        plans.append(callback.plan)
        assert not callback.plan.is_applied
    assert plans[0] is not plans[1]
    lines = [each.getMessage() for each in caplog.records if each.name.startswith("recoup")]
    assert [line.partition(",")[0] for line in lines] == ["Plan(Module"] * 2
    assert all(line.endswith("; applied)") for line in lines)
    no_trace(module)


@pytest.mark.slow
def test_lightning_twice(tmp_path):
    wanted, found = Module(), Module()
    callback = OfLightning(step_bytes(Module())[0] * 5 // 4)
    for _ in range(2):
        fit(tmp_path, wanted)
        fit(tmp_path, found, callback)
    same(found, wanted)
    no_trace(found)


def test_lightning_refuses_what_it_cannot_plan(tmp_path):
    module = Module(is_manual=True)
    with pytest.raises(ValueError, match="automatic_optimization"):
        fit(tmp_path, module, OfLightning("1 GiB"))
    no_trace(module)
    module = Module()
    with pytest.raises(BudgetError):
        fit(tmp_path, module, OfLightning(1000))
    no_trace(module)


def peaks_of_transformers() -> Any:
    """A callback that takes the peak of each micro-batch."""
    transformers = transformers_or_skip()

    class Peaks(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.peaks: list[int] = []
            self.tracker: Any = None

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.tracker = StorageTracker("cpu")
            self.tracker.__enter__()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.tracker.__exit__(None, None, None)
            self.peaks.append(self.tracker.peak_bytes)

        def on_substep_end(self, *_: Any, **__: Any) -> None:
            self.on_pre_optimizer_step()
            self.on_step_begin()

    return Peaks()


class Tokens(Dataset[Any]):
    def __init__(self) -> None:
        torch.manual_seed(5)
        self.tokens = torch.randint(100, (32, 24))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def train(tmp_path: Any, *callbacks: Any, **options: Any) -> tuple[Any, list[float]]:
    transformers = transformers_or_skip()
    pytest.importorskip("accelerate")
    model = MODELS["gpt2"]().model
    options = {"gradient_accumulation_steps": 2} | options
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], num_train_epochs=1, logging_steps=1,
        per_device_train_batch_size=4, per_device_eval_batch_size=4, eval_strategy="steps",
        eval_steps=1, disable_tqdm=True, save_strategy="no", seed=1, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=Tokens(), eval_dataset=Tokens(),
        callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def of_transformers() -> Any:
    transformers_or_skip()
    from recoup.integrations.transformers import MemoryBudget

    return MemoryBudget


def gpt2_bytes() -> tuple[int, int]:
    model = MODELS["gpt2"]().model
    tokens = Tokens().tokens[:4]
    whole = recoup.plan(model, input_ids=tokens, labels=tokens, budget="1 GiB")
    return whole.least_bytes, whole.most_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("trainer", ["lightning", "transformers"])
def test_compiled_blocks(tmp_path, trainer, monkeypatch):
    give_steady_times(monkeypatch)
    plans: list[recoup.Plan] = []
    if trainer == "lightning":
        callback = OfLightning("1 GiB", show=plans.append, compile="aot_eager")
        fit(tmp_path, Module(), callback)
    else:
        callback = of_transformers()("1 GiB", show=plans.append, compile="aot_eager")
        train(tmp_path, callback)
    assert all(row.way.startswith("keep, compiled") for row in plans[0].blocks)
    with pytest.raises(ValueError, match="`compile` is 'fast'"):
        type(callback)("1 GiB", compile="fast")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"bf16": True}], ids=["plain", "bf16"])
def test_transformers(tmp_path, options):
    least, most = gpt2_bytes()
    budget = least + (most - least) // 2
    wanted, losses = train(tmp_path, **options)
    plans: list[recoup.Plan] = []
    callback = of_transformers()(budget, show=plans.append)
    peaks = peaks_of_transformers()
    found, found_losses = train(tmp_path, callback, peaks, **options)
    assert len(peaks.peaks) == 8
    assert max(peaks.peaks[1:]) <= budget  # in the first one it is planned
    assert found_losses == losses
    assert len(losses) == 4
    for name, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    assert plans == [callback.plan]
    assert not callback.plan.is_applied
    for each in (*found.modules(),):
        own = [type(value) for name, value in vars(each).items() if "forward" in name]
        assert all(kind.__module__.partition(".")[0] != "recoup" for kind in own)
        assert not each._forward_pre_hooks


@pytest.mark.slow
def test_transformers_switches_the_own_checkpointing_of_a_model_off(tmp_path):
    transformers = transformers_or_skip()
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    newer = "activation_checkpointing"  # than transformers 5.0
    name = newer if newer in names else "gradient_checkpointing"
    wanted, losses = train(tmp_path)
    with pytest.warns(UserWarning, match="its own activation checkpointing on"):
        found, found_losses = train(tmp_path, of_transformers()("1 GiB"), **{name: True})
    assert found_losses == losses
    for key, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key
    assert any(getattr(each, "gradient_checkpointing", False) for each in found.modules())


class OfLayers(nn.Module):
    """Has checkpointing of its own, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in "abc"))
        self.gradient_checkpointing = True

    def forward(self, x):
        return self.layers(x)


class Around(nn.Module):
    """Has the attributes of what it wraps, as models of peft do."""

    def __init__(self):
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
    transformers_or_skip()
    model, callback, given = Around(), of_transformers()(budget), (None, None, None)
    for _ in range(2):
        with pytest.warns(UserWarning, match="its own activation checkpointing on"):
            callback.on_train_begin(*given, model=model)
        assert not model.gradient_checkpointing
        with pytest.raises(BudgetError) if budget == 1000 else contextlib.nullcontext():
            model(torch.ones(64, 8))
        if budget != 1000:
            callback.on_train_end(*given)
        assert model.base.gradient_checkpointing
        assert "gradient_checkpointing" not in vars(model)


@pytest.mark.slow
def test_transformers_refuses_what_it_cannot_plan(tmp_path):
    with pytest.raises(BudgetError):
        train(tmp_path, of_transformers()(1000))


@pytest.mark.parametrize(
    ("trainer", "left_out"),
    [
        # A module of Lightning returns its loss, its step is planned with all forwards that it has,
        # and each trainer has its optimizer.
        ("lightning", {"loss", "num_forwards", "optimizer", "holds_output"}),
        ("transformers", {"optimizer", "holds_output"}),
    ],
)
def test_every_option_of_a_plan_is_one_of_a_trainer(trainer, left_out):
    budget: Any = OfLightning if trainer == "lightning" else of_transformers()
    own = inspect.signature(budget.__init__).parameters
    wanted = {f.name: f.default for f in dataclasses.fields(PlanOptions) if f.name not in left_out}
    assert {name: own[name].default for name in wanted} == wanted
    assert set(own) == {"self", "budget", *wanted, "show", "replan"}


class Couplings(nn.Module):
    """Blocks that can be inverted, between layers that cannot."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        half = lambda: nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))  # noqa: E731
        self.stem, self.head = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(AdditiveCoupling(half(), half()) for _ in range(6))

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)


@pytest.mark.slow
def test_lightning_inverts_blocks_where_it_may(tmp_path):
    def module() -> Module:
        made = Module()
        made.net = Couplings()
        return made

    least, most = step_bytes(module())
    budget = least + (most - least) // 3
    wanted, peaks = fit(tmp_path, module()), Peaks()
    callback = OfLightning(budget, exact=False)
    found = fit(tmp_path, module(), callback, peaks)
    assert "invert" in {row.way for row in callback.plan.blocks}
    assert callback.plan.drift is not None
    assert max(peaks.peaks) <= budget
    assert found.losses == pytest.approx(wanted.losses, rel=1e-4)
    no_trace(found)


class Regression(nn.Module):
    """A model for a trainer of transformers: it is given keywords, and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Couplings()

    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": (self.net(x) - labels).square().mean()}


def train_regression(tmp_path: Any, *callbacks: Any) -> tuple[nn.Module, list[float]]:
    transformers = transformers_or_skip()
    pytest.importorskip("accelerate")
    torch.manual_seed(7)
    rows = [{"x": x, "labels": x.roll(1)} for x in torch.randn(256, 32)]
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], num_train_epochs=1, logging_steps=1,
        per_device_train_batch_size=64, disable_tqdm=True, save_strategy="no", seed=1,
    )  # fmt: skip
    model = Regression()
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=rows, callbacks=list(callbacks)
    )
    trainer.train()
    return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_transformers_inverts_blocks_where_it_may(tmp_path):
    model, x = Regression(), torch.randn(64, 32)
    points = recoup.plan(model, x=x, labels=x, holds_output=False).points
    budget = (2 * points[0].peak_bytes + points[-1].peak_bytes) // 3
    _, wanted = train_regression(tmp_path)
    callback, peaks = of_transformers()(budget, exact=False), peaks_of_transformers()
    _, found = train_regression(tmp_path, callback, peaks)
    assert "invert" in {row.way for row in callback.plan.blocks}
    assert max(peaks.peaks[1:]) <= budget  # in the first one it is planned
    assert found == pytest.approx(wanted, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["lightning", "transformers"])
def test_inputs_of_blocks_wait_where_it_is_said(tmp_path, trainer):
    """On the CPU there is no host beside it, so it is an error that shows that it is asked for."""
    if trainer == "lightning":
        callback = OfLightning("1 GiB", offload_to="host")
        run = functools.partial(fit, tmp_path, Module(), callback)
    else:
        run = functools.partial(train, tmp_path, of_transformers()("1 GiB", offload_to="host"))
    with pytest.raises(ValueError, match='`offload_to` is "host", but the model is on the cpu'):
        run()


class _Sizes:
    """Batches of several sizes, the largest of which comes late."""

    def __iter__(self) -> Any:
        start = 0
        for size in (40, 30, 64, 58, 64):
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return 5


@pytest.mark.slow
def test_lightning_plans_again(tmp_path, monkeypatch):
    """Batches of several sizes, the first of which is not the largest, keep to the budget."""
    torch.manual_seed(7)
    loader = DataLoader(TensorDataset(torch.randn(256, 32)), batch_sampler=_Sizes())
    monkeypatch.setattr(f"{__name__}.data", lambda: loader)
    least, most = step_bytes(Module())
    budget = least + (most - least) // 4
    plans: list[recoup.Plan] = []
    peaks, families = Peaks(), []

    class Families(lightning.pytorch.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            families.append(len(plans[0].family))

    callback = OfLightning(budget, show=plans.append, replan=True)
    found = fit(tmp_path, Module(), callback, peaks, Families())
    same(found, fit(tmp_path, Module()))
    assert max(peaks.peaks) <= budget
    assert max(families) > 1
    assert families[5:] == families[4:5] * 5  # the second epoch plans nothing
    no_trace(found)
    with pytest.raises(ValueError, match="`replan` is True with `compile`"):
        OfLightning("1 GiB", replan=True, compile=True)


@pytest.mark.slow
def test_transformers_plans_again(tmp_path):
    least, most = gpt2_bytes()
    budget = least + (most - least) // 2
    lengths = iter([12, 12, 24, 24, 20, 24, 24, 16] * 20)

    class Trimmed(Tokens):
        def __getitems__(self, indices: list[int]) -> Any:
            length = next(lengths)
            return [{"input_ids": t, "labels": t} for t in self.tokens[indices, :length]]

    plans: list[recoup.Plan] = []
    callback = of_transformers()(budget, show=plans.append, replan=True)
    sizes: list[int] = []
    transformers = transformers_or_skip()

    class Families(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            sizes.append(len(plans[0].family))

    def run(*callbacks: Any) -> Any:
        nonlocal lengths
        lengths = iter([12, 12, 24, 24, 20, 24, 24, 16] * 20)
        model = MODELS["gpt2"]().model
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], num_train_epochs=2,
            per_device_train_batch_size=4, disable_tqdm=True, save_strategy="no", seed=1,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=model, args=args, train_dataset=Trimmed(), callbacks=list(callbacks)
        )
        trainer.train()
        return model

    peaks = peaks_of_transformers()
    found, wanted = run(callback, Families(), peaks), run()
    for name, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    assert max(peaks.peaks[8:]) <= budget  # in the first epoch it is planned
    assert max(sizes) > 1
    assert sizes[8:] == sizes[7:8] * 8
    assert not found._forward_pre_hooks


@pytest.mark.slow
def test_transformers_plans_at_the_first_forward_with_a_graph(tmp_path):
    """A reference forward without a graph comes first (GRPO), and two with one (R-Drop)."""
    transformers = transformers_or_skip()
    pytest.importorskip("accelerate")

    class Twice(transformers.Trainer):
        def compute_loss(self, model: Any, inputs: Any, **_: Any) -> Any:
            with torch.no_grad():
                model(**{key: value[:1, :4] for key, value in inputs.items()})
            return model(**inputs).loss + model(**inputs).loss

    def run(*callbacks: Any) -> Any:
        model = MODELS["gpt2"]().model
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], num_train_epochs=1,
            per_device_train_batch_size=4, disable_tqdm=True, save_strategy="no", seed=1,
        )  # fmt: skip
        trainer = Twice(
            model=model, args=args, train_dataset=Tokens(), callbacks=list(callbacks)
        )  # fmt: skip
        trainer.train()
        return model

    least, most = gpt2_bytes()
    with pytest.raises(BudgetError, match="num_forwards=2"):
        run(of_transformers()((least + most) // 2))
    callback, peaks = of_transformers()(least + most, num_forwards=2), peaks_of_transformers()
    found, wanted = run(callback, peaks), run()
    assert max(peaks.peaks[1:]) <= least + most  # in the first one it is planned
    assert len({row.name for row in callback.plan.blocks}) < len(callback.plan.blocks)
    for name, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
