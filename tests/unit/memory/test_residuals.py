"""The table of residuals: equal ones in a row, the largest first, the ways in their order."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from recoup._core.saved_tensors import Way
from recoup.memory.census import Residual, Residuals

WAYS = get_args(Way)


def test_the_table():
    mib, kept = 2**20, ("linear [8, 8] float32", "layers.0")
    entries = Residuals((
        Residual("gelu [8, 8] float32", "layers.0", mib, "recompute"),
        *(Residual(*kept, num_bytes, "keep") for num_bytes in (mib // 2, mib, 0)),
    ))  # fmt: skip
    assert str(entries).splitlines() == [
        "value                  module    count    MiB  way",
        "linear [8, 8] float32  layers.0      2  1.500  keep",
        "gelu [8, 8] float32    layers.0      1  1.000  recompute",
        "total                                   1.500  keep",
        "                                        1.000  recompute",
        "1 more look at memory that is counted above",
    ]
    assert [each.num_bytes for each in entries] == [mib, mib // 2, mib, 0]
    assert len(entries) == 4
    with pytest.raises(ValueError, match=r"`way` is 'kept', but must be one of keep, recompute"):
        entries.total_bytes("kept")
    assert str(Residuals(())).splitlines()[-1].split() == ["total", "0.000", "keep"]


def test_ways_are_in_their_order_and_lines_in_their_width():
    shape = [1024] * 4
    entries = [
        Residual(f"{'long_' * 9}{way} {shape} bfloat16", f"{'deep.' * 9}{way}", 2**35, way)
        for way in reversed(WAYS)
    ]
    lines = str(Residuals(tuple(entries))).splitlines()
    assert max(map(len, lines)) <= 100
    assert tuple(line.split()[-1] for line in lines[-5:]) == WAYS
    for line in lines[1:6]:
        assert re.search(rf"^\.\.\.\S* {re.escape(str(shape))} bfloat16 +\.\.\.\S*deep\.\w+ ", line)
