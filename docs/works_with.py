"""Write the matrix of limits.md from works_with.toml; `python docs/works_with.py` does it.

A test says when the page is stale, and when a test that a cell names is no longer there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER / "limits.md"
BEGIN, END = "<!-- matrix:begin -->\n", "<!-- matrix:end -->\n"


def table() -> dict[str, Any]:
    return tomllib.loads((FOLDER / "works_with.toml").read_text(encoding="utf-8"))


def cells(found: dict[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """Each cell: the row and the feature, the answer, and the tests that it names."""
    for row in found["row"]:
        for feature in found["features"]:
            answer, tests, *_ = [*row[feature], ""]
            yield f"{row['with']}: {feature}", answer, names_in(tests)


def names_in(tests: str) -> list[str]:
    return [f"test_{name.strip()}" for name in tests.split("test_") if name.strip()]


def matrix(found: dict[str, Any]) -> str:
    """The table in Markdown, with its notes below."""
    features, notes = found["features"], []
    lines = [f"| with | {' | '.join(features)} |", f"|{'---|' * (1 + len(features))}"]
    for row in found["row"]:
        shown = [row["with"]]
        for feature in features:
            answer, _, note = [*row[feature], "", ""][:3]
            if note and note not in notes:
                notes.append(note)
            shown.append(f"{answer}<sup>{notes.index(note) + 1}</sup>" if note else answer)
        lines.append(f"| {' | '.join(shown)} |")
    below = [f"{number}. {note[0].upper() + note[1:]}." for number, note in enumerate(notes, 1)]
    return "\n".join([*lines, "", *below, ""])


def page(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{matrix(table())}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
