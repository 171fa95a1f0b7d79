from __future__ import annotations

from itertools import pairwise

import pytest

from recoup.schedules import Keep, linear, simulate, sqrt


def segments(n: int) -> list[int]:
    actions = sqrt(n).actions
    starts = [action.index for action in actions if isinstance(action, Keep)]
    last = simulate(sqrt(n)).forwards_per_stage.index(1)
    return [stop - start for start, stop in pairwise([*starts, last, n])]


@pytest.mark.parametrize(("n", "forwards", "peak"), [(100, 199, 17), (1000, 1999, 48)])
def test_sqrt_keeps_its_promise(n, forwards, peak):
    simulation = simulate(sqrt(n))
    assert simulation.num_forwards <= forwards
    assert simulation.peak_bytes <= peak


def test_sqrt_of_nine_is_triangular():
    # The nominal 4, 3, 2 is exact; never 1, 1, 1, 1, 5.
    assert segments(9) == [4, 3, 2]
    assert segments(8) == [3, 3, 2]
    assert segments(10) == [4, 3, 2, 1]


@pytest.mark.slow
def test_sqrt_at_every_length():
    for n in range(1, 400):
        longest = next(k for k in range(1, n + 1) if k * (k + 1) // 2 >= n)
        simulation = simulate(sqrt(n))
        lengths = segments(n)
        assert sum(lengths) == n
        assert all(length >= 1 for length in lengths)
        assert simulation.peak_bytes <= longest + 1
        assert simulation.num_forwards == 2 * n - lengths[-1]
        assert max(simulation.forwards_per_stage) <= 2
        # A last segment that is one longer would not fit below the same peak.
        assert lengths[-1] == longest - len(lengths) + 1 or len(lengths) == 1


def test_sqrt_of_one_and_two_is_linear():
    assert sqrt(1).actions == linear(1).actions
    assert sqrt(2).actions == linear(2).actions


def test_sqrt_refuses_an_empty_chain():
    with pytest.raises(ValueError, match=r"`n` is 0"):
        sqrt(0)
