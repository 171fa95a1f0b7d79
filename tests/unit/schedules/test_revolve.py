from __future__ import annotations

import pytest

from recoup.schedules import num_advances, revolve, simulate

# Number of forward runs for each number of slots, tabulated.
OPTIMUM = {
    10: {1: 55, 2: 30, 3: 25, 4: 24, 5: 23, 9: 19},
    50: {1: 1275, 2: 335, 3: 230, 4: 194, 5: 172, 6: 164, 8: 145, 9: 139, 10: 138, 16: 132}
    | {25: 123, 49: 99},
    100: {1: 5050, 2: 945, 3: 590, 4: 474, 5: 416, 6: 380, 7: 355, 8: 345, 10: 322, 12: 295}
    | {13: 285, 14: 284, 20: 278, 32: 266, 50: 248, 99: 199},
    1000: {1: 500500, 2: 29820, 3: 13155, 4: 8998, 5: 7284, 6: 6284, 8: 5285, 10: 4636}
    | {12: 4440, 16: 3860, 20: 3747, 32: 3405, 44: 2954, 64: 2934, 100: 2898, 200: 2798}
    | {500: 2498, 999: 1999},
}
ROWS = [(n, slots, runs) for n, row in OPTIMUM.items() for slots, runs in row.items()]


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("n", "slots", "num_forwards"), ROWS)
def test_revolve_equals_the_tabulated_optimum(n, slots, num_forwards):
    simulation = simulate(revolve(n, slots))
    assert simulation.num_forwards == num_forwards
    assert simulation.peak_states <= slots
    assert simulation.peak_tapes == 1
    assert simulation.peak_bytes <= slots + 2


@pytest.mark.sampled(10)
@pytest.mark.parametrize("n", range(1, 61))
def test_revolve_is_optimal_for_every_number_of_slots(n):
    for slots in range(1, n + 2):
        simulation = simulate(revolve(n, slots))
        assert simulation.num_forwards == num_advances(n, slots) + n
        assert simulation.peak_states <= slots
        assert simulation.peak_tapes == 1


def test_revolve_refuses_counts_below_one():
    with pytest.raises(ValueError, match=r"`slots` is 0"):
        revolve(3, 0)
    with pytest.raises(ValueError, match=r"`n` is 0"):
        revolve(0, 3)
