"""The language model from the command line: windows, segments, averages and what it writes."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from language_model import MONITOR, Averaging, Texts, main, window_lengths
from text import UNKNOWN, joined, read_parts, tokenized, vocabulary_of
from torch.nn import functional as F

import recoup
from benchmarks.awd_lstm_by_hand import Beside, numbers_of
from tests.examples.conftest import EXAMPLES, LINES, QUIET, logged_in, same, weights

CONFIGS = sorted((EXAMPLES / "configs" / "language_model").glob("*.yaml"))


def test_a_trained_model_is_tested_and_writes(texts, capsys):
    folder = texts.fit(epochs=3)
    logged = logged_in(folder, "val_perplexity")
    assert logged[-1] < logged[0]
    run = texts.use("test", folder, "--data.eval_batch_size=1")
    network, ids = run.model.network.eval(), run.datamodule.parts["test"]
    logits, _ = network(ids[:-1, None])
    by_hand = F.cross_entropy(logits[:, 0], ids[1:]).exp().item()
    found = run.trainer.callback_metrics["test_perplexity"].item()
    assert found == pytest.approx(by_hand, rel=1e-5)

    def written(option):
        capsys.readouterr()
        options = ["--data.prompt=the a", "--model.num_tokens=12", option]
        texts.use("predict", folder, *options)
        return capsys.readouterr().out

    first, again, other = (written(f"--seed_everything={seed}") for seed in (1, 1, 2))
    assert first.splitlines()[-1] != ""
    assert UNKNOWN not in first
    assert first == again != other
    # The likeliest tokens are those of the network.
    found = tokenized(written("--model.temperature=0").partition("the a")[2], "words")[:12]
    ids = run.datamodule.encode(["<eos>", "the", "a"])[:, None]
    for token in found:
        logits, _ = network(ids)
        logits[-1, 0, run.datamodule.vocabulary.index(UNKNOWN)] = -math.inf
        assert token == run.datamodule.vocabulary[int(logits[-1, 0].argmax())]
        ids = torch.cat([ids, run.datamodule.encode([token])[:, None]])


TRIGGERS = [
    ([4.0, 3.0, 2.9, 2.8, 3.1], 3, False),
    ([3.0, 4.0, 2.9, 2.8, 3.1], 3, True),
    ([3.0, 2.0, 2.5], 0, True),
    ([3.0, 2.0, 1.0], 0, False),
    ([3.0], 0, False),
]


@pytest.mark.parametrize(("losses", "num_patient", "expected"), TRIGGERS)
def test_the_trigger_does_not_count_the_latest_losses(losses, num_patient, expected):
    averaging, trainer = Averaging(num_patient), SimpleNamespace(should_stop=False)
    for loss in losses:
        trainer.callback_metrics = {MONITOR: loss}
        averaging.on_validation_end(trainer, None)
    assert averaging.is_averaging == expected
    assert not trainer.should_stop


def test_the_weights_of_a_checkpoint_are_the_average(texts, monkeypatch):
    seen = []

    class Seen(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            seen.append([p.detach().clone() for p in self.param_groups[0]["params"]])

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim, "SGD", Seen)
        folder = texts.fit("--model.averaging=always", epochs=2)
    averages = [torch.stack(each).mean(0) for each in zip(*seen, strict=True)]
    names = [name for name, _ in texts.cli.model.named_parameters()]
    found = weights(folder)
    for name, average in zip(names, averages, strict=True):
        torch.testing.assert_close(found[name], average, rtol=1e-4, atol=1e-6)
    assert torch.equal(found["network.decoder.weight"], found["network.embedding.weight"])
    assert same(texts.cli.model.state_dict(), found)  # left in the model
    contents = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    for name, parameter in zip(names, seen[-1], strict=True):
        assert torch.equal(contents["current_model_state"][name], parameter)
    # A test is of the average.
    run = texts.use("test", folder, checkpoint=folder / "checkpoints" / "last.ckpt")
    assert same(run.model.state_dict(), found)


def test_finetuning_begins_with_the_weights_of_a_checkpoint(texts):
    folder = texts.finished
    options = [f"--model.init_from={folder}/checkpoints/best.ckpt", "--model.averaging=always"]
    texts.fit(*options, "--model.learning_rate=0", epochs=1)
    assert same(texts.cli.model.state_dict(), weights(folder, "best"))


@pytest.mark.slow
def test_two_processes_train_as_one(texts):
    plain = [f"--model.{each}_dropout=0" for each in ("input", "hidden", "output", "embedding")]
    plain += ["--model.weight_dropout=0", "--model.learning_rate=1"]
    one = weights(texts.fit(*plain, "--data.batch_size=6", out="one"))
    ddp = ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_epochs=2"]
    process = texts.started(*plain, *ddp, "--trainer.logger.save_dir=two")
    try:
        assert process.wait(timeout=180) == 0
    finally:
        process.kill()
    two = weights("two/language_model/version_0")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_presets_build_what_they_say(texts, path):
    sizes = ["--model.embed_size=4", "--model.hidden_size=5", "--data.batch_size=2"]
    options = [*sizes, "--data.eval_batch_size=2", "--data.bptt=12"]
    run = texts.main(["-c", str(path), *QUIET, *options, *texts.tiny[-1:]], run=False)
    network = run.model.network
    assert network.dropout_kind == ("independent" if "standard" in path.stem else "locked")
    assert network.decoder.weight is network.embedding.get_parameter("weight")
    applied = {each.name for each in recoup.weights.applied(network)}
    assert ("layers.0.weight_hh_l0" in applied) == ("standard" not in path.stem)
    assert len(network.layers) == (2 if path.stem == "tiny" or "standard" in path.stem else 3)


def test_windows_cover_the_text_anew_in_each_epoch(text):
    data = Texts(text, tokens="words", batch_size=3, bptt=12)
    columns = data.columns("train", 3)
    windows = list(data.train_dataloader())
    assert torch.equal(torch.cat([window[:-1] for window in windows]), columns[:-1])
    for before, after in pairwise(windows):
        assert torch.equal(before[-1], after[0])
    assert len(data.train_dataloader()) == len(windows)
    lengths = [window_lengths(10_000, 70, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert lengths[0] == window_lengths(10_000, 70, 0, 0)
    assert lengths[0] != lengths[1] != lengths[2] != lengths[0]
    assert {sum(each) for each in lengths} == {10_000}
    assert all(5 <= length <= 95 for each in lengths for length in each[:-1])
    even = Texts(text, tokens="words", batch_size=3, bptt=12, jitter=False).train_dataloader()
    assert {len(window) for window in even} - {13} < set(range(2, 13))


def test_parts_are_those_of_files_or_cut_from_the_end(tmp_path):
    words = [f"w{n}" for n in range(100)]
    (tmp_path / "whole.txt").write_text(" ".join(words))
    data = Texts(str(tmp_path / "whole.txt"), min_count=1, batch_size=2, eval_batch_size=2)
    assert [len(data.parts[part]) for part in ("train", "validation", "test")] == [81, 10, 10]
    assert data.vocabulary[int(data.parts["train"][0])] == "w0"
    assert int(data.parts["test"][0]) == data.vocabulary.index(UNKNOWN)
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, part in (("train", "a b a b"), ("valid", "b a"), ("test", "a c")):
        (folder / f"wiki.{name}.tokens").write_text(f"{part}\n")
    data = Texts(str(folder), batch_size=1, eval_batch_size=1)
    tokens = {part: [data.vocabulary[n] for n in ids] for part, ids in data.parts.items()}
    assert tokens["validation"] == ["b", "a", UNKNOWN]  # the end of a line occurs once in training
    assert tokens["test"] == ["a", UNKNOWN, UNKNOWN]


def test_tokens_and_text():
    text = "It isn't (so), yet...\n\nÉtude's end\n"
    tokens = tokenized(text, "words")
    assert tokens == [
        *("It", "isn't", "(", "so", ")", ",", "yet", "...", "<eos>", "<eos>"),
        *("Étude's", "end", "<eos>"),
    ]
    assert joined(tokens, "words") == text
    assert tokenized(text, "whitespace")[:3] == ["It", "isn't", "(so),"]
    assert joined(tokenized(text, "characters"), "characters") == text
    for min_count, max_size in ((2, None), (1, 3)):
        found = vocabulary_of(["a", "rose", "is", "a", "rose"], min_count, max_size)
        assert found == ["a", "rose", UNKNOWN]
    assert len(read_parts(None)["train"]) > 100_000


REFUSALS = {
    "nowhere": ({"path": "nowhere"}, "no text to train on"),
    "a folder without texts": ({"path": "."}, "no text to train on"),
    "an empty file": ({"path": "empty.txt"}, "is empty"),
    "bytes": ({"path": "bytes.txt"}, "is not UTF-8"),
    "two of a kind": ({"path": "two"}, "with 2 train texts"),
    "too short": ({"path": "short.txt", "min_count": 1}, "too few for 20 columns"),
    "too rare": ({"path": "short.txt", "min_count": 9}, "`min_count` is 9"),
    "no windows": ({"bptt": 0}, "`bptt` is 0"),
    "a fraction": ({"test_fraction": 1.5}, "`test_fraction` is 1.5"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_text_that_does_not_fit_is_named(name):
    Path("two").mkdir()
    for file in ("two/train.txt", "two/my-train.txt"):
        Path(file).write_text("a b\n")
    Path("empty.txt").write_text(" \n")
    Path("bytes.txt").write_bytes(b"\xff\xfe")
    Path("short.txt").write_text("a b c a b c d\n")
    settings, message = REFUSALS[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        Texts(**settings)


# -- the same training, written out by hand --------------------------------------------------------
# They differ by rounding alone, so in float64 by 1e-15 at first; steps of a rate of 20 or 30 on a
# short text let any difference grow a hundredfold in twenty steps.

SMALL = [
    *("--model.embed_size=8", "--model.hidden_size=16", "--data.bptt=12", "--data.batch_size=3"),
    *("--data.eval_batch_size=2", "--data.tokens=whitespace"),
]


def beside(folder, preset, *options):
    for name, lines in (("train", LINES * 2), ("valid", LINES[::3]), ("test", LINES[:9])):
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    config = EXAMPLES / "configs" / "language_model" / f"{preset}.yaml"
    start = ("-c", str(config), f"--data.path={folder}", "--trainer.precision=64-true")
    run = main([*start, *QUIET, *SMALL, *options], run=False)
    number = {token: n for n, token in enumerate(run.datamodule.vocabulary)}
    numbers = (numbers_of(folder / f"{name}.txt", number) for name in ("train", "valid"))
    training = Beside(*numbers, (3, 2))
    run.trainer.callbacks.append(training)
    run.trainer.fit(run.model, run.datamodule)
    assert training.loss_error < 1e-10
    assert training.perplexity_error < 1e-10
    return training


PRESETS = [("tiny", "linear"), ("tiny", "sqrt"), ("standard-lstm-200", "sqrt")]
PRESETS.append(pytest.param("awd-lstm-wt2", "sqrt", marks=pytest.mark.slow))


@pytest.mark.parametrize(("preset", "memory"), PRESETS)
def test_a_training_of_a_preset_is_the_one_by_hand(tmp_path, preset, memory):
    by_hand = beside(tmp_path, preset, "--trainer.max_epochs=1", f"--model.memory={memory}")
    assert len(by_hand.losses) > 15
    assert by_hand.gradient_error < 1e-10


@pytest.mark.slow
def test_the_average_is_the_one_by_hand(tmp_path):
    options = ["--trainer.max_epochs=6", "--model.num_patient=0", "--model.learning_rate=10"]
    by_hand = beside(tmp_path, "tiny", *options)
    num_steps = len(by_hand.losses) // 6
    assert by_hand.num_averaged in range(num_steps, 6 * num_steps)
