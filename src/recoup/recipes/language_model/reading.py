"""Reading text from disk and tokenising it, with errors that name the file and the reason."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["END_OF_LINE", "Text", "TokenKind", "read_text", "text_of", "tokens_of"]

TokenKind = Literal["words", "whitespace", "characters"]

END_OF_LINE = "<eos>"

_PART_NAMES = {
    "train": {"train", "training"},
    "validation": {"valid", "validation", "val", "dev"},
    "test": {"test"},
}
_BEFORE = re.compile(r" ([.,;:!?)\]}]+)(?=\s|$)")
_AFTER = re.compile(r"(?<!\S)([(\[{]+) ")
# Accents and vowel signs that are characters of their own, which Python's \w leaves out.
_MARKS = "".join(c for c in map(chr, range(0x300, 0x20000)) if unicodedata.category(c)[0] == "M")
_LETTERS = rf"\w[\w{_MARKS}]*"
# Not by the package tokenizers: it takes four times as long for the same tokens, and brings the
# client of a model hub.
_WORD = re.compile(rf"<\w+>|{_LETTERS}(?:['\u2019]{_LETTERS})*|(\S)\1*")


@dataclass(frozen=True, slots=True)
class Text:
    """A text, in the parts that its files name.

    Attributes:
        name: name of the text in messages.
        parts: the text of "train", "validation" and "test"; without the latter two, or one of
            them, if the files do not name them.
    """

    name: str
    parts: Mapping[str, str]


def read_text(path: Path | None) -> Text:
    """Read a text: a file, a folder of files for the parts, or Python's documentation.

    Args:
        path: A file; or a folder with one file that has ``train`` in its name, such
            as ``wiki.train.tokens``, and perhaps one with ``valid`` and one with ``test``. None for
            the documentation that comes with CPython.

    Raises:
        ValueError: When a file does not exist, is not text, or is empty; the message names it.
    """
    if path is None:
        return Text("the documentation of Python", {"train": _topics()})
    if path.is_file():
        return Text(str(path), {"train": _file(path)})
    if not path.is_dir():
        raise ValueError(
            f"`--data` is {path}, which does not exist. Give a text file, or a folder with "
            "train.txt, valid.txt and test.txt, or leave `--data` out for the documentation "
            "of Python."
        )
    files = {part: _part(path, part, names) for part, names in _PART_NAMES.items()}
    if files["train"] is None:
        raise ValueError(
            f"`--data` is {path}, a folder without a file that has `train` in its name. Give one "
            "with train.txt, and valid.txt and test.txt if you have them, or a single file."
        )
    found = {part: file for part, file in files.items() if file is not None}
    for file in found.values():
        same = [part for part in found if found[part] == file]
        if len(same) > 1:
            raise ValueError(
                f"`--data` is {path}, where {file.name} looks like its {' and its '.join(same)} "
                "text. Give each part a file of its own."
            )
    return Text(str(path), {part: _file(file) for part, file in found.items()})


def tokens_of(text: str, kind: TokenKind) -> list[str]:
    """Cut a text into tokens.

    Args:
        text: The text.
        kind: "whitespace" for the pieces between white space, as in texts that were tokenized
            before, with ``<eos>`` at the end of each line; "words" for words and marks of
            punctuation, with ``<eos>`` too; "characters" for characters, newlines among them.

    Example:
        >>> tokens_of("It isn't, yet.\\n", "words")
        ['It', "isn't", ',', 'yet', '.', '<eos>']
    """
    if kind == "characters":
        return list(text)
    # Not `splitlines`, which also splits at form feeds and Unicode separators.
    lines = text.removesuffix("\n").split("\n") if text else []
    if kind == "whitespace":
        found = (line.split() for line in lines)
    else:
        found = ([match[0] for match in _WORD.finditer(line)] for line in lines)
    return [token for line in found for token in (*line, END_OF_LINE)]


def text_of(tokens: Sequence[str], kind: TokenKind) -> str:
    """Join tokens into readable text: nearly the inverse of `tokens_of`.

    Example:
        >>> text_of(["It", "is", "(", "not", ")", ".", "<eos>", "Yet"], "words")
        'It is (not).\\nYet'
    """
    if kind == "characters":
        return "".join(tokens)
    lines: list[list[str]] = [[]]
    for token in tokens:
        if token == END_OF_LINE:
            lines.append([])
        else:
            lines[-1].append(token)
    text = "\n".join(map(" ".join, lines))
    if kind == "words":
        text = _BEFORE.sub(r"\1", _AFTER.sub(r"\1", text))
    return text


def _part(folder: Path, part: str, names: set[str]) -> Path | None:
    """Find the file of a part by words in its name."""
    found = sorted(
        file
        for file in folder.iterdir()
        if file.is_file()
        and not file.name.startswith(".")
        and names & set(re.split(r"[^a-z]+", file.name.lower()))
    )
    if len(found) > 1:
        raise ValueError(
            f"`--data` is {folder}, where both {found[0].name} and {found[1].name} look like its "
            f"{part} text. Leave one there."
        )
    return found[0] if found else None


def _file(path: Path) -> str:
    data = path.read_bytes()
    try:
        text = data.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}. Convert it, for"
            " example by `iconv -f latin1 -t utf-8`."
        ) from error
    if not text.strip():
        raise ValueError(f"{path} is empty. Give a file with text.")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _topics() -> str:
    """Return the documentation that CPython shows as help: each paragraph once, as a line."""
    from pydoc_data.topics import topics

    paragraphs = (
        " ".join(paragraph.split())
        for name in sorted(topics)
        for paragraph in re.split(r"\n\s*\n", topics[name])
    )
    # Topics share paragraphs: a repeated one could be in both training and test.
    return "\n".join(dict.fromkeys(filter(None, paragraphs))) + "\n"
