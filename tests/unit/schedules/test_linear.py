from __future__ import annotations

import pytest

from recoup.schedules import Reverse, Tape, linear, simulate


def test_linear_tapes_all_and_reverses_all():
    assert linear(2).actions == (Tape(0), Tape(1), Reverse(1), Reverse(0))


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
def test_linear_runs_each_stage_once(n):
    simulation = simulate(linear(n))
    assert simulation.forwards_per_stage == (1,) * n
    assert (simulation.peak_bytes, simulation.peak_states, simulation.peak_tapes) == (n + 1, 0, n)


def test_linear_refuses_an_empty_chain():
    with pytest.raises(ValueError, match=r"`n` is 0"):
        linear(0)
