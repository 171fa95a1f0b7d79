"""Reading text from disk, cutting it into tokens, and joining tokens again."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

TokenKind = Literal["words", "whitespace", "characters"]

END_OF_LINE, UNKNOWN = "<eos>", "<unk>"
# Accents and vowel signs that are characters of their own, which Python's \w leaves out.
_MARKS = "".join(c for c in map(chr, range(0x300, 0x20000)) if unicodedata.category(c)[0] == "M")
_LETTERS = rf"\w[\w{_MARKS}]*"
_WORD = re.compile(rf"<\w+>|{_LETTERS}(?:['\u2019]{_LETTERS})*|(\S)\1*")
_BEFORE = re.compile(r" ([.,;:!?)\]}]+)(?=\s|$)")
_AFTER = re.compile(r"(?<!\S)([(\[{]+) ")


def read_parts(path: str | None) -> dict[str, str]:
    """Read the texts of "train" and, where files have these words in their names, of the others.

    Args:
        path: A file, or a folder of files such as ``wiki.train.tokens``; the documentation that
            comes with CPython if None.

    Raises:
        ValueError: When a file does not exist, is not text, or is empty; the message names it.
    """
    if path is None:  # topics share paragraphs: a repeated one could be in training and in test
        paragraphs = (
            " ".join(paragraph.split())
            for name in sorted(topics)
            for paragraph in re.split(r"\n\s*\n", topics[name])
        )
        return {"train": "\n".join(dict.fromkeys(filter(None, paragraphs))) + "\n"}
    if Path(path).is_file():
        return {"train": _read(Path(path))}
    parts: dict[str, str] = {}
    for part, word in {"train": "train", "validation": "valid", "test": "test"}.items():
        files = [file for file in Path(path).glob("[!.]*") if word in file.name.lower()]
        if len(files) > 1:
            raise ValueError(f"`path` is {path}, with {len(files)} {part} texts. Leave one there.")
        if files:
            parts[part] = _read(files[0])
    if "train" not in parts:
        raise ValueError(
            f"`path` is {path}, where there is no text to train on. Give a text file, or a folder "
            "with train.txt, and valid.txt and test.txt if you have them."
        )
    return parts


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}). Convert it.") from error
    if not text.strip():
        raise ValueError(f"{path} is empty. Give a file with text.")
    return text


def tokenized(text: str, kind: TokenKind) -> list[str]:
    """Cut a text into tokens, and end each line with ``<eos>``, or a newline if as characters."""
    if kind == "characters":
        return list(text)
    tokens: list[str] = []
    # Not `splitlines`, which also splits at form feeds and Unicode separators.
    for line in text.removesuffix("\n").split("\n") if text else []:
        is_tokenized = kind == "whitespace"
        tokens += line.split() if is_tokenized else (match[0] for match in _WORD.finditer(line))
        tokens.append(END_OF_LINE)
    return tokens


def joined(tokens: Sequence[str], kind: TokenKind) -> str:
    """Join tokens into readable text: nearly the inverse of `tokenized`."""
    if kind == "characters":
        return "".join(tokens)
    text = re.sub(f" ?{END_OF_LINE} ?", "\n", " ".join(tokens))
    return _BEFORE.sub(r"\1", _AFTER.sub(r"\1", text)) if kind == "words" else text


def vocabulary_of(tokens: Sequence[str], min_count: int, max_size: int | None) -> list[str]:
    """Return the tokens of a text, ``<unk>`` among them, the most frequent first.

    Those that occur less often than `min_count`, or are more than `max_size`, are ``<unk>``.
    """
    counts = Counter(tokens)
    known = [each for each, n in counts.most_common() if n >= min_count and each != UNKNOWN]
    known = known if max_size is None else known[: max_size - 1]
    # It counts the tokens that are left out, and those that are ``<unk>`` in the text itself.
    left_out = counts.total() - sum(counts[token] for token in known)
    rank = sum(counts[token] >= left_out for token in known)
    return [*known[:rank], UNKNOWN, *known[rank:]]
