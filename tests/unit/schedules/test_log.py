from __future__ import annotations

from math import comb
from math import log as ln

import pytest

from recoup.schedules import log, num_advances, simulate


@pytest.mark.parametrize("n", [*range(1, 80), 252, 253, 924, 1000, 3432, 3433])
def test_log_is_binomial_with_as_many_slots_as_runs(n):
    slots = next(c for c in range(1, n + 1) if comb(2 * c, c) >= n)
    simulation = simulate(log(n))
    assert simulation.num_forwards == num_advances(n, slots) + 1
    assert simulation.peak_states <= slots
    assert simulation.peak_tapes <= slots + 1
    assert max(simulation.forwards_per_stage) <= slots
    # Stirling: C(2c, c) is at least 4^c / (2 sqrt(c)).
    assert slots <= 2 + ln(n, 4) + ln(2 * slots**0.5, 4)


def test_log_refuses_an_empty_chain():
    with pytest.raises(ValueError, match=r"`n` is 0"):
        log(0)
