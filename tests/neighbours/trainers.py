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
    # A module returns its loss, and is planned with all forwards that it has in a step.
    left_out = {"loss", "num_forwards", "optimizer", "holds_output"}  # noqa: RUF012
    shapes = {"sizes": (40, 30, 64, 58, 64)}  # noqa: RUF012 - the largest of which comes late

    @staticmethod
    def train(folder: Any, *callbacks: Any, module: Any = None, **options: Any) -> Trained:
        module = module or Module()
        ends = [0, *itertools.accumulate(options.pop("sizes", (64,) * 4))]
        torch.manual_seed(7)
        rows = TensorDataset(torch.randn(256, 32))
        batches = [list(range(*pair)) for pair in itertools.pairwise(ends)]
        data = DataLoader(rows, batch_sampler=batches)
        torch.manual_seed(3)
        no = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = lightning.Trainer(
            default_root_dir=folder, callbacks=list(callbacks), accelerator="cpu", devices=1,
            max_epochs=2, **dict.fromkeys(no, False), **options,
        )  # fmt: skip
        trainer.fit(module, data, data)
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


class Tokens(list):
    """Rows of tokens; a batch is as long as the next of `lengths`."""

    def __init__(self, lengths: Any) -> None:
        torch.manual_seed(5)
        super().__init__(torch.randint(100, (32, 24)))
        self.lengths = itertools.cycle(lengths)

    def __getitems__(self, indices: list[int]) -> Any:
        length = next(self.lengths)
        rows = [list.__getitem__(self, index)[:length] for index in indices]
        return [{"input_ids": row, "labels": row} for row in rows]


class OfTransformers:
    num_planning = 1
    left_out = {"optimizer", "holds_output"}  # noqa: RUF012
    shapes = {  # noqa: RUF012
        "lengths": (12, 12, 24, 24, 20, 24, 24, 16), "num_train_epochs": 2
    }  # fmt: skip

    @property
    def budget(self) -> Any:
        transformers_or_skip()
        from recoup.integrations.transformers import MemoryBudget

        return MemoryBudget

    @staticmethod
    def train(folder: Any, *callbacks: Any, trainer: Any = None, **options: Any) -> Trained:
        transformers = transformers_or_skip()
        pytest.importorskip("accelerate")
        model, rows = MODELS["gpt2"]().model, Tokens(options.pop("lengths", (24,)))
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
