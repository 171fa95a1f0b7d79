"""What the programs of other libraries train here: a small language, models, and a record."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from recoup._core.storage_tracking import Allocations
from tests.planned_zoo import transformers_or_skip

VOCABULARY = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{index}" for index in range(196))]


class Trained(NamedTuple):
    """What a training came to.

    Attributes:
        losses: the loss and the norm of the gradients, of each step.
        weights: all parameters, one after the other.
        peaks: the bytes of each forward with its backward but the first, as the allocator saw them.
    """

    losses: list[tuple[float, float]]
    weights: Tensor
    peaks: list[int]


@functools.cache
def tokenizer() -> Any:
    """A tokenizer of 196 words, made here: nothing is loaded."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), transformers_or_skip()
    words = tokenizers.models.WordLevel(
        {word: index for index, word in enumerate(VOCABULARY)}, unk_token="<unk>"
    )
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>", cls_token="<s>", sep_token="</s>", model_max_length=128,
    )  # fmt: skip


def text(num_words: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(VOCABULARY[4:]) for _ in range(num_words))


def llama(num_layers: int = 4) -> Any:
    """A Llama of 32 units, with dropout."""
    transformers = transformers_or_skip()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
    config = transformers.LlamaConfig(
        **sizes, **heads, vocab_size=len(VOCABULARY), max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def run(trainer: Any, seen: Any, **options: Any) -> Trained:
    """Train, and say what it came to."""
    try:
        trainer.train(**options)
    finally:
        seen.ends()
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return Trained(seen.losses, weights, seen.peaks)


def budget(*args: Any, **options: Any) -> Any:
    from recoup.integrations.transformers import MemoryBudget

    return MemoryBudget(*args, **options)


def bytes_of(train: Callable[..., Trained], **options: Any) -> tuple[int, int]:
    """The least and the most bytes of a step of a training."""
    callback = budget("1 GiB", **options)
    train(callback, num_steps=1)
    return callback.plan.least_bytes, callback.plan.most_bytes


def assert_same_training(
    train: Callable[..., Trained], wanted: Trained, num_bytes: int, skips: int = 0, **options: Any
) -> Trained:
    """Train within a budget, step by step as the program without recoup, which takes more."""
    callback = budget(num_bytes, **options)
    found = train(callback)
    assert found.losses == wanted.losses
    assert torch.equal(found.weights, wanted.weights)
    assert max(found.peaks[skips:]) < max(wanted.peaks)
    assert callback.plan is None or {row.way for row in callback.plan.blocks} != {"keep"}
    return found


def watch() -> Any:
    """A callback for a trainer that has the losses and the peaks of all steps."""
    transformers = transformers_or_skip()

    class Watch(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.losses: list[tuple[float, float]] = []
            self.peaks: list[int] = []
            self._levels: list[int] = []
            self._following: Any = None

        def on_log(self, *_: Any, logs: Any, **__: Any) -> None:
            if "loss" in logs:
                self.losses.append((logs["loss"], logs["grad_norm"]))

        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step:  # in the first one it is planned
                self._levels = []
                self._following = Allocations(self._levels).__enter__()

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            if self._following is not None:
                self.ends()
                self.peaks.append(max(self._levels))

        def ends(self) -> None:
            """End what follows the allocator, also where a step raised."""
            following, self._following = self._following, None
            if following is not None:
                following.__exit__(None, None, None)

    return Watch()


def settings(folder: Any, num_steps: int) -> dict[str, Any]:
    """The arguments that all trainers of transformers are given here."""
    return {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "max_steps": num_steps, "logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no",
        "bf16": False, "seed": 1,
    }  # fmt: skip
