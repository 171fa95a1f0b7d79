"""Peaks against ten budgets of a plan, and its speed beside other ways that take as many bytes.

`RECOUP_QUICK=1 python benchmarks/run.py budgets` is a small size of everything, in a minute. The
models have the sizes of practice, so this is for an accelerator: GPT-2 and a ViT under autocast, a
Llama of a billion parameters in bfloat16, whose AdamW is fused, and a ResNet-50.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from plan_models import Case, gpt2, llama, resnet, vit
from plan_rivals import Around, Forward, compiled_blocks, plain, torch_checkpoint
from timing import seconds_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import recoup
from recoup._core.devices import is_accelerator
from recoup.errors import BudgetError
from recoup.planning.frontier import Frontier

QUICK = bool(os.environ.get("RECOUP_QUICK"))
NUM_BUDGETS, ROUNDS = (3, 2) if QUICK else (10, 5)
COMPILER_BUDGETS, BACKEND = (0.5, 0.0), "aot_eager_decomp_partition" if QUICK else "inductor"
FULL = "torch checkpoint, each block"
SEED = 1


class Model(NamedTuple):
    """A model of this benchmark.

    Args:
        build: builds it on a device.
        samples: what a step has of what its speed counts, tokens or images.
        unit: which of these.
        has_optimizer: whether a step has a fused AdamW, and parameters are of bfloat16.
        is_autocast: whether forward runs in bfloat16.
    """

    build: Callable[[str], Case]
    samples: int
    unit: str
    has_optimizer: bool = False
    is_autocast: bool = False


SMALL_WORDS = {"vocab_size": 128, "num_layers": 3, "batch_size": 2}
MODELS = (
    {
        "GPT-2": Model(
            partial(gpt2, **SMALL_WORDS, n_embd=64, n_head=2, n_positions=64), 128, "tokens"
        ),
        "Llama": Model(
            partial(llama, **SMALL_WORDS, length=64, hidden_size=64), 128, "tokens", True
        ),
        "ViT": Model(partial(vit, num_layers=3, batch_size=2, hidden_size=64), 2, "images"),
        "ResNet-50": Model(
            partial(resnet, num_blocks=(1, 1), width=8, batch_size=4, size=32), 4, "images"
        ),
    }
    if QUICK
    else {
        "GPT-2": Model(
            partial(
                gpt2, batch_size=16, vocab_size=50_257, n_embd=768, n_head=12, n_positions=1024
            ),
            *(16 * 1024, "tokens"),
            is_autocast=True,
        ),
        "Llama": Model(
            partial(
                llama, num_layers=16, batch_size=4, length=2048, vocab_size=32_000,
                hidden_size=2048, intermediate_size=8192, num_attention_heads=32,
                num_key_value_heads=8,
            ),
            *(4 * 2048, "tokens"),
            has_optimizer=True,
        ),
        "ViT": Model(
            partial(
                vit, batch_size=128, hidden_size=768, intermediate_size=3072,
                num_attention_heads=12,
            ),
            *(128, "images"),
            is_autocast=True,
        ),
        "ResNet-50": Model(partial(resnet, width=64, batch_size=128, size=224), 128, "images"),
    }
)  # fmt: skip
# The compiler takes longer over the eight kinds of its blocks than anybody would wait.
NOT_COMPILED = {"ResNet-50"}


class Training:
    """A model, and what steps of it take in one way after the other."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.model, self.device = name, MODELS[name], torch.device(device)
        with self.device:
            self.case = self.model.build(device)
        self.blocks = getattr(self.case.owner, self.case.name)
        self.optimizer = None
        if self.model.has_optimizer:
            self.case.model.bfloat16()
            parameters = self.case.model.parameters()
            self.optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=True)
        self.wanted: Tensor | None = None  # the gradient of the plain step, in one vector

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.model.is_autocast)

    def frontier(self, **options) -> Frontier:
        options |= {"loss": self.case.loss, "holds_output": False}
        with self.autocast():
            found = recoup.plan(self.case.model, **options, **self.case.kwargs)
        print(found, flush=True)
        return found

    def row(
        self, way: str, change: Callable[[Case], Forward] = plain, around=nullcontext, **found
    ) -> dict:
        """Train in a way, and return what a step takes in it; the model is as it was after that."""
        forward = change(self.case)

        def backward() -> None:
            torch.manual_seed(SEED)
            with self.autocast():
                loss = forward()
            loss.backward()

        def step() -> None:
            backward()
            if self.optimizer is not None:
                self.optimizer.step()
            self.case.model.zero_grad()

        try:
            with around():
                backward()
                found["gradient_error"] = self.error()
                step()
                self.empty()
                peaks = recoup.measure(step, device=self.device, repeats=0).peaks
                seconds = min(seconds_of(step, self.device.type) for _ in range(ROUNDS))
                if "budget_bytes" in found and self.device.type == "cuda":
                    found["num_retries"] = self.num_retries(step, found["budget_bytes"])
        finally:
            setattr(self.case.owner, self.case.name, self.blocks)
            self.empty()
        found |= {f"{kind}_bytes": size for kind, size in peaks._asdict().items()}
        speed = self.model.samples / seconds
        row = {"model": self.name, "name": way, **found, "seconds": seconds}
        return row | {"speed": speed, "unit": self.model.unit}

    def num_retries(self, step: Callable[[], None], budget_bytes: int) -> int | None:
        """Train where a CUDA device has a budget beside what is there; None if that is too little.

        Returns:
            How often the allocator gave cached memory back to find room.
        """
        self.empty()
        total = torch.cuda.get_device_properties(self.device).total_memory
        before = torch.cuda.memory_stats()["num_alloc_retries"]
        limit = torch.cuda.memory_reserved() + budget_bytes
        torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0))
        try:
            for _ in range(ROUNDS):
                step()
        except torch.OutOfMemoryError:
            self.case.model.zero_grad()
            return None
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return torch.cuda.memory_stats()["num_alloc_retries"] - before

    def error(self) -> float:
        """Return the distance of the gradient to that of the plain step, relative to it."""
        found = torch.cat([p.grad.flatten() for p in self.case.model.parameters()])
        self.case.model.zero_grad()
        if self.wanted is None:
            self.wanted = found
        return float((found - self.wanted).norm() / self.wanted.norm())

    def empty(self) -> None:
        gc.collect()
        if is_accelerator(self.device):
            torch.accelerator.empty_cache()


def _checkpoints(call: Callable, **options) -> Callable[[Case], Forward]:
    def change(case: Case) -> Forward:
        case.blocks = [Around(block, partial(call, **options)) for block in case.blocks]
        return case.forward

    return change


SKETCHES = {
    "torch checkpoint": _checkpoints(checkpoint, use_reentrant=False),
    "recoup.checkpoint": _checkpoints(recoup.checkpoint),
    "recoup.checkpoint, compare=False": _checkpoints(recoup.checkpoint, compare=False),
}


def of_model(name: str, device: str) -> Iterator[tuple[str, dict]]:
    """Yield the rows of all tables about a model, each with the name of its table."""
    training = Training(name, device)
    yield "speeds", training.row("plain")
    frontier = training.frontier()

    def planned(budget: int, way: str = "recoup.plan", frontier: Frontier = frontier) -> dict:
        with training.autocast():
            plan = frontier.plan(budget)
        found = {"budget_bytes": budget, "usable_bytes": plan.usable_bytes}
        found |= {"predicted_bytes": plan.predicted_peak_bytes, "headroom": plan.headroom}
        found["predicted_time"] = plan.predicted_time_ratio
        return training.row(way, around=plan.applied, **found)

    with training.autocast():
        least = frontier.least_bytes
    row = planned(least)
    yield "budgets", row
    room = 1 - row["headroom"]
    most = frontier.points[-1].peak_bytes
    for place in range(1, NUM_BUDGETS):
        yield "budgets", planned(least + (most - least) * place // (NUM_BUDGETS - 1))

    def beside(
        row: dict, way: str = "recoup.plan", frontier: Frontier = frontier
    ) -> Iterator[dict]:
        with contextlib.suppress(BudgetError):  # then nothing stands beside it
            budget = int(row["allocated_bytes"] / room)
            yield planned(budget, f"{way}, bytes of {row['name']}", frontier)

    row = training.row(FULL, torch_checkpoint)
    for each in (row, *beside(row)):
        yield "speeds", each
    for way, change in SKETCHES.items():
        yield "sketches", training.row(way, change)
    if name in NOT_COMPILED:
        return
    rows = []  # last, since compiling takes longest
    for budget in COMPILER_BUDGETS:
        rows.append(training.row(f"compiled, {budget}", compiled_blocks(budget, BACKEND)))
        yield "speeds", rows[-1]
    compiled = training.frontier(compile=True)
    for row in rows:
        for each in beside(row, "recoup.plan(compile=True)", compiled):
            yield "speeds", each


def suite(device: str, models: Sequence[str] = tuple(MODELS)) -> Iterator[tuple[str, list[dict]]]:
    """Yield the tables, again with each row."""
    found: dict[str, list[dict]] = {}
    for name in models:
        for table, row in of_model(name, device):
            found.setdefault(table, []).append(row)
            yield table, found[table]
