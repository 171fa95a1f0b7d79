"""``recoup lm generate``: what it writes, against an LSTM by hand."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from recoup.recipes.cli import main
from tests.recipes.test_lm_commands import (
    ids_of,
    run_by_hand,
    train_on_letters,
    train_on_words,
)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return train_on_words(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    return train_on_letters(tmp_path_factory.mktemp("letters"))


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other take longer than what there is to do."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def generate(capsys, model, *options):
    capsys.readouterr()
    command = ["lm", "generate", "--checkpoint", str(model.path), *map(str, options)]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "<eos>" not in printed.out
    assert "<unk>" not in printed.out
    assert list(Path.cwd().iterdir()) == []
    return printed.out.removesuffix("\n"), printed.err


def tokens_in(written):
    return [x for line in written.split("\n") for x in [*line.split(), "<eos>"]][:-1]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_are_drawn_as_the_network_has_them(words, capsys, temperature):
    """What is written must be a sum of draws: each count is as far from its mean as it may be."""
    written, _ = generate(capsys, words, "--num-tokens", "3000", "--temperature", temperature)
    ids = ids_of(words, tokens_in(written))
    assert len(ids) == 3000
    logits, _ = run_by_hand(words, ids_of(words, ["<eos>"]) + ids[:-1])
    logits[:, words.vocabulary.index("<unk>")] = -math.inf
    p = (logits / temperature).softmax(dim=1)
    counts = torch.bincount(torch.tensor(ids), minlength=p.shape[1])
    spread = (p * (1 - p)).sum(dim=0).sqrt()
    assert ((counts - p.sum(dim=0)).abs() <= 4 * spread).all()
    assert float(spread.max()) < 50


@pytest.mark.parametrize("temperature", ["0", "1e-300", "5e-324"])
def test_without_temperature_each_token_is_the_likeliest(words, capsys, temperature):
    start = ["a", "bb", "a"]
    written, error = generate(
        capsys, words, "--prompt", "a  bb a", "--num-tokens", "20", "--temperature", temperature
    )
    assert error == ""
    found = tokens_in(written)
    assert len(found) == 23
    assert found[:3] == start
    logits, _ = run_by_hand(words, ids_of(words, ["<eos>", *found]))
    logits[:, words.vocabulary.index("<unk>")] = -math.inf
    assert logits[3:-1].argmax(dim=1).tolist() == ids_of(words, found[3:])


def test_the_same_seed_writes_the_same(words, capsys):
    options = ("--num-tokens", "50", "--prompt", "c")
    first = generate(capsys, words, *options)
    torch.rand(3)
    assert generate(capsys, words, *options, "--seed", "0") == first
    assert generate(capsys, words, *options, "--seed", "1") != first
    generate(capsys, words, *options, "--temperature", "1e300")


def test_unknown_tokens_of_the_prompt_are_told_and_read_as_such(words, capsys):
    options = ("--num-tokens", "9", "--temperature", "0", "--prompt")
    written, error = generate(capsys, words, *options, "zz a once zz")
    assert error == "read as <unk>: zz, once\n"
    assert written.startswith("zz a once zz")
    other, _ = generate(capsys, words, *options, "x a y x")
    assert other.removeprefix("x a y x") == written.removeprefix("zz a once zz")


@pytest.mark.parametrize(("prompt", "lines"), [("a", 1), ("a\n", 2), ("a\n\n", 3), ("\n", 2)])
def test_a_prompt_may_end_its_line(words, capsys, prompt, lines):
    options = ("--num-tokens", "30", "--temperature", "0")
    written, _ = generate(capsys, words, "--prompt", prompt, *options)
    assert written.startswith(prompt)
    found = tokens_in(written)
    start = len(found) - 30
    assert found[:start].count("<eos>") == lines - 1
    logits, _ = run_by_hand(words, ids_of(words, ["<eos>", *found]))
    logits[:, words.vocabulary.index("<unk>")] = -math.inf
    assert logits[start:-1].argmax(dim=1).tolist() == ids_of(words, found[start:])


def test_characters_are_written_without_spaces_between(letters, capsys):
    written, error = generate(capsys, letters, "--prompt", "a bü\n", "--num-tokens", "40")
    assert error == "read as <unk>: ü\n"
    assert written.startswith("a bü\n")
    assert len(written) == 45
    assert re.fullmatch(r"[abcd \n]*", written[5:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-tokens", "0"], "`--num-tokens` is 0, but must be at least 1"),
        (["--num-tokens", "2.5"], "argument --num-tokens: invalid int value: '2.5'"),
        (["--temperature", "-0.1"], "`--temperature` is -0.1, but must be at least 0"),
        (["--temperature", "1e999"], "`--temperature` is inf"),
        (["--temperature", "hot"], "argument --temperature: invalid float value: 'hot'"),
        (["--seed", str(2**64)], f"`--seed` is {2**64}, but must have at most 64 bits"),
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--device", "abacus"], "`--device` is abacus, which torch cannot use here"),
        (["--device", "cuda:99"], "`--device` is cuda:99, which torch cannot use here"),
        (["--device", "meta"], "`--device` is meta, which torch cannot use here"),
    ],
)
def test_options_of_generate(refusal, words, options, message):
    assert message in refusal("lm", "generate", "--checkpoint", words.path, *options)
