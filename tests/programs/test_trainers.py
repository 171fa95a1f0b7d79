"""Trainers of TRL and sentence-transformers within a byte budget: the same training."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch

from recoup._core.storage_tracking import Allocations
from tests.planned_zoo import transformers_or_skip
from tests.programs.programs import VOCABULARY, llama, text, tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:.*its own activation checkpointing:UserWarning"),
]


def library(name):
    return pytest.importorskip(name, reason=f"{name} is not installed")


def rows(num_rows=32, **columns):
    """A data set of columns of so many words, each from seeds of its own."""
    return library("datasets").Dataset.from_list([
        {name: text(num_words, index + seed) for name, (num_words, seed) in columns.items()}
        for index in range(num_rows)
    ])  # fmt: skip


# -- what trains: each makes a trainer but for its callbacks ---------------------------------------


def of_trl(kind, dataset, args, peft=None, **given):
    trl = library("trl")
    made = getattr(trl, f"{kind}Config")(per_device_train_batch_size=4, **args)
    given |= {"args": made, "train_dataset": dataset, "processing_class": tokenizer()}
    return functools.partial(getattr(trl, f"{kind}Trainer"), llama(), peft_config=peft, **given)


def sft(folder, num_words=64, peft=None, **args):
    data = rows(text=(num_words, 0))
    return of_trl("SFT", data, {"max_length": 64, **args}, peft, eval_dataset=data)


def dpo(folder, peft=None, **args):
    """With adapters the reference is the model without them."""
    columns = rows(prompt=(8, 0), chosen=(20, 100), rejected=(24, 200))
    given = {} if peft else {"ref_model": llama()}
    return of_trl("DPO", columns, {"max_length": 64, **args}, peft, **given)


def num_different(completions, **_):
    return [float(len(set(completion.split()))) for completion in completions]


def grpo(folder, **args):
    args |= {"max_completion_length": 16, "num_generations": 4}
    return of_trl("GRPO", rows(prompt=(8, 0)), args, reward_funcs=num_different)


@functools.cache
def saved(folder):
    transformers = transformers_or_skip()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        vocab_size=len(VOCABULARY), max_position_embeddings=128,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def contrastive(folder, loss="", **args):
    library("sentence_transformers")
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments

    model = SentenceTransformer(saved(folder / "model"), device="cpu")
    kind = getattr(losses, f"{loss}MultipleNegativesRankingLoss")
    columns = rows(64, anchor=(24, 0), positive=(24, 100))
    return functools.partial(
        SentenceTransformerTrainer, model, train_dataset=columns,
        loss=kind(model, mini_batch_size=4) if loss else kind(model),
        args=Arguments(per_device_train_batch_size=16, **args),
    )  # fmt: skip


# -- the training ----------------------------------------------------------------------------------


def watch():
    """A callback that has losses with norms of gradients, and the peaks of steps but the first."""

    class Watch(transformers_or_skip().TrainerCallback):
        def __init__(self):
            self.losses, self.peaks, self.following = [], [], contextlib.ExitStack()

        def on_log(self, *_, logs, **__):
            if "loss" in logs:
                self.losses.append((logs["loss"], logs["grad_norm"]))

        def on_step_begin(self, args, state, *_, **__):
            if state.global_step:  # in the first one it is planned
                self.following.callback(lambda levels: self.peaks.append(max(levels)), levels := [])
                self.following.enter_context(Allocations(levels))

        def on_pre_optimizer_step(self, *_, **__):
            self.following.close()

        def on_substep_end(self, args, state, *_, **__):
            self.on_pre_optimizer_step()
            self.on_step_begin(args, state)

    return Watch()


def train(program, folder, *callbacks, num_steps=3, resume=None, **options):
    settings = {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "max_steps": num_steps, "logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no",
        "bf16": False, "seed": 1,
    }  # fmt: skip
    made, seen = program(folder, **settings | options), watch()
    torch.manual_seed(1)
    trainer = made(callbacks=[seen, *callbacks])
    is_said = callbacks and made.func.__module__.startswith("trl")
    own = pytest.warns(UserWarning, match="its own activation checkpointing on")
    with seen.following, own if is_said else contextlib.nullcontext():
        trainer.train(resume_from_checkpoint=resume)
    seen.weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return seen


def budget(*args, **options):
    from recoup.integrations.transformers import MemoryBudget

    return MemoryBudget(*args, **options)


def half_of(training, **options):
    callback = budget("1 GiB", **options)
    training(callback, num_steps=1)
    return (callback.plan.least_bytes + callback.plan.most_bytes) // 2


def assert_same_training(training, num_bytes, **options):
    """Train within a budget, step by step as the program without recoup, which takes more."""
    wanted = training(gradient_checkpointing=False)
    callback = budget(num_bytes, **options)
    found = training(callback)
    assert found.losses == wanted.losses
    assert torch.equal(found.weights, wanted.weights)
    assert max(found.peaks) < max(wanted.peaks)
    assert callback.plan is None or {row.way for row in callback.plan.blocks} != {"keep"}
    return found


def adapters(**options):
    peft, targets = library("peft"), ["q_proj", "v_proj", "down_proj"]
    options |= {"lora_dropout": 0.1, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(r=4, target_modules=targets, **options)


PACKED = {"num_words": 24, "packing": True}
EVALUATED = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
CASES = {
    "SFT": (sft, dict),
    "SFT, evaluated, bf16": (sft, lambda: EVALUATED | {"bf16": True}),
    "SFT, compiled": (sft, lambda: COMPILED),
    "SFT, packed": (sft, lambda: PACKED),
    "SFT, LoRA": (sft, lambda: {"peft": adapters()}),
    "SFT, packed, DoRA": (sft, lambda: PACKED | {"peft": adapters(use_dora=True)}),
    "DPO": (dpo, dict),
    "DPO, LoRA": (dpo, lambda: {"peft": adapters()}),
    "GRPO": (grpo, dict),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_training_within_the_budget(tmp_path, case):
    program, options = CASES[case]
    training = functools.partial(train, program, tmp_path, **options())
    num_bytes = half_of(training)
    found = assert_same_training(training, num_bytes)
    assert len(found.peaks) == 2 * options().get("gradient_accumulation_steps", 1)
    assert max(found.peaks) <= num_bytes


@pytest.mark.parametrize(("loss", "num_forwards"), [("", 2), ("Cached", 1)])
def test_contrastive_losses(tmp_path, loss, num_forwards):
    training = functools.partial(train, contrastive, tmp_path, loss=loss)
    num_bytes = half_of(training, num_forwards=num_forwards)
    found = assert_same_training(training, num_bytes, num_forwards=num_forwards)
    # One mini-batch is within the budget, and what the cached loss holds for all is beside it.
    assert loss or max(found.peaks) <= num_bytes


def test_training_resumes(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "num_steps": 4}
    callback = budget(half_of(functools.partial(train, sft, tmp_path)))
    wanted = train(sft, tmp_path / "plain", gradient_checkpointing=False, **options)
    train(sft, tmp_path, callback, **options)
    again = train(sft, tmp_path, callback, resume=str(tmp_path / "checkpoint-2"), **options)
    assert again.losses == wanted.losses[2:]
    assert torch.equal(again.weights, wanted.weights)
