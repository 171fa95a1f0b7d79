"""TRL's trainers within a byte budget: the same training, in the bytes that were promised."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recoup.errors import BudgetError
from tests.programs.programs import (
    Trained,
    llama,
    settings,
    text,
    tokenizer,
    watch,
    weights_of,
)

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:.*its own activation checkpointing:UserWarning"),
]


def sft(**options: Any) -> Any:
    num_words = 24 if options.get("packing") else 64
    rows = [{"text": text(num_words, index)} for index in range(32)]
    args = trl.SFTConfig(max_length=64, per_device_train_batch_size=4, **options)
    return trl.SFTTrainer, {"args": args, "train_dataset": datasets.Dataset.from_list(rows)}


def packed(**options: Any) -> Any:
    return sft(packing=True, **options)


def dpo(**options: Any) -> Any:
    rows = [
        {"prompt": text(8, i), "chosen": text(20, i + 100), "rejected": text(24, i + 200)}
        for i in range(32)
    ]
    args = trl.DPOConfig(max_length=64, per_device_train_batch_size=4, **options)
    return trl.DPOTrainer, {"args": args, "train_dataset": datasets.Dataset.from_list(rows)}


def grpo(**options: Any) -> Any:
    rows = [{"prompt": text(8, index)} for index in range(32)]
    args = trl.GRPOConfig(
        max_completion_length=16, num_generations=4, per_device_train_batch_size=4,
        **options,
    )  # fmt: skip

    def num_words(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    given = {"train_dataset": datasets.Dataset.from_list(rows), "reward_funcs": num_words}
    return trl.GRPOTrainer, {"args": args, **given}


def adapters(**options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    targets = ["q_proj", "v_proj", "down_proj"]
    return peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM", **options
    )


def train(folder: Any, program: Any, *callbacks: Any, peft: Any = None, **options: Any) -> Trained:
    options = {"num_steps": 3} | options
    num_steps, resume = options.pop("num_steps"), options.pop("resume", None)
    trainer, given = program(**settings(folder, num_steps) | options)
    if trainer is trl.DPOTrainer and peft is None:
        given["ref_model"] = llama()
    model, seen = llama(), watch()
    torch.manual_seed(1)
    made = trainer(
        model, processing_class=tokenizer(), callbacks=[seen, *callbacks], peft_config=peft, **given
    )
    try:
        made.train(resume_from_checkpoint=resume)
    finally:
        seen.ends()
    return Trained(seen.losses, weights_of(made.model), seen.peaks)


def budget_for(folder: Any, program: Any, **options: Any) -> tuple[Any, int]:
    """The callback, and bytes of which a third of what may be saved is saved."""
    from recoup.integrations.transformers import MemoryBudget

    callback = MemoryBudget("1 GiB")
    with pytest.warns(UserWarning, match="its own activation checkpointing on"):
        train(folder, program, callback, num_steps=1, **options)
    least, most = callback.plan.least_bytes, callback.plan.most_bytes
    return MemoryBudget, least + (most - least) * 2 // 3


PROGRAMS = {"SFT": sft, "SFT, packed": packed, "DPO": dpo, "GRPO": grpo}
ADAPTERS = {"whole": dict, "LoRA": adapters, "DoRA": lambda: adapters(use_dora=True)}


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        *((program, "whole") for program in PROGRAMS),
        ("SFT", "LoRA"),
        ("DPO", "LoRA"),  # whose reference is the model without its adapters
        ("GRPO", "LoRA"),
        ("SFT, packed", "DoRA"),
    ],
)
def test_the_same_training_within_the_budget(tmp_path, program, kind):
    """Step by step equal to the program without recoup, which checkpoints by default."""
    made, options = PROGRAMS[program], {"peft": ADAPTERS[kind]() or None}
    MemoryBudget, budget = budget_for(tmp_path, made, **options)
    wanted = train(tmp_path, made, gradient_checkpointing=False, **options)
    callback = MemoryBudget(budget)
    with pytest.warns(UserWarning, match="its own activation checkpointing on"):
        found = train(tmp_path, made, callback, **options)
    assert found.same(wanted)
    assert len(found.peaks) == 2
    assert max(found.peaks) <= budget
    assert max(wanted.peaks) > budget
    assert {row.way for row in callback.plan.blocks} != {"keep"}


def test_training_resumes(tmp_path):
    """A training that goes on from a checkpoint plans again, and ends where one run ends."""
    MemoryBudget, budget = budget_for(tmp_path, sft)
    saved = {"save_strategy": "steps", "save_steps": 2, "num_steps": 4}
    wanted = train(tmp_path / "plain", sft, gradient_checkpointing=False, **saved)
    callback = MemoryBudget(budget)
    with pytest.warns(UserWarning, match="its own activation checkpointing on"):
        train(tmp_path, sft, callback, **saved)
    with pytest.warns(UserWarning, match="its own activation checkpointing on"):
        again = train(tmp_path, sft, callback, resume=str(tmp_path / "checkpoint-2"), **saved)
    assert again.losses == wanted.losses[2:]
    assert torch.equal(again.weights, wanted.weights)


def test_a_budget_that_is_too_small_says_what_takes_the_bytes(tmp_path):
    """TRL's own head runs in tiles of its own, which `tiles=True` leaves alone."""
    from recoup.integrations.transformers import MemoryBudget

    with (
        pytest.warns(UserWarning, match="its own activation checkpointing on"),
        pytest.raises(BudgetError, match="the least that a step of this model was seen to take"),
    ):
        train(tmp_path, sft, MemoryBudget(1000, tiles=True))
