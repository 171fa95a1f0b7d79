from __future__ import annotations

import pytest

from recoup.schedules import Drop, Keep, binomial, linear, num_advances, simulate

# Number of forward runs for each number of slots: 1 + rn - C(slots + r, slots + 1), tabulated.
OPTIMUM = {
    10: {1: 46, 2: 21, 3: 16, 4: 15, 5: 14, 9: 10},
    50: {1: 1226, 2: 286, 3: 181, 4: 145, 5: 123, 6: 115, 8: 96, 9: 90, 10: 89, 16: 83}
    | {25: 74, 49: 50},
    100: {1: 4951, 2: 846, 3: 491, 4: 375, 5: 317, 6: 281, 7: 256, 8: 246, 10: 223, 12: 196}
    | {13: 186, 14: 185, 20: 179, 32: 167, 50: 149, 99: 100},
    1000: {1: 499501, 2: 28821, 3: 12156, 4: 7999, 5: 6285, 6: 5285, 8: 4286, 10: 3637}
    | {12: 3441, 16: 2861, 20: 2748, 32: 2406, 44: 1955, 64: 1935, 100: 1899, 200: 1799}
    | {500: 1499, 999: 1000},
}
ROWS = [(n, slots, runs) for n, row in OPTIMUM.items() for slots, runs in row.items()]


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("n", "slots", "num_forwards"), ROWS)
def test_binomial_equals_the_tabulated_optimum(n, slots, num_forwards):
    simulation = simulate(binomial(n, slots))
    assert simulation.num_forwards == num_forwards
    assert simulation.peak_states <= slots
    assert simulation.peak_tapes <= slots + 1
    assert simulation.peak_bytes <= 2 * slots + 2


@pytest.mark.sampled(10)
@pytest.mark.parametrize("n", range(1, 61))
def test_binomial_is_optimal_for_every_number_of_slots(n):
    for slots in range(1, n + 1):
        schedule = binomial(n, slots)
        simulation = simulate(schedule)
        assert simulation.num_forwards == num_advances(n, slots) + 1
        assert simulation.peak_states <= slots
        assert simulation.peak_tapes <= slots + 1
        assert simulation.peak_bytes <= 2 * slots + 2
        keeps = [action.index for action in schedule.actions if isinstance(action, Keep)]
        drops = [action.index for action in schedule.actions if isinstance(action, Drop)]
        assert sorted(keeps) == sorted(drops)


@pytest.mark.parametrize(("n", "slots"), [(1, 1), (2, 1), (7, 6), (7, 7), (7, 100)])
def test_binomial_with_slots_enough_is_linear(n, slots):
    assert binomial(n, slots).actions == linear(n).actions


def test_binomial_of_a_long_chain_takes_few_actions():
    # Half a million stage runs, but one pass for each tape.
    assert len(binomial(1000, 1).actions) < 4 * 1000


def test_binomial_refuses_counts_below_one():
    with pytest.raises(ValueError, match=r"`slots` is 0, but must be a whole number, at least 1"):
        binomial(3, 0)
    with pytest.raises(ValueError, match=r"`n` is -1, but must be a whole number, at least 1"):
        binomial(-1, 2)
