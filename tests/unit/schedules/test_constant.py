from __future__ import annotations

from itertools import product

import pytest

from recoup.schedules import (
    Advance,
    Drop,
    Invert,
    Keep,
    Load,
    Reverse,
    Tape,
    constant,
    simulate,
)


def test_constant_inverts_every_stage():
    assert constant(2).actions == (
        *(Advance(0, 2), Keep(2), Load(2), Drop(2)),
        *(Invert(1), Reverse(1), Invert(0), Reverse(0)),
    )


@pytest.mark.parametrize("n", [1, 4, 64, 1000])
def test_constant_holds_the_same_at_every_depth(n):
    simulation = simulate(constant(n))
    assert (simulation.num_forwards, simulation.num_inverses) == (n, n)
    assert (simulation.peak_bytes, simulation.peak_states, simulation.peak_tapes) == (1, 1, 1)


def test_constant_hands_over_between_ways():
    assert constant(["invert", "recompute", "keep", "invert"]).actions == (
        *(Advance(0, 1), Keep(1), Advance(1, 2), Tape(2), Advance(3, 4), Keep(4)),
        *(Load(4), Drop(4), Invert(3), Reverse(3)),
        Reverse(2),
        *(Load(1), Tape(1), Reverse(1)),
        *(Load(1), Drop(1), Invert(0), Reverse(0)),
    )
    assert constant(["invert", "keep"]).actions == (
        *(Advance(0, 1), Keep(1), Tape(1)),
        *(Reverse(1), Load(1), Drop(1), Invert(0), Reverse(0)),
    )


def test_constant_executes_every_mixture():
    for n in range(1, 6):
        for ways in product(["invert", "recompute", "keep"], repeat=n):
            schedule = constant(ways)
            simulation = simulate(schedule)
            runs = tuple(2 if way == "recompute" else 1 for way in ways)
            assert simulation.forwards_per_stage == runs
            assert simulation.num_inverses == ways.count("invert")
            kept = [action.index for action in schedule.actions if isinstance(action, Keep)]
            dropped = [action.index for action in schedule.actions if isinstance(action, Drop)]
            assert sorted(kept) == sorted(set(dropped))
            # A state goes with its last load.
            for position, action in enumerate(schedule.actions):
                if isinstance(action, Drop):
                    assert schedule.actions[position - 1] == Load(action.index)


def test_constant_refuses_what_is_no_way():
    with pytest.raises(ValueError, match=r"`ways\[1\]` is 'offload', but must be one of invert"):
        constant(["invert", "offload"])
    with pytest.raises(ValueError, match=r"`ways` is empty"):
        constant([])
    with pytest.raises(ValueError, match=r"`ways` is 0"):
        constant(0)
