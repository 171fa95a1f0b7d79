"""The trainers of Lightning and transformers, with a way to ask both of them for the same."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import lightning
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import recoup
from recoup._core.storage_tracking import StorageTracker
from recoup.integrations.lightning import MemoryBudget
from recoup.invertible import AdditiveCoupling
from tests.neighbours.planned import Net
from tests.planned_zoo import MODELS, transformers_or_skip


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
