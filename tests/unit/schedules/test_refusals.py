"""Arguments that are refused: the call, and the words that name the argument and the way out."""

from __future__ import annotations

import pytest

from recoup.schedules import (
    Cost,
    Schedule,
    SelectiveTape,
    binomial,
    constant,
    frontier,
    linear,
    log,
    num_advances,
    num_sweeps,
    offloaded,
    optimal,
    revolve,
    simulate,
    sqrt,
    trace,
)
from recoup.schedules._binomial import best_split


def stage(**more):
    return Cost(1.0, 10, 100, **more)


def by_host(speed):
    return {"bytes_per_second": {"host": speed}}


MUST = ", but must be a whole number, at least 1"
REFUSED = [
    *((lambda make=make: make(0), f"`n` is 0{MUST}") for make in (linear, log, sqrt)),
    *((lambda make=make, given=given: make(*given), f"`{name}` is 0{MUST}")
      for make in (binomial, revolve, num_sweeps, num_advances)
      for name, given in (("n", (0, 1)), ("slots", (3, 0)))),
    *((lambda name=name, given=given: offloaded(**{"n": 4, "every": 2, "slots": 1, name: given}),
       f"`{name}` is {given}{MUST}")
      for name in ("n", "every", "slots") for given in (0, 1.5)),
    (lambda: offloaded(11, 3, every=3), "`to` is 3, but must be"),
    (lambda: best_split(1, 3), "`n` is 1"),
    (lambda: constant(0), "`ways` is 0"),
    (lambda: constant([]), "`ways` is empty"),
    (lambda: constant(["invert", "offload"]), r"`ways\[1\]` is 'offload', but must be one of inv"),
    (lambda: simulate(linear(2), [1, 1], 1), "`state_bytes` has 2 numbers, .* needs 3"),
    (lambda: simulate(linear(2), 1, [1, 1, 1]), "`tape_bytes` has 3 numbers, .* needs 2"),
    (lambda: simulate(linear(2), 1, [1, -1]), "`tape_bytes` is -1, but it must not be"),
    (lambda: Schedule(0, ()), "`num_stages` is 0"),
    (lambda: Schedule(2, 5), "`actions` is 5, but must be a tuple of actions"),
    (lambda: simulate(linear(2), in_flight_bytes=-1), "`in_flight_bytes` is -1"),
    (lambda: simulate(linear(4), **by_host(1.0)), "`bytes_per_second` is given without `costs`"),
    (lambda: simulate(offloaded(4, "/scratch"), costs=[stage()] * 4, **by_host(1.0)),
     r"`bytes_per_second\['/scratch'\]` is None"),
    *((lambda call=call: call(linear(2), costs=[stage()]),
       "`costs` has 1 numbers, but this schedule needs 2") for call in (simulate, trace)),
    (lambda: optimal([], 1), "`costs` is empty"),
    (lambda: frontier([]), "`costs` is empty"),
    (lambda: Cost(float("nan"), 1, 1), "`seconds` is nan"),
    (lambda: Cost(1.0, -1, 1), "`state_bytes` is -1"),
    (lambda: Cost(1.0, 2, 1), r"`tape_bytes` is 1, .* `state_bytes` \(2\)"),
    (lambda: stage(run_bytes=-1), "`run_bytes` is -1"),
    (lambda: stage(invert_seconds=-1.0), "`invert_seconds` is -1"),
    (lambda: stage(offload_seconds=-1.0), "`offload_seconds` is -1"),
    (lambda: stage(variants=(SelectiveTape(9, 0.0),)), r"`variants\[0\].tape_bytes` is 9"),
    (lambda: SelectiveTape(1, float("nan")), "`seconds` is nan"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_unsuitable_arguments_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
