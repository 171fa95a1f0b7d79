"""Programs of TRL and sentence-transformers within the bytes of their own checkpointing.

Also contrastive batches in mini-batches, and a language model at ten times the tokens that fit.

`RECOUP_QUICK=1 python benchmarks/run.py programs` is a small size of everything, in a minute.
"""

import os
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
import trl
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses
from sentence_transformers.models import Pooling, Transformer
from sentence_transformers.training_args import SentenceTransformerTrainingArguments
from timing import in_turn, seconds_of
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

import recoup
from recoup.integrations.transformers import MemoryBudget
from recoup.memory.meter import timeline

QUICK = bool(os.environ.get("RECOUP_QUICK"))
UNITS, LAYERS, LENGTH, BATCH, STEPS = (32, 3, 32, 4, 3) if QUICK else (192, 6, 128, 8, 6)
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{index}" for index in range(996))]
ROUNDS = 2 if QUICK else 7
Program = Callable[..., Any]


def tokenizer() -> Any:
    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    made = Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        unk_token="<unk>", cls_token="<s>", sep_token="</s>", model_max_length=2 * LENGTH,
    )  # fmt: skip


def text(num_words: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS[4:]) for _ in range(num_words))


def llama(layers: int = LAYERS, words: int = len(WORDS), **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=UNITS, intermediate_size=8 * UNITS // 3, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=words, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, max_position_embeddings=1 << 16, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def embedding_model(folder: str) -> SentenceTransformer:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=UNITS, intermediate_size=4 * UNITS, num_hidden_layers=LAYERS,
        num_attention_heads=4, vocab_size=len(WORDS), max_position_embeddings=2 * LENGTH,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return SentenceTransformer(modules=[Transformer(folder), Pooling(UNITS)], device="cpu")


# -- programs --------------------------------------------------------------------------------------


def sft(folder: str, callbacks: list[Any], **options: Any) -> Any:
    rows = [{"text": text(LENGTH, index)} for index in range(BATCH * STEPS)]
    args = trl.SFTConfig(folder, max_length=LENGTH, **options)
    given = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer()}
    return trl.SFTTrainer(llama(), args=args, callbacks=callbacks, **given)


def dpo(folder: str, callbacks: list[Any], **options: Any) -> Any:
    half = LENGTH // 2
    rows = [
        {"prompt": text(half, i), "chosen": text(half, i + 1000), "rejected": text(half, i + 2000)}
        for i in range(BATCH * STEPS)
    ]
    args = trl.DPOConfig(folder, max_length=LENGTH, **options)
    given = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer()}
    return trl.DPOTrainer(llama(), ref_model=llama(), args=args, callbacks=callbacks, **given)


def grpo(folder: str, callbacks: list[Any], **options: Any) -> Any:
    rows = [{"prompt": text(LENGTH // 2, index)} for index in range(BATCH * STEPS)]
    args = trl.GRPOConfig(folder, max_completion_length=16, num_generations=BATCH, **options)

    def num_words(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    given = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer()}
    return trl.GRPOTrainer(llama(), num_words, args=args, callbacks=callbacks, **given)


def mnrl(folder: str, callbacks: list[Any], **options: Any) -> Any:
    rows = [
        {"anchor": text(LENGTH // 2, i), "positive": text(LENGTH // 2, i + 1000)}
        for i in range(BATCH * STEPS)
    ]
    model = embedding_model(folder)
    return SentenceTransformerTrainer(
        model, SentenceTransformerTrainingArguments(folder, **options), Dataset.from_list(rows),
        loss=losses.MultipleNegativesRankingLoss(model), callbacks=callbacks,
    )  # fmt: skip


PROGRAMS = {"TRL, SFT": (sft, 1), "TRL, DPO": (dpo, 1), "TRL, GRPO": (grpo, 1)}
PROGRAMS["sentence-transformers, MNRL"] = (mnrl, 2)


class Meter(transformers.TrainerCallback):
    """Peaks, times and losses of the steps; the first, in which it is planned, is left out."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.is_measured = state.global_step % 2 == 1  # others are timed
        self.tracker = timeline(torch.device("cpu")) if self.is_measured else None
        if self.tracker is not None:
            self.line = self.tracker.__enter__()
        self.begin = time.process_time()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.tracker is not None:
            span = self.line.mark()
            self.tracker.__exit__(None, None, None)
            self.peaks.append(span.peak_bytes)  # known by now
        elif state.global_step:
            self.seconds.append(time.process_time() - self.begin)

    def on_log(self, *_: Any, logs: Any, **__: Any) -> None:
        self.losses += [logs["loss"]] if "loss" in logs else []


def trained(program: Program, *callbacks: Any, checkpointing: bool = False) -> Meter:
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = program(
            folder, [meter, *callbacks], use_cpu=True, report_to=[], disable_tqdm=True,
            max_steps=STEPS, logging_steps=1, save_strategy="no", bf16=False,
            per_device_train_batch_size=BATCH, gradient_checkpointing=checkpointing,
        )  # fmt: skip
        trainer.train()
    return meter


def programs() -> Iterator[dict]:
    for name, (program, num_forwards) in PROGRAMS.items():
        plain, own = trained(program), trained(program, checkpointing=True)
        budget = MemoryBudget(max(own.peaks), num_forwards=num_forwards)
        planned = trained(program, budget)
        second = statistics.median(plain.seconds)
        for way, meter in (("plain", plain), ("its checkpointing", own), ("recoup", planned)):
            yield {
                "program": name,
                "way": way,
                "peak_bytes": max(meter.peaks),
                "time": statistics.median(meter.seconds) / second,
                "is_equal": meter.losses == plain.losses,
            }


# -- contrastive batches ---------------------------------------------------------------------------


def contrastive() -> Iterator[dict]:
    """The loss of two columns of sentences, in mini-batches of the same size."""
    num, mini = (16, 4) if QUICK else (128, 16)
    with tempfile.TemporaryDirectory() as folder:
        model = embedding_model(folder).train()
    draw = torch.Generator().manual_seed(0)
    shape = (num, LENGTH // 4)
    columns = [torch.randint(4, len(WORDS), shape, generator=draw) for _ in "ab"]

    def features(ids: Tensor) -> dict[str, Tensor]:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def embed(ids: Tensor) -> Tensor:
        return model(features(ids))["sentence_embedding"]

    whole = losses.MultipleNegativesRankingLoss(model)
    cached = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=mini)
    tiled = recoup.tiled(embed, dim=0, tiles=num // mini)

    ways = {
        "whole": lambda: whole.compute_loss_from_embeddings([embed(c) for c in columns], None),
        "CachedMNRL": lambda: cached([features(c) for c in columns], None),
        "recoup.tiled": lambda: whole.compute_loss_from_embeddings(
            [tiled(c) for c in columns], None
        ),
    }

    def step(loss: Callable[[], Tensor]) -> None:
        model.zero_grad()
        loss().backward()

    steps = {way: partial(step, loss) for way, loss in ways.items()}
    in_turn(steps, 1)  # what is looked at once
    seconds = in_turn(steps, ROUNDS, clock=time.process_time)
    base = statistics.median(seconds["CachedMNRL"])
    for way, run in steps.items():
        peak = recoup.measure(run, repeats=0).peak_bytes
        yield {"way": way, "peak_bytes": peak, "time": statistics.median(seconds[way]) / base}


# -- long sequences --------------------------------------------------------------------------------


def long_sequences() -> Iterator[dict]:
    """Ten times the tokens, in the bytes that a step of the model as it is takes for one."""
    length = 64 if QUICK else 256
    model = llama(layers=12, words=8000, use_cache=False, attn_implementation="sdpa").train()

    def batch(num_tokens: int) -> dict[str, Tensor]:
        tokens = torch.arange(num_tokens)[None] * 7919 % 8000
        return {"input_ids": tokens, "labels": tokens}

    def row(way: str, num_tokens: int, base: float = 0.0) -> dict:
        def step() -> None:
            model.zero_grad()
            model(**batch(num_tokens)).loss.backward()

        step()
        peak_bytes = recoup.measure(step, repeats=0).peak_bytes
        seconds = seconds_of(step, clock=time.process_time)
        model.zero_grad()
        return {"way": way, "tokens": num_tokens, "peak_bytes": peak_bytes,
                "seconds": seconds, "time": seconds / base if base else 1.0}  # fmt: skip

    fits = row("plain", length)
    plain = row("plain", 10 * length)
    yield from (fits, plain)
    with tempfile.TemporaryDirectory() as folder:
        for way, options in {
            "plan": {},
            "plan, offload_to": {"offload_to": folder},
            "plan, tiles": {"tiles": True},
            "plan, tiles, offload_to": {"tiles": True, "offload_to": folder},
        }.items():
            given = batch(10 * length)
            for layer in model.model.layers if "tiles" in options else ():
                mlp = vars(layer.mlp)
                mlp["forward"] = recoup.tiled(
                    type(layer.mlp).forward.__get__(layer.mlp), dim=1, tiles=8
                )
            plans = recoup.plan(model, **given, holds_output=False, **options)
            with plans.plan(max(plans.least_bytes, fits["peak_bytes"])).applied():
                yield row(way, 10 * length, plain["seconds"])


def suite(device: str) -> Iterator[tuple[str, list]]:
    warnings.simplefilter("ignore")
    if device != "cpu":
        raise SystemExit("The programs are measured on the CPU, by the events of its allocator.")
    yield "contrastive", list(contrastive())
    yield "long_sequences", list(long_sequences())
    yield "programs", list(programs())
