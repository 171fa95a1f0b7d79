"""The seconds that steps take, in turn: so what else the machine does falls on all of them."""

import operator
import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from recoup._core.devices import synchronize

Step = Callable[[], object]
Clock = Callable[[], float]


def clock_of(device: str) -> Clock:
    """Return processor time, of all threads, or on an accelerator wall time."""
    return time.process_time if torch.device(device).type == "cpu" else time.perf_counter


def seconds_of(
    step: Step, device: str = "cpu", clock: Clock = time.perf_counter, calls: int = 1
) -> float:
    """Return the seconds of one of so many calls of a step."""
    synchronize(torch.device(device))
    start = clock()
    for _ in range(calls):
        step()
    synchronize(torch.device(device))
    return (clock() - start) / calls


def in_turn(
    steps: Mapping[str, Step],
    rounds: int,
    device: str = "cpu",
    clock: Clock = time.perf_counter,
    *,
    calls: int = 1,
    is_warm: bool = True,
) -> dict[str, list[float]]:
    """Return the seconds of each step in each round, of which each has another order.

    What the allocator has cached depends on the steps before: a fixed order favours some.

    Args:
        steps: the steps, by name.
        rounds: the number of rounds.
        device: the device.
        clock: the clock.
        calls: the number of calls of a step in each round.
        is_warm: whether the first call of a round counts.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(steps), len(steps)):
            if not is_warm:
                steps[name]()
            times[name].append(seconds_of(steps[name], device, clock, calls))
    return times


def ratio(times: list[float], reference: list[float]) -> float:
    """Return the median over all rounds of the time over that of a reference."""
    return statistics.median(map(operator.truediv, times, reference))
