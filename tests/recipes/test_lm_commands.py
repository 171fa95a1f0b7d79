"""``recoup lm evaluate``: the perplexity of texts, against an LSTM by hand."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recoup.recipes.cli import main
from recoup.recipes.language_model.train import prepare

TINY = [
    *("--model.embed_size", "8", "--model.hidden_size", "8", "--model.num_layers", "1"),
    *("--data.bptt", "11", "--batch-size", "3", "--data.eval_batch_size", "2"),
    *("--model.learning_rate", "10", "--model.weight_dropout", "0.1"),
    *("--model.input_dropout", "0", "--model.output_dropout", "0", "--threads", "1"),
]


def train(folder, text, *options):
    """A trained checkpoint, and what a test has to know of it."""
    path = folder / "text.txt"
    path.write_bytes(text.encode())
    run = prepare(["--data", str(path), "--out", str(folder / "run"), *TINY, *options])
    run.fit()
    checkpoint = folder / "run" / "checkpoints" / "last.ckpt"
    content = torch.load(checkpoint, weights_only=True)
    # Weights so large that much depends on what was read long before.
    generator, state = torch.Generator().manual_seed(0), content["state_dict"]
    for name in [each for each in state if each.startswith("network.")]:
        state[name] = 0.7 * torch.randn(state[name].shape, generator=generator)
    state["network.decoder.weight"] = state["network.embedding.weight"]
    torch.save(content, checkpoint)
    vocabulary = content["Texts"]["vocabulary"]
    return SimpleNamespace(path=checkpoint, data=path, content=content, vocabulary=vocabulary)


def train_on_words(folder):
    draw = random.Random(0)
    lines = [" ".join(draw.choices(["a", "bb", "c", "a", "<unk>"], k=5)) for _ in range(150)]
    lines[3] += " once"
    text = "\n\n".join(lines) + "\n"
    return train(folder, text, "--epochs", "2")


def train_on_letters(folder):
    return train(folder, "a bad cab\n" * 60, "--epochs", "1", "--data.tokens", "characters")


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


# -- by hand ---------------------------------------------------------------------------------------


def run_by_hand(model, ids):
    """Logits and outputs of the network in float64, cell by cell: ``(T, V)`` and ``(T, C)``."""
    weights = {
        name.removeprefix("network."): value.double()
        for name, value in model.content["state_dict"].items()
        if name.startswith("network.")
    }
    embedding = weights["embedding.weight"]
    w_ih, w_hh, b_ih, b_hh = (
        weights[f"layers.0.{name}_l0"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    h = c = torch.zeros(8, dtype=torch.float64)
    outputs = []
    for number in ids:
        i, f, g, o = (w_ih @ embedding[number] + b_ih + w_hh @ h + b_hh).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    outputs = torch.stack(outputs)
    return outputs @ embedding.t() + weights["decoder.bias"], outputs


def read_by_hand(model, text):
    tokens = [token for line in text.split("\n") for token in [*line.split(), "<eos>"]]
    return ids_of(model, tokens[:-1] if text.endswith("\n") else tokens)


def ids_of(model, tokens):
    numbers = {token: number for number, token in enumerate(model.vocabulary)}
    return [numbers.get(token, numbers["<unk>"]) for token in tokens]


def nll_by_hand(model, ids):
    logits, _ = run_by_hand(model, ids[:-1])
    return -logits.log_softmax(dim=1)[range(len(ids) - 1), ids[1:]]


def perplexity_by_hand(model, *columns):
    nll = torch.cat([nll_by_hand(model, column) for column in columns])
    return math.exp(float(nll.sum()) / len(nll))


def evaluate(capsys, model, *options):
    """The first line, and the numbers of each row, of the command."""
    capsys.readouterr()
    path = str(getattr(model, "path", model))
    assert main(["lm", "evaluate", "--checkpoint", path, *map(str, options)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    first, _, _, *rows = printed.out.splitlines()
    return first, {row[:12].strip(): [float(x) for x in row.split()[-3:]] for row in rows}


def assert_perplexity(rows, expected, name="network"):
    perplexity, nats, bits = rows[name]
    assert perplexity == pytest.approx(expected, abs=6e-4, rel=1e-5)
    assert nats == pytest.approx(math.log(expected), abs=6e-5)
    assert bits == pytest.approx(math.log2(expected), abs=6e-5)


# -- evaluate --------------------------------------------------------------------------------------


def test_the_test_part_is_what_training_kept_for_the_end(words, capsys):
    ids = read_by_hand(words, words.data.read_text())
    num = round(0.1 * len(ids))
    expected = perplexity_by_hand(words, ids[-num:])
    for options in ((), ("--data", words.data), ("--data", words.data.parent / "run/../text.txt")):
        first, rows = evaluate(capsys, words, *options)
        assert f"{num - 1} tokens (whitespace), the test part of " in first
        assert "text.txt; 0 that the model does not know" in first
        assert_perplexity(rows, expected)
        assert rows.keys() == {"network"}
    assert list(Path.cwd().iterdir()) == []


OTHER = "a bb zz\nc <unk> Once once\n\na a c bb\n" * 4


@pytest.mark.parametrize(
    "content",
    [
        OTHER.encode(),
        OTHER.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + OTHER.encode(),
        OTHER.removesuffix("\n").encode(),
    ],
    ids=["unix", "windows", "mark", "no newline at the end"],
)
def test_all_of_another_text_with_unknown_tokens_counted(words, capsys, content):
    Path("other.txt").write_bytes(content)
    first, rows = evaluate(capsys, words, "--data", "other.txt")
    ids = read_by_hand(words, OTHER)
    assert first == (
        f"{len(ids) - 1} tokens (whitespace), all of other.txt; "
        "12 that the model does not know were read as <unk>"
    )
    assert_perplexity(rows, perplexity_by_hand(words, ids))


@pytest.mark.parametrize("text", ["a", "a bb", "zz\nzz"])
def test_a_text_of_a_line_is_enough(words, capsys, text):
    Path("other.txt").write_text(text)
    _, rows = evaluate(capsys, words, "--data", "other.txt")
    assert_perplexity(rows, perplexity_by_hand(words, read_by_hand(words, text)))


@pytest.mark.parametrize("batch_size", [3, 5])
def test_columns_begin_anew_and_what_is_left_over_is_left_out(words, capsys, batch_size):
    Path("other.txt").write_text(OTHER)
    ids = read_by_hand(words, OTHER)
    rows = len(ids) // batch_size
    columns = [ids[n * rows : (n + 1) * rows] for n in range(batch_size)]
    first, found = evaluate(capsys, words, "--data", "other.txt", "--batch-size", batch_size)
    assert first.startswith(f"{batch_size * (rows - 1)} tokens ")
    assert_perplexity(found, perplexity_by_hand(words, *columns))


@pytest.mark.parametrize("bptt", [1, 7, 1000])
def test_the_state_and_the_cache_are_carried_from_window_to_window(words, capsys, bptt):
    settings = words.content["datamodule_hyper_parameters"] | {"bptt": bptt, "jitter": False}
    torch.save({**words.content, "datamodule_hyper_parameters": settings}, "other.ckpt")
    options = ("--cache-window", "11")
    first, rows = evaluate(capsys, "other.ckpt", *options)
    ids = read_by_hand(words, words.data.read_text())
    ids = ids[-round(0.1 * len(ids)) :]
    afresh = [ids[at : at + 10] for at in range(0, len(ids) - 1, 9)]
    assert abs(perplexity_by_hand(words, *afresh) / perplexity_by_hand(words, ids) - 1) > 0.01
    expected_first, expected = evaluate(capsys, words, *options)
    assert first == expected_first
    for name in expected:
        assert rows[name] == pytest.approx(expected[name], abs=2e-4)


def test_the_cache_is_the_published_one(words, capsys):
    Path("other.txt").write_text(OTHER)
    options = ("--cache-window", "11", "--cache-theta", "3.5", "--cache-weight", "0.3")
    _, rows = evaluate(capsys, words, "--data", "other.txt", *options)
    ids = read_by_hand(words, OTHER)
    logits, outputs = run_by_hand(words, ids[:-1])
    network, targets, nll = logits.softmax(dim=1), ids[1:], 0.0
    for t, target in enumerate(targets):
        p = float(network[t, target])
        seen = range(max(0, t - 11), t)
        likeness = [math.exp(3.5 * float(outputs[t] @ outputs[i])) for i in seen]
        if seen:
            same = [each for i, each in zip(seen, likeness, strict=True) if targets[i] == target]
            p = 0.7 * p + 0.3 * sum(same) / sum(likeness)
        nll -= math.log(p)
    assert_perplexity(rows, math.exp(nll / len(targets)), "with cache")
    assert_perplexity(rows, perplexity_by_hand(words, ids))


def test_a_folder_has_its_test_file_or_all_of_it(words, capsys):
    Path("some").mkdir()
    parts = {"train": "a bb c\n", "valid": "c c zz\n", "test": "bb bb a a\nc\n"}
    for part in ("train", "valid"):
        Path("some", f"{part}.txt").write_text(parts[part])
    first, rows = evaluate(capsys, words, "--data", "some")
    assert first.startswith("7 tokens (whitespace), all of some; 1 that")
    ids = read_by_hand(words, parts["train"] + parts["valid"])
    assert_perplexity(rows, perplexity_by_hand(words, ids))
    Path("some", "test.txt").write_text(parts["test"])
    first, rows = evaluate(capsys, words, "--data", "some")
    assert first.startswith("6 tokens (whitespace), the test part of some; 0 that")
    assert_perplexity(rows, perplexity_by_hand(words, read_by_hand(words, parts["test"])))


def test_characters(letters, capsys, refusal):
    Path("other.txt").write_bytes("a cab\r\nüb".encode())
    first, rows = evaluate(capsys, letters, "--data", "other.txt")
    assert first.startswith("7 tokens (characters), all of other.txt; 1 that")
    assert_perplexity(rows, perplexity_by_hand(letters, ids_of(letters, "a cab\nüb")))
    Path("other.txt").write_text("a")
    message = refusal("lm", "evaluate", "--checkpoint", letters.path, "--data", "other.txt")
    assert "other.txt has 1 tokens, too few for 1 columns of two" in message


def test_a_relative_path_is_known_from_another_folder(monkeypatch, capsys, refusal):
    Path("here").mkdir()
    Path("there").mkdir()
    monkeypatch.chdir("here")
    Path("text.txt").write_text("a b c d\n" * 100)
    prepare(["--data", "text.txt", "--out", "run", *TINY, "--epochs", "1"]).fit()
    _, expected = evaluate(capsys, "run/checkpoints/last.ckpt")
    monkeypatch.chdir("../there")
    Path("text.txt").write_text("another text\n" * 100)
    checkpoint = "../here/run/checkpoints/last.ckpt"
    for options in ((), ("--data", "../here/text.txt")):
        first, rows = evaluate(capsys, checkpoint, *options)
        assert "the test part of " in first
        assert rows == expected
    assert "all of text.txt" in evaluate(capsys, checkpoint, "--data", "text.txt")[0]
    Path("text.txt").unlink()
    Path("../here/text.txt").unlink()
    message = refusal("lm", "evaluate", "--checkpoint", checkpoint)
    assert "trained on text.txt, which does not exist" in message
    assert "as `--data`" in message


# -- what a user can mend --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "0"], "`--batch-size` is 0, but must be at least 1"),
        (["--batch-size", "many"], "argument --batch-size: invalid int value: 'many'"),
        (["--batch-size", "9999"], "tokens, too few for 9999 columns of two. Give more text"),
        (["--cache-window", "-1"], "`cache_window` is -1, but must be at least 1"),
        (["--cache-window", "1.5"], "argument --cache-window: invalid int value: '1.5'"),
        (["--cache-window", "9", "--cache-weight", "1"], "`cache_weight` is 1.0"),
        (["--cache-window", "9", "--cache-theta", "-1"], "`cache_theta` is -1.0"),
        (["--cache-theta", "1"], "`--cache-theta` is given, but there is no cache"),
        (["--accelerator", "abacus"], "invalid accelerator name"),
        (["--data", "nowhere"], "`--data` is nowhere, which does not exist"),
        (["--data", "empty.txt"], "empty.txt is empty"),
        (["--data", "latin.txt"], "latin.txt is not UTF-8: byte 3 is 0xe9"),
        (["--data", "none"], "a folder without a file that has `train` in its name"),
        (["--data", "two"], "both a.train.txt and b.train.txt look like its train text"),
        (["--dta", "x"], "no option `--dta x`"),
    ],
)
def test_options_of_evaluate(refusal, words, options, message):
    Path("empty.txt").write_text("")
    Path("latin.txt").write_bytes(b"caf\xe9 au lait")
    Path("none").mkdir()
    Path("none", "test.txt").write_text("a bb c")
    Path("two").mkdir()
    for name in ("a", "b"):
        Path("two", f"{name}.train.txt").write_text("a bb c")
    assert message in refusal("lm", "evaluate", "--checkpoint", words.path, *options)


def cut_short(model, path):
    path.write_bytes(model.path.read_bytes()[:5000])


def half(model, path):
    state = dict(list(model.content["state_dict"].items())[1:])
    torch.save({**model.content, "state_dict": state}, path)


@pytest.mark.parametrize("command", ["evaluate", "generate"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut_short, "`--checkpoint` is bad.ckpt, which cannot be read as a checkpoint"),
        (half, "bad.ckpt is a checkpoint of another architecture"),
        (lambda model, path: None, "`--checkpoint` is bad.ckpt, but there is no such file"),
        (lambda model, path: path.mkdir(), "`--checkpoint` is bad.ckpt, but there is no such file"),
    ],
)
def test_a_checkpoint_that_cannot_be_used(refusal, words, command, spoil, message):
    spoil(words, Path("bad.ckpt"))
    assert message in refusal("lm", command, "--checkpoint", "bad.ckpt")
    assert "arguments are required: --checkpoint" in refusal("lm", command)


def test_checkpoints_of_the_other_recipe(refusal, words, checkpoint):
    for command in ("evaluate", "generate"):
        message = refusal("lm", command, "--checkpoint", checkpoint)
        assert "is not a checkpoint of a language model. Give one that `recoup lm fit`" in message
    for command in ("evaluate", "sample"):
        message = refusal("flow", command, "--checkpoint", words.path)
        assert "is not a checkpoint of a flow, or is damaged. Give one that `recoup flow" in message


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("a b c d e f g h", (), "`min_count` is 2, but no token of text.txt occurs as often"),
        ("a b\n" * 9, ("--data.min_count", "99"), "`min_count` is 99, but no token"),
        ("a b\n" * 9, ("--data.max_vocab_size", "1"), "`max_vocab_size` is 1"),
        ("a b\n" * 9, ("--data.validation_fraction", "0.01"), "none are left for validation"),
        ("a b\n" * 9, ("--data.test_fraction", "1.5"), "`test_fraction` 1.5"),
        ("ab" * 1000, (), "text.txt has 2 tokens, and none are left for test"),
        ("<unk> " * 99, (), "no token of text.txt occurs as often"),
    ],
)
def test_texts_that_nothing_can_be_learned_from(refusal, content, options, message):
    Path("text.txt").write_text(content)
    assert message in refusal("lm", "fit", "--data", "text.txt", *TINY, *options)


@pytest.mark.parametrize("max_size", [2, 3, 99])
def test_a_vocabulary_that_is_cut_short_has_unknown_in_it(max_size, capsys):
    """Also where the text has the mark itself, and more seldom than other words."""
    Path("text.txt").write_text("a a a b b <unk>\n" * 40)
    options = ("--data.max_vocab_size", str(max_size), "--data", "text.txt", "--epochs", "1")
    run = prepare([*TINY, *options, "--out", "run"])
    tokens = run.datamodule.vocabulary.tokens
    assert len(tokens) == min(max_size, 4)
    assert "<unk>" in tokens
    run.fit()
    _, rows = evaluate(capsys, "run/checkpoints/last.ckpt")
    assert 1 < rows["network"][0] < 20
