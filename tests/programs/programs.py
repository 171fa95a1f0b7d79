"""What the programs of other libraries train here: a small language, and a small model of it."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch

from tests.planned_zoo import transformers_or_skip

VOCABULARY = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{index}" for index in range(196))]


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
    transformers = transformers_or_skip()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
    config = transformers.LlamaConfig(
        **sizes, **heads, vocab_size=len(VOCABULARY), max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)
