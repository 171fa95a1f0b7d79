"""Tables for the screen: text as it is, in one line each, numbers below each other."""

from __future__ import annotations

from recoup.recipes.tables import table


def test_text_is_shown_as_it_is_and_no_line_is_broken():
    rows = [["[bold]", "1.5", ":smile:"], ["x" * 300, "-12.25", ""]]
    head, line, first, second = table(["[a]", "number", "b"], rows).splitlines()
    assert head.split() == ["[a]", "number", "b"]
    assert set(line) == {"-"}
    assert first.split() == rows[0]
    assert second.split() == rows[1][:2]
    assert first.index("1.5") + 3 == second.index("-12.25") + 6 == head.index("number") + 6
