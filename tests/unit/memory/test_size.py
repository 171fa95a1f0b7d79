"""Numbers of bytes: what is parsed, what is refused, and what is printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recoup.memory import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        *((0, 0), ("0", 0), ("17 B", 17), ("1.5 GiB", 3 * 2**29), ("  2GB ", 2_000_000_000)),
        *(("1 kb", 1000), ("1 TiB", 2**40), (".5 KiB", 512), ("3. KiB", 3072)),
        ("0.1 GB", 10**8),  # exact, though 0.1 is no binary fraction
        ("1.0001 KiB", 1024),
    ],
)
def test_parse_bytes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "value",
    ["", "GiB", "-1 KiB", "1 K", "1 XB", "1,5 GiB", "1 2", "inf", "1_0", -1, True, 1.5, None],
)
def test_what_is_no_number_of_bytes_is_refused_with_the_way_out(value):
    with pytest.raises(ValueError, match=r'`value` is .*such as "1.5 GiB"'):
        parse_bytes(value)


@given(st.integers(0, 2**68))
def test_what_is_formatted_is_parsed_back(num_bytes):
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=5e-4, abs=1)


def test_format_bytes():
    given = 0, 1023, 1024, 2**20 - 1, -1536, 123_456_789
    wanted = "0 B", "1023 B", "1 KiB", "1 MiB", "-1.5 KiB", "117.7 MiB"
    assert tuple(map(format_bytes, given)) == wanted
