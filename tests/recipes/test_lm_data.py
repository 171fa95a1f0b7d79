"""Text from files: read, cut into tokens, numbered, split, laid out in columns and windows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recoup.recipes.language_model.data import Texts
from recoup.recipes.language_model.reading import read_text, text_of, tokens_of
from recoup.recipes.language_model.vocabulary import Vocabulary
from recoup.recipes.language_model.windows import Windows, columns_of, jittered_lengths

WIKITEXT = Path(__file__).parents[3] / "shared" / "data" / "wikitext-2"

# White space of each kind, among it what ends lines for Unicode alone, and marks.
any_text = st.text(alphabet="ab'é\u2019.,([)] \n\t\x0c\x1c\x85\u2028\xa0-", max_size=40)


def write(content, path="text.txt"):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


# -- tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["whitespace", "words"])
@given(text=any_text)
def test_a_line_ends_where_newline_says_so_and_nothing_is_lost(kind, text):
    tokens = tokens_of(text, kind)
    lines = text.split("\n")
    assert tokens.count("<eos>") == len(lines) - (lines[-1] == "")
    assert "".join(each for each in tokens if each != "<eos>") == "".join(text.split())
    assert tokens[-1:] == (["<eos>"] if text else [])


@given(text=any_text)
def test_between_white_space(text):
    assert [each for each in tokens_of(text, "whitespace") if each != "<eos>"] == text.split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Isn't it?", "Isn't it ?"),
        ("isn\u2019t 'quoted'", "isn\u2019t ' quoted '"),
        ("f(x[0]) == 3.14", "f ( x [ 0 ] ) == 3 . 14"),
        ("-- well... <unk> <a b>", "-- well ... <unk> < a b >"),
        ("naïve_name Überfluß 你好", "naïve_name Überfluß 你好"),
        (
            "cafe\u0301's \u0939\u093f\u0928\u094d\u0926\u0940.",
            "cafe\u0301's \u0939\u093f\u0928\u094d\u0926\u0940 .",
        ),
    ],
)
def test_words_and_marks(text, words):
    assert tokens_of(text, "words") == [*words.split(), "<eos>"]


def test_without_text_there_are_no_tokens():
    assert [tokens_of("", kind) for kind in ("words", "whitespace", "characters")] == [[], [], []]
    assert tokens_of("\n\n", "words") == ["<eos>", "<eos>"]


def test_a_single_huge_line():
    assert len(tokens_of("a b, " * 100_000, "words")) == 300_001
    assert len(tokens_of("ab" * 1_000_000, "words")) == 2


@given(text=any_text)
def test_putting_together_is_the_inverse(text):
    assert text_of(tokens_of(text, "characters"), "characters") == text
    tokens = tokens_of(text, "whitespace")
    assert tokens_of(text_of(tokens, "whitespace"), "whitespace") == tokens


@given(text=any_text)
def test_words_put_together_have_the_same_marks_in_the_same_lines(text):
    written = text_of(tokens_of(text, "words"), "words")
    ours, theirs = ([line.split() for line in each.split("\n")] for each in (written, text))
    assert ["".join(line) for line in ours][: len(theirs)] == ["".join(line) for line in theirs]


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("<eos> a <eos> <eos> b <eos>", "\na\n\nb\n"),
        ("f ( a , [ b ] ) .", "f (a, [b])."),
        ("( [ a ] )", "([a])"),
        ("a ( <eos> ) b", "a (\n) b"),
        ("it 's ; no ! ? : { x }", "it 's; no!?: {x}"),
    ],
)
def test_what_is_put_together_reads_well(tokens, text):
    assert text_of(tokens.split(" "), "words").replace("(\n )", "(\n)") == text


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"one two\n\nthr\xc3\xa9e\n",
        b"one two\r\n\r\nthr\xc3\xa9e\r\n",
        b"one two\r\rthr\xc3\xa9e\r",
        b"\xef\xbb\xbfone two\n\nthr\xc3\xa9e\n",
        b"\xef\xbb\xbfone two\r\n\r\nthr\xc3\xa9e",
        b"one two\n\nthr\xc3\xa9e",
    ],
    ids=["unix", "windows", "mac", "mark", "windows and mark", "no newline at the end"],
)
def test_how_an_editor_wrote_the_file_makes_no_difference(data):
    parts = read_text(write(data)).parts
    assert tokens_of(parts["train"], "words") == ["one", "two", "<eos>", "<eos>", "thrée", "<eos>"]
    assert parts["train"].rstrip("\n") == "one two\n\nthrée"


@pytest.mark.parametrize(("mark", "at"), [(b"", 4), (b"\xef\xbb\xbf", 7)])
def test_a_file_that_is_not_utf8_is_told_with_the_byte(mark, at):
    path = write(mark + b"caf\n\xe9 au lait")
    with pytest.raises(ValueError, match=f"text.txt is not UTF-8: byte {at} is 0xe9. Convert it"):
        read_text(path)


@pytest.mark.parametrize("content", ["", "\ufeff", " \n\t\n", "\r\n"])
def test_an_empty_file(content):
    with pytest.raises(ValueError, match=r"text\.txt is empty"):
        read_text(write(content))


@pytest.mark.parametrize(
    "names",
    [
        ("train.txt", "valid.txt", "test.txt"),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("Training-1.TXT", "dev.txt", "my_test.txt"),
        ("train-prefix.txt", "validation", "test"),
    ],
)
def test_a_folder_names_its_parts(names):
    for name in names:
        write(name, f"some/{name}")
    for other in ("some/latest.txt", "some/constraint.txt", "some/.train.txt.swp", "some/train/x"):
        write("no part", other)
    assert read_text(Path("some")).parts == dict(
        zip(("train", "validation", "test"), names, strict=True)
    )


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "a folder without a file that has `train`"),
        (("test.txt", "valid.txt", "constraint.txt"), "without a file that has `train`"),
        (("a.train.txt", "b.train.txt"), "both a.train.txt and b.train.txt look like its train"),
        (("train.txt", "val.txt", "dev.txt"), "dev.txt and val.txt look like its validation"),
        (("train.txt", "valid.test.txt"), "valid.test.txt looks like its validation and its test"),
        (("train-test.txt",), "train-test.txt looks like its train and its test"),
    ],
)
def test_a_folder_whose_parts_are_not_clear(names, message):
    Path("some").mkdir()
    for name in names:
        write("a b c", f"some/{name}")
    with pytest.raises(ValueError, match=message):
        read_text(Path("some"))


def test_the_documentation_of_python_has_no_paragraph_twice():
    text = read_text(None).parts["train"]
    lines = text.removesuffix("\n").split("\n")
    assert len(lines) == len(set(lines)) > 1000
    assert all(line == " ".join(line.split()) != "" for line in lines)


@pytest.mark.skipif(not WIKITEXT.is_dir(), reason=f"there is no {WIKITEXT.name} beside")
def test_wikitext_has_the_published_number_of_tokens():
    parts = read_text(WIKITEXT).parts
    assert parts.keys() == {"train", "validation", "test"}
    counts = {part: len(tokens_of(parts[part], "whitespace")) for part in ("validation", "test")}
    assert counts == {"validation": 217_646, "test": 245_569}


# -- numbers ---------------------------------------------------------------------------------------


@given(
    tokens=st.lists(st.sampled_from(["a", "b", "c", "d", "e", "<unk>"]), max_size=40),
    min_count=st.integers(1, 5),
    max_size=st.none() | st.integers(2, 7),
)
def test_a_vocabulary_has_the_most_frequent_tokens(tokens, min_count, max_size):
    found = Vocabulary.of(tokens, min_count, max_size).tokens
    counts = Counter(token for token in tokens if token != "<unk>")
    fit = [token for token in counts if counts[token] >= min_count]
    known = [token for token in found if token != "<unk>"]
    assert found.count("<unk>") == 1
    assert set(known) <= set(fit)
    assert len(set(known)) == len(known) == min(len(fit), (max_size or 99) - 1)
    left_out = [counts[token] for token in fit if token not in known]
    assert max(left_out, default=0) <= min((counts[token] for token in known), default=99)
    counts["<unk>"] = sum(token not in known for token in tokens)
    assert [counts[token] for token in found] == sorted(map(counts.get, found), reverse=True)


def test_tokens_beyond_the_vocabulary_are_unknown_and_counted():
    vocabulary = Vocabulary(["b", "<unk>", "a"])
    tokens = ["a", "z", "<unk>", "b", "Z", "z"]
    ids = vocabulary.encode(iter(tokens))
    assert ids.tolist() == [2, 1, 1, 0, 1, 1]
    assert ids.dtype == vocabulary.encode([]).dtype == torch.int64
    assert vocabulary.num_unknown(tokens) == 3
    assert ["z" in vocabulary, "a" in vocabulary, len(vocabulary)] == [False, True, 3]


@pytest.mark.parametrize("tokens", [[], ["a"], ["<unk>", "a", "a"]])
def test_a_list_of_tokens_that_is_no_vocabulary(tokens):
    with pytest.raises(ValueError, match=f"`tokens` are {len(tokens)}"):
        Vocabulary(tokens)


# -- parts -----------------------------------------------------------------------------------------


@given(num=st.integers(1, 60), validation=st.floats(0.01, 0.99), test=st.floats(0.01, 0.99))
def test_one_file_is_split_and_nothing_is_lost(num, validation, test):
    path = write(" ".join(map(str, range(num))))
    options = {"min_count": 1, "validation_fraction": validation, "test_fraction": test}
    wanted = {"test": round((num + 1) * test), "validation": round((num + 1) * validation)}
    wanted["train"] = num + 1 - sum(wanted.values())
    if min(wanted.values()) < 1:
        with pytest.raises(ValueError, match=f"has {num + 1} tokens, and none are left for"):
            Texts(str(path), **options)
        return
    texts = Texts(str(path), **options)
    assert {part: len(ids) for part, ids in texts.parts.items()} == wanted
    tokens = [*map(str, range(num)), "<eos>"]
    start = 0
    for part in ("train", "validation", "test"):
        mine = tokens[start : start + wanted[part]]
        known = [texts.vocabulary.tokens[number] for number in texts.parts[part].tolist()]
        assert known == [token if token in texts.vocabulary else "<unk>" for token in mine]
        start += wanted[part]
    assert set(texts.vocabulary.tokens) == {*tokens[: wanted["train"]], "<unk>"}


@pytest.mark.parametrize("files", [(), ("valid",), ("test",), ("valid", "test")])
def test_all_of_a_text_is_in_order(files):
    contents = {"train": "a b c d e f g h i j", "valid": "k l", "test": "m n"}
    for name in ("train", *files):
        write(contents[name], f"some/{name}.txt")
    texts = Texts("some", min_count=1, vocabulary=[*"abcdefghijklmn", "<eos>", "<unk>"])
    texts.test_on_everything()
    whole = [texts.vocabulary.tokens[number] for number in texts.parts["test"].tolist()]
    assert whole == [x for name in ("train", *files) for x in [*contents[name].split(), "<eos>"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_count": 0}, "`min_count` is 0, but must be at least 1"),
        ({"min_count": 99}, "`min_count` is 99, but no token of text.txt occurs as often"),
        ({"max_vocab_size": 1}, "`max_vocab_size` is 1, but must be at least 2"),
        ({"batch_size": 0}, "`batch_size` is 0"),
        ({"eval_batch_size": -1}, "`eval_batch_size` is -1"),
        ({"bptt": 0}, "`bptt` is 0"),
        ({"bptt": 9}, "`bptt` is 9, but windows of at least 5 steps"),
        ({"validation_fraction": 0.0}, "`validation_fraction` is 0.0"),
        ({"test_fraction": 1.0}, "`test_fraction` 1.0, but both must lie between 0 and 1"),
        ({"test_fraction": float("nan")}, "`test_fraction` nan"),
        ({"test_fraction": 0.6, "validation_fraction": 0.6}, "none are left for train"),
        ({"tokens": "letters"}, '`tokens` is \'letters\', but must be "words", "whitespace" or'),
    ],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        Texts(str(write("a b c d\n" * 10)), **options)


def test_a_part_that_is_too_short_for_its_columns():
    texts = Texts(str(write("a b c\n" * 25)), batch_size=40, eval_batch_size=5)
    assert len(texts.val_dataloader().columns) == 2
    assert texts.num_train_steps == 1
    texts = Texts("text.txt", batch_size=41, eval_batch_size=6)
    for build in (texts.val_dataloader, texts.test_dataloader, texts.train_dataloader):
        with pytest.raises(ValueError, match=r"too few for (6|41) columns of two. Give more text"):
            build()


# -- columns and windows ---------------------------------------------------------------------------


@given(num=st.integers(0, 50), batch_size=st.integers(1, 12))
def test_columns_are_read_side_by_side(num, batch_size):
    columns = columns_of(torch.arange(num), batch_size)
    rows = num // batch_size
    assert columns.tolist() == [[n * rows + t for n in range(batch_size)] for t in range(rows)]
    assert columns.is_contiguous()


def assert_each_step_once(windows, columns):
    pairs = [
        (int(before), int(after))
        for window in windows
        for before, after in zip(window[:-1].flatten(), window[1:].flatten(), strict=True)
    ]
    assert pairs == [(int(n), int(n) + 1) for n in columns[:-1].flatten()]
    assert windows.num_tokens == len(pairs)
    assert len(windows) == len(list(windows))


@given(num=st.integers(2, 60), batch_size=st.integers(1, 4), bptt=st.integers(1, 70))
def test_windows_have_each_step_once(num, batch_size, bptt):
    columns = torch.arange(num)[:, None] + 1000 * torch.arange(batch_size)
    windows = Windows.even(columns, bptt)
    assert_each_step_once(windows, columns)
    assert set(windows.lengths[:-1]) <= {bptt}
    assert 1 <= windows.lengths[-1] <= bptt
    assert_each_step_once(Windows(columns, jittered_lengths(num - 1, bptt, 0, 0)), columns)


@given(num=st.integers(1, 3000), bptt=st.integers(1, 200), seed=st.integers(0, 2**40))
def test_lengths_vary_within_bounds(num, bptt, seed):
    lengths = jittered_lengths(num, bptt, seed, 3)
    assert sum(lengths) == num
    assert all(5 <= length <= bptt + 25 for length in lengths[:-1])
    assert 1 <= lengths[-1] <= bptt + 25
    torch.manual_seed(num)
    assert lengths == jittered_lengths(num, bptt, seed, 3)


def test_lengths_are_drawn_as_published():
    """Around 70, or 35 in one window of twenty, with a deviation of 5, cut off to integers."""
    lengths = torch.tensor(jittered_lengths(2_000_000, 70, 0, 0)[:-1], dtype=torch.float64)
    short = lengths[lengths < 52]
    share = len(short) / len(lengths)
    assert share == pytest.approx(0.05, abs=4 * (0.05 * 0.95 / len(lengths)) ** 0.5)
    for found, centre in ((short, 34.5), (lengths[lengths >= 52], 69.5)):
        error = 5 / len(found) ** 0.5
        assert float(found.mean()) == pytest.approx(centre, abs=4 * error)
        assert float(found.std()) == pytest.approx(5, abs=4 * error)


def test_each_epoch_and_seed_has_lengths_of_its_own():
    drawn = {tuple(jittered_lengths(700, 70, *at)) for at in ((0, 0), (0, 1), (1, 0), (1, 1))}
    assert len(drawn) == 4
