"""TRL's trainers within a byte budget: the same training, in the bytes that were promised."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch

from tests.programs.programs import (
    Trained,
    assert_same_training,
    budget,
    bytes_of,
    llama,
    run,
    settings,
    text,
    tokenizer,
    watch,
)

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:.*its own activation checkpointing:UserWarning"),
]


def rows(**columns: tuple[int, int]) -> Any:
    """A data set of columns of so many words, each from seeds of its own."""
    return datasets.Dataset.from_list([
        {name: text(num_words, index + seed) for name, (num_words, seed) in columns.items()}
        for index in range(32)
    ])  # fmt: skip


def sft(num_words: int = 64, **options: Any) -> Any:
    args = trl.SFTConfig(max_length=64, per_device_train_batch_size=4, **options)
    return trl.SFTTrainer, {"args": args, "train_dataset": rows(text=(num_words, 0))}


def packed(**options: Any) -> Any:
    return sft(24, packing=True, **options)


def dpo(**options: Any) -> Any:
    args = trl.DPOConfig(max_length=64, per_device_train_batch_size=4, **options)
    columns = rows(prompt=(8, 0), chosen=(20, 100), rejected=(24, 200))
    return trl.DPOTrainer, {"args": args, "train_dataset": columns}


def num_different(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def grpo(**options: Any) -> Any:
    sizes = {"max_completion_length": 16, "num_generations": 4, "per_device_train_batch_size": 4}
    given = {"train_dataset": rows(prompt=(8, 0)), "reward_funcs": num_different}
    return trl.GRPOTrainer, {"args": trl.GRPOConfig(**sizes, **options), **given}


def adapters(**options: Any) -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    targets = ["q_proj", "v_proj", "down_proj"]
    return peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=targets, task_type="CAUSAL_LM", **options
    )


def train(
    folder: Any,
    program: Any,
    *callbacks: Any,
    peft: Any = None,
    num_steps: int = 3,
    resume: str | None = None,
    **options: Any,
) -> Trained:
    trainer, given = program(**settings(folder, num_steps) | options)
    if trainer is trl.DPOTrainer and peft is None:
        given["ref_model"] = llama()
    model, seen = llama(), watch()
    torch.manual_seed(1)
    made = trainer(
        model, processing_class=tokenizer(), callbacks=[seen, *callbacks], peft_config=peft, **given
    )
    own = pytest.warns(UserWarning, match="its own activation checkpointing on")
    with own if callbacks else contextlib.nullcontext():
        return run(made, seen, resume_from_checkpoint=resume)


PROGRAMS = {"SFT": sft, "SFT, packed": packed, "DPO": dpo, "GRPO": grpo}
ADAPTERS = {"whole": dict, "LoRA": adapters, "DoRA": lambda: adapters(use_dora=True)}


def budget_for(train: Any) -> int:
    """Bytes of which a third of what may be saved is saved."""
    least, most = bytes_of(train)
    return least + (most - least) * 2 // 3


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
    peft = ADAPTERS[kind]() or None
    of_program = functools.partial(train, tmp_path, PROGRAMS[program], peft=peft)
    num_bytes = budget_for(of_program)
    wanted = of_program(gradient_checkpointing=False)
    found = assert_same_training(of_program, wanted, num_bytes)
    assert len(found.peaks) == 2
    assert max(found.peaks) <= num_bytes < max(wanted.peaks)


def test_training_resumes(tmp_path):
    """A training that goes on from a checkpoint plans again, and ends where one run ends."""
    callback = budget(budget_for(functools.partial(train, tmp_path, sft)))
    saved = {"save_strategy": "steps", "save_steps": 2, "num_steps": 4}
    wanted = train(tmp_path / "plain", sft, gradient_checkpointing=False, **saved)
    train(tmp_path, sft, callback, **saved)
    again = train(tmp_path, sft, callback, resume=str(tmp_path / "checkpoint-2"), **saved)
    assert again.losses == wanted.losses[2:]
    assert torch.equal(again.weights, wanted.weights)
